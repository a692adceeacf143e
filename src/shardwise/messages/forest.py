"""Trees with the wires that they use: all that programs of any size follow from.

Enters: what the solver makes, or a plan's file. Leaves: `Forest`, plain data that every rank lowers
by itself (`collectives.derive`), without a cluster and without a solver: the same trees carry any
number of elements, and the order of messages follows from the wires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A part of the data: the parents by which it is summed to `root`, and copied from it.

    The root's parent is -1; a half that the operation does not have is empty.
    """

    weight: float
    root: int
    inward: tuple[int, ...] = ()
    outward: tuple[int, ...] = ()

    @property
    def edges(self) -> set[tuple[int, int]]:
        """Who sends to whom."""
        up = {(rank, parent) for rank, parent in enumerate(self.inward) if parent >= 0}
        return up | {(parent, rank) for rank, parent in enumerate(self.outward) if parent >= 0}

    def to_json(self) -> dict[str, Any]:
        halves = {"in": self.inward, "out": self.outward}
        return {
            "weight": self.weight,
            "root": self.root,
            **{name: _row(half) for name, half in halves.items() if half},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A send that trees use: from whom to whom, over which resources, and its latency."""

    source: int
    target: int
    uses: tuple[int, ...]
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The trees of one group of ranks, numbered from 0, and their wires.

    `capacity` is the bytes per second of each resource; `message_s` what a message costs a rank.
    """

    num_ranks: int
    trees: tuple[Tree, ...]
    wires: tuple[Wire, ...]
    capacity: tuple[float, ...]
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.trees:
            raise PlanError("a forest without trees", hint="sw.choose_collectives(plan, cluster)")
        if not 0 <= self.message_s < math.inf:
            raise PlanError(f"message_s is {self.message_s}, must be a number of at least 0")
        known = {(wire.source, wire.target) for wire in self.wires}
        for number, tree in enumerate(self.trees):
            _check_tree(tree, number, self.num_ranks)
            missing = sorted(tree.edges - known)
            if missing:
                a, b = missing[0]
                raise PlanError(f"tree {number} sends {a}>{b}, for which there is no wire")

    # ------------------------------------------------------------ files

    def to_json(self) -> dict[str, Any]:
        """Wires by latency, as `0>1:0,5`: rank 0 sends to rank 1 over resources 0 and 5."""
        sends: dict[str, list[str]] = {}
        for wire in self.wires:
            uses = ",".join(map(str, wire.uses))
            sends.setdefault(repr(wire.latency_s), []).append(f"{wire.source}>{wire.target}:{uses}")
        return {
            "ranks": self.num_ranks,
            "message_s": self.message_s,
            "capacity_bytes_per_s": list(self.capacity),
            "sends": {latency: " ".join(found) for latency, found in sends.items()},
            "trees": [tree.to_json() for tree in self.trees],
        }

    @staticmethod
    def from_json(data: Any, where: str) -> Forest:
        """What `to_json` gave, or an edited one."""
        known = ("ranks", "message_s", "capacity_bytes_per_s", "sends", "trees")
        fields = require_fields(data, known, known, where)
        try:
            capacity = tuple(number(value, "a rate") for value in fields["capacity_bytes_per_s"])
            if any(not 0 < value < math.inf for value in capacity):
                raise ValueError(f"capacities {capacity} are not all above 0")
            sends = [
                _read_wire(text, float(latency), len(capacity))
                for latency, row in fields["sends"].items()
                for text in row.split()
            ]
            trees = [
                _read_tree(tree, f"{where}.trees[{i}]") for i, tree in enumerate(fields["trees"])
            ]
            return Forest(
                num_ranks=whole(fields["ranks"], "ranks"),
                trees=tuple(trees),
                wires=tuple(sorted(sends, key=lambda wire: (wire.source, wire.target))),
                capacity=capacity,
                message_s=number(fields["message_s"], "message_s"),
            )
        except PlanError as error:
            raise PlanError(error.message, where=error.where or where, hint=error.hint) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(f"malformed: {error}", where=where) from None


def require_fields(
    data: Any, known: Sequence[str], required: Sequence[str], where: str
) -> Mapping[str, Any]:
    """An object's fields, all known; else an error that names one."""
    if not isinstance(data, Mapping):
        raise PlanError(f"expected an object, found {type(data).__name__}", where=where)
    for key in data:
        if key not in known:
            raise PlanError(f"unknown field {key!r}", where=where, hint=", ".join(known))
    for key in required:
        if key not in data:
            raise PlanError(f"field {key!r} is missing", where=where)
    return data


def whole(value: object, name: str) -> int:
    """A whole number of a file: JSON has others, and True."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, must be a whole number")
    return value


def number(value: object, name: str) -> float:
    """A number of a file."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, must be a number")
    return float(value)


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


def _read_tree(data: Any, where: str) -> Tree:
    fields = require_fields(data, ("weight", "root", "in", "out"), ("weight", "root"), where)
    halves = [
        tuple(-1 if word == "-" else int(word) for word in str(fields.get(name, "")).split())
        for name in ("in", "out")
    ]
    weight, root = number(fields["weight"], "weight"), whole(fields["root"], "root")
    return Tree(weight=weight, root=root, inward=halves[0], outward=halves[1])


def _read_wire(text: str, latency_s: float, resources: int) -> Wire:
    ends, _, uses = text.partition(":")
    source, _, target = ends.partition(">")
    used = tuple(int(use) for use in uses.split(",") if use)
    if any(not 0 <= use < resources for use in used) or not 0 <= latency_s < math.inf:
        raise ValueError(f"send {text!r}: {resources} resources, latency {latency_s}")
    return Wire(source=int(source), target=int(target), uses=used, latency_s=latency_s)


def _row(parents: Sequence[int]) -> str:
    return " ".join("-" if parent < 0 else str(parent) for parent in parents)
