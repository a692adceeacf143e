"""Predictions of a step: time, memory and what happens when, before anything runs."""

from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.fold import FoldedGraph
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.setting import ExecutionConfig
from shardwise.simulation.simulate import simulate
from shardwise.simulation.step import Timeline
from shardwise.simulation.stored import stored_estimate
from shardwise.simulation.times import Group
from shardwise.simulation.works import WorkloadModel

__all__ = [
    "Estimate",
    "Evaluator",
    "ExecutionConfig",
    "FoldedGraph",
    "Group",
    "MemoryUse",
    "Timeline",
    "WorkloadModel",
    "simulate",
    "stored_estimate",
]
