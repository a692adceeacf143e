"""Which plan a strategy runs: `ShardwiseStrategy("hybrid", dp=2, tp=2)`.

Enters: what the user said, and the captured step. Leaves: a `Plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.api import capture_for_plan
from shardwise.cluster import Cluster
from shardwise.errors import PlanError, did_you_mean
from shardwise.frontend import capture
from shardwise.ir import Graph
from shardwise.planner import strategies
from shardwise.planner.search import plan as search
from shardwise.plans import Plan, Precision

__all__ = ["PlanChoice"]

Made = Callable[..., Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A plan, its file, the name of a strategy, "auto", or an own strategy; and its options."""

    plan: str | Path | Plan | Made
    options: Mapping[str, Any] = field(default_factory=dict)
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        if isinstance(self.plan, str) and not self._is_file and self.plan != "auto":
            known = ["auto", *(name for name in strategies.__all__ if name != "make_plan")]
            if self.plan not in known:
                raise PlanError(
                    f"no strategy is named {self.plan!r}{did_you_mean(self.plan, known)}",
                    hint=f"{', '.join(known)}, or a plan's file: plan.json",
                )
        if self.options and (isinstance(self.plan, Plan) or self._is_file):
            raise PlanError(f"a plan that is made takes no options {sorted(self.options)}")

    @property
    def _is_file(self) -> bool:
        return isinstance(self.plan, Path) or (
            isinstance(self.plan, str) and self.plan.endswith(".json")
        )

    def make(self, model: nn.Module, batch: Any, ranks: int, precision: Precision | None) -> Plan:
        """The plan for so many ranks, in the trainer's number types if it names some."""
        if isinstance(self.plan, Plan):
            return _in_types(self.plan, precision)
        if self._is_file:
            return _in_types(Plan.load(Path(str(self.plan))), precision)
        options = dict(self.options)
        if precision is not None:
            if options.setdefault("precision", precision) != precision:
                raise _two_types(Precision.of(options["precision"]), precision)
        cluster = self.cluster or Cluster.local(ranks)
        return self._function()(_graph(model, batch, options), cluster, **options)

    def _function(self) -> Made:
        if callable(self.plan):
            return self.plan
        if self.plan == "auto":
            return lambda graph, cluster, **more: search(graph, cluster, progress=False, **more)
        made: Made = getattr(strategies, str(self.plan))
        return made


def _graph(model: nn.Module, batch: Any, options: Mapping[str, Any]) -> Graph:
    """The step in the number types that the plan will have."""
    kinds = Precision.of(options.get("precision"))
    if not kinds.compute:
        return capture(model, batch)
    return capture_for_plan(model, batch, _types_only(capture(model, batch), kinds))


def _types_only(graph: Graph, precision: Precision) -> Plan:
    return strategies.ddp(graph, Cluster.local(1), precision=precision)


def _in_types(plan: Plan, precision: Precision | None) -> Plan:
    if precision is None or plan.precision == precision:
        return plan
    if plan.precision != Precision():
        raise _two_types(plan.precision, precision)
    return plan.with_(precision=precision)


def _two_types(mine: Precision, asked: Precision) -> PlanError:
    return PlanError(
        f"the plan's precision is {mine.to_json()}, the Trainer's is {asked.to_json()}",
        hint="give it once: Trainer(precision=…), or the plan's own with precision='32-true'",
    )


