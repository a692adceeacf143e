"""Draw the pictures of the documentation: `python docs/pictures/draw.py` writes the SVG files.

Colors are CSS variables of the page, so that a picture follows its light or dark theme; a file that
is opened directly uses light ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise import schedules

COLORS = {  # variables of furo or shardwise.css, with a default for files opened directly
    "ink": "var(--color-foreground-primary, #222)",
    "soft": "var(--color-foreground-secondary, #5a5c63)",
    "box": "var(--color-background-secondary, #f8f9fb)",
    "page": "var(--color-background-primary, #fff)",
    "one": "var(--picture-one, #9ec5fe)",
    "two": "var(--picture-two, #ffd27d)",
    "three": "var(--picture-three, #a8e0b6)",
    "four": "var(--picture-four, #e8b4e8)",
}
PARTS = ("one", "two", "three", "four")


class Picture:
    """Shapes on a canvas, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.width, self.height, self.about = width, height, about
        self.shapes: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = "box", *, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" '
            f'fill="{COLORS.get(fill, fill)}" stroke="{COLORS["ink"]}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        anchor: str = "middle",
        color: str = "ink",
        code: bool = False,
        bold: bool = False,
    ) -> None:
        font = "ui-monospace, monospace" if code else "system-ui, sans-serif"
        weight = ' font-weight="600"' if bold else ""
        body = text.replace("&", "&amp;").replace("<", "&lt;")
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{font}" font-size="{size}"{weight} '
            f'text-anchor="{anchor}" fill="{COLORS[color]}">{body}</text>'
        )

    def labelled(
        self, x: float, y: float, w: float, h: float, text: str, fill: str = "box", **options: bool
    ) -> None:
        self.box(x, y, w, h, fill)
        dark = fill in PARTS  # light fills in both themes, so the letters on them stay dark
        self.text(x + w / 2, y + h / 2 + 4.5, text, **options)
        if dark:
            self.shapes[-1] = self.shapes[-1].replace(COLORS["ink"], "#222")

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{COLORS["ink"]}" '
            f'stroke-width="1.4" marker-end="url(#head)"{dash}/>'
        )

    def svg(self) -> str:
        head = (
            f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{COLORS["ink"]}"/>'
            "</marker></defs>"
        )
        return "\n".join(
            [
                f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" role="img" '
                f'aria-label="{self.about}" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}">',
                f"<title>{self.about}</title>",
                head,
                *self.shapes,
                "</svg>\n",
            ]
        )


def flow() -> Picture:
    """From a model to a program and its uses."""
    picture = Picture(760, 252, "From a model and a batch to a graph, a plan and a program")
    row = [("model, batch", 20, False), ("Graph", 190, True), ("Plan", 360, True)]
    for text, x, code in (*row, ("Program", 530, True)):
        picture.labelled(x, 30, 110, 46, text, "one" if code else "box", code=code)
    for x, verb in ((130, "capture"), (300, "plan"), (470, "compile")):
        picture.arrow(x + 2, 53, x + 57, 53)
        picture.text(x + 29, 22, verb, code=True, size=12)
    picture.labelled(360, 108, 110, 34, "Cluster", "three", code=True)
    picture.arrow(415, 108, 415, 79)
    results = (("verify", "equality check"), ("simulate", "time and memory"))
    results += (("save", "readable PyTorch"), ("parallelize", "training"))
    for index, (verb, result) in enumerate(results):
        x = 20 + 185 * index
        picture.labelled(x, 200, 160, 40, result)
        picture.arrow(x + 40, 165, x + 40, 197)
        picture.text(x + 50, 187, verb, code=True, size=12, anchor="start")
    line = f'fill="none" stroke="{COLORS["ink"]}" stroke-width="1.4"'
    picture.shapes.append(f'<path d="M585 76 V165 M60 165 H615" {line}/>')
    return picture


