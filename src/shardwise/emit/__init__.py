"""Program -> Python source."""

from shardwise.emit.source import emit

__all__ = ["emit"]
