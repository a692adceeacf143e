"""The learning rate over time: one class of `torch.optim.lr_scheduler`, or a chain of several."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardwise.errors import ConfigError
from shardwise.training.config import LrScheduleConfig
from shardwise.training.planning import check_arguments, find_class, resolved

__all__ = ["LrSchedule", "from_plain", "to_plain"]


class LrSchedule:
    """Steps the learning rate of an optimizer; without any config it stays as it is."""

    def __init__(
        self,
        configs: Sequence[LrScheduleConfig],
        optimizer: torch.optim.Optimizer,
        totals: Mapping[str, int | None],
        base: Path | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.each = _common(configs)
        self._scheduler: Any = None
        made = [
            _make(config, f"lr_schedule.{i}", optimizer, totals, base)
            for i, config in enumerate(configs)
        ]
        if len(made) == 1:
            self._scheduler = made[0]
        elif made:
            ends = list(accumulate(config.steps or 0 for config in configs[:-1]))
            self._scheduler = lr_scheduler.SequentialLR(optimizer, made, ends)
        step = getattr(self._scheduler, "step", None)
        self._wants_metric = step is not None and "metrics" in inspect.signature(step).parameters

    def happened(self, what: str, metric: float) -> None:
        """A step, an epoch or an evaluation ended; `metric` is its loss."""
        if self._scheduler is None or what != self.each:
            return
        with warnings.catch_warnings():  # of a step that a loss scaler skipped
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            self._scheduler.step(metric) if self._wants_metric else self._scheduler.step()

    @property
    def learning_rate(self) -> float:
        """That of the first group of parameters."""
        groups = self.optimizer.param_groups
        return float(groups[0].get("lr", 0.0)) if groups else 0.0

    def state_dict(self) -> dict[str, Any]:
        """As JSON; what the constructor gives again is left out where it has no such form."""
        state = {} if self._scheduler is None else self._scheduler.state_dict()
        found = {name: to_plain(value) for name, value in state.items()}
        return {name: plain for name, plain in found.items() if plain is not _NO}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if self._scheduler is None or not state:
            return
        fresh = self._scheduler.state_dict()
        self._scheduler.load_state_dict(fresh | {n: from_plain(v) for n, v in state.items()})


def _common(configs: Sequence[LrScheduleConfig]) -> str:
    kinds = {config.each for config in configs}
    if len(kinds) > 1:
        several = " and each ".join(sorted(kinds))
        raise ConfigError(
            f"the schedules of a chain step at different times: each {several}", where="lr_schedule"
        )
    for index, config in enumerate(configs[:-1]):
        if config.steps is None:
            raise ConfigError(
                "how long this schedule of the chain lasts is not set",
                where=f"lr_schedule.{index}",
                hint="steps: 100 on all but the last of a chain",
            )
    return next(iter(kinds), "step")


def _make(
    config: LrScheduleConfig,
    key: str,
    optimizer: torch.optim.Optimizer,
    totals: Mapping[str, int | None],
    base: Path | None,
) -> Any:
    found = find_class(config.name, lr_scheduler, key, base)
    args = resolved(config.args, key, base)
    for name, value in args.items():
        if isinstance(value, str) and value in totals:
            total = totals[value]
            if total is None:
                raise ConfigError(f"{value} is not known for this data", where=f"{key}.args.{name}")
            args[name] = total
    check_arguments(found, args, key, str(config.name), given=1)
    try:
        return found(optimizer, **args)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{config.name}: {error}", where=f"{key}.args") from error


# --- states as JSON ----------------------------------------------------------------------

_NO: Any = object()


def to_plain(value: Any) -> Any:
    """A value as JSON from which `from_plain` makes it again; a marker where it has no form.

    >>> from_plain(to_plain((1, float("inf"))))
    (1, inf)
    """
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return to_plain(value.item())
    if isinstance(value, Mapping):
        pairs = [[to_plain(k), to_plain(v)] for k, v in value.items()]
        pairs = [[k, v] for k, v in pairs if k is not _NO and v is not _NO]
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        return {kind: pairs}
    if isinstance(value, list | tuple):
        items = [to_plain(item) for item in value]
        if any(item is _NO for item in items):
            return _NO
        return items if isinstance(value, list) else {"$tuple": items}
    return _NO


def from_plain(value: Any) -> Any:
    """The value of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, inner),) = value.items()
    if kind == "$float":
        return float(inner)
    if kind == "$tuple":
        return tuple(from_plain(item) for item in inner)
    pairs = {from_plain(key): from_plain(item) for key, item in inner}
    return Counter(pairs) if kind == "$counter" else pairs
