"""The processes of a training: the group that this one is in, and a start of several here.

Enters: what torchrun put into the environment, or a number of ranks. Leaves: `World`; for a start,
the exit code of all.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, RankError, did_you_mean
from shardwise.runtime.rendezvous import host_store, init_process_group

__all__ = ["World", "choose_device", "process_group", "start_ranks"]

GRACE_S = 20.0  # after a rank failed, for the others to name it
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all."""

    rank: int
    size: int
    device: torch.device

    @property
    def talks(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.rank == 0


def choose_device(name: str) -> str:
    """`cpu` or `cuda`; `auto` is the GPU where there is one."""
    kinds = ("auto", "cpu", "cuda")
    if name not in kinds:
        raise ConfigError(f"{name!r}{did_you_mean(name, kinds)}", where="device", hint="auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU is here that torch can use", where="device", hint="device: cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


@contextlib.contextmanager
def process_group(device: str, timeout_s: float) -> Iterator[World]:
    """The group that torchrun's variables describe, or the one that is there; else this alone."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(here)
    made = False
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _join(device, timeout_s)
        made = True
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        yield World(rank=rank, size=size, device=here)
    finally:
        if made:
            dist.destroy_process_group()


def _join(device: str, timeout_s: float) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL takes one rank for each GPU; gloo moves what GPUs hold through the host.
    own = device == "cuda" and local <= torch.cuda.device_count()
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        init_process_group("nccl" if own else "gloo", limit)
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        busy = "EADDRINUSE" in str(error) or "in use" in str(error)
        raise RankError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} could not meet the "
            f"others at {place}: " + str(error).partition("\n")[0],
            hint="another --master-port: this one is in use"
            if busy
            else f"is {place} reachable from this machine, and did all ranks start?",
        ) from error


def start_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m shardwise.cli ARGUMENTS` in several processes here; their exit code.

    The ranks meet at a store that this process hosts, as torchrun's agent does, so that it is there
    whichever rank dies. A signal is passed on to all. After a rank fails, the others have some
    seconds to say what they saw of it.
    """
    store = host_store("127.0.0.1")
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are guests of the store
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))
        ),
    }
    command = [sys.executable, "-m", "shardwise.cli", *arguments]
    started: list[subprocess.Popen[bytes]] = []
    with _passing_signals_to(started):
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(subprocess.Popen(command, env={**os.environ, **shared, **own}))
            return _exit_code(started)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()


def _exit_code(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """That of the first rank that failed, or 0 once all have ended."""
    failed, deadline = 0, math.inf
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        if not failed and any(codes):
            failed = next(code for code in codes if code)
            deadline = time.monotonic() + GRACE_S
        if None not in codes:
            break
        time.sleep(_POLL_S)
    return failed if failed >= 0 else 128 - failed


@contextlib.contextmanager
def _passing_signals_to(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT are for the ranks, who save their state and end."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in started:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
