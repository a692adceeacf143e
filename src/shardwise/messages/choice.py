"""Which way an operation of some groups of ranks takes: the library's, or trees.

Enters: what a selection found, or a plan's file. Leaves: `CollectiveChoice`, a part of a plan: the
ranks, what is used from how many bytes on, the times that decided, and the trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import PlanError, did_you_mean
from shardwise.messages.forest import Forest, number, require_fields, whole
from shardwise.messages.ranks import Ranks, format_steps, parse_ranks

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")  # that a step repeats, with trees
WAYS = ("library", "hierarchical", "solved", "shared")  # shared: memory of one host
REFERENCE_BYTES = 16 << 20  # at which times are compared in a plan's text


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChoice:
    """What `operation` uses on `groups`, which all do it at the same time.

    Data of fewer than `min_bytes` take the library's way. `predicted_s` are the seconds of each
    way for `REFERENCE_BYTES`; of what is used, data of b bytes take `latency_s + b * s_per_byte`.
    There is a forest for each group, or one for all.
    """

    operation: str
    groups: tuple[Ranks, ...]
    uses: str = "library"
    min_bytes: int = 0
    latency_s: float = 0.0
    s_per_byte: float = 0.0
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    chunk_bytes: int = 0
    forests: tuple[Forest, ...] = ()

    def __post_init__(self) -> None:
        for name, value, known in (
            ("operation", self.operation, OPERATIONS),
            ("uses", self.uses, WAYS),
        ):
            if value not in known:
                raise PlanError(
                    f"{name} {value!r}{did_you_mean(value, known)}", hint=", ".join(known)
                )
        sizes = {len(group) for group in self.groups}
        if len(sizes) != 1 or min(sizes) < 2 or any(len(set(g)) != len(g) for g in self.groups):
            raise PlanError(
                f"groups {format_groups(self.groups)} do not all have the same number of ranks, "
                "two or more"
            )
        for backend in self.predicted_s:
            if backend not in WAYS:
                raise PlanError(
                    f"predicted_s of {backend[:80]!r}{did_you_mean(backend, WAYS)}",
                    hint=", ".join(WAYS),
                )
        if not all(0 <= s < math.inf for s in self.predicted_s.values()):
            raise PlanError(f"predicted_s {dict(self.predicted_s)} are not all times")
        if not all(0 <= s < math.inf for s in (self.latency_s, self.s_per_byte)):
            raise PlanError(f"{self.latency_s} s and {self.s_per_byte} s for each byte")
        if not self.has_trees:
            if self.forests:
                raise PlanError(f"{self.uses} has no trees", hint="leave forests out")
            return
        if len(self.forests) not in (1, len(self.groups)):
            raise PlanError(f"{len(self.forests)} forests for {len(self.groups)} groups")
        if any(forest.num_ranks != len(self.groups[0]) for forest in self.forests):
            raise PlanError(f"a forest is not of the {len(self.groups[0])} ranks of a group")
        if self.chunk_bytes < 1 or self.min_bytes < 0:
            raise PlanError(f"chunks of {self.chunk_bytes} bytes, from {self.min_bytes} bytes on")

    @property
    def is_library(self) -> bool:
        return self.uses == "library"

    @property
    def has_trees(self) -> bool:
        """Whether it is a program of messages."""
        return self.uses in ("hierarchical", "solved")

    @property
    def gain(self) -> float:
        """What it saves of the library's time, of data of the reference size."""
        if self.is_library or not self.predicted_s.get("library"):
            return 0.0
        return 1 - self.predicted_s.get(self.uses, 0.0) / self.predicted_s["library"]

    def seconds(self, num_bytes: float) -> float | None:
        """The time without the library; None if it is the library's."""
        if self.is_library or num_bytes < self.min_bytes:
            return None
        return self.latency_s + num_bytes * self.s_per_byte

    def forest(self, ranks: Ranks) -> Forest | None:
        """The trees of one group; None if it is not of these, or the library is used."""
        if not self.has_trees or ranks not in self.groups:
            return None
        return self.forests[0 if len(self.forests) == 1 else self.groups.index(ranks)]

    # ------------------------------------------------------------ files and text

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "operation": self.operation,
            "groups": [format_steps(group) for group in self.groups],
            "uses": self.uses,
            "predicted_s": dict(self.predicted_s),
        }
        if not self.is_library:
            for name in ("min_bytes", "latency_s", "s_per_byte"):
                data[name] = getattr(self, name)
        if self.has_trees:
            data["chunk_bytes"] = self.chunk_bytes
            data["forests"] = [forest.to_json() for forest in self.forests]
        return data

    @staticmethod
    def from_json(data: Any, where: str) -> CollectiveChoice:
        """What `to_json` gave, or an edited one."""
        known = (
            "operation", "groups", "uses", "predicted_s", "min_bytes", "latency_s", "s_per_byte",
            "chunk_bytes", "forests",
        )  # fmt: skip
        fields = require_fields(data, known, ("operation", "groups", "uses"), where)
        try:
            return CollectiveChoice(
                operation=str(fields["operation"]),
                groups=tuple(parse_ranks(str(group), where) for group in fields["groups"]),
                uses=str(fields["uses"]),
                predicted_s={
                    str(way): number(s, f"predicted_s.{way}")
                    for way, s in fields.get("predicted_s", {}).items()
                },
                min_bytes=whole(fields.get("min_bytes", 0), "min_bytes"),
                latency_s=number(fields.get("latency_s", 0.0), "latency_s"),
                s_per_byte=number(fields.get("s_per_byte", 0.0), "s_per_byte"),
                chunk_bytes=whole(fields.get("chunk_bytes", 0), "chunk_bytes"),
                forests=tuple(
                    Forest.from_json(forest, f"{where}.forests[{i}]")
                    for i, forest in enumerate(fields.get("forests", ()))
                ),
            )
        except PlanError as error:
            raise PlanError(error.message, where=error.where or where, hint=error.hint) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(f"malformed: {error}", where=where) from None

    @property
    def way(self) -> str:
        """What is used, in words: `solved from 64 KiB on, 2 trees, chunks of 1 MiB`."""
        told = self.uses
        if not self.is_library and self.min_bytes:
            told += f" from {_size(self.min_bytes)} on"
        if self.has_trees:
            trees = max(len(forest.trees) for forest in self.forests)
            told += f", {trees} trees, chunks of {_size(self.chunk_bytes)}"
        return told

    def __str__(self) -> str:
        times = ", ".join(f"{way} {_time(s)}" for way, s in self.predicted_s.items())
        told = f"{self.operation} on ranks {format_groups(self.groups)}: {self.way}"
        return told + (f" ({_size(REFERENCE_BYTES)}: {times})" if times else "")


