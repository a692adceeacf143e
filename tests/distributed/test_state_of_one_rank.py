"""Python state that changes on one rank only is named at once, or by the next check of batches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import BatchError, ShardwiseError
from shardwise.listening import listening_socket
from shardwise.runtime import consistency, failures
from shardwise.runtime.module import AGREED_CHANGES
from shardwise.runtime.rendezvous import start_heartbeat

BATCH = {"x": torch.ones(4, 3)}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.beta = nn.Linear(3, 2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).square().sum() * self.beta


def parallel(model: nn.Module, timeout: float = 60.0) -> Any:
    plan = sw.strategies.ddp(sw.capture(model, BATCH), sw.Cluster.local(dist.get_world_size()))
    return sw.parallelize(model, BATCH, plan, timeout_s=timeout)


def back_on_one_rank(rank_that_changes: int) -> tuple[str, str, int]:
    """Both programs are compiled, so that each rank could run its own forever."""
    model = Scaled()
    with mock.patch.object(consistency, "BATCH_CHECK_EVERY", 4):
        pm = parallel(model)
        for _ in range(AGREED_CHANGES + 1):
            for beta in (2.0, 1.0):
                model.beta = beta
                pm.train_step(BATCH)
        if dist.get_rank() == rank_that_changes:
            model.beta = 2.0
        for number in range(9):
            try:
                pm.train_step(BATCH)
            except BatchError as error:
                return error.message, str(error.where), number
    return "", "", -1


@pytest.mark.distributed
def test_another_compiled_program_on_one_rank_is_detected(pool: Callable[[int], Any]) -> None:
    for message, where, number in pool(2).run(back_on_one_rank, 1, timeout=100):
        assert "[1]" in message
        assert "requires_grad" in where
        assert 0 <= number < 4


def worker(rank: int, port: int, what: str, seconds: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = Scaled()
    pm = parallel(model, timeout=90.0)
    for frozen in (False, True, False):
        model.line.bias.requires_grad_(not frozen)
        pm.train_step(BATCH)
    if rank == 1 and what == "beta":
        model.beta = 3.0
    elif rank == 1:
        model.line.bias.requires_grad_(False)
    start = time.monotonic()
    try:
        pm.train_step(BATCH)
    finally:
        (seconds / str(rank)).write_text(f"{time.monotonic() - start}")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("what", ["beta", "flags"])
def test_a_change_on_one_rank_is_named_at_once(tmp_path: Path, what: str) -> None:
    with listening_socket("127.0.0.1") as free:
        port = free.getsockname()[1]
    code = "import sys; from tests.distributed.test_state_of_one_rank import worker, Path; "
    code += "worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port), what, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    for rank, text in enumerate(errors):
        assert re.search(rf"RankError: .*rank 1 .*{what}", text), text
        assert float((tmp_path / str(rank)).read_text()) < 30


def weight_of_one_rank() -> list[tuple[str, str, float]]:
    """Rank 1 fails and lives on; a second attempt there must not wait, either."""
    model, errors = Scaled(), []
    pm = parallel(model)
    pm.train_step(BATCH)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.line.weight.add_(1.0)
    for _ in range(2):
        start = time.monotonic()
        try:
            with mock.patch.object(failures, "CLOSE_S", 0.5):
                pm.train_step(BATCH)
        except ShardwiseError as error:
            errors.append((type(error).__name__, str(error), time.monotonic() - start))
            time.sleep(2.0)
    return errors[: 2 if dist.get_rank() == 1 else 1]


@pytest.mark.distributed
def test_ranks_do_not_wait_for_one_that_failed_and_lives_on(pool: Callable[[int], Any]) -> None:
    other, own = pool(2).run(weight_of_one_rank, timeout=100)
    [(kind, text, seconds)] = other
    assert kind == "RankError"
    assert "rank 1 failed: ProgramError: line.weight" in text
    assert seconds < 30
    assert [kind for kind, _, _ in own] == ["ProgramError", "RankError"]
    assert "closed its connections" in own[1][1]


def shorter_on_one_rank(strategy: str, verb: str, folder: str) -> tuple[str, str, float]:
    """The last rank has one batch less, and nobody refers to its module after the failure."""
    plan = getattr(sw.strategies, strategy)(
        sw.capture(model := Scaled(), BATCH), sw.Cluster.local(dist.get_world_size())
    )
    pm = sw.parallelize(model, BATCH, plan)
    last = {
        "gather": pm.gather_state_dict,
        "evaluate": lambda: pm.eval_loss(BATCH),
        "save": lambda: sw.save_checkpoint(folder, pm),
        "copy": lambda: pm.copy_to(None),
    }[verb]
    start = time.monotonic()
    try:
        with mock.patch.object(failures, "CLOSE_S", 0.2):
            for _ in range(6 - (dist.get_rank() == dist.get_world_size() - 1)):
                pm.train_step(BATCH)
            last()
            return "", "", 0.0
    except ShardwiseError as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "verb", "ranks"),
    [
        ("ddp", "gather", 2),
        ("fsdp", "evaluate", 2),
        pytest.param("fsdp", "save", 3, marks=pytest.mark.slow),
        pytest.param("tensor", "copy", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_data_of_different_length_are_named(
    pool: Callable[[int], Any], tmp_path: Path, strategy: str, verb: str, ranks: int
) -> None:
    arguments = (strategy, verb, str(tmp_path / "checkpoint"))
    for kind, text, seconds in pool(ranks).run(shorter_on_one_rank, *arguments, timeout=100):
        assert kind == "RankError"
        assert re.search(rf"rank {ranks - 1} began to {verb}.*, while .* began another step", text)
        assert seconds < 30


def gathered_after_a_failed_meeting(folder: str) -> tuple[str, list[str]]:
    """Only the last rank had begun to gather when it failed; then both train again and gather."""
    failure, _, _ = shorter_on_one_rank("ddp", "gather", folder)
    pm = parallel(Scaled(), timeout=20.0)
    pm.train_step(BATCH)
    if dist.get_rank() == 0:
        time.sleep(1.5)  # longer than ranks wait before they look for the others
    return failure, sorted(pm.gather_state_dict())


@pytest.mark.distributed
def test_ranks_meet_again_after_a_failed_meeting(
    pool: Callable[[int], Any], tmp_path: Path
) -> None:
    for failure, names in pool(2).run(gathered_after_a_failed_meeting, str(tmp_path), timeout=100):
        assert (failure, names) == ("RankError", ["line.bias", "line.weight"])


def slower_after_a_failure() -> tuple[int, tuple[int, str]]:
    """Rank 0 had begun a step that failed on the other before it began, and takes its time."""
    pm = parallel(Scaled())
    heartbeat = start_heartbeat()
    assert heartbeat is not None
    if dist.get_rank() == 0:
        heartbeat.num_runs, heartbeat.body = heartbeat.num_runs + 1, (heartbeat.body[0] + 1, "")
        heartbeat.has_failed = True
        time.sleep(2.5)
    pm.gather_state_dict()
    assert not heartbeat.has_failed
    return heartbeat.num_runs, heartbeat.body


@pytest.mark.distributed
def test_ranks_agree_on_their_numbers_after_a_failure(pool: Callable[[int], Any]) -> None:
    first, second = pool(2).run(slower_after_a_failure, timeout=100)
    assert first == second


class Deepening(nn.Module):
    """Uses more layers later, and a teacher that follows one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.depth = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), 2
        self.teacher = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.teacher(x)
        for layer in self.layers[: self.depth]:
            x = x + layer(x).tanh()
        return x.square().sum()