def mesh() -> Picture:
    """Eight ranks along two axes."""
    picture = Picture(620, 210, "Eight ranks as a mesh of dp=2 by tp=4")
    picture.text(330, 26, "tp: 4 ranks share the work of each layer", size=13, color="soft")
    for row in range(2):
        for column in range(4):
            x, y = 150 + 115 * column, 45 + 75 * row
            picture.labelled(x, y, 95, 55, f"rank {4 * row + column}", PARTS[column])
        picture.text(135, 78 + 75 * row, f"dp {row}", anchor="end", code=True)
        picture.text(
            135, 95 + 75 * row, ("first half", "second half")[row], anchor="end", size=11,
            color="soft",
        )  # fmt: skip
    picture.text(330, 203, "equal colors hold the same parameters", size=12, color="soft")
    return picture


def layouts() -> Picture:
    """One tensor on two ranks with four placements."""
    picture = Picture(760, 210, "A tensor on two ranks: sharded on dim 0 or 1, replicated, partial")
    kinds = (
        ("S(0)", "sharded on dim 0"),
        ("S(1)", "sharded on dim 1"),
        ("R", "replicated"),
        ("P", "terms of a sum"),
    )
    for index, (name, meaning) in enumerate(kinds):
        left = 20 + 188 * index
        picture.text(left + 78, 22, name, code=True, bold=True)
        picture.text(left + 78, 40, meaning, size=12, color="soft")
        for rank in range(2):
            x, y = left + 84 * rank, 56
            picture.text(x + 36, 148, f"rank {rank}", size=12, color="soft")
            picture.box(x, y, 72, 72, "page", dashed=True)
            if name == "S(0)":
                picture.box(x, y + 36 * rank, 72, 36, PARTS[rank])
            elif name == "S(1)":
                picture.box(x + 36 * rank, y, 36, 72, PARTS[rank])
            elif name == "R":
                picture.box(x, y, 72, 72, "three")
            else:
                picture.box(x, y, 72, 72, "four")
                picture.text(x + 36, y + 41, ("x - 2", "2")[rank], code=True)
                picture.shapes[-1] = picture.shapes[-1].replace(COLORS["ink"], "#222")
    notes = ("gather: R", "gather: R", "slice: S, no messages", "reduce: R")
    for index, note in enumerate(notes):
        picture.text(98 + 188 * index, 180, note, size=12)
    return picture


def tensor() -> Picture:
    """Two layers, sharded so that they communicate once."""
    picture = Picture(760, 250, "Two linear layers on two ranks with one reduction")
    for rank in range(2):
        y = 40 + 100 * rank
        picture.text(20, y + 34, f"rank {rank}", anchor="start", bold=True)
        picture.labelled(90, y, 60, 60, "x", "three", code=True)
        picture.labelled(200, y, 90, 60, f"up[{'top' if rank == 0 else 'bottom'}]", PARTS[rank])
        picture.labelled(340, y, 60, 60, "relu", PARTS[rank])
        picture.labelled(
            450, y, 100, 60, f"down[:, {'left' if rank == 0 else 'right'}]", PARTS[rank]
        )
        picture.labelled(660, y, 70, 60, "loss", "three")
        for x1, x2 in ((152, 197), (292, 337), (402, 447)):
            picture.arrow(x1, y + 30, x2, y + 30)
        picture.arrow(552, y + 30, 592, 100 if rank else 92)
        picture.arrow(618, 100 if rank else 92, 657, y + 30)
    picture.shapes.append(
        f'<circle cx="605" cy="96" r="15" fill="{COLORS["four"]}" stroke="{COLORS["ink"]}"/>'
    )
    picture.text(605, 101, "+")
    picture.shapes[-1] = picture.shapes[-1].replace(COLORS["ink"], "#222")
    for x, label in (
        (120, "R~"),
        (245, "S(1)"),
        (370, "S(1)"),
        (500, "P"),
        (605, "reduce"),
        (695, "R"),
    ):
        picture.text(x, 226, label, code=True, size=12)
    picture.text(370, 245, "placement of the result of each column", size=12, color="soft")
    return picture


