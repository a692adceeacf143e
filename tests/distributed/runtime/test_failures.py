"""A rank that dies or fails during a step is named by all the others, in time.

Each test starts processes of its own, because they are killed; run as a program, this file is one
of them: `python test_failures.py SCENARIO RANK WORLD PORT_OR_FILE`.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

GROUP_TIMEOUT_S = 5.0  # gloo's own: when a rank that waits for a living one wakes up
ENDED_S = 60.0


@dataclass
class Ended:
    """Exit code and output of a rank's process, and its seconds from the start of the step."""

    code: int
    output: str
    seconds: float


def run(scenario: str, world: int, where: str | None = None) -> list[Ended]:
    """Start the ranks and wait for all of them."""
    target = where or str(_free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, scenario]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), target],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + ENDED_S
    try:
        ended = []
        for process in ranks:
            output = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
            ended.append(Ended(process.returncode, output, _seconds(output)))
    finally:
        for process in ranks:
            process.kill()
    for rank, each in enumerate(ended):
        print(f"rank {rank}: {each.code} after {each.seconds} s\n{each.output}")
    return ended


def _seconds(output: str) -> float:
    lines = [line for line in output.splitlines() if line.startswith("after ")]
    return float(lines[-1].split()[1]) if lines else 0.0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def check(ended: list[Ended], failed: int, text: str) -> None:
    """Assert that all ranks but the failed one name the cause and end in time."""
    for rank, each in enumerate(ended):
        if rank != failed:
            assert each.code == 1, each.output
            assert f"RankError: {text}" in each.output, each.output
            assert f"at: rank {rank} saw: " in each.output
            assert each.seconds < GROUP_TIMEOUT_S + 12


pytestmark = pytest.mark.distributed


@pytest.mark.slow  # tests/distributed/test_pipeline_module.py kills a rank every day
def test_a_killed_rank_is_named_by_ranks_that_reduce_and_receive() -> None:
    ended = run("kill-1", 4)
    assert ended[1].code == -signal.SIGKILL
    check(ended, 1, "rank 1 died: no heartbeat for 4 s")


@pytest.mark.slow
def test_a_killed_rank_0_is_named_as_the_host_of_the_store() -> None:
    ended = run("kill-0", 3)
    assert ended[0].code == -signal.SIGKILL
    check(ended, 0, "rank 0 died: the store that it hosts is gone")


@pytest.mark.slow
def test_a_killed_rank_0_is_named_with_a_store_that_survives(tmp_path: Path) -> None:
    ended = run("kill-0", 3, str(tmp_path / "store"))
    check(ended, 0, "rank 0 died: no heartbeat for 4 s")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_raises_is_named_with_its_reason(rank: int) -> None:
    ended = run(f"raise-{rank}", 3)
    assert "ValueError: seven apples" in ended[rank].output
    assert "RankError" not in ended[rank].output
    check(ended, rank, f"rank {rank} failed: ValueError: seven apples")


@pytest.mark.slow
def test_unfinished_requests_do_not_delay_the_exit_of_a_failed_rank() -> None:
    ended = run("pending-1", 2)
    assert "ValueError: seven apples" in ended[1].output
    assert ended[1].code == 1
    seconds_to_exit = float(ended[0].output.split("rank 1 was gone after ")[1].split()[0])
    assert seconds_to_exit < 15  # 5 after its end began, where gloo would wait for 30


@pytest.mark.slow
def test_a_slow_rank_is_not_called_dead() -> None:
    ended = run("slow-1", 3)
    assert "went on" in ended[1].output
    for each in (ended[0], ended[2]):
        assert "RankError: no rank died, but rank 1 did not arrive in time" in each.output


@pytest.mark.slow
def test_a_rank_that_has_ended_is_named() -> None:
    ended = run("end-1", 3)
    assert ended[1].code == 0
    check(ended, 1, "rank 1 ended before the step did")


@pytest.mark.slow
def test_an_error_that_all_ranks_survive_is_forgotten() -> None:
    ended = run("recover-1", 3)
    check(ended, 1, "rank 1 failed: ValueError: another")


def _main(scenario: str, rank: int, world: int, target: str) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.runtime.failures import naming_failures

    what, _, who = scenario.partition("-")
    limit = datetime.timedelta(seconds=30 if what == "pending" else GROUP_TIMEOUT_S)
    if target.isdigit():
        store: dist.Store = dist.TCPStore("127.0.0.1", int(target), is_master=rank == 0)
    else:
        store = dist.FileStore(target, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    value = torch.ones(4)
    with naming_failures(20):
        dist.all_reduce(value)
    if what == "recover":
        try:
            with naming_failures(20):
                raise ValueError("everyone's")
        except ValueError:
            pass
        with naming_failures(20):
            dist.all_reduce(value)
    begin = time.monotonic()
    if what == "end" and rank == int(who):
        return
    try:
        with naming_failures(20):
            if rank == int(who):
                _fail(what, value)
            elif what == "pending":
                _watch_end(1, begin)
            elif rank == 2:
                dist.recv(value, 0)  # which waits elsewhere
            else:
                dist.all_reduce(value)
    finally:
        print(f"after {time.monotonic() - begin:.1f} s", flush=True)


def _fail(what: str, value: object) -> None:
    import torch
    import torch.distributed as dist

    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise ValueError("seven apples")
    elif what == "recover":
        raise ValueError("another")
    elif what == "pending":
        dist.all_reduce(torch.ones(4), async_op=True)
        dist.irecv(torch.ones(3), 0)
        raise ValueError("seven apples")
    elif what == "slow":
        time.sleep(GROUP_TIMEOUT_S + 14)
        print("went on", flush=True)


def _watch_end(rank: int, begin: float) -> None:
    """Wait for the end of another rank's process, detected by its connection."""
    import torch
    import torch.distributed as dist

    try:
        dist.recv(torch.ones(2), rank, tag=9)
    except RuntimeError as error:
        closed = "was gone" if "Connection closed" in str(error) else "is still there"
        print(f"rank {rank} {closed} after {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
