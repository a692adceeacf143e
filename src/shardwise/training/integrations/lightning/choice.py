"""Which plan a strategy runs: `ShardwiseStrategy("hybrid", dp=2, tp=2)`.

Enters: what the user said, and the step with its first batch. Leaves: a `Plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.cluster import Cluster
from shardwise.errors import PlanError, did_you_mean
from shardwise.planner.strategies import strategy_names
from shardwise.plans import Plan
from shardwise.training.config import DataConfig, PlanConfig, TrainConfig
from shardwise.training.planning import make_planned

__all__ = ["OwnStrategy", "PlanChoice"]

OwnStrategy = Callable[..., Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """A plan, its file, the name of a strategy, "auto", or an own strategy; and its options."""

    plan: str | Path | Plan | OwnStrategy
    options: Mapping[str, Any] = field(default_factory=dict)
    cluster: Cluster | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """What can be known to be wrong is refused before any process starts."""
        known = ("auto", *strategy_names())
        named = isinstance(self.plan, str) and not self.plan.endswith(".json")
        if isinstance(self.plan, str) and named and self.plan not in known:
            raise PlanError(
                f"no strategy is named {self.plan!r}{did_you_mean(self.plan, known)}",
                hint=f"{', '.join(known)}, or a plan's file: plan.json",
            )
        if self.options and not named:
            raise PlanError(
                f"{sorted(self.options)} are options of a named strategy",
                hint='ShardwiseStrategy("hybrid", dp=2, tp=2)',
            )

    @property
    def text(self) -> str | None:
        """What was asked for, if it is not a plan already: the same text asks for the same."""
        if isinstance(self.plan, str) and not self.plan.endswith(".json"):
            return f"{self.plan} {sorted(self.options.items())} {self.cluster}"
        return None

    def make(
        self, model: nn.Module, batch: Any, ranks: int, device: torch.device, precision: str | None
    ) -> Plan:
        """The plan for so many ranks, in the trainer's number types if it names some."""
        wanted: Any = self.plan
        options = dict(self.options)
        own = options.pop("precision", None)
        if own is not None and precision is not None and own != precision:
            raise PlanError(
                f"the strategy's precision is {own!r}, the Trainer's {precision!r}",
                hint="give it once: Trainer(precision=…) or ShardwiseStrategy(…, precision=…)",
            )
        if isinstance(wanted, str | Path):
            wanted = PlanConfig(name=str(wanted), args=options)
        config = TrainConfig(
            model=None,
            data=DataConfig(train=None),
            plan=wanted,
            cluster=self.cluster,
            precision=own or precision,
            seed=self.seed,
        )
        return make_planned(
            config, model, batch, None, ranks=ranks, device=device.type, base=None
        ).plan
