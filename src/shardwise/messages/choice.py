"""The implementation of a collective on some groups of ranks: the library's, or trees.

A `CollectiveChoice` is a part of a plan: the ranks, what is used from how many bytes on, the
predicted times that decided, and the trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import PlanError
from shardwise.formatting import short_seconds, short_size
from shardwise.messages.program import Ranks, format_steps, parse_ranks
from shardwise.messages.trees import Forest
from shardwise.schema import Form, OneOf, Range, Reader, Stored, Writer, check_fields

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")  # that a step repeats, with trees
IMPLEMENTATIONS = ("library", "hierarchical", "solved", "shared")  # shared: memory of one host
TIMED = (*IMPLEMENTATIONS, *(f"{name} measured" for name in IMPLEMENTATIONS))
REFERENCE_BYTES = 16 << 20  # at which times are compared in a plan's text
RankRanges = Annotated[Ranks, Form(parse_ranks, format_steps)]
Seconds = Annotated[float, Range(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChoice:
    """The implementation that `operation` uses on `groups`, which all run it at the same time.

    Data of fewer than `min_bytes` use the library. `predicted_s` are the seconds of each
    implementation for `REFERENCE_BYTES`; with the one that is used, b bytes take
    `latency_s + b * s_per_byte`. There is a forest for each group, or one for all.
    """

    operation: Annotated[str, OneOf(OPERATIONS)]
    groups: tuple[RankRanges, ...]
    uses: Annotated[str, OneOf(IMPLEMENTATIONS), Stored(always=True)] = "library"
    predicted_s: Annotated[
        Mapping[Annotated[str, OneOf(TIMED, "implementation")], Seconds], Stored(always=True)
    ] = field(default_factory=dict)
    min_bytes: Annotated[int, Range(0), Stored(always=True)] = 0
    latency_s: Annotated[float, Range(0), Stored(always=True)] = 0.0
    s_per_byte: Annotated[float, Range(0), Stored(always=True)] = 0.0
    chunk_bytes: Annotated[int, Range(0), Stored(always=True)] = 0
    forests: Annotated[tuple[Forest, ...], Stored(always=True)] = ()

    def __post_init__(self) -> None:
        check_fields(self, PlanError)
        sizes = {len(group) for group in self.groups}
        if len(sizes) != 1 or min(sizes) < 2 or any(len(set(g)) != len(g) for g in self.groups):
            raise PlanError(
                f"groups {format_groups(self.groups)} do not all have the same number of ranks, "
                "two or more"
            )
        if not self.has_trees:
            if self.forests:
                raise PlanError(f"{self.uses} has no trees", hint="leave forests out")
            return
        if len(self.forests) not in (1, len(self.groups)):
            raise PlanError(f"{len(self.forests)} forests for {len(self.groups)} groups")
        if any(forest.num_ranks != len(self.groups[0]) for forest in self.forests):
            raise PlanError(f"a forest is not of the {len(self.groups[0])} ranks of a group")
        if self.chunk_bytes < 1:
            raise PlanError(f"chunks of {self.chunk_bytes} bytes", hint="1 or more")

    @property
    def is_library(self) -> bool:
        return self.uses == "library"

    @property
    def has_trees(self) -> bool:
        """Whether it is a message program."""
        return self.uses in ("hierarchical", "solved")

    @property
    def gain(self) -> float:
        """The fraction of the library's time that it saves for data of the reference size."""
        if self.is_library or not self.predicted_s.get("library"):
            return 0.0
        return 1 - self.predicted_s.get(self.uses, 0.0) / self.predicted_s["library"]

    def seconds(self, num_bytes: float) -> float | None:
        """Return the time of data that do not use the library; None if they use it."""
        if self.is_library or num_bytes < self.min_bytes:
            return None
        return self.latency_s + num_bytes * self.s_per_byte

    def forest(self, ranks: Ranks) -> Forest | None:
        """Return the trees of one group; None if it has none."""
        if not self.has_trees or ranks not in self.groups:
            return None
        return self.forests[0 if len(self.forests) == 1 else self.groups.index(ranks)]

    # ------------------------------------------------------------ files and text

    def to_json(self) -> dict[str, Any]:
        omitted = set() if self.has_trees else {"chunk_bytes", "forests"}
        if self.is_library:
            omitted |= {"min_bytes", "latency_s", "s_per_byte"}
        fields = Writer().fields(self)
        return {name: value for name, value in fields.items() if name not in omitted}

    @staticmethod
    def from_json(data: Any, where: str) -> CollectiveChoice:
        """Read what `to_json` wrote, or an edited one."""
        choice: CollectiveChoice = Reader(PlanError, where).read(CollectiveChoice, data)
        return choice

    @property
    def way(self) -> str:
        """What is used, in words: `solved from 64 KiB on, 2 trees, chunks of 1 MiB`."""
        told = self.uses
        if not self.is_library and self.min_bytes:
            told += f" from {short_size(self.min_bytes)} on"
        if self.has_trees:
            trees = max(len(forest.trees) for forest in self.forests)
            told += f", {trees} trees, chunks of {short_size(self.chunk_bytes)}"
        return told

    def __str__(self) -> str:
        times = ", ".join(f"{way} {short_seconds(s)}" for way, s in self.predicted_s.items())
        told = f"{self.operation} on ranks {format_groups(self.groups)}: {self.way}"
        return told + (f" ({short_size(REFERENCE_BYTES)}: {times})" if times else "")


def check_ranks(choices: Sequence[CollectiveChoice], num_ranks: int) -> None:
    """Raise if a choice names a rank outside the plan."""
    for i, choice in enumerate(choices):
        last = max(map(max, choice.groups))
        if last >= num_ranks:
            raise PlanError(
                f"rank {last} is outside a plan for {num_ranks} ranks", where=f"collectives[{i}]"
            )


Chooser = Callable[[str, NDArray[np.int64]], CollectiveChoice | None]


def chosen(choices: Sequence[CollectiveChoice]) -> Chooser:
    """Return a function that finds the choice of an operation on some groups, in any order."""
    known = {(c.operation, frozenset(c.groups)): c for c in choices}

    def choose(operation: str, groups: NDArray[np.int64]) -> CollectiveChoice | None:
        return known.get((operation, frozenset(tuple(row) for row in groups.tolist())))

    return choose


def format_groups(groups: Sequence[Ranks], most: int = 4) -> str:
    """Return groups of ranks as text, at most the first `most`.

    >>> format_groups([(0, 1), (2, 3)])
    '0-1 | 2-3'
    """
    shown = " | ".join(format_steps(group) for group in groups[:most])
    return shown + (f" | … {len(groups) - most} more" if len(groups) > most else "")