def zero() -> Picture:
    """Draw the tensors that each of four ranks stores under data parallelism."""
    picture = Picture(
        760, 220, "Parameters, gradients and optimizer state on four ranks by ZeRO level"
    )
    strategies = (("ddp", 0), ("zero1", 1), ("zero2", 2), ("fsdp", 3))
    parts = (("parameters", 30, 3), ("gradients", 30, 2), ("optimizer", 60, 1))
    for index, (name, level) in enumerate(strategies):
        left = 130 + 158 * index
        picture.text(left + 60, 24, name, code=True, bold=True)
        for rank in range(4):
            x, y = left + 32 * rank, 40.0
            for _, height, from_level in parts:
                share = height / 4 if level >= from_level else height
                picture.box(x, y, 24, height, "page", dashed=True)
                picture.box(
                    x, y + (height / 4 * rank if share < height else 0), 24, share, PARTS[rank]
                )
                y += height + 6
            picture.text(x + 12, 190, str(rank), size=12, color="soft")
    y = 40
    for name, height, _ in parts:
        picture.text(115, y + height / 2 + 4, name, anchor="end", size=12)
        y += height + 6
    picture.text(115, 190, "rank", anchor="end", size=12, color="soft")
    picture.text(
        440, 213, "fsdp gathers a block's parameters for use, and frees them", size=12, color="soft"
    )
    return picture


def pipeline() -> Picture:
    """Two schedules of four stages and eight micro-batches, replayed."""
    picture = Picture(760, 350, "GPipe and 1F1B on four stages with eight micro-batches")
    for index, name in enumerate(("gpipe", "1f1b")):
        order = schedules.make(name, num_groups=4, num_microbatches=8)
        line = schedules.replay(order, lambda action: 1.0 if action.kind == "F" else 2.0)
        unit, top = 690 / line.step_time, 40 + 160 * index
        alive = max(schedules.check(order).alive)
        title = f"{name}: up to {alive} micro-batches wait for their backward"
        picture.text(60, top - 10, title, anchor="start", bold=True)
        for group, spans in enumerate(line.spans):
            picture.text(50, top + 19 + 28 * group, f"rank {group}", anchor="end", size=12)
            for span in spans:
                x, w = 60 + span.start * unit, (span.end - span.start) * unit
                fill = "one" if span.action.kind == "F" else "three"
                label = str(span.action.microbatch)
                picture.labelled(x, top + 28 * group, w, 24, label, fill, size=11)
    picture.labelled(60, 325, 18, 18, "", "one")
    picture.text(84, 339, "forward", anchor="start", size=12)
    picture.labelled(150, 325, 18, 18, "", "three")
    picture.text(174, 339, "backward; the numbers are micro-batches", anchor="start", size=12)
    return picture


def checkpoint() -> Picture:
    """Three ranks write the boxes of a tensor, two read them."""
    picture = Picture(760, 210, "A tensor saved by three ranks and loaded by two")
    picture.text(120, 24, "saved: fsdp on 3 ranks", size=13, bold=True)
    for rank in range(3):
        picture.labelled(50, 45 + 48 * rank, 140, 40, f"rank {rank}", PARTS[rank])
        picture.arrow(193, 65 + 48 * rank, 297, 69 + 44 * rank)
    picture.text(380, 24, "the full tensor", size=13, bold=True)
    for rank in range(3):
        picture.labelled(300, 47 + 44 * rank, 160, 44, f"box {rank}, checksum", PARTS[rank])
    picture.text(640, 24, "loaded: tensor on 2 ranks", size=13, bold=True)
    for rank in range(2):
        x = 570 + 76 * rank
        for row in range(3):
            picture.box(x, 47 + 44 * row, 64, 44, PARTS[row])
        picture.text(x + 32, 198, f"rank {rank}", size=12)
    for row in range(3):
        picture.arrow(463, 69 + 44 * row, 565, 69 + 44 * row)
    return picture


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and content of every file."""
    for draw in (flow, mesh, layouts, tensor, zero, pipeline, checkpoint):
        yield f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    for name, content in pictures():
        Path(__file__).with_name(name).write_text(content)
