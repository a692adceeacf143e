"""`shardwise tune` hides GPUs if it plans for CPUs."""

from __future__ import annotations

import os

import pytest

from shardwise.cli.options import PlanOptions


@pytest.mark.parametrize(("cluster", "hidden"), [("local:2", True), ("h100:2", False)])
def test_gpus_are_hidden_from_plans_for_cpus(
    cluster: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    PlanOptions(cluster=cluster).hide_unplanned_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "0,1")
