"""The verbs: compile, parallelize, verify, explain.

They are imported on first use, so that a training script does not load the verifier or simulator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api.captured import capture_for_plan
    from shardwise.api.certify import verify
    from shardwise.api.compiled import PipelineProgram, Program, compile
    from shardwise.api.explanation import explain
    from shardwise.api.memory import MemoryEstimate, predict_memory
    from shardwise.api.parallel import parallelize

__all__ = [
    "MemoryEstimate",
    "PipelineProgram",
    "Program",
    "capture_for_plan",
    "compile",
    "explain",
    "parallelize",
    "predict_memory",
    "verify",
]

_HOME = {
    "MemoryEstimate": "memory",
    "PipelineProgram": "compiled",
    "Program": "compiled",
    "capture_for_plan": "captured",
    "compile": "compiled",
    "explain": "explanation",
    "parallelize": "parallel",
    "predict_memory": "memory",
    "verify": "certify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
