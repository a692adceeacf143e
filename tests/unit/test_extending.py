"""Strategies, schedules, plan fields, dtypes and redistributions can be added from outside.

CONTRIBUTING.md lists the source files to change for an addition inside the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import cli, redistribution
from shardwise.dtypes import DTYPES, DType, itemsize, torch_dtypes, torch_pairs
from shardwise.errors import PlanError
from shardwise.planner import strategies
from shardwise.planner.search_space import SearchLimits, UserOptions, configs
from shardwise.schedules import SCHEDULES, Schedule, ScheduleError, ScheduleKind, check
from shardwise.schema import Reader
from shardwise.training.config import PlanConfig, TrainConfig
from shardwise.training.planning import check_plan_name


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).pow(2).mean()


def tiny() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Tiny(), {"x": torch.ones(4, 8)}


# ---------------------------------------------------------------- a strategy


@pytest.fixture
def halves() -> Iterator[str]:
    """Register a strategy that shards the batch on one axis and parameters on the other."""

    def halves(graph: sw.Graph, cluster: sw.Cluster, *, seed: int = 0) -> sw.Plan:
        return sw.strategies.make_plan("halves", graph, cluster, dp=2, tp=2, seed=seed)

    sw.strategies.register_strategy("halves", halves)
    yield "halves"
    del strategies._STRATEGIES["halves"]


def test_a_new_strategy_works_in_trainers_and_on_the_command_line(
    halves: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert halves in sw.strategies.strategy_names()
    config: dict[str, Any] = {"model": None, "data": {"train": None}}
    check_plan_name(TrainConfig(**config, plan=PlanConfig(name=halves)), None)
    (tmp_path / "tiny.py").write_text("from tests.unit.test_extending import tiny\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", f"{tmp_path / 'tiny.py'}:tiny", "--strategy", halves, "--ranks", "4"])
    assert ended.value.code == 0
    assert "dp=2, tp=2" in capsys.readouterr().out


def test_a_name_cannot_be_registered_twice(halves: str) -> None:
    with pytest.raises(PlanError, match="halves"):
        sw.strategies.register_strategy(halves, sw.strategies.ddp)


# ---------------------------------------------------------------- a schedule


@pytest.fixture
def sequential() -> Iterator[str]:
    """Register a schedule that finishes each micro-batch before the next one begins."""

    def build(num_stages: int, num_microbatches: int, num_groups: int) -> Schedule:
        rows = (
            " ".join(f"{stage}F{m} {stage}B{m}" for m in range(num_microbatches))
            for stage in range(num_stages)
        )
        return replace(Schedule.parse_text("\n".join(rows)), name="sequential")

    kind = ScheduleKind(name="sequential", build=build, searched_stages_per_group=(1,))
    sw.schedules.register_schedule(kind)
    yield "sequential"
    del SCHEDULES["sequential"]


def test_a_new_schedule_works_in_plans_and_in_the_search(sequential: str) -> None:
    model, batch = tiny()
    plan = sw.strategies.pipeline(
        sw.capture(model, batch), sw.Cluster.local(2), schedule=sequential, num_microbatches=2
    )
    assert plan.schedule == sequential
    check(sw.schedules.make(sequential, num_groups=2, num_microbatches=3))
    limits = SearchLimits(
        ranks=4, rows=8, num_microbatches=8, stages=4, virtual_stages=4, tensor_ranks=4
    )
    assert sequential in {config.schedule for config in configs(limits, UserOptions())}
    options = UserOptions(pp=2, schedule=sequential)
    assert {config.schedule for config in configs(limits, options)} == {sequential}
    with pytest.raises(ScheduleError, match="needs 2 stages, not 4"):
        sw.schedules.make(sequential, num_groups=2, num_microbatches=3, num_stages=4)


# ---------------------------------------------------------------- a field of plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Longer(sw.Plan):
    """A plan with one more field."""

    overlap: str | tuple[str, ...] = "all"


def test_a_new_plan_field_is_written_printed_and_read_by_its_type() -> None:
    model, batch = tiny()
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    longer = Longer(**values, overlap=("grads",))
    assert longer.to_json()["overlap"] == ["grads"]
    assert "overlap ('grads',)" in str(longer)
    assert "overlap" not in str(Longer(**values))
    reader = Reader(PlanError, "plan.json")
    assert reader.read(Longer, longer.to_json()) == longer
    with pytest.raises(PlanError, match="overlap is 3") as caught:
        reader.read(Longer, {**longer.to_json(), "overlap": 3})
    assert caught.value.where == "plan.json (overlap)"


# ---------------------------------------------------------------- a dtype, a redistribution


def test_a_dtype_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    row = DType(name="quint8", num_bytes=1, widened="float32", can_reduce=True)
    monkeypatch.setitem(DTYPES, row.name, row)
    assert itemsize("quint8", 4) == 1
    assert torch.quint8 in torch_dtypes(can_reduce=True)
    assert torch_pairs("widened")[torch.quint8] == torch.float32


def test_a_redistribution_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("REDISTRIBUTIONS", "_BY_KINDS"):
        monkeypatch.setattr(redistribution, table, dict(getattr(redistribution, table)))
    rotate = redistribution.Primitive(name="rotate", copies=1, volume=1)
    redistribution.register("rotate", "S", "T", rotate, rotate)
    entry = redistribution.between("S", "T")
    assert entry is redistribution.REDISTRIBUTIONS["rt.rotate"]
    assert not entry.is_local
    assert entry.forward.collective == "rotate"
