"""Synthesize collectives for a network as programs of messages, with lower bounds on their time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.collectives.network import Network, Send
from shardwise.collectives.solve import Solution, solve
from shardwise.collectives.spec import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    choose: Callable[..., Any]
    tune: Callable[..., Any]

__all__ = ["OPERATIONS", "Network", "Send", "Solution", "choose", "solve", "tune"]

_ABOVE = {"choose": "shardwise.planner.write", "tune": "shardwise.tuning.tune_collectives"}


def __getattr__(name: str) -> Any:
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ABOVE[name]), name)
