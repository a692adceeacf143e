"""What ranks agree on before they first communicate: that all are there and run one program.

The exchange goes through the store of the default process group, never through a collective: a
rank that is missing or differs cannot hang the others, who name it within the time-out.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed
import torch.distributed as dist

from shardwise.errors import RankError

__all__ = ["agree", "require_ranks"]

_POLL_S = 0.05
_rounds = 0  # every rank calls `agree` equally often; the number keeps the rounds' keys apart


def require_ranks(num_ranks: int) -> None:
    """Refuse a mesh that has more ranks than the group, or fewer than one."""
    here = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks < 1:
        raise RankError(f"a plan needs at least one rank, this one has {num_ranks}")
    if num_ranks > here:
        started = "the default group has" if dist.is_initialized() else "without a process group:"
        raise RankError(
            f"the plan is for {num_ranks} ranks, {started} {here}",
            hint=f"torchrun --nproc-per-node {num_ranks}",
        )
    if num_ranks < here:
        raise RankError(
            f"the plan is for {num_ranks} ranks, the default group has {here}",
            hint=f"torchrun --nproc-per-node {num_ranks}, or a plan for {here} ranks",
        )


def agree(fingerprint: str, timeout: float = 60.0) -> None:
    """Return once all ranks have come with the same fingerprint; else raise on all of them.

    `RankError` names the ranks that are missing after `timeout` seconds, or who differ.
    """
    global _rounds
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _rounds += 1
    prefix = f"shardwise/agree/{_rounds}"
    rank, world = dist.get_rank(), dist.get_world_size()
    deadline = time.monotonic() + timeout
    _put(f"{prefix}/program/{rank}", fingerprint)
    found = _collect(f"{prefix}/program", world, deadline)
    complaint = _complaint(found, world, timeout)
    _put(f"{prefix}/verdict/{rank}", complaint or "")
    if complaint is None:
        # A rank that came too late for the others learns here that they gave up.
        verdicts = _collect(f"{prefix}/verdict", world, deadline + timeout)
        complaint = next((v for v in verdicts.values() if v), None)
        if complaint is None and len(verdicts) < world:
            complaint = _missing(verdicts, world, timeout)
    if complaint is not None:
        raise RankError(complaint, hint="look at the log of the ranks named here")


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _put(key: str, value: str) -> None:
    try:
        _store().set(key, json.dumps(value))
    except RuntimeError as error:
        raise RankError(f"the rank that hosts the store is gone: {_first_line(error)}") from error


def _collect(prefix: str, world: int, deadline: float) -> dict[int, str]:
    """What each rank has put below the prefix, as far as it came before the deadline."""
    store = _store()
    found: dict[int, str] = {}
    try:
        while True:
            for rank in range(world):
                if rank not in found and store.check([f"{prefix}/{rank}"]):
                    found[rank] = json.loads(store.get(f"{prefix}/{rank}"))
            if len(found) == world or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)
    except RuntimeError as error:
        missing = [rank for rank in range(world) if rank not in found]
        raise RankError(
            f"ranks {missing} of {world} had not come when the store was lost with the rank that "
            f"hosts it: {_first_line(error)}"
        ) from error


def _complaint(found: dict[int, str], world: int, timeout: float) -> str | None:
    if len(found) < world:
        return _missing(found, world, timeout)
    programs: dict[str, list[int]] = {}
    for rank in sorted(found):
        programs.setdefault(found[rank], []).append(rank)
    if len(programs) == 1:
        return None
    told = "; ".join(f"ranks {ranks}: {text[:16]}" for text, ranks in programs.items())
    return f"ranks have different programs ({told}): their model, batch, plan or version differ"


def _missing(found: dict[int, str], world: int, timeout: float) -> str:
    missing = [rank for rank in range(world) if rank not in found]
    return f"ranks {missing} of {world} did not start within {timeout:g} s"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
