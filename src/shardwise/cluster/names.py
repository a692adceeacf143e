"""Ranges of names: `gpu[0-63]` stands for 64 nodes.

Enters: a name with at most one range in brackets. Leaves: the names it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from shardwise.errors import ClusterError

MOST = 10**6  # of anything that is counted
_RANGE = re.compile(r"^([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)$")


@cache
def expand(pattern: str) -> tuple[str, ...]:
    """All names, in order.

    >>> expand("gpu[08-10,20]")
    ('gpu08', 'gpu09', 'gpu10', 'gpu20')
    >>> expand("localhost")
    ('localhost',)
    """
    found = _RANGE.match(pattern)
    if found is None:
        if not pattern or "[" in pattern or "]" in pattern:
            raise _malformed(pattern)
        return (pattern,)
    head, inside, tail = found.groups()
    return tuple(f"{head}{number}{tail}" for part in inside.split(",") for number in _numbers(part))


@cache
def count(pattern: str) -> int:
    """How many names the pattern stands for."""
    return len(expand(pattern)) if "[" in pattern or "]" in pattern or not pattern else 1


def expand_all(patterns: Iterable[str]) -> tuple[str, ...]:
    """The names of several patterns, in order."""
    return tuple(name for pattern in patterns for name in expand(pattern))


def _numbers(part: str) -> list[str]:
    first, dash, last = part.strip().partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise _malformed(part)
    if not dash:
        return [first]
    low, high = int(first), int(last)
    if high < low:
        raise _malformed(part)
    if high - low >= MOST:
        raise ClusterError(
            f"{high - low + 1:,} names in {part!r}, more than {MOST:,}", hint="gpu[0-63]"
        )
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]


def _malformed(text: str) -> ClusterError:
    return ClusterError(f"{text!r} is neither a name nor a range of names", hint="gpu[0-63]")
