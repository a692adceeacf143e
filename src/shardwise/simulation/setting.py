"""How a step runs, beside the layouts of its nodes.

Enters: a `Plan`, or a point of the planner's search. Leaves: `ExecutionConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardwise.dtypes import itemsize
from shardwise.plans import Precision
from shardwise.schedules import Schedule
from shardwise.simulation.times import Group


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Groups of ranks, the stages that they run, and what is done to save memory.

    `cuts` are the positions at which stages begin, the first at 0; `placement` says which group
    runs each. `zero` is the level of all parameters, `zeros` that of those that match a glob; the
    last match wins. `prefetch` says whether new parameters are gathered (zero 1 and 2) while the
    next forward already runs, `whole_units` that a unit's parameters travel in one message whatever
    their size; both are of other stacks than ours.
    """

    groups: tuple[Group, ...]
    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: Schedule | None = None
    num_microbatches: int = 1
    zero: int = 0
    zeros: Mapping[str, int] = field(default_factory=dict)
    recompute: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    prefetch: bool = False
    whole_units: bool = False

    def level(self, parameter: str) -> int:
        """The zero level of a parameter."""
        found = self.zero
        for glob, level in self.zeros.items():
            if fnmatchcase(parameter, glob):
                found = level
        return found

    def wire_size(self, item_bytes: int) -> int:
        """Return the bytes of a gradient's element while it is summed, given its parameter's."""
        precision = self.precision
        return itemsize(precision.reduce or precision.gradients or precision.master, item_bytes)

    @property
    def sums(self) -> object:
        """What of the setting decides how parameters and gradients travel."""
        return (self.zero, tuple(self.zeros.items()), self.wire_size(0), self.whole_units)

    @property
    def num_ranks(self) -> int:
        return sum(len(group.ranks) for group in self.groups)
