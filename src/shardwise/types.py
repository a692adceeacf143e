"""The types of arguments and results of the public API, for annotations and `isinstance`.

    def evaluate(pm: shardwise.types.ParallelModule) -> float: ...

Unlike `import shardwise`, importing this module imports torch. `JaxModule` and `OnnxModule` need
their extras and are imported on first use.
"""

import importlib
import typing

from shardwise.api.advise import Advice as Advice
from shardwise.api.advise import AdviceRow as AdviceRow
from shardwise.api.compile import PipelineProgram as PipelineProgram
from shardwise.api.compile import Program as Program
from shardwise.api.steps import Plans as Plans
from shardwise.api.weights import Init as Init
from shardwise.checkpoint import Loaded as Loaded
from shardwise.checkpoint import Saving as Saving
from shardwise.checkpoint.optimizer_state import Optimizers as Optimizers
from shardwise.cluster import ClusterNode as ClusterNode
from shardwise.cluster import Device as Device
from shardwise.cluster import Link as Link
from shardwise.cluster import Network as Network
from shardwise.cluster import Start as Start
from shardwise.cluster import topology
from shardwise.collectives import Solution as Solution
from shardwise.collectives.messages import CollectiveChoice as CollectiveChoice
from shardwise.cost import OpTable as OpTable
from shardwise.equivalence.certificate import Certificate as Certificate
from shardwise.equivalence.certificate import Comparison as Comparison
from shardwise.frontend.objective import LossFn as LossFn
from shardwise.frontend.objective import Model as Model
from shardwise.frontend.objective import StepFn as StepFn
from shardwise.inexact import Inexact as Inexact
from shardwise.ir import Buffer as Buffer
from shardwise.ir import Constant as Constant
from shardwise.ir import GradientHook as GradientHook
from shardwise.ir import Guard as Guard
from shardwise.ir import Guards as Guards
from shardwise.ir import Input as Input
from shardwise.ir import Node as Node
from shardwise.ir import Parameter as Parameter
from shardwise.ir import TensorType as TensorType
from shardwise.planner.options import Constraints as Constraints
from shardwise.plans import ParameterEntry as ParameterEntry
from shardwise.plans.search_result import SearchResult as SearchResult
from shardwise.reports.document import Report as Report
from shardwise.reports.recorded import Recording as Recording
from shardwise.runtime.module import ParallelModule as ParallelModule
from shardwise.runtime.optimizer import HasStore as HasStore
from shardwise.runtime.optimizer import Params as Params
from shardwise.runtime.optimizer import ShardedOptimizer as ShardedOptimizer
from shardwise.schedules import Schedule as Schedule
from shardwise.sharding.rule import Call as Call
from shardwise.sharding.rule import NodeRule as NodeRule
from shardwise.sharding.rule import RuleFunction as RuleFunction
from shardwise.shares import AxisSize as AxisSize
from shardwise.simulation import Estimate as Estimate
from shardwise.simulation import MemoryUse as MemoryUse
from shardwise.simulation import Timeline as Timeline
from shardwise.training.config import TrainConfig as TrainConfig
from shardwise.training.trainer import DryRun as DryRun
from shardwise.training.trainer import FitResult as FitResult
from shardwise.tuning.replay import Communication as Communication
from shardwise.tuning.replay import Replay as Replay

if typing.TYPE_CHECKING:
    from shardwise.integrations.jax import JaxModule as JaxModule
    from shardwise.integrations.onnx import OnnxModule as OnnxModule

LinkPath = topology.Path
_EXTRAS = {"JaxModule": "shardwise.integrations.jax", "OnnxModule": "shardwise.integrations.onnx"}
__all__ = sorted([*(name for name in globals() if name[0].isupper()), *_EXTRAS])


def __getattr__(name: str) -> typing.Any:
    if name not in _EXTRAS:
        raise AttributeError(f"module 'shardwise.types' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXTRAS[name]), name)
