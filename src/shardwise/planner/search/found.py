"""What a search comes to: simulated points, bounds of the others.

Enters: nothing. Leaves: `Candidate`, `Bound` and `Found`, the values between search and report.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planner.search.bank import Layouts
from shardwise.planner.search.space import Point
from shardwise.simulation.estimate import Estimate
from shardwise.simulation.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A simulated point."""

    point: Point
    setting: Setting
    estimate: Estimate
    layouts: Layouts


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A point with its bounds: no step is quicker, no rank needs less memory.

    A memory that fits is what the fullest rank does need.
    """

    point: Point
    seconds: float
    memory: float  # of the fullest rank, as a part of its device's


@dataclass(frozen=True, slots=True, kw_only=True)
class Polish:
    """What was tried after the search: other cuts of stages, other layouts."""

    layouts: int
    simulated: int  # points
    gain: float  # as a part of the step
    complete: bool  # whether all that could be quicker was tried


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the search came to, best first."""

    feasible: tuple[Candidate, ...]
    bounds: tuple[Bound, ...]  # of all that were looked at
    next_bound_s: float  # of the first point that was not simulated
    points: int
    polish: Polish | None = None

    @property
    def best(self) -> Candidate:
        return self.feasible[0]

    @property
    def limited_by_memory(self) -> bool:
        """Whether a point that does not fit might be quicker than the best that does."""
        best = self.best.estimate.step_time_s if self.feasible else float("inf")
        return any(bound.memory > 1 and bound.seconds < best for bound in self.bounds)

    @property
    def gap(self) -> float:
        """How much quicker, as a part of the step, a point that was not simulated could be."""
        time = self.best.estimate.step_time_s
        return max(0.0, 1 - self.next_bound_s / time)
