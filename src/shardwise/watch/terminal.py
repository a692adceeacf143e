"""Show a run in a terminal as a live panel, or as plain lines if the output is not a terminal.

Names are plain text and never interpreted as markup.
"""

import textwrap
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.formatting import GIB, duration, short_seconds
from shardwise.watch.run import Run

BLOCKS = "▁▂▃▄▅▆▇█"
LABEL = 14  # columns
SLOWEST = 3


def panel(run: Run, width: int) -> RenderableType:
    """Return the run as a panel of the given width."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    inside = max(10, width - LABEL - 6)
    if run.total is not None:
        done = ProgressBar(total=run.total, completed=run.step, width=min(inside, 60))
        table.add_row("progress", done)
    for label, text in _rows(run, inside):
        table.add_row(label, Text(text))
    title = run.title
    style = "red" if run.state in ("failed", "gone") else "green" if run.ended else "cyan"
    return Panel(
        Group(Text(progress_text(run)), table),
        title=Text(title if len(title) <= width - 6 else title[: max(0, width - 7)] + "…"),
        title_align="left",
        border_style=style,
    )


def progress_text(run: Run) -> str:
    """Return the progress, remaining time and state."""
    of = f" of {run.total:,} ({run.step / run.total:.0%})" if run.total else ""
    remaining = "" if run.seconds_left is None else f", about {duration(run.seconds_left)} left"
    return f"step {run.step:,}{of}{remaining}, {run.status}"


def _rows(run: Run, width: int) -> list[tuple[str, str]]:
    """Return the available figures as labels and texts."""
    now, load = run.latest, (run.ranks or {}).get("expert_load")
    rows: list[tuple[str, str | None]] = [
        ("loss", _loss(run, width)),
        ("evaluation", _digits(now.get("evaluation_loss"))),
        ("throughput", _throughput(run, width)),
        ("step time", _step_time(run)),
        ("memory", _memory(run)),
        ("learning rate", _figure(now.get("learning_rate"), "{:.3g}")),
        ("gradient norm", _figure(now.get("gradient_norm"), "{:.4g}")),
        ("staleness", _figure(now.get("staleness"), "{:,.0f} steps")),
        ("omitted", _figure(now.get("compression_error"), "{:.2%} of messages")),
        ("ranks", _ranks(run)),
        ("experts", load and f"{load['max']:.2f} times the mean on the most loaded rank"),
        ("skipped", f"{run.skipped:,} steps without a finite loss" if run.skipped else None),
    ]
    return [(name, text) for name, text in rows if text]


def _figure(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _digits(loss: float | None) -> str | None:
    """Format a loss; of a huge one, only the first digits."""
    return None if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def _loss(run: Run, width: int) -> str | None:
    if "loss" not in run.latest:
        return None
    text = _digits(run.latest["loss"]) or "not a number"
    line = sparkline(run.history.means("loss"), max(0, min(60, width - len(text) - 2)))
    return f"{text}  {line}".rstrip()


def _throughput(run: Run, width: int) -> str | None:
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        value = run.latest.get(name)
        if value is not None:
            text = f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
            mfu = run.latest.get("mfu")
            text += "" if mfu is None else f", MFU {mfu:.1%}"
            line = sparkline(run.history.means(name), max(0, min(60, width - len(text) - 2)))
            return f"{text}  {line}".rstrip()
    return None


def _step_time(run: Run) -> str | None:
    if run.step_s is None:
        return None
    text = short_seconds(run.step_s)
    predicted = run.predicted_step_s
    if predicted:
        is_guess = run.about.get("known_machines") is False
        text += f", {run.step_s / predicted:.2f} times the predicted {short_seconds(predicted)}"
        text += ", an estimate for an unknown cluster" if is_guess else ""
    return text


def _memory(run: Run) -> str | None:
    if run.ranks is not None and run.ranks["ranks"] > 1:
        spread = run.ranks["memory_bytes"]
        return f"{spread['min'] / GIB:.2f} to {spread['max'] / GIB:.2f} GiB per rank"
    value = run.latest.get("memory_bytes")
    return None if value is None else f"{value / GIB:.2f} GiB"


def _ranks(run: Run) -> str | None:
    if run.ranks is None or run.ranks["ranks"] < 2:
        return None
    own = run.ranks["own_s"]
    text = f"work {short_seconds(own['min'])} to {short_seconds(own['max'])} per step"
    slow = [f"rank {s['rank']} {s['ratio']:.2f}x" for s in run.slow_ranks[:SLOWEST]]
    return f"{text}; slow: {', '.join(slow)}" if slow else f"{text}; no rank is slow"


def line(run: Run) -> str:
    """Return the run as one line for logs."""
    parts = [progress_text(run)]
    for name, text in _rows(run, 0):
        if name in ("loss", "throughput", "step time", "memory"):
            parts.append(f"{name} {text.partition(',')[0]}" if name != "throughput" else text)
    if run.slow_ranks:
        parts.append("slow: " + ", ".join(f"rank {s['rank']}" for s in run.slow_ranks[:SLOWEST]))
    return "  ".join(parts)


def summary(run: Run, width: int) -> str:
    """Return the run as text."""
    lines = [*textwrap.wrap(run.title, width), *textwrap.wrap(progress_text(run), width)]
    for name, text in _rows(run, width - LABEL - 4):
        label, below = f"  {name:<{LABEL}} ", " " * (LABEL + 3)
        lines += textwrap.wrap(text, width, initial_indent=label, subsequent_indent=below)
    return "\n".join(lines)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw values as block characters, the newest on the right; missing values are gaps.

    >>> sparkline([4.0, 3.0, None, 1.0], 4)
    '█▆ ▁'
    """
    if width < 1 or not values:
        return ""
    step = max(1.0, len(values) / width)
    count = min(width, len(values))
    cells = [
        values[int(i * step) : max(int(i * step) + 1, int((i + 1) * step))] for i in range(count)
    ]
    means = [sum(k) / len(k) if (k := [v for v in c if v is not None]) else None for c in cells]
    finite = [m for m in means if m is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    spread = (high - low) or 1.0
    top = len(BLOCKS) - 1
    return "".join(" " if m is None else BLOCKS[round((m - low) / spread * top)] for m in means)
