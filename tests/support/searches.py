"""Faster searches, without the local search for small clusters (`planner/local_search.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def unpolished() -> Iterator[None]:
    """Plan without the local search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.planner.local_search.MAX_RANKS", 0)
        yield
