"""Figures as people read them.

Enters: seconds, bytes and amounts. Leaves: text.
"""

from __future__ import annotations

GIB = 2**30


def seconds(value: float) -> str:
    """Return a time with its unit.

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
    """Return a count or rate with three digits that matter.

    >>> amount(0.1234), amount(12.34), amount(1234.5), amount(4.2e7)
    ('0.123', '12.3', '1,234', '42.0 M')
    """
    if abs(value) >= 1e9:
        return f"{value / 1e9:.1f} G"
    if abs(value) >= 1e7:
        return f"{value / 1e6:.1f} M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
