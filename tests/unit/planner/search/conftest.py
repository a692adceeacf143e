"""What tests of a plan's own words share."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.ir import Graph
from shardwise.planner.search import polish
from tests.unit.planner.search.tokens import Tokens


@pytest.fixture
def briefly_polished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are the same of plans that few others were compared with: of two ranks' alone."""
    monkeypatch.setattr(polish, "MOST_RANKS", 2)
    monkeypatch.setattr(polish, "SIMULATED", 20)
    monkeypatch.setattr(polish, "LOWERED_NODES", 60)


@pytest.fixture(scope="module")
def graph() -> Graph:
    ids = torch.randint(0, 128, (16, 32))
    return sw.capture(Tokens(), {"ids": ids, "labels": ids})
