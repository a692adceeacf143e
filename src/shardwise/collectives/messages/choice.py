"""The implementation of a collective that a plan stores: the library's, or trees of messages.

A `CollectiveChoice` says which implementation an operation uses on some groups of ranks, and has
the trees where that is a message program. Files hold trees and edges as short texts, because plans
of many ranks would otherwise be mostly brackets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.collectives.messages.program import Ranks, format_steps, parse_ranks
from shardwise.errors import PlanError
from shardwise.formatting import short_seconds, short_size
from shardwise.schema import Form, OneOf, Range, Reader, Stored, Writer, check_fields

Parents = Form(
    lambda text: tuple(-1 if word == "-" else int(word) for word in text.split()),
    lambda parents: " ".join("-" if parent < 0 else str(parent) for parent in parents),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The trees that carry a fraction of the data: into `root` as sums, out of it as copies.

    `inward` and `outward` are the parent of each rank, -1 at the root; a tree that the operation
    does not need is empty.
    """

    weight: float
    root: int
    inward: Annotated[tuple[int, ...], Parents, Stored("in")] = ()
    outward: Annotated[tuple[int, ...], Parents, Stored("out")] = ()

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The pairs of sender and receiver."""
        up = {(rank, parent) for rank, parent in enumerate(self.inward) if parent >= 0}
        return up | {(parent, rank) for rank, parent in enumerate(self.outward) if parent >= 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A send that trees use: its ranks, the resources it occupies, and its latency."""

    source: int
    target: int
    uses: tuple[int, ...]
    latency_s: float


def _read_edges(sends: Mapping[str, str]) -> tuple[Edge, ...]:
    """Read edges by latency, as `0>1:0,5`: rank 0 sends to rank 1 over resources 0 and 5."""
    edges = []
    for latency, row in sends.items():
        for text in row.split():
            ends, _, uses = text.partition(":")
            source, _, target = ends.partition(">")
            edges.append(
                Edge(
                    source=int(source),
                    target=int(target),
                    uses=tuple(int(use) for use in uses.split(",") if use),
                    latency_s=float(latency),
                )
            )
    return tuple(sorted(edges, key=lambda edge: (edge.source, edge.target)))


