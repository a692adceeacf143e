"""Format times, sizes, counts and tables as text for people.

The report page formats numbers in the same way (`reports/page/format.js`).
"""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

GIB = 2**30
NARROWEST = 40  # columns; a smaller reported width is wrong
PIPE = 100  # columns of output that does not go to a terminal
READABLE = 24  # columns that the last cell of a row needs next to the others


def seconds(value: float) -> str:
    """Return a time with its unit.

    >>> seconds(1.23456), seconds(0.0123), seconds(4.2e-5), seconds(0)
    ('1.235 s', '12.30 ms', '42.0 us', '0')
    """
    if not value:
        return "0"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.1f} s"
    if magnitude >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if magnitude >= 1e-3 else f"{value * 1e6:.1f} us"


def short_seconds(value: float) -> str:
    """Return a time with its unit, rounded to three digits.

    >>> short_seconds(0.0123), short_seconds(2.5), short_seconds(1315.2), short_seconds(4.2e-6)
    ('12.3 ms', '2.5 s', '1,315 s', '0.0042 ms')
    """
    return f"{digits(value, 3)} s" if value >= 0.9995 else f"{digits(value * 1e3, 3)} ms"


def duration(value: float) -> str:
    """Return a long time in its two largest units.

    >>> duration(42), duration(125), duration(7300), duration(200000)
    ('42 s', '2 min 5 s', '2 h 1 min', '2 d 7 h')
    """
    total = int(value)
    for size, unit, smaller, name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if total >= size:
            return f"{total // size} {unit} {total % size // smaller} {name}"
    return f"{total} s"


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit.

    >>> size(80 * 2**30), size(3 * 2**20), size(1536), size(100), size(0)
    ('80.0 GiB', '3.0 MiB', '1.5 KiB', '100 B', '0')
    """
    if not num_bytes:
        return "0"
    for unit, unit_bytes in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def short_size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, rounded to three digits.

    >>> short_size(16 << 20), short_size(1536), short_size(100)
    ('16 MiB', '1.5 KiB', '100 B')
    """
    for unit, unit_bytes in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def amount(value: float) -> str:
    """Return a count or rate with three significant digits.

    >>> amount(0.1234), amount(12.34), amount(1234.5), amount(4.2e7)
    ('0.123', '12.3', '1,234', '42.0 M')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:.1f} G"
    if abs(value) >= 1e7:
        return f"{value / 1e6:.1f} M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def digits(value: float, count: int) -> str:
    """Return a number with `count` significant digits, without an exponent.

    >>> digits(2.134, 2), digits(99.7, 2), digits(1315.2, 2), digits(0.0000123, 3)
    ('2.1', '100', '1,315', '0.0000123')
    """
    if abs(value) >= 10**count - 0.5:
        return f"{value:,.0f}"
    return f"{Decimal(f'{value:.{count}g}'):f}"


def terminal_width() -> int:
    """Return the number of columns of the terminal, or `PIPE` without a terminal."""
    width = shutil.get_terminal_size((0, 0)).columns
    return PIPE if width < NARROWEST else width


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "rank"), counted(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def money(value: float | None) -> str:
    """Return a price with enough digits to be meaningful.

    >>> money(12.345), money(0.00123), money(None)
    ('12.35', '0.00123', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def bar(share: float, width: int) -> str:
    """Return a bar that fills `share` of the width.

    >>> bar(0.5, 8)
    '####'
    """
    return "#" * round(max(0.0, min(1.0, share)) * width)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures; columns with the largest `order` are dropped first in narrow tables."""

    title: str
    order: int = 0


def table(
    columns: Sequence[Column], last: str, rows: Sequence[Sequence[str]], width: int
) -> list[str]:
    """Return lines of right-aligned figures and a cell of text, which wraps or moves below."""
    shown = list(range(len(columns)))
    widths = [max(0, len(c.title), *(len(row[i]) for row in rows)) for i, c in enumerate(columns)]
    while len(shown) > 1 and sum(widths[i] + 2 for i in shown) > width:
        shown.remove(max(shown, key=lambda i: (columns[i].order, i)))
    used = sum(widths[i] + 2 for i in shown)
    below = width - used < min(READABLE, max((len(row[-1]) for row in rows), default=0))

    def line(cells: Sequence[str]) -> list[str]:
        figures = "".join(f"  {cells[i]:>{widths[i]}}" for i in shown)
        if below:
            return [figures, *wrapped(cells[-1], width, "      ", "        ")]
        return wrapped(f"{figures}  {cells[-1]}", width, "", " " * (used + 2))

    lines = line([*(c.title for c in columns), last])[: 1 if below else None]
    for row in rows:
        lines += line(row)
    return [text.rstrip() for text in lines]


def wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """Wrap text to lines of the given width; longer words are broken."""
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
