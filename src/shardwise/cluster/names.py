"""Ranges of names: `gpu[0-63]` stands for 64 nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated

from shardwise.errors import ClusterError
from shardwise.schema import Form

MOST = 10**6  # ranks, nodes, cards and so on of a cluster
LONGEST = 255  # characters of a host name
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_RANGE = re.compile(r"^([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)$")


@cache
def expand(pattern: str) -> tuple[str, ...]:
    """Return all names of a pattern, in order.

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
    if len(head) + len(tail) > LONGEST:
        raise ClusterError(f"{pattern[:60]!r}… is a name of more than {LONGEST} characters")
    parts = [_numbers(part) for part in inside.split(",")]
    if sum(len(numbers) for numbers, _ in parts) > MOST:
        raise ClusterError(f"more than {MOST:,} names in {pattern[:60]!r}", hint="gpu[0-63]")
    return tuple(
        f"{head}{str(number).zfill(width)}{tail}" for numbers, width in parts for number in numbers
    )


@cache
def count(pattern: str) -> int:
    """Return how many names the pattern stands for."""
    return len(expand(pattern)) if "[" in pattern or "]" in pattern or not pattern else 1


def expand_all(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of several patterns, in order."""
    return tuple(name for pattern in patterns for name in expand(pattern))


def _checked(pattern: str) -> str:
    expand(pattern)  # raises
    return pattern


Pattern = Annotated[str, Form(_checked)]  # in files


def _numbers(part: str) -> tuple[range, int]:
    """Return the numbers of `08-10`, and the digits that each is written with."""
    found = _NUMBERS.fullmatch(part.strip())
    if found is None:
        raise _malformed(part)
    first, last = found[1], found[2] or found[1]
    if int(last) < int(first):
        raise _malformed(part)
    return range(int(first), int(last) + 1), len(first)


def _malformed(text: str) -> ClusterError:
    return ClusterError(f"{text[:80]!r} is neither a name nor a range of names", hint="gpu[0-63]")