def _write_edges(edges: Sequence[Edge]) -> dict[str, str]:
    sends: dict[str, list[str]] = {}
    for edge in edges:
        uses = ",".join(map(str, edge.uses))
        sends.setdefault(repr(edge.latency_s), []).append(f"{edge.source}>{edge.target}:{uses}")
    return {latency: " ".join(row) for latency, row in sends.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The trees of one group of ranks, numbered from 0, and the edges that they use.

    `capacity` is the bytes per second of each resource, `message_s` the time that a rank spends on
    a message.
    """

    num_ranks: Annotated[int, Stored("ranks")]
    message_s: Annotated[float, Range(0), Stored(always=True)] = 0.0
    capacity: Annotated[
        tuple[Annotated[float, Range(0, above=True)], ...], Stored("capacity_bytes_per_s")
    ]
    edges: Annotated[
        tuple[Edge, ...], Form(_read_edges, _write_edges, Mapping[str, str]), Stored("sends")
    ]
    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        if not self.trees:
            raise PlanError("a forest without trees", hint="sw.collectives.choose(plan, cluster)")
        check_fields(self, PlanError)
        for edge in self.edges:
            outside = any(not 0 <= use < len(self.capacity) for use in edge.uses)
            if outside or not 0 <= edge.latency_s < math.inf:
                raise PlanError(
                    f"send {edge.source}>{edge.target} over {edge.uses} of {len(self.capacity)} "
                    f"resources with latency {edge.latency_s}"
                )
        pairs = {(edge.source, edge.target) for edge in self.edges}
        for number, tree in enumerate(self.trees):
            _check_tree(tree, number, self.num_ranks)
            missing = sorted(tree.pairs - pairs)
            if missing:
                a, b = missing[0]
                raise PlanError(f"tree {number} sends {a}>{b}, which is not among the sends")


def _check_tree(tree: Tree, number: int, count: int) -> None:
    where = f"tree {number}"
    if not 0 <= tree.root < count or not 0 < tree.weight <= 1 + 1e-6:
        raise PlanError(
            f"{where}: root {tree.root} of {count} ranks, weight {tree.weight}",
            hint="weights above 0 that add up to 1",
        )
    for half in (tree.inward, tree.outward):
        if half and (len(half) != count or half[tree.root] != -1):
            raise PlanError(f"{where} does not span {count} ranks from the root {tree.root}")
        for rank in range(len(half)):
            hops, ancestor = 0, rank
            while ancestor != tree.root and hops <= count:
                parent = half[ancestor]
                ancestor, hops = parent if 0 <= parent < count else rank, hops + 1
            if hops > count:
                raise PlanError(f"{where}: rank {rank} does not lead to the root {tree.root}")


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")  # a step repeats them; trees exist
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
                f"groups {format_groups(self.groups)} must have equally many different ranks, "
                "at least two"
            )
        if not self.has_trees:
            if self.forests:
                raise PlanError(f"{self.uses} has no trees", hint="leave forests out")
            return
        if len(self.forests) not in (1, len(self.groups)):
            raise PlanError(f"{len(self.forests)} forests for {len(self.groups)} groups")
        if any(forest.num_ranks != len(self.groups[0]) for forest in self.forests):
            raise PlanError(f"a forest does not have the {len(self.groups[0])} ranks of a group")
        if self.chunk_bytes < 1:
            raise PlanError(f"chunks of {self.chunk_bytes} bytes", hint="1 or more")

    @property
    def is_library(self) -> bool:
        return self.uses == "library"

    @property
    def has_trees(self) -> bool:
        """Whether the implementation is a message program."""
        return self.uses in ("hierarchical", "solved")

    @property
    def gain(self) -> float:
        """The fraction of the library's time that is saved at the reference size."""
        if self.is_library or not self.predicted_s.get("library"):
            return 0.0
        return 1 - self.predicted_s.get(self.uses, 0.0) / self.predicted_s["library"]

    def seconds(self, num_bytes: float) -> float | None:
        """Return the predicted time, or None if data of this size use the library."""
        if self.is_library or num_bytes < self.min_bytes:
            return None
        return self.latency_s + num_bytes * self.s_per_byte

    def forest(self, ranks: Ranks) -> Forest | None:
        """Return the trees of one group, or None if it has no trees."""
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
        """Read a choice from plain data."""
        choice: CollectiveChoice = Reader(PlanError, where).read(CollectiveChoice, data)
        return choice

    @property
    def summary(self) -> str:
        """The implementation in words: `solved from 64 KiB on, 2 trees, chunks of 1 MiB`."""
        text = self.uses
        if not self.is_library and self.min_bytes:
            text += f" from {short_size(self.min_bytes)} on"
        if self.has_trees:
            trees = max(len(forest.trees) for forest in self.forests)
            text += f", {trees} trees, chunks of {short_size(self.chunk_bytes)}"
        return text

    def __str__(self) -> str:
        times = ", ".join(f"{name} {short_seconds(s)}" for name, s in self.predicted_s.items())
        text = f"{self.operation} on ranks {format_groups(self.groups)}: {self.summary}"
        return text + (f" ({short_size(REFERENCE_BYTES)}: {times})" if times else "")


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
    """Return a function that looks up the choice of an operation on groups in any order."""
    by_groups = {(c.operation, frozenset(c.groups)): c for c in choices}

    def choose(operation: str, groups: NDArray[np.int64]) -> CollectiveChoice | None:
        return by_groups.get((operation, frozenset(tuple(row) for row in groups.tolist())))

    return choose


def format_groups(groups: Sequence[Ranks], limit: int = 4) -> str:
    """Return groups of ranks as text, at most the first `limit`.

    >>> format_groups([(0, 1), (2, 3)])
    '0-1 | 2-3'
    """
    shown = " | ".join(format_steps(group) for group in groups[:limit])
    return shown + (f" | … {len(groups) - limit} more" if len(groups) > limit else "")
