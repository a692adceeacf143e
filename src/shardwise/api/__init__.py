"""The verbs: compile, parallelize, verify, explain."""

from shardwise.api.captured import capture_for_plan
from shardwise.api.certify import verify
from shardwise.api.compiled import PipelineProgram, Program, compile
from shardwise.api.explanation import explain
from shardwise.api.parallel import parallelize

__all__ = [
    "PipelineProgram",
    "Program",
    "capture_for_plan",
    "compile",
    "explain",
    "parallelize",
    "verify",
]
