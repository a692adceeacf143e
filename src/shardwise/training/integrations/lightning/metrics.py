"""torchmetrics of a module: each rank has the whole batch's values, so none are joined.

Enters: a module. Leaves: its metrics with their joining between ranks off, until a stack closes.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

__all__ = ["own_values"]


def own_values(module: nn.Module, until: ExitStack) -> None:
    """Count every sample once: a metric's state is the same on all ranks."""
    for found in module.modules():
        metric: Any = found
        if hasattr(metric, "sync_on_compute") and hasattr(metric, "_to_sync"):
            until.callback(_set, metric, metric.sync_on_compute, metric.dist_sync_on_step)
            _set(metric, False, False)


def _set(metric: Any, on_compute: bool, on_step: bool) -> None:
    metric.sync_on_compute = metric._to_sync = on_compute
    metric.dist_sync_on_step = on_step
