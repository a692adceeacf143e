"""Draw the paths of a program's chunks, as text and as SVG.

Chunks that take the same path share a picture: `reduce` arrows carry sums inward, `receive` arrows
copies outward.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.collectives.messages.program import MessageProgram

Pair = tuple[int, int]  # sender, receiver
MAX_PATHS = 16
SIDE, CIRCLE, DOT, GAP = 220, 78, 12, 14  # in pixels
COLORS = {"sums": "#b3541e", "copies": "#1f5f8b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The edges of chunks that take the same path, in the order of their first messages."""

    chunks: tuple[int, ...]
    elements: int
    sums: tuple[Pair, ...]
    copies: tuple[Pair, ...]


def paths_of(program: MessageProgram) -> list[Path]:
    """Return the paths of all chunks, those with the most elements first."""
    sums: dict[int, list[Pair]] = {}
    copies: dict[int, list[Pair]] = {}
    for rank, steps in enumerate(program.instructions):
        for step in steps:
            if step.kind != "send":
                edges_of_kind = sums if step.kind == "reduce" else copies
                for chunk in range(step.first, step.stop):
                    edges_of_kind.setdefault(chunk, []).append((step.peer, rank))
    same_path: dict[tuple[tuple[Pair, ...], tuple[Pair, ...]], list[int]] = {}
    for chunk in range(len(program.chunks)):
        key = (tuple(sorted(sums.get(chunk, ()))), tuple(sorted(copies.get(chunk, ()))))
        if key != ((), ()):
            same_path.setdefault(key, []).append(chunk)
    paths = []
    for (inward, outward), chunks in same_path.items():
        elements = sum(program.chunks[c].size for c in chunks)
        paths.append(Path(chunks=tuple(chunks), elements=elements, sums=inward, copies=outward))
    return sorted(paths, key=lambda path: -path.elements)


def trees_text(program: MessageProgram) -> str:
    """Return the paths as trees of ranks, at most `MAX_PATHS` of them."""
    paths = paths_of(program)
    lines = []
    for path in paths[:MAX_PATHS]:
        share = path.elements / max(program.numel, 1)
        lines.append(f"{share:.1%} of the elements, {len(path.chunks)} chunks")
        for title, edges, arrow in (
            ("sums, towards", [(b, a) for a, b in path.sums], "<-"),
            ("copies, from", list(path.copies), "->"),
        ):
            if edges and not _roots(edges):
                pairs = sorted({(min(edge), max(edge)) for edge in edges})
                exchanged = ", ".join(f"{a} and {b}" for a, b in pairs)
                lines.append(f"  {title.partition(',')[0]}, exchanged between {exchanged}")
            for root in _roots(edges):
                lines.append(f"  {title} rank {root}")
                lines += [f"    {line}" for line in _branches(root, edges, arrow, "", set())]
    if len(paths) > MAX_PATHS:
        lines.append(f"and {len(paths) - MAX_PATHS} more paths")
    return "\n".join(lines)


def _roots(edges: list[Pair]) -> list[int]:
    """Return ranks that have no parent; empty where ranks exchange, as in recursive doubling."""
    return sorted({a for a, _ in edges} - {b for _, b in edges})


def _branches(
    root: int, edges: list[Pair], arrow: str, indent: str, visited: set[int]
) -> Iterator[str]:
    visited.add(root)
    children = [b for a, b in edges if a == root and b not in visited]
    for number, child in enumerate(children):
        last = number == len(children) - 1
        yield f"{indent}{'└' if last else '├'}{arrow} {child}"
        if child not in visited:
            yield from _branches(child, edges, arrow, indent + ("   " if last else "│  "), visited)


def svg(program: MessageProgram) -> str:
    """Return the paths as arrows between ranks on circles."""
    paths = paths_of(program)[:MAX_PATHS]
    columns = max(1, min(4, len(paths)))
    rows = -(-len(paths) // columns)
    width, height = columns * (SIDE + GAP) + GAP, rows * (SIDE + 2 * GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        "<defs>",
        *(
            f'<marker id="{name}" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0 L6 3 L0 6 z" fill="{color}"/></marker>'
            for name, color in COLORS.items()
        ),
        "</defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, path in enumerate(paths):
        x = GAP + (number % columns) * (SIDE + GAP)
        y = GAP + (number // columns) * (SIDE + 2 * GAP)
        parts += _drawing(program, path, x + SIDE / 2, y + SIDE / 2)
    return "\n".join([*parts, "</svg>", ""])


def _drawing(program: MessageProgram, path: Path, x: float, y: float) -> Iterator[str]:
    def place(rank: int, radius: float = CIRCLE) -> tuple[float, float]:
        angle = 2 * math.pi * rank / program.num_ranks - math.pi / 2
        return x + radius * math.cos(angle), y + radius * math.sin(angle)

    share = path.elements / max(program.numel, 1)
    yield f'<text x="{x:.1f}" y="{y + SIDE / 2:.1f}">{share:.1%} of the elements</text>'
    for name, edges in (("sums", path.sums), ("copies", path.copies)):
        for a, b in edges:
            (x0, y0), (x1, y1) = place(a), place(b)
            length = max(math.hypot(x1 - x0, y1 - y0), 1.0)
            dx, dy = (x1 - x0) / length, (y1 - y0) / length
            # Offset from the straight line, so that both directions of a pair are visible.
            ox, oy = -dy * 3, dx * 3
            yield (
                f'<line x1="{x0 + dx * DOT + ox:.1f}" y1="{y0 + dy * DOT + oy:.1f}" '
                f'x2="{x1 - dx * DOT + ox:.1f}" y2="{y1 - dy * DOT + oy:.1f}" '
                f'stroke="{COLORS[name]}" marker-end="url(#{name})"/>'
            )
    for rank in range(program.num_ranks):
        cx, cy = place(rank)
        yield f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{DOT - 2}" fill="#eee" stroke="#555"/>'
        yield f'<text x="{cx:.1f}" y="{cy + 4:.1f}">{rank}</text>'
