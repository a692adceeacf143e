"""Predictions of a step: time, memory and what happens when, before anything runs."""

from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.estimate import Estimate, Evaluator, simulate, stored_estimate
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.step import Timeline
from shardwise.simulation.workload import WorkloadModel
