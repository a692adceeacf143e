"""Shardwise turns a training step for one device into a verified, readable one for many.

This module is the public API; `shardwise.types` has the types of its arguments and results. Names
are imported on first use, so that `import shardwise` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise import collectives, errors, schedules, types
    from shardwise.api.advise import advise
    from shardwise.api.compile import capture, compile
    from shardwise.api.explain import explain
    from shardwise.api.parallelize import parallelize
    from shardwise.api.verify import verify
    from shardwise.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
    from shardwise.cluster import Cluster, Mesh
    from shardwise.errors import ShardwiseError
    from shardwise.inexact import Compression, OuterOptimizer
    from shardwise.integrations.jax import from_jax
    from shardwise.integrations.onnx import from_onnx
    from shardwise.ir import Graph
    from shardwise.planner import strategies
    from shardwise.planner.plan import plan
    from shardwise.plans import Plan, Precision, Stage, Sync
    from shardwise.reports.build import report
    from shardwise.runtime import clip_grad_norm_, optimizer
    from shardwise.sharding import register_rule
    from shardwise.simulation.estimate import simulate
    from shardwise.training.callbacks import Callback
    from shardwise.training.export import export
    from shardwise.training.trainer import Trainer
    from shardwise.tuning.tune import tune


__all__ = [
    "Callback",
    "CheckpointManager",
    "Cluster",
    "Compression",
    "Graph",
    "Mesh",
    "OuterOptimizer",
    "Plan",
    "Precision",
    "ShardwiseError",
    "Stage",
    "Sync",
    "Trainer",
    "__version__",
    "advise",
    "capture",
    "clip_grad_norm_",
    "collectives",
    "compile",
    "errors",
    "explain",
    "export",
    "from_jax",
    "from_onnx",
    "load_checkpoint",
    "optimizer",
    "parallelize",
    "plan",
    "register_rule",
    "report",
    "save_checkpoint",
    "schedules",
    "simulate",
    "strategies",
    "tune",
    "types",
    "verify",
]

_HOME = {
    "Callback": "shardwise.training.callbacks",
    "CheckpointManager": "shardwise.checkpoint",
    "Cluster": "shardwise.cluster",
    "Compression": "shardwise.inexact",
    "Graph": "shardwise.ir",
    "Mesh": "shardwise.cluster",
    "OuterOptimizer": "shardwise.inexact",
    "Plan": "shardwise.plans",
    "Precision": "shardwise.plans",
    "ShardwiseError": "shardwise.errors",
    "Stage": "shardwise.plans",
    "Sync": "shardwise.plans",
    "Trainer": "shardwise.training.trainer",
    "advise": "shardwise.api.advise",
    "capture": "shardwise.api.compile",
    "clip_grad_norm_": "shardwise.runtime",
    "compile": "shardwise.api.compile",
    "explain": "shardwise.api.explain",
    "export": "shardwise.training.export",
    "from_jax": "shardwise.integrations.jax",
    "from_onnx": "shardwise.integrations.onnx",
    "load_checkpoint": "shardwise.checkpoint",
    "optimizer": "shardwise.runtime",
    "parallelize": "shardwise.api.parallelize",
    "plan": "shardwise.planner.plan",
    "register_rule": "shardwise.sharding",
    "report": "shardwise.reports.build",
    "save_checkpoint": "shardwise.checkpoint",
    "simulate": "shardwise.simulation.estimate",
    "tune": "shardwise.tuning.tune",
    "verify": "shardwise.api.verify",
}
_MODULES = {
    "collectives": "shardwise.collectives",
    "errors": "shardwise.errors",
    "schedules": "shardwise.schedules",
    "strategies": "shardwise.planner.strategies",
    "types": "shardwise.types",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
