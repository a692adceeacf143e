"""Shardwise turns a training step for one device into a verified, readable one for many.

This module is the public API; `shardwise.types` has the types of its arguments and results. Names
are imported on first use, so that `import shardwise` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.version import __version__ as __version__

if TYPE_CHECKING:
    from shardwise import collectives as collectives
    from shardwise import errors as errors
    from shardwise import schedules as schedules
    from shardwise import types as types
    from shardwise.api.advise import advise as advise
    from shardwise.api.compile import capture as capture
    from shardwise.api.compile import compile as compile
    from shardwise.api.explain import explain as explain
    from shardwise.api.parallelize import parallelize as parallelize
    from shardwise.api.verify import verify as verify
    from shardwise.checkpoint import CheckpointManager as CheckpointManager
    from shardwise.checkpoint import load_checkpoint as load_checkpoint
    from shardwise.checkpoint import save_checkpoint as save_checkpoint
    from shardwise.cluster import Cluster as Cluster
    from shardwise.cluster import Mesh as Mesh
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.inexact import Compression as Compression
    from shardwise.inexact import OuterOptimizer as OuterOptimizer
    from shardwise.integrations.jax import from_jax as from_jax
    from shardwise.integrations.onnx import from_onnx as from_onnx
    from shardwise.ir import Graph as Graph
    from shardwise.planner import strategies as strategies
    from shardwise.planner.plan import plan as plan
    from shardwise.plans import Plan as Plan
    from shardwise.plans import Precision as Precision
    from shardwise.plans import Stage as Stage
    from shardwise.plans import Sync as Sync
    from shardwise.reports.build import report as report
    from shardwise.runtime import clip_grad_norm_ as clip_grad_norm_
    from shardwise.runtime import optimizer as optimizer
    from shardwise.sharding import register_rule as register_rule
    from shardwise.simulation.estimate import simulate as simulate
    from shardwise.training.callbacks import Callback as Callback
    from shardwise.training.export import export as export
    from shardwise.training.trainer import Trainer as Trainer
    from shardwise.tuning.replay import replay as replay
    from shardwise.tuning.tune import tune as tune

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
    "replay": "shardwise.tuning.replay",
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
__all__ = sorted([*_HOME, *_MODULES, "__version__"])


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
