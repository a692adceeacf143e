"""The plan that a trainer was asked for.

Enters: `"auto"`, a strategy's name, a plan or its file, or a function; the model's graph and the
cluster. Leaves: a `Plan`, the same on every rank, and how many replicas of a batch it takes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.cluster import Cluster
from shardwise.errors import PlanError, did_you_mean
from shardwise.frontend import capture
from shardwise.ir import Graph
from shardwise.planner import strategies
from shardwise.planner.search import plan as search
from shardwise.plans import Plan, Precision

Strategy = Callable[[Graph, Cluster], Plan]
_NAMES = tuple(name for name in strategies.__all__ if name != "make_plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked for; `precision` is that of the training arguments."""

    plan: str | Path | Plan | Strategy = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    cluster: Cluster | str | Path | None = None
    precision: str = ""

    def __post_init__(self) -> None:
        fixed = isinstance(self.plan, Plan) or self._file is not None
        if fixed and self.options:
            raise PlanError(f"a plan takes no options, found {', '.join(self.options)}")
        known = ("auto", *_NAMES)
        if isinstance(self.plan, str) and not fixed and self.plan not in known:
            raise PlanError(
                f"no strategy and no plan file {self.plan!r}{did_you_mean(self.plan, known)}",
                hint=f"{', '.join(known)}, or a plan's .json file",
            )

    @property
    def _file(self) -> Path | None:
        if isinstance(self.plan, Path):
            return self.plan
        text = self.plan if isinstance(self.plan, str) else ""
        return Path(text) if text.endswith(".json") or Path(text).is_file() else None

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses, so that the batch must be known before the plan."""
        return self.plan == "auto"

    def make(self, model: nn.Module, batch: Any, ranks: int, device: torch.device) -> Plan:
        """The plan for this model and batch on so many ranks."""
        if isinstance(self.plan, Plan):
            return self._with_precision(self.plan)
        if self._file is not None:
            return self._with_precision(Plan.load(self._file))
        with self._autocast(device):
            graph = capture(model, batch, training=True, device=device)
        cluster = self._cluster(ranks)
        if callable(self.plan):
            return self._with_precision(self.plan(graph, cluster, **self.options))
        options = {"precision": self.precision or None, **self.options}
        if self.plan == "auto":
            return search(graph, cluster, progress=False, **options)
        if self.plan == "pipeline":
            options = {"stages": ranks, **options}
        made: Plan = getattr(strategies, str(self.plan))(graph, cluster, **options)
        return made

    def _cluster(self, ranks: int) -> Cluster:
        found = self.cluster
        if isinstance(found, (str, Path)):
            found = Cluster.load(found)
        return found if found is not None else Cluster.local(ranks)

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        kinds = Precision.of(self.precision)
        if not kinds.compute:
            return contextlib.nullcontext()
        dtype = getattr(torch, kinds.compute)
        return torch.autocast(device.type, dtype, cache_enabled=False)

    def _with_precision(self, plan: Plan) -> Plan:
        """A given plan in the number types of the training arguments."""
        wanted = Precision.of(self.precision)
        if not wanted.compute or plan.precision.compute == wanted.compute:
            return plan
        if plan.precision.compute:
            raise PlanError(
                f"the training arguments say {wanted.compute}, the plan {plan.name!r} computes in "
                f"{plan.precision.compute}",
                hint="leave bf16 and fp16 out of the arguments, or make a plan without precision",
            )
        return plan.with_(precision=wanted)


def replicas_of(plan: Plan) -> int:
    """How many groups of ranks have samples of their own, as `accelerate` counts them."""
    return max(
        math.prod(int(n) for axis, n in stage.mesh.axes if plan.roles[axis] == "batch")
        for stage in plan.all_stages
    )
