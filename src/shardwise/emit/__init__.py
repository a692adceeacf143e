"""Emit programs as Python source."""

from shardwise.emit.module import emit
from shardwise.emit.pipeline import emit_pipeline
