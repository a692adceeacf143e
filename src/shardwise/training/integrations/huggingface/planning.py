"""The plan that a trainer was asked for.

Enters: `"auto"`, a strategy's name, a plan or its file, or a function; the trainer's step and a
batch. Leaves: a `Plan`, the same on every rank, and how many replicas of a batch it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.training.config import DataConfig, PlanConfig, TrainConfig
from shardwise.training.planning import check_plan_name, make_planned

Strategy = Callable[[Graph, Cluster], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked for; `precision` and `seed` are those of the training arguments."""

    plan: str | Path | Plan | Strategy = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    cluster: Cluster | str | Path | None = None
    precision: str | None = None
    seed: int = 0

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses, so that the batch must be known before the plan."""
        return self.plan == "auto"

    def __post_init__(self) -> None:
        check_plan_name(self._config, None)

    @property
    def _config(self) -> TrainConfig:
        wanted: Any = self.plan
        if isinstance(wanted, (str, Path)):
            wanted = PlanConfig(name=str(wanted), args=self.options)
        return TrainConfig(
            model=None,
            data=DataConfig(train=None),
            plan=wanted,
            cluster=str(self.cluster) if isinstance(self.cluster, Path) else self.cluster,
            precision=self.precision,
            seed=self.seed,
        )

    def make(self, model: nn.Module, batch: Any, ranks: int, device: torch.device) -> Plan:
        """The plan for this model and batch on so many ranks."""
        return make_planned(
            self._config, model, batch, None, ranks=ranks, device=device.type, base=None
        ).plan


def replicas_of(plan: Plan) -> int:
    """How many groups of ranks have samples of their own, as `accelerate` counts them."""
    return max(
        math.prod(int(n) for axis, n in stage.mesh.axes if plan.roles[axis] == "batch")
        for stage in plan.all_stages
    )
