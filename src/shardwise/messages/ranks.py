"""Ranks as text: ranges such as `0-2,5`, with the step where it is not 1.

No text of a file can stand for more ranks than a cluster may have.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise

from shardwise.errors import PlanError

Ranks = tuple[int, ...]
MOST_RANKS = 1 << 20
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,8}))?)?", re.ASCII)


def format_ranks(ranks: Ranks) -> str:
    """Return ranks as ranges.

    >>> format_ranks((0, 1, 2, 5))
    '0-2,5'
    """
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def format_steps(ranks: Ranks) -> str:
    """Return ranks as ranges, as a single one where all are equally far apart.

    >>> format_steps((0, 1, 2, 5)), format_steps((0, 4, 8, 12))
    ('0-2,5', '0-12/4')
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and next(iter(steps)) > 1:
        return f"{ranks[0]}-{ranks[-1]}/{next(iter(steps))}"
    return format_ranks(ranks)


def parse_ranks(text: str, where: str | None = None) -> Ranks:
    """Return the ranks of a text that either of the others wrote.

    >>> parse_ranks("0-2,5"), parse_ranks("0-12/4")
    ((0, 1, 2, 5), (0, 4, 8, 12))
    """
    ranks: list[int] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        first, last, step = match.groups() if match is not None else ("1", "0", "1")
        span = range(int(first), int(last or first) + 1, int(step or 1))
        if not span or len(ranks) + len(span) > MOST_RANKS:
            raise PlanError(
                f"ranks {text[:80]!r} are not ranges of at most {MOST_RANKS:,} ranks",
                where=where,
                hint='"0-3", "0,2" or "0-12/4"',
            )
        ranks += span
    return tuple(ranks)
