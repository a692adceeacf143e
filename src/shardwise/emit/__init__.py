"""Emit a program as Python source."""

from shardwise.emit.pipeline import emit_pipeline
from shardwise.emit.source import emit

__all__ = ["emit", "emit_pipeline"]
