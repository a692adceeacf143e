"""Plans race against each other on this machine, and `tune` takes the fastest."""

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
from shardwise.tuning import race
from shardwise.tuning import tune as tuning
from shardwise.tuning.measurement_server import MeasurementServer, measurement_server
from shardwise.tuning.race import can_race, plans_that_fit, race_plans
from shardwise.tuning.tune import tune
from tests.support import training
from tests.support.clusters import measured
from tests.support.searches import unpolished


@pytest.fixture(scope="module", autouse=True)
def _fast_searches() -> Iterator[None]:
    with unpolished():
        yield


def test_every_plan_runs() -> None:
    graph = sw.capture(*training.make("odd"))
    cluster = Cluster.local(2)
    pipeline = sw.strategies.pipeline(graph, cluster, pp=2, num_microbatches=2)
    plans = [sw.strategies.ddp(graph, cluster), sw.strategies.fsdp(graph, cluster), pipeline]
    seconds = race_plans(graph, plans, cluster)
    assert len(seconds) == 3
    assert all(s > 0 for s in seconds)


@pytest.mark.slow
def test_plans_run_with_their_collective_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sw.capture(*training.make("odd"))
    plan = sw.strategies.ddp(graph, Cluster.local(2))
    shared = sw.collectives.choose(plan, measured(2), use="shared")

    def fails(*_: object) -> None:
        raise ValueError("in shared memory")

    monkeypatch.setattr(SharedBuckets, "all_reduce", fails)
    assert race_plans(graph, [plan], Cluster.local(2))[0] > 0
    with pytest.raises(RankError, match="in shared memory"):
        race_plans(graph, [shared], Cluster.local(2))


def test_plans_race_only_on_one_node_of_cpus() -> None:
    assert can_race(Cluster.local(2))
    assert not can_race(Cluster.local(1))
    assert not can_race(Cluster.preset("h100", nodes=1, devices_per_node=2))
    assert not can_race(Cluster.preset("cpu", nodes=2, devices_per_node=2))


def test_only_as_many_plans_as_fit_in_memory_race() -> None:
    graph = sw.capture(*training.make("odd"))
    cluster = Cluster.local(4)
    plan = sw.plan(graph, cluster, pp=1, tp=1, progress=False)
    room = race.SHARE * cluster.device(0).host_memory_bytes
    times = int(room // plan.search.best.memory.peak_bytes)
    assert times > 1
    assert len(plans_that_fit([plan] * (times + 1), cluster)) == times


class _Runner:
    """A plan whose steps report the given seconds without running."""

    def __init__(self, *times_s: float) -> None:
        self.times_s, self.ran = times_s, 0

    def seconds(self) -> float:
        self.ran += 1
        return self.times_s[min(self.ran, len(self.times_s)) - 1]


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "_as_rank_0", list)


def test_slow_plans_drop_out_after_each_round(single_rank: None) -> None:
    fast, equal, slow, slowest = _Runner(1.0), _Runner(1.02), _Runner(1.08), _Runner(1.2)
    assert race._race([slowest, fast, slow, equal]) == pytest.approx([1.2, 1.0, 1.08, 1.02])
    first, second, third = (rounds for rounds, _ in race.HEATS)
    assert slowest.ran == race.WARM_UPS + first
    assert slow.ran == slowest.ran + second
    assert fast.ran == equal.ran == slow.ran + third


def test_a_dropped_plan_gains_nothing_if_the_machine_slows_down(single_rank: None) -> None:
    slower = (*(1.0,) * 5, 3.0)  # from the second round on
    assert race._race([_Runner(*slower), _Runner(1.2)]) == pytest.approx([3.0, 3.6])


def test_a_race_that_takes_too_long_ends(
    single_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "RACE_S", -1.0)
    runners = [_Runner(2.0), _Runner(1.0)]
    assert race._race(runners) == [2.0, 1.0]
    assert [runner.ran for runner in runners] == [2, 2]


def test_candidates_of_different_meshes_alternate() -> None:
    graph = sw.capture(*training.make("odd"))
    plans = {t: sw.plan(graph, Cluster.local(2), tp=t, pp=1, progress=False) for t in (1, 2)}
    predicted = [(2, 0.5), (2, 0.6), (2, 0.7), (1, 1.1), (1, 1.0)]
    candidates = [
        tuning._Candidate(plan=plans[tp], cluster=Cluster.local(2), seconds=s, programs=[])
        for tp, s in predicted
    ]
    assert [c.seconds for c in tuning._in_turns(candidates)] == [0.5, 1.0, 0.6, 1.1, 0.7]