def read_choices(data: Sequence[Any]) -> tuple[CollectiveChoice, ...]:
    """Those of a plan's file."""
    return tuple(CollectiveChoice.from_json(row, f"collectives[{i}]") for i, row in enumerate(data))


def check_ranks(choices: Sequence[CollectiveChoice], num_ranks: int) -> None:
    """Raise if a choice is for a rank that there is not."""
    for i, choice in enumerate(choices):
        last = max(map(max, choice.groups))
        if last >= num_ranks:
            raise PlanError(
                f"rank {last} of a plan for {num_ranks} ranks", where=f"collectives[{i}]"
            )


Chooser = Callable[[str, NDArray[np.int64]], CollectiveChoice | None]


def chosen(choices: Sequence[CollectiveChoice]) -> Chooser:
    """Of these choices, that of an operation on some groups, in any order."""
    known = {(c.operation, frozenset(c.groups)): c for c in choices}

    def choose(operation: str, groups: NDArray[np.int64]) -> CollectiveChoice | None:
        return known.get((operation, frozenset(tuple(row) for row in groups.tolist())))

    return choose


def format_groups(groups: Sequence[Ranks], most: int = 4) -> str:
    """Groups of ranks, the first of many.

    >>> format_groups([(0, 1), (2, 3)])
    '0-1 | 2-3'
    """
    shown = " | ".join(format_steps(group) for group in groups[:most])
    return shown + (f" | … {len(groups) - most} more" if len(groups) > most else "")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):.3g} MiB"
    return f"{num_bytes / 1024:.3g} KiB" if num_bytes >= 1024 else f"{num_bytes} B"
