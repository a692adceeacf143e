"""Rules of unknown operators, found by executing them on small inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.sharding.rule import Call, NodeRule, whole_rule


def discover(call: Call, run: Callable[..., Any] | None = None) -> NodeRule:
    """The rule of an operator that the table does not know."""
    return whole_rule(call, f"no rule for {call.node.op}")
