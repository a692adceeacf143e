"""Program -> Python source."""

from shardwise.emit.load import load
from shardwise.emit.source import emit

__all__ = ["emit", "load"]
