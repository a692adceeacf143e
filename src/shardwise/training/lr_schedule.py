"""Change the learning rate over time: one `torch.optim.lr_scheduler` class, or a chain of them."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardwise.checkpoint.manifest import decode, encode
from shardwise.errors import ConfigError
from shardwise.training.config import LrScheduleConfig
from shardwise.training.planning import check_arguments, find_class, resolved


class LrSchedule:
    """The learning rate schedule of an optimizer; constant without any config."""

    def __init__(
        self,
        configs: Sequence[LrScheduleConfig],
        optimizer: torch.optim.Optimizer,
        totals: Mapping[str, int | None],
        base: Path | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.each = _check_chain(configs)
        self._scheduler: Any = None
        schedulers = [
            _make(config, f"lr_schedule.{i}", optimizer, totals, base)
            for i, config in enumerate(configs)
        ]
        if len(schedulers) == 1:
            self._scheduler = schedulers[0]
        elif schedulers:
            ends = list(accumulate(config.steps or 0 for config in configs[:-1]))
            self._scheduler = lr_scheduler.SequentialLR(optimizer, schedulers, ends)
        step = getattr(self._scheduler, "step", None)
        self._takes_metric = step is not None and "metrics" in inspect.signature(step).parameters

    def advance(self, event: str, metric: float) -> None:
        """Advance after a step, an epoch or an evaluation whose loss is `metric`."""
        if self._scheduler is None or event != self.each:
            return
        with warnings.catch_warnings():  # torch warns after a step that the loss scaler skipped
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            self._scheduler.step(metric) if self._takes_metric else self._scheduler.step()

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        groups = self.optimizer.param_groups
        return float(groups[0].get("lr", 0.0)) if groups else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, without objects such as functions that the config restores."""
        state = {} if self._scheduler is None else self._scheduler.state_dict()
        result: dict[str, Any] = encode(state, "lr_schedule", partial=True)
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        if self._scheduler is None or not state:
            return
        fresh = self._scheduler.state_dict()
        self._scheduler.load_state_dict(fresh | decode(state, "lr_schedule"))


def _check_chain(configs: Sequence[LrScheduleConfig]) -> str:
    """Return the event after which all schedules of a chain advance."""
    kinds = {config.each for config in configs}
    if len(kinds) > 1:
        events = ", ".join(sorted(kinds))
        raise ConfigError(
            f"the schedules of a chain advance after different events: {events}",
            where="lr_schedule",
        )
    for index, config in enumerate(configs[:-1]):
        if config.steps is None:
            raise ConfigError(
                "the number of steps is not set",
                where=f"lr_schedule.{index}",
                hint="steps: 100 in every schedule of a chain but the last",
            )
    return next(iter(kinds), "step")


def _make(
    config: LrScheduleConfig,
    key: str,
    optimizer: torch.optim.Optimizer,
    totals: Mapping[str, int | None],
    base: Path | None,
) -> Any:
    scheduler = find_class(config.name, lr_scheduler, key, base)
    args = resolved(config.args, key, base)
    for name, value in args.items():
        if isinstance(value, str) and value in totals:
            total = totals[value]
            if total is None:
                raise ConfigError(f"{value} is unknown for this data", where=f"{key}.args.{name}")
            args[name] = total
    check_arguments(scheduler, args, key, str(config.name), num_positional=1)
    try:
        return scheduler(optimizer, **args)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{config.name}: {error}", where=f"{key}.args") from error
