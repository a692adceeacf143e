"""The types of arguments and results of the public API, for annotations and `isinstance`.

    def evaluate(pm: shardwise.types.ParallelModule) -> float: ...

Unlike `import shardwise`, importing this module imports torch. `JaxModule` and `OnnxModule` need
their extras and are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.api.advise import Advice, AdviceRow
from shardwise.api.compile import PipelineProgram, Program
from shardwise.api.steps import Plans
from shardwise.api.weights import Init
from shardwise.checkpoint import Loaded, Saving
from shardwise.checkpoint.optimizer_state import Optimizers
from shardwise.cluster import ClusterNode, Device, Link, Network, Start
from shardwise.cluster.topology import Path as LinkPath
from shardwise.collectives import Solution
from shardwise.collectives.messages import CollectiveChoice
from shardwise.cost import OpTable
from shardwise.equivalence.certificate import Certificate, Comparison
from shardwise.frontend.objective import LossFn, Model, StepFn
from shardwise.inexact import Inexact
from shardwise.ir import (
    Buffer,
    Constant,
    GradientHook,
    Guard,
    Guards,
    Input,
    Node,
    Parameter,
    TensorType,
)
from shardwise.planner.options import Constraints
from shardwise.plans import ParameterEntry
from shardwise.plans.search_result import SearchResult
from shardwise.reports.document import Report
from shardwise.reports.recorded import Recording
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.optimizer import HasStore, Params, ShardedOptimizer
from shardwise.schedules import Schedule
from shardwise.sharding.rule import Call, NodeRule, RuleFunction
from shardwise.shares import AxisSize
from shardwise.simulation import Estimate, MemoryUse, Timeline
from shardwise.training.config import TrainConfig
from shardwise.training.trainer import DryRun, FitResult

if TYPE_CHECKING:
    from shardwise.integrations.jax import JaxModule
    from shardwise.integrations.onnx import OnnxModule

__all__ = [
    "Advice",
    "AdviceRow",
    "AxisSize",
    "Buffer",
    "Call",
    "Certificate",
    "ClusterNode",
    "CollectiveChoice",
    "Comparison",
    "Constant",
    "Constraints",
    "Device",
    "DryRun",
    "Estimate",
    "FitResult",
    "GradientHook",
    "Guard",
    "Guards",
    "HasStore",
    "Inexact",
    "Init",
    "Input",
    "JaxModule",
    "Link",
    "LinkPath",
    "Loaded",
    "LossFn",
    "MemoryUse",
    "Model",
    "Network",
    "Node",
    "NodeRule",
    "OnnxModule",
    "OpTable",
    "Optimizers",
    "ParallelModule",
    "Parameter",
    "ParameterEntry",
    "Params",
    "PipelineProgram",
    "Plans",
    "Program",
    "Recording",
    "Report",
    "RuleFunction",
    "Saving",
    "Schedule",
    "SearchResult",
    "ShardedOptimizer",
    "Solution",
    "Start",
    "StepFn",
    "TensorType",
    "Timeline",
    "TrainConfig",
]

_EXTRAS = {"JaxModule": "shardwise.integrations.jax", "OnnxModule": "shardwise.integrations.onnx"}


def __getattr__(name: str) -> Any:
    if name not in _EXTRAS:
        raise AttributeError(f"module 'shardwise.types' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXTRAS[name]), name)
