"""What ranks agree on before they first communicate: that all are there and run one program.

The exchange goes through the store of the default process group, never through a collective: a
rank that fails, is missing or differs cannot hang the others, who name it within the time-out.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch.distributed
import torch.distributed as dist

from shardwise.errors import RankError

__all__ = ["Agree", "require_ranks", "starting"]


class Agree(Protocol):
    """What `starting` gives its body to call once a program is made."""

    def __call__(self, fingerprint: str, values: Mapping[str, str] | None = None) -> None: ...


_POLL_S = 0.05
_AGREED = "agreed"


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


@contextlib.contextmanager
def starting(timeout: float = 60.0) -> Iterator[Agree]:
    """One attempt of all ranks to start; the body makes a program and calls what this gives.

        with starting(timeout) as agree:
            program = ...
            agree(program.fingerprint)

    `agree` returns once all ranks have come with the same fingerprint, and the same values of what
    they name besides (`agree(fingerprint, {"what": "value"})`); else it raises a
    `RankError`, the same on all ranks, that names those who failed in their body, are missing
    after `timeout` seconds, or differ. The first rank to know how an attempt ended writes it down.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield lambda fingerprint, values=None: None
        return
    attempt = _Attempt(timeout)
    try:
        yield attempt.agree
    except BaseException as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        with contextlib.suppress(RankError):
            attempt.settle(
                f"rank {attempt.rank} of {attempt.world} failed before the start: {what}"
            )
        raise


class _Attempt:
    """One rank's part of an attempt: the keys of all ranks' n-th attempts have one prefix.

    Attempts are counted when they begin, by the store: a rank that fails before it agrees has
    taken part, and the next attempts of all ranks meet again.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.store: Any = torch.distributed.distributed_c10d._get_default_store()
        with _naming_the_host():
            self.number = self.store.add(f"shardwise/attempts/{self.rank}", 1)
        self.prefix = f"shardwise/attempt/{self.number}"

    def agree(self, fingerprint: str, values: Mapping[str, str] | None = None) -> None:
        with _naming_the_host():
            text = json.dumps([fingerprint, dict(values or {})])
            self.store.set(f"{self.prefix}/program/{self.rank}", text)
        outcome = self.settle(_complaint(self._programs(), self.world, self.timeout) or _AGREED)
        if outcome != _AGREED:
            raise RankError(
                outcome,
                hint="look at the log of the ranks named here; all ranks take the same steps, with "
                "the same batches, frozen parameters and modes",
            )

    def settle(self, outcome: str) -> str:
        """Write down how the attempt ended, unless another rank has; what is written then."""
        with _naming_the_host():
            settled: str = self.store.compare_set(f"{self.prefix}/outcome", "", outcome).decode()
        return settled

    def _programs(self) -> dict[int, str]:
        """The fingerprint of each rank, as far as they came before the end of the attempt."""
        deadline = time.monotonic() + self.timeout
        found: dict[int, str] = {}
        try:
            while True:
                settled = self.store.check([f"{self.prefix}/outcome"])
                for rank in range(self.world):
                    key = f"{self.prefix}/program/{rank}"
                    if rank not in found and self.store.check([key]):
                        found[rank] = self.store.get(key).decode()
                if settled or len(found) == self.world or time.monotonic() > deadline:
                    return found
                time.sleep(_POLL_S)
        except RuntimeError as error:
            missing = [rank for rank in range(self.world) if rank not in found]
            raise RankError(
                f"ranks {missing} of {self.world} had not come when the store was lost with the "
                f"rank that hosts it: {_first_line(error)}"
            ) from error


@contextlib.contextmanager
def _naming_the_host() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"the rank that hosts the store is gone: {_first_line(error)}") from error


def _complaint(found: dict[int, str], world: int, timeout: float) -> str | None:
    missing = [rank for rank in range(world) if rank not in found]
    if missing:
        return f"ranks {missing} of {world} did not start within {timeout:g} s"
    programs: dict[str, list[int]] = {}
    first_values = json.loads(found[0])[1]
    for rank in sorted(found):
        fingerprint, values = json.loads(found[rank])
        programs.setdefault(fingerprint, []).append(rank)
        for what in sorted(first_values.keys() & values.keys()):
            if values[what] != first_values[what]:
                return f"rank {rank} has other values than rank 0 of {what}"
    if len(programs) == 1:
        return None
    told = "; ".join(f"ranks {ranks}: {text[:16]}" for text, ranks in programs.items())
    return f"ranks have different programs ({told}): their model, batch, plan or version differ"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
