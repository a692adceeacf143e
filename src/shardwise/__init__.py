"""Shardwise turns a training step for one device into a verified, readable one for many.

This module is the whole public API. Names are imported on first use, so that `import shardwise`
is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise import errors, schedules
    from shardwise.api.advise import Advice, advise
    from shardwise.api.captured import capture_for_plan
    from shardwise.api.certify import verify
    from shardwise.api.compiled import Program, compile
    from shardwise.api.explanation import explain
    from shardwise.api.memory import predict_memory
    from shardwise.api.parallel import parallelize
    from shardwise.api.tuned_ways import tune_collectives
    from shardwise.api.tuning import tune
    from shardwise.cluster import Cluster, Mesh
    from shardwise.equivalence import Certificate
    from shardwise.frontend import capture
    from shardwise.ir import Graph
    from shardwise.planner import strategies
    from shardwise.planner.collectives import choose_collectives
    from shardwise.planner.search.plan import plan
    from shardwise.plans import Plan, Precision, Stage
    from shardwise.reporting.build import report
    from shardwise.reporting.document import Report
    from shardwise.runtime import clip_grad_norm_, optimizer
    from shardwise.sharding import register_rule
    from shardwise.simulation import Estimate, Timeline
    from shardwise.simulation.simulate import simulate
    from shardwise.training.callbacks import Callback
    from shardwise.training.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
    from shardwise.training.export import export
    from shardwise.training.trainer import Trainer


__all__ = [
    "Advice",
    "Callback",
    "Certificate",
    "Checkpoints",
    "Cluster",
    "Estimate",
    "Graph",
    "Mesh",
    "Plan",
    "Precision",
    "Program",
    "Report",
    "Stage",
    "Timeline",
    "Trainer",
    "__version__",
    "advise",
    "capture",
    "capture_for_plan",
    "choose_collectives",
    "clip_grad_norm_",
    "compile",
    "errors",
    "explain",
    "export",
    "load_checkpoint",
    "optimizer",
    "parallelize",
    "plan",
    "predict_memory",
    "register_rule",
    "report",
    "save_checkpoint",
    "schedules",
    "simulate",
    "strategies",
    "tune",
    "tune_collectives",
    "verify",
]

_HOME = {
    "Advice": "shardwise.api.advise",
    "Callback": "shardwise.training.callbacks",
    "Certificate": "shardwise.equivalence",
    "Checkpoints": "shardwise.training.checkpoint",
    "Cluster": "shardwise.cluster",
    "Estimate": "shardwise.simulation",
    "Graph": "shardwise.ir",
    "Mesh": "shardwise.cluster",
    "Plan": "shardwise.plans",
    "Precision": "shardwise.plans",
    "Program": "shardwise.api.compiled",
    "Report": "shardwise.reporting.document",
    "Stage": "shardwise.plans",
    "Timeline": "shardwise.simulation",
    "Trainer": "shardwise.training.trainer",
    "advise": "shardwise.api.advise",
    "capture": "shardwise.frontend",
    "capture_for_plan": "shardwise.api.captured",
    "choose_collectives": "shardwise.planner.collectives",
    "clip_grad_norm_": "shardwise.runtime",
    "compile": "shardwise.api.compiled",
    "explain": "shardwise.api.explanation",
    "export": "shardwise.training.export",
    "load_checkpoint": "shardwise.training.checkpoint",
    "optimizer": "shardwise.runtime",
    "parallelize": "shardwise.api.parallel",
    "plan": "shardwise.planner.search",
    "predict_memory": "shardwise.api.memory",
    "register_rule": "shardwise.sharding",
    "report": "shardwise.reporting.build",
    "save_checkpoint": "shardwise.training.checkpoint",
    "simulate": "shardwise.simulation",
    "tune": "shardwise.api.tuning",
    "tune_collectives": "shardwise.api.tuned_ways",
    "verify": "shardwise.api.certify",
}
_MODULES = {
    "errors": "shardwise.errors",
    "schedules": "shardwise.schedules",
    "strategies": "shardwise.planner.strategies",
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
