"""Plans that run against each other on this machine, and what `tune` makes of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.errors import RankError
from shardwise.processes import fork_ranks, fork_server
from shardwise.runtime.collectives.shared_memory import SharedBuckets
from shardwise.tuning import race as trials
from shardwise.tuning import tune as tuning
from shardwise.tuning.measurement_server import MeasurementServer, measurement_server
from shardwise.tuning.race import can_race, plans_that_fit, race_plans
from shardwise.tuning.tune import tune
from tests.support import training
from tests.support.clusters import measured
from tests.support.searches import unpolished


@pytest.fixture(scope="module", autouse=True)
def _quick_searches() -> Iterator[None]:
    with unpolished():
        yield


def test_every_plan_is_run() -> None:
    graph = sw.capture(*training.make("odd"))
    cluster = Cluster.local(2)
    pipeline = sw.strategies.pipeline(graph, cluster, pp=2, num_microbatches=2)
    plans = [sw.strategies.ddp(graph, cluster), sw.strategies.fsdp(graph, cluster), pipeline]
    seconds = race_plans(graph, plans, cluster)
    assert len(seconds) == 3
    assert all(s > 0 for s in seconds)


def test_plans_are_run_with_the_ways_of_their_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sw.capture(*training.make("odd"))
    plan = sw.strategies.ddp(graph, Cluster.local(2))
    found = sw.collectives.choose(plan, measured(2), use="shared")

    def fails(*_: object) -> None:
        raise ValueError("in shared memory")

    monkeypatch.setattr(SharedBuckets, "all_reduce", fails)
    assert race_plans(graph, [plan], Cluster.local(2))[0] > 0
    with pytest.raises(RankError, match="in shared memory"):
        race_plans(graph, [found], Cluster.local(2))


def test_where_plans_can_be_tried() -> None:
    assert can_race(Cluster.local(2))
    assert not can_race(Cluster.local(1))
    assert not can_race(Cluster.preset("h100", nodes=1, devices_per_node=2))
    assert not can_race(Cluster.preset("cpu", nodes=2, devices_per_node=2))


def test_every_rank_has_its_share_of_the_memory() -> None:
    graph = sw.capture(*training.make("odd"))
    cluster = Cluster.local(4)
    plan = sw.plan(graph, cluster, pp=1, tp=1, progress=False)
    room = trials.SHARE * cluster.device(0).host_memory_bytes
    times = int(room // plan.search.best.memory.peak_bytes)
    assert times > 1
    assert len(plans_that_fit([plan] * (times + 1), cluster)) == times


class _Runner:
    """A plan whose steps take what is told, in seconds that do not pass."""

    def __init__(self, *told: float) -> None:
        self.told, self.ran = told, 0

    def seconds(self) -> float:
        self.ran += 1
        return self.told[min(self.ran, len(self.told)) - 1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_as_rank_0", list)


def test_plans_race_in_heats(alone: None) -> None:
    quick, equal, behind, far = _Runner(1.0), _Runner(1.02), _Runner(1.08), _Runner(1.2)
    assert trials._race([far, quick, behind, equal]) == pytest.approx([1.2, 1.0, 1.08, 1.02])
    first, second, third = (rounds for rounds, _ in trials.HEATS)
    assert far.ran == trials.WARM_UPS + first
    assert behind.ran == far.ran + second
    assert quick.ran == equal.ran == behind.ran + third


def test_a_plan_left_out_gains_nothing_where_the_machine_slows_down(alone: None) -> None:
    slower = (*(1.0,) * 5, 3.0)  # from the second heat on
    assert trials._race([_Runner(*slower), _Runner(1.2)]) == pytest.approx([3.0, 3.6])


def test_a_race_that_takes_too_long_ends(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "RACE_S", -1.0)
    runners = [_Runner(2.0), _Runner(1.0)]
    assert trials._race(runners) == [2.0, 1.0]
    assert [runner.ran for runner in runners] == [2, 2]


def test_a_kind_that_looks_too_quick_fills_no_trial() -> None:
    graph = sw.capture(*training.make("odd"))
    made = {t: sw.plan(graph, Cluster.local(2), tp=t, pp=1, progress=False) for t in (1, 2)}
    told = [(2, 0.5), (2, 0.6), (2, 0.7), (1, 1.1), (1, 1.0)]
    candidates = [
        tuning._Candidate(plan=made[tp], cluster=Cluster.local(2), seconds=s, programs=[])
        for tp, s in told
    ]
    assert [c.seconds for c in tuning._in_turns(candidates)] == [0.5, 1.0, 0.6, 1.1, 0.7]


def test_a_fork_that_stands_by_answers_and_fails() -> None:
    graph = sw.capture(*training.make("odd"))
    cluster = Cluster.local(2)
    plan = sw.strategies.ddp(graph, cluster)
    with measurement_server(graph, cluster) as server:
        assert set(server.time_compute(plan).training_s) == {0}
        assert len(server.race_plans([plan])) == 1
        with pytest.raises(RankError, match="rank"):
            server.race_plans([sw.strategies.ddp(graph, Cluster.local(4))])
        assert len(server.race_plans([plan])) == 1


def test_a_late_answer_is_not_that_to_the_next_question() -> None:
    def serve(question: str) -> str:
        time.sleep(1.0 if question == "late" else 0.0)
        return question

    with fork_server(serve, timeout_s=0.2) as ask:
        with pytest.raises(RankError, match="no answer within"):
            ask("late")
        time.sleep(1.0)
        with pytest.raises(RankError, match="has ended"):
            ask("next")


def test_a_fork_that_died_is_an_error_of_ranks_again_and_again() -> None:
    def serve(question: str) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return question

    with fork_server(serve, timeout_s=20.0) as ask:
        for said in ("died", "has ended"):
            with pytest.raises(RankError, match=said):
                ask("anything")


def test_no_rank_outlives_the_fork_that_made_it(tmp_path: Path) -> None:
    def work(rank: int, meet: Callable[[], object]) -> None:
        (tmp_path / f"{rank}.part").write_text(str(os.getpid()))
        (tmp_path / f"{rank}.part").rename(tmp_path / str(rank))
        time.sleep(60)

    with fork_server(lambda question: fork_ranks(work, 2), timeout_s=0.1) as ask:
        with pytest.raises(RankError, match="no answer within"):
            ask("anything")
        until = time.monotonic() + 20
        while len([*tmp_path.glob("[01]")]) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    for path in [tmp_path / "0", tmp_path / "1"]:
        while _runs(int(path.read_text())) and time.monotonic() < until:
            time.sleep(0.01)
        assert not _runs(int(path.read_text()))


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("meets", [True, False])
def test_the_rank_that_failed_is_named(meets: bool) -> None:
    def work(rank: int, meet: Callable[[], object]) -> int:
        if rank == 2:
            raise ValueError("no such thing")
        if meets:
            meet()
        return rank

    with pytest.raises(RankError, match="rank 2 cannot run here: ValueError: no such thing"):
        fork_ranks(work, 3, timeout_s=20.0)


def test_ranks_that_take_too_long_are_named() -> None:
    def work(rank: int, meet: Callable[[], object]) -> None:
        if rank == 0:
            meet()

    with pytest.raises(RankError, match=r"rank 0 did not end within 0\.2 s"):
        fork_ranks(work, 2, timeout_s=0.2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No times are measured, and all plans are predicted to take as long."""
    monkeypatch.setattr(tuning, "measure_plan", lambda *_, table, **__: table)
    monkeypatch.setattr(tuning, "compute_factors", lambda *_: [])
    monkeypatch.setattr(tuning, "simulate", lambda *_, **__: SimpleNamespace(step_time_s=1.0))


