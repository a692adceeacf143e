"""Trees of a collective with the links that they use.

Every rank lowers a `Forest` to a message program by itself (`collectives.derive`), without a
cluster and without a solver: the same trees carry any number of elements, and the order of messages
follows from the links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from shardwise.errors import PlanError
from shardwise.schema import Form, Range, Stored, check_fields


def _read_parents(text: str) -> tuple[int, ...]:
    return tuple(-1 if word == "-" else int(word) for word in text.split())


def _write_parents(parents: Sequence[int]) -> str:
    return " ".join("-" if parent < 0 else str(parent) for parent in parents)


Parents = Form(_read_parents, _write_parents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A part of the data: the parents along which it is summed to `root`, and copied from it.

    The root's parent is -1; a half that the operation does not need is empty.
    """

    weight: float
    root: int
    inward: Annotated[tuple[int, ...], Parents, Stored("in")] = ()
    outward: Annotated[tuple[int, ...], Parents, Stored("out")] = ()

    @property
    def edges(self) -> set[tuple[int, int]]:
        """The pairs of sender and receiver."""
        up = {(rank, parent) for rank, parent in enumerate(self.inward) if parent >= 0}
        return up | {(parent, rank) for rank, parent in enumerate(self.outward) if parent >= 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A send that trees use: its ends, the resources it occupies, and its latency."""

    source: int
    target: int
    uses: tuple[int, ...]
    latency_s: float


def _read_wires(sends: Mapping[str, str]) -> tuple[Wire, ...]:
    """Read wires by latency, as `0>1:0,5`: rank 0 sends to rank 1 over resources 0 and 5."""
    wires = []
    for latency, row in sends.items():
        for text in row.split():
            ends, _, uses = text.partition(":")
            source, _, target = ends.partition(">")
            used = tuple(int(use) for use in uses.split(",") if use)
            latency_s = float(latency)
            wires.append(
                Wire(source=int(source), target=int(target), uses=used, latency_s=latency_s)
            )
    return tuple(sorted(wires, key=lambda wire: (wire.source, wire.target)))


def _write_wires(wires: Sequence[Wire]) -> dict[str, str]:
    sends: dict[str, list[str]] = {}
    for wire in wires:
        uses = ",".join(map(str, wire.uses))
        sends.setdefault(repr(wire.latency_s), []).append(f"{wire.source}>{wire.target}:{uses}")
    return {latency: " ".join(row) for latency, row in sends.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The trees of one group of ranks, numbered from 0, and their wires.

    `capacity` is the bytes per second of each resource; `message_s` the time that a message costs
    a rank.
    """

    num_ranks: Annotated[int, Stored("ranks")]
    message_s: Annotated[float, Range(0), Stored(always=True)] = 0.0
    capacity: Annotated[
        tuple[Annotated[float, Range(0, above=True)], ...], Stored("capacity_bytes_per_s")
    ]
    wires: Annotated[
        tuple[Wire, ...], Form(_read_wires, _write_wires, Mapping[str, str]), Stored("sends")
    ]
    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        if not self.trees:
            raise PlanError("a forest without trees", hint="sw.collectives.choose(plan, cluster)")
        check_fields(self, PlanError)
        for wire in self.wires:
            outside = any(not 0 <= use < len(self.capacity) for use in wire.uses)
            if outside or not 0 <= wire.latency_s < math.inf:
                raise PlanError(
                    f"send {wire.source}>{wire.target} over {wire.uses} of {len(self.capacity)} "
                    f"resources with latency {wire.latency_s}"
                )
        known = {(wire.source, wire.target) for wire in self.wires}
        for number, tree in enumerate(self.trees):
            _check_tree(tree, number, self.num_ranks)
            missing = sorted(tree.edges - known)
            if missing:
                a, b = missing[0]
                raise PlanError(f"tree {number} sends {a}>{b}, for which there is no wire")


def _check_tree(tree: Tree, number: int, count: int) -> None:
    where = f"tree {number}"
    if not 0 <= tree.root < count or not 0 < tree.weight <= 1 + 1e-6:
        raise PlanError(
            f"{where}: root {tree.root} of {count} ranks, weight {tree.weight}",
            hint="weights above 0 that add up to 1",
        )
    for half in (tree.inward, tree.outward):
        if half and (len(half) != count or half[tree.root] != -1):
            raise PlanError(f"{where} is not one of {count} ranks with the root {tree.root}")
        for rank in range(len(half)):
            seen, at = 0, rank
            while at != tree.root and seen <= count:
                at, seen = half[at] if 0 <= half[at] < count else rank, seen + 1
            if seen > count:
                raise PlanError(f"{where}: rank {rank} does not lead to the root {tree.root}")
