"""The types of arguments and results of the public API, for annotations and `isinstance`.

    def evaluate(pm: shardwise.types.ParallelModule) -> float: ...

Unlike `import shardwise`, importing this module imports torch.
"""

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
from shardwise.ir import Buffer, Constant, GradientHook, Input, Node, Parameter, TensorType
from shardwise.planner.options import Constraints
from shardwise.plans import ParameterEntry
from shardwise.plans.search_result import SearchResult
from shardwise.reports.document import Report
from shardwise.reports.recorded import Recording
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.optimizer import HasStore, Params, ShardedOptimizer
from shardwise.schedules import Schedule
from shardwise.sharding.rule import Call, NodeRule, RuleFunction
from shardwise.simulation import Estimate, MemoryUse, Timeline
from shardwise.training.config import TrainConfig
from shardwise.training.trainer import DryRun, FitResult

__all__ = [
    "Advice",
    "AdviceRow",
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
    "HasStore",
    "Init",
    "Input",
    "Link",
    "LinkPath",
    "Loaded",
    "LossFn",
    "MemoryUse",
    "Model",
    "Network",
    "Node",
    "NodeRule",
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
