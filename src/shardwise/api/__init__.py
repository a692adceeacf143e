"""The verbs: compile, parallelize, verify, explain."""

from shardwise.api.compiled import Program, compile
from shardwise.api.explain import explain
from shardwise.api.parallel import parallelize
from shardwise.api.verify import verify

__all__ = ["Program", "compile", "explain", "parallelize", "verify"]
