"""Figures and tables as text that fits a terminal.

Enters: numbers and rows of cells. Leaves: lines of at most the terminal's width, from 40 columns.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

NARROWEST = 40  # columns; below, a terminal's size is not to be believed
PIPE = 100  # columns where the output is no terminal
READABLE = 24  # columns that the last cell of a row needs to stand beside the others
GIB = 2**30


def terminal_width() -> int:
    """The terminal's columns; a usual number where there is none."""
    width = shutil.get_terminal_size((0, 0)).columns
    return PIPE if width < NARROWEST else width


def seconds(value: float) -> str:
    """A time with its unit.

    >>> seconds(1.23456), seconds(0.0123), seconds(4.2e-5), seconds(0)
    ('1.235 s', '12.30 ms', '42.0 us', '0')
    """
    if not value:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.1f} s"
    if size >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if size >= 1e-3 else f"{value * 1e6:.1f} us"


def size(num_bytes: float) -> str:
    """Bytes with their unit.

    >>> size(80 * 2**30), size(3 * 2**20), size(100), size(0)
    ('80.0 GiB', '3.0 MiB', '0.1 KiB', '0')
    """
    if not num_bytes:
        return "0"
    for unit, each in (("GiB", GIB), ("MiB", 2**20)):
        if abs(num_bytes) >= each:
            return f"{num_bytes / each:,.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def amount(value: float) -> str:
    """A count or rate with three digits that matter.

    >>> amount(0.1234), amount(12.34), amount(1234.5), amount(4.2e7)
    ('0.123', '12.3', '1,234', '42.0 M')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:.1f} G"
    if abs(value) >= 1e7:
        return f"{value / 1e6:.1f} M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


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
