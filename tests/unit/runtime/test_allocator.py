"""CUDA segments are expandable where torch supports it and the user has not configured it."""

from __future__ import annotations

import pytest
import torch

from shardwise.cluster import Cluster
from shardwise.runtime.memory import GROWING, SETTINGS, grow_segments
from shardwise.simulation.memory import Budget

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings passed to torch's allocator."""
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    monkeypatch.setattr(torch.version, "hip", None)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return settings


def test_segments_are_expandable_on_cuda_only(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not grow_segments(CPU)
    assert asked == []
    assert grow_segments(CUDA)
    assert asked == [GROWING]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not grow_segments(CUDA)
    assert asked == [GROWING]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_user_take_precedence(
    name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert not grow_segments(CUDA)
    assert asked == []


def test_a_device_without_expandable_segments_reserves_more() -> None:
    amd, nvidia = (Cluster.preset(name).device(0) for name in ("mi300x", "b200"))
    shares = [Budget.of(device).limit_bytes / device.memory_bytes for device in (amd, nvidia)]
    assert shares[0] < 0.8 < 0.9 < shares[1]
