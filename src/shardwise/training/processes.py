"""The processes of a training: the group that this one is in, and a start of several here.

Enters: what torchrun put into the environment, or a number of ranks. Leaves: `World`; for a start,
the exit code of all.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, RankError, did_you_mean
from shardwise.processes import run_until_exit
from shardwise.runtime.rendezvous import host_store, init_process_group

__all__ = ["World", "choose_device", "process_group", "start_ranks"]


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
    """Run `python -m shardwise.cli ARGUMENTS` as several ranks here; return their exit code.

    The ranks meet at a store that this process hosts, as torchrun's agent does, so that it survives
    whichever rank dies.
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
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return run_until_exit(command, own)