def _zero(plan: sw.Plan) -> int:
    return plan.search.best.config.zero


@pytest.mark.parametrize("quickest", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_fastest_that_ran_is_taken(
    quickest: int,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = sw.capture(*training.make("odd"))

    def run(_: object, plans: Sequence[sw.Plan]) -> list[float]:
        return [0.9 if _zero(plan) == quickest else 1.0 for plan in plans]

    monkeypatch.setattr(MeasurementServer, "race_plans", run)
    plan = tune(graph, Cluster.local(2), pp=1, tp=1, num_microbatches=1)
    assert _zero(plan) == quickest
    assert "900 ms measured" in capsys.readouterr().err


def test_ways_that_were_measured_alone_are_tried_against_the_library(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = sw.capture(*training.make("odd"))

    def run(_: object, plans: Sequence[sw.Plan]) -> list[float]:
        assert any(plan.collectives for plan in plans)
        return [1.0 if plan.collectives else 0.9 for plan in plans]

    monkeypatch.setattr(MeasurementServer, "race_plans", run)
    fixed = {"pp": 1, "tp": 1, "num_microbatches": 1, "zero": 0}
    plan = tune(graph, measured(2), **fixed)
    assert not plan.collectives
    assert plan.search.cluster.fingerprint == measured(2).fingerprint
    assert [line for line in capsys.readouterr().err.splitlines() if "measured" in line] == [
        "dp=2, tp=1, pp=1, zero 0, shared collectives: 1e+03 ms measured",
        "dp=2, tp=1, pp=1, zero 0: 900 ms measured",
    ]


@pytest.mark.slow
def test_plans_that_cannot_run_are_told_and_predicted(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[float]:
        raise RankError("rank 1 died while it ran here")

    monkeypatch.setattr(MeasurementServer, "race_plans", fail)
    graph = sw.capture(*training.make("odd"))
    tune(graph, Cluster.local(2), pp=1, tp=1, num_microbatches=1)
    assert "rank 1 died while it ran here" in capsys.readouterr().err


def test_plans_that_were_rehearsed_go_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sw.capture(*training.make("odd"))
    made = {z: sw.plan(graph, Cluster.local(2), zero=z, pp=1, tp=1, progress=False) for z in (0, 1)}
    found = tuning._Tuning(MeasurementServer(graph, Cluster.local(2)), {}, lambda _: None)
    found.candidates = [
        tuning._Candidate(plan=made[zero], cluster=found.cluster, seconds=s, programs=programs)
        for zero, s, programs in ((0, 0.5, []), (1, 1.0, [("cpu", 1.2, 1.1)]))
    ]
    assert found.predicted().plan is made[1]
