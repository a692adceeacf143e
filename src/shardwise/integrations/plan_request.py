"""The `plan` argument of `ShardwiseStrategy` and `ShardwiseTrainer`, as in `sw.Trainer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError, PlanError
from shardwise.plans import Plan
from shardwise.schema import Reader
from shardwise.training.config import DataConfig, PlanConfig, TrainConfig
from shardwise.training.planning import check_plan_name, make_planned

PlanLike = str | Path | Mapping[str, Any] | Plan | Callable[..., Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A plan as users request it, checked before any process starts.

    `plan` is "auto", the name of a strategy, a plan file, `{"name": …, "args": {…}}` for a
    strategy with options, a `Plan`, or a function of graph and cluster.
    """

    plan: PlanLike
    cluster: Cluster | str | Path | None = None
    precision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        config = self._config
        check_plan_name(config, None)
        if isinstance(config.plan, PlanConfig) and config.plan.args and not self.is_named:
            raise PlanError(
                f"{sorted(config.plan.args)} are options of a named strategy",
                hint='plan={"name": "hybrid", "args": {"dp": 2, "tp": 2}}',
            )

    @property
    def is_named(self) -> bool:
        """Return whether the planner or a named strategy makes the plan."""
        plan = self._config.plan
        return isinstance(plan, PlanConfig) and not plan.name.endswith(".json")

    @property
    def is_auto(self) -> bool:
        """Return whether the planner makes the plan, which needs a batch of the final size."""
        plan = self._config.plan
        return isinstance(plan, PlanConfig) and plan.name == "auto"

    @property
    def text(self) -> str | None:
        """Return what identifies the request in a checkpoint; None if the plan itself was given."""
        plan = self._config.plan
        return f"{plan.name} {sorted(plan.args.items())} {self.cluster}" if self.is_named else None

    @property
    def _config(self) -> TrainConfig:
        plan: Any = str(self.plan) if isinstance(self.plan, Path) else self.plan
        if isinstance(plan, str | Mapping):
            plan = Reader(ConfigError, "plan", call=True).read(PlanConfig, plan)
        return TrainConfig(
            model=None,
            data=DataConfig(train=None),
            plan=plan,
            cluster=str(self.cluster) if isinstance(self.cluster, Path) else self.cluster,
            precision=self.precision,
            seed=self.seed,
        )

    def make(
        self,
        model: nn.Module,
        batch: Any,
        ranks: int,
        device: torch.device,
        precision: str | None = None,
    ) -> Plan:
        """Make the plan for this model and batch, in the trainer's precision if it has one."""
        config, precision = self._config, precision or self.precision
        if isinstance(config.plan, PlanConfig):
            args = dict(config.plan.args)
            plan_precision = args.pop("precision", None)
            if plan_precision is not None and precision not in (None, plan_precision):
                raise PlanError(
                    f"the plan's precision is {plan_precision!r}, the trainer's {precision!r}",
                    hint="set it once, in the trainer or in the plan",
                )
            config = replace(config, plan=replace(config.plan, args=args))
            precision = plan_precision or precision
        config = replace(config, precision=precision)
        return make_planned(
            config, model, batch, None, ranks=ranks, device=device.type, base=None
        ).plan
