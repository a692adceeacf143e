"""How ranks agree on the outcome of one save or load, without collectives.

Ranks talk through the store of the default process group, from any thread, beside a training step
that goes on. Whoever waits learns of a rank that failed, died or never came, and names it: nobody
hangs. Messages are short texts; all that is large goes through the file system.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed
import torch.distributed as dist

from shardwise.errors import CheckpointError, RankError, ShardwiseError
from shardwise.runtime.failures import DEAD_AFTER_S, show_life

__all__ = ["Meeting", "open_meeting"]

_POLL_S = 0.02
_LOOK_S = 1.0  # between looks at signs of life
_ANSWER_S = 30.0  # for the store
_COME_S = 120.0  # for all ranks to begin the same save or load
_KEPT = 4  # meetings whose keys stay


class Meeting:
    """One rank's part in what all ranks do together; alone, nobody is waited for."""

    rank, world = 0, 1

    def tell(self, point: str, text: str = "") -> None:
        """Say that this rank has come to a point."""

    def fail(self, error: BaseException) -> None:
        """Say that this rank cannot go on, and why."""

    def hear(self, point: str, ranks: Sequence[int], timeout: float) -> dict[int, str]:
        """What ranks said at a point, once all of them have; raises if one cannot."""
        return dict.fromkeys(ranks, "")

    def agree(self, work: Callable[[], Any], timeout: float) -> Any:
        """Do something on every rank; if it fails on one, it fails on all, naming that one."""
        return work()


def open_meeting() -> Meeting:
    """The next meeting of all ranks, of which each counts its own."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Meeting()
    with _naming_the_host():
        return _StoreMeeting()


_connected: tuple[Any, Any] | None = None  # of the default process group


def _connection() -> tuple[Any, Any]:
    """A connection to the store for meetings alone, and what serves it.

    All meetings share it, from any thread: none of them waits on it. A connection to a host that
    is gone would be tried for minutes; that it answers is asked on the one there is.
    """
    global _connected
    default: Any = torch.distributed.distributed_c10d._get_default_store()
    default.check(["shardwise/there"])
    if _connected is None or _connected[0] is not dist.group.WORLD:
        made = default.clone()
        made.set_timeout(datetime.timedelta(seconds=_ANSWER_S))
        _connected = dist.group.WORLD, made
    return _connected[1], default


class _StoreMeeting(Meeting):
    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        show_life()
        # What serves it is kept until all is said, even if the process group is destroyed.
        self._store, self._server = _connection()
        self.number = self._store.add(f"shardwise/meetings/{self.rank}", 1)
        self.prefix = f"shardwise/meeting/{self.number}"
        self._failed = False
        self._forget(self.number - _KEPT)

    def _forget(self, number: int) -> None:
        with contextlib.suppress(RuntimeError):
            for point in ("folder", "written", "outcome"):
                self._store.delete_key(f"shardwise/meeting/{number}/{point}/{self.rank}")

    def tell(self, point: str, text: str = "") -> None:
        with _naming_the_host():
            self._store.set(f"{self.prefix}/{point}/{self.rank}", text)
            self._store.add(f"{self.prefix}/{point}", 1)

    def fail(self, error: BaseException) -> None:
        if self._failed:
            return
        self._failed = True
        with contextlib.suppress(RuntimeError, RankError):
            self._store.set(f"{self.prefix}/failed/{self.rank}", _text_of(error))
            self._store.add(f"{self.prefix}/failed", 1)

    def hear(self, point: str, ranks: Sequence[int], timeout: float) -> dict[int, str]:
        begin = looked = time.monotonic()
        lives: dict[int, tuple[str, float]] = {}
        with _naming_the_host():
            while True:
                if self._all_told(point, ranks):
                    keys = {r: f"{self.prefix}/{point}/{r}" for r in ranks}
                    return {r: self._store.get(key).decode() for r, key in keys.items()}
                self._raise_failures(ranks)
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked = now
                    self._look(point, ranks, lives, now - begin, timeout)
                time.sleep(_POLL_S)

    def _all_told(self, point: str, ranks: Sequence[int]) -> bool:
        if len(ranks) == 1:
            return bool(self._store.check([f"{self.prefix}/{point}/{ranks[0]}"]))
        told: int = self._store.add(f"{self.prefix}/{point}", 0)
        return told >= len(ranks)

    def _raise_failures(self, ranks: Sequence[int]) -> None:
        if not self._store.add(f"{self.prefix}/failed", 0):
            return
        for rank in ranks:
            key = f"{self.prefix}/failed/{rank}"
            if self._store.check([key]):
                raise _error_of(rank, self._store.get(key).decode())

    def _look(
        self,
        point: str,
        ranks: Sequence[int],
        lives: dict[int, tuple[str, float]],
        waited: float,
        timeout: float,
    ) -> None:
        """Name those who are waited for and died, never came, or take too long."""
        now, dead, absent, late = time.monotonic(), [], [], []
        for rank in ranks:
            if self._store.check([f"{self.prefix}/{point}/{rank}"]):
                continue
            late.append(rank)
            life = _read(self._store, f"shardwise/life/{rank}")
            if rank not in lives or lives[rank][0] != life:
                lives[rank] = life, now
            elif life and now - lives[rank][1] > DEAD_AFTER_S:
                dead.append(rank)
            if self._store.add(f"shardwise/meetings/{rank}", 0) < self.number:
                absent.append(rank)
        if dead:
            raise RankError(f"ranks {dead} died: no sign of life for {DEAD_AFTER_S:g} s")
        if absent and waited > min(_COME_S, timeout):
            raise RankError(
                f"ranks {absent} did not call it within {waited:.0f} s",
                hint="all ranks save and load together",
            )
        if late and waited > timeout:
            raise RankError(f"ranks {late} were not done after {waited:.0f} s")

    def agree(self, work: Callable[[], Any], timeout: float) -> Any:
        try:
            result = work()
        except BaseException as error:
            self.fail(error)
            raise
        self.tell("written")
        try:
            if self.rank == 0:
                self.hear("written", range(self.world), timeout)
                self.tell("outcome")
            else:
                self.hear("outcome", [0], timeout)
        except (CheckpointError, RankError) as error:
            self.fail(error)
            raise
        return result


def _text_of(error: BaseException) -> str:
    """An error as one text for the others: its message, and the rest."""
    message = getattr(error, "message", None) or str(error).partition("\n")[0]
    if not isinstance(error, ShardwiseError):
        message = f"{type(error).__name__}: {message}"
    where, hint = getattr(error, "where", None), getattr(error, "hint", None)
    return json.dumps([message, where, hint])


def _error_of(rank: int, text: str) -> CheckpointError:
    """The error of another rank."""
    message, where, hint = json.loads(text)
    named = message if message.startswith("rank") else f"rank {rank}: {message}"
    return CheckpointError(named, where=where, hint=hint)


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


@contextlib.contextmanager
def _naming_the_host() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        gone = "the launcher is" if dist.is_torchelastic_launched() else "rank 0 is"
        first = str(error).partition("\n")[0]
        raise RankError(f"{gone} gone, and with it the store: {first}") from error