def test_the_measurement_server_survives_failing_requests() -> None:
    graph = sw.capture(*training.make("odd"))
    cluster = Cluster.local(2)
    plan = sw.strategies.ddp(graph, cluster)
    with measurement_server(graph, cluster) as server:
        assert set(server.time_compute(plan).training_s) == {0}
        assert len(server.race_plans([plan])) == 1
        with pytest.raises(RankError, match="rank"):
            server.race_plans([sw.strategies.ddp(graph, Cluster.local(4))])
        assert len(server.race_plans([plan])) == 1


def test_a_late_answer_is_not_taken_for_the_next(tmp_path: Path) -> None:
    def serve(question: str) -> str:
        while question == "late" and not (tmp_path / "is_late").exists():
            time.sleep(0.01)
        return question

    with fork_server(serve, timeout_s=0.2) as ask:
        with pytest.raises(RankError, match="no answer within"):
            ask("late")
        (tmp_path / "is_late").touch()
        with pytest.raises(RankError, match="has ended"):
            ask("next")


def test_a_dead_fork_server_raises_every_time() -> None:
    def serve(question: str) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return question

    with fork_server(serve, timeout_s=20.0) as ask:
        for message in ("died", "has ended"):
            with pytest.raises(RankError, match=message):
                ask("anything")


@pytest.mark.slow
def test_no_rank_outlives_the_fork_server(tmp_path: Path) -> None:
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
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("meets", [True, False])
def test_the_error_names_the_rank_that_failed(meets: bool) -> None:
    def work(rank: int, meet: Callable[[], object]) -> int:
        if rank == 2:
            raise ValueError("no such thing")
        if meets:
            meet()
        return rank

    with pytest.raises(RankError, match="rank 2 cannot run here: ValueError: no such thing"):
        fork_ranks(work, 3, timeout_s=20.0)


@pytest.mark.slow
def test_the_error_names_the_rank_that_timed_out() -> None:
    def work(rank: int, meet: Callable[[], object]) -> None:
        if rank == 0:
            meet()

    with pytest.raises(RankError, match="rank 0 did not finish within 3 s"):
        fork_ranks(work, 2, timeout_s=3.0)


@pytest.fixture
def equal_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing, and predict the same time for all plans."""
    monkeypatch.setattr(tuning, "measure_plan", lambda *_, table, **__: table)
    monkeypatch.setattr(tuning, "compute_factors", lambda *_: [])
    monkeypatch.setattr(tuning, "simulate", lambda *_, **__: SimpleNamespace(step_time_s=1.0))


def _zero(plan: sw.Plan) -> int:
    return plan.search.best.config.zero


@pytest.mark.parametrize("fastest", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_fastest_measured_plan_is_taken(
    fastest: int,
    equal_predictions: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = sw.capture(*training.make("odd"))

    def run(_: object, plans: Sequence[sw.Plan]) -> list[float]:
        return [0.9 if _zero(plan) == fastest else 1.0 for plan in plans]

    monkeypatch.setattr(MeasurementServer, "race_plans", run)
    plan = tune(graph, Cluster.local(2), pp=1, tp=1, num_microbatches=1)
    assert _zero(plan) == fastest
    assert "900 ms measured" in capsys.readouterr().err


def test_collective_backends_race_against_the_library(
    equal_predictions: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
def test_plans_that_cannot_run_are_reported_and_predicted(
    equal_predictions: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[float]:
        raise RankError("rank 1 died while it ran here")

    monkeypatch.setattr(MeasurementServer, "race_plans", fail)
    graph = sw.capture(*training.make("odd"))
    tune(graph, Cluster.local(2), pp=1, tp=1, num_microbatches=1)
    assert "rank 1 died while it ran here" in capsys.readouterr().err


def test_plans_with_timed_compute_go_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sw.capture(*training.make("odd"))
    plans = {
        z: sw.plan(graph, Cluster.local(2), zero=z, pp=1, tp=1, progress=False) for z in (0, 1)
    }
    tuner = tuning._Tuning(MeasurementServer(graph, Cluster.local(2)), {}, lambda _: None)
    tuner.candidates = [
        tuning._Candidate(plan=plans[zero], cluster=tuner.cluster, seconds=s, programs=programs)
        for zero, s, programs in ((0, 0.5, []), (1, 1.0, [("cpu", 1.2, 1.1)]))
    ]
    assert tuner.predicted().plan is plans[1]
