"""Fixtures for tests of search results and of infeasible plans."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.ir import Graph
from shardwise.planner import local_search
from tests.unit.planner.search.tokens import Tokens


@pytest.fixture
def short_local_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the local search: reports do not depend on how many configurations it tried."""
    monkeypatch.setattr(local_search, "MAX_RANKS", 2)
    monkeypatch.setattr(local_search, "MAX_SIMULATED", 20)


@pytest.fixture(scope="module")
def graph() -> Graph:
    ids = torch.randint(0, 128, (16, 32))
    return sw.capture(Tokens(), {"ids": ids, "labels": ids})
