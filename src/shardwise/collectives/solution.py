"""What a solve found.

Enters: what `solve.py` computes. Leaves: `Solution`: a program, its times, and what is proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from shardwise.collectives.text import solution_text
from shardwise.collectives.trees import Part
from shardwise.messages import MessageProgram

PROVED = 1e-4  # a gap to the bound below which a time counts as optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A program with its times, for `numel` elements of `item_bytes`.

    `bandwidth_s` is what the busiest resource takes; `lp_bound_s` is the least for any trees or
    routes, `cut_bound_s` for any algorithm that moves sums and copies; both count no latency.
    `predicted_s` is the whole time with latencies and the filling of pipelines.
    """

    name: str
    program: MessageProgram
    item_bytes: int
    predicted_s: float
    bandwidth_s: float
    lp_bound_s: float
    cut_bound_s: float
    bottlenecks: tuple[str, ...]
    depth: int
    symmetry: int
    others: tuple[tuple[str, float], ...]
    parts: tuple[Part, ...] = field(default=(), compare=False)  # none of rounds and routes

    @property
    def num_bytes(self) -> int:
        return self.program.numel * self.item_bytes

    @property
    def gap(self) -> float:
        """How much longer the busiest resource takes than the better bound, as a part of it.

        Infinite where bytes take time and nothing bounds it: some rank has no element.
        """
        bound = max(self.lp_bound_s, self.cut_bound_s)
        if bound > 0:
            return max(0.0, self.bandwidth_s / bound - 1)
        return math.inf if self.num_bytes and self.bottlenecks else 0.0

    @property
    def proved(self) -> bool:
        """Whether no trees could use the network better."""
        return self.gap <= PROVED

    def to_json(self) -> dict[str, Any]:
        """Its times for machines, and the program."""
        return {
            "name": self.name,
            "num_bytes": self.num_bytes,
            "item_bytes": self.item_bytes,
            "predicted_s": self.predicted_s,
            "bandwidth_s": self.bandwidth_s,
            "lp_bound_s": self.lp_bound_s,
            "cut_bound_s": self.cut_bound_s,
            "gap": self.gap if self.gap < math.inf else None,
            "proved": self.proved,
            "bottlenecks": list(self.bottlenecks),
            "depth": self.depth,
            "symmetry": self.symmetry,
            "others": dict(self.others),
            "program": self.program.to_json(),
        }

    def __str__(self) -> str:
        return solution_text(self)
