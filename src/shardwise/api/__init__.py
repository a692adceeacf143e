"""The verbs: compile, parallelize, verify, explain."""

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
