"""Figures and tables as text that fits a terminal.

Enters: numbers and rows of cells. Leaves: lines of at most the terminal's width, from 40 columns.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.reporting.words import amount, seconds, size

__all__ = [
    "Column",
    "amount",
    "bar",
    "counted",
    "money",
    "seconds",
    "size",
    "table",
    "terminal_width",
    "wrapped",
]

NARROWEST = 40  # columns; below, a terminal's size is not to be believed
PIPE = 100  # columns where the output is no terminal
READABLE = 24  # columns that the last cell of a row needs to stand beside the others


def terminal_width() -> int:
    """The terminal's columns; a usual number where there is none."""
    width = shutil.get_terminal_size((0, 0)).columns
    return PIPE if width < NARROWEST else width


def counted(number: int, what: str) -> str:
    """So many of something.

    >>> counted(1, "rank"), counted(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def money(value: float | None) -> str:
    """A price, with digits that show.

    >>> money(12.345), money(0.00123), money(None)
    ('12.35', '0.00123', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def bar(share: float, width: int) -> str:
    """A bar of `share` of the width.

    >>> bar(0.5, 8)
    '####'
    """
    return "#" * round(max(0.0, min(1.0, share)) * width)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures; those with the largest `order` are left out first."""

    title: str
    order: int = 0


def table(
    columns: Sequence[Column], last: str, rows: Sequence[Sequence[str]], width: int
) -> list[str]:
    """Figures to the right, then one cell of text, which wraps or stands below its figures."""
    kept = list(range(len(columns)))
    widths = [
        max(len(c.title), *(len(row[i]) for row in rows), 0) if rows else len(c.title)
        for i, c in enumerate(columns)
    ]
    while len(kept) > 1 and sum(widths[i] + 2 for i in kept) > width:
        kept.remove(max(kept, key=lambda i: (columns[i].order, i)))
    used = sum(widths[i] + 2 for i in kept)
    below = width - used < min(READABLE, max((len(row[-1]) for row in rows), default=0))

    def line(cells: Sequence[str]) -> list[str]:
        figures = "".join(f"  {cells[i]:>{widths[i]}}" for i in kept)
        if below:
            return [figures, *wrapped(cells[-1], width, "      ", "        ")]
        return wrapped(f"{figures}  {cells[-1]}", width, "", " " * (used + 2))

    head = [c.title for c in columns]
    found = line([*head, last]) if not below else line([*head, last])[:1]
    for row in rows:
        found += line(row)
    return [text.rstrip() for text in found]


def wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """The text in lines of the width; a word that is longer is cut."""
    if len(first) + len(text) <= width:
        return [first + text]
    lead = len(text) - len(text.lstrip())
    lines = textwrap.wrap(
        text.lstrip(),
        width,
        initial_indent=first + text[:lead],
        subsequent_indent=later,
        break_on_hyphens=False,
    )
    return lines or [""]