def errors_over_stages() -> list[tuple[str, str, float]]:
    model, errors = Deepening(), []
    plan = sw.strategies.pipeline(
        sw.capture(model, BATCH), sw.Cluster.local(2), pp=2, num_microbatches=2
    )
    pm = sw.parallelize(model, BATCH, plan)
    pm.train_step(BATCH)
    named = dict(pm.named_parameters())

    def average() -> None:
        with torch.no_grad():
            named["teacher.weight"].lerp_(named["layers.1.weight"], 0.1)

    def deepen() -> None:
        model.depth = 4
        pm.train_step(BATCH)

    for action in (average, deepen):
        start = time.monotonic()
        try:
            action()
        except ShardwiseError as error:
            seconds = time.monotonic() - start
            errors.append((type(error).__name__, str(error), seconds))
    return errors


@pytest.mark.distributed
def test_all_ranks_name_parameters_of_other_stages_at_once(pool: Callable[[int], Any]) -> None:
    results = pool(2).run(errors_over_stages, timeout=100)
    for (kind, text, _), (second_kind, second_text, seconds) in results:
        assert kind == "OptimizerError"
        assert "teacher.weight" in text
        assert "layers.1.weight" in text
        assert second_kind in ("BatchError", "RankError")
        assert "layers." in second_text
        assert seconds < 30
