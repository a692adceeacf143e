"""The verbs: compile, parallelize, verify, explain."""

from shardwise.api.certify import verify
from shardwise.api.compiled import Program, compile
from shardwise.api.explanation import explain
from shardwise.api.parallel import parallelize

__all__ = ["Program", "compile", "explain", "parallelize", "verify"]
