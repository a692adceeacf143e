"""Synthesize collectives for a network as programs of messages, with lower bounds on their time.

`messages` defines the programs and what a plan stores of them, `solver` finds the fastest program
for a network, and `bench` times programs against the library's collectives. Names are imported on
first use: the runtime needs `messages` alone and must not load the solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.collectives.messages.program import OPERATIONS
    from shardwise.collectives.solver.network import Network, Send
    from shardwise.collectives.solver.solve import Solution, solve

    choose: Callable[..., Any]
    tune: Callable[..., Any]


_HOMES = {
    "OPERATIONS": "shardwise.collectives.messages.program",
    **dict.fromkeys(("Network", "Send"), "shardwise.collectives.solver.network"),
    **dict.fromkeys(("Solution", "solve"), "shardwise.collectives.solver.solve"),
    "choose": "shardwise.planner.write",
    "tune": "shardwise.tuning.tune_collectives",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
