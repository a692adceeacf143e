"""Where the figures of a training go: files, services and the terminal, from rank 0 alone."""

from __future__ import annotations

from shardwise.training.logs.console import make_console
from shardwise.training.logs.files import Log, make_logs

__all__ = ["Log", "make_console", "make_logs"]
