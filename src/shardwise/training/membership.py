"""The processes of an elastic training, and their agreement on who takes part.

The launcher, which starts the processes, hosts a store and is the only writer of the `Membership`:
a generation number and its processes in rank order. Each process runs a `Member`, whose thread
shows that the process is alive and reads the membership. When others are lost, it ends every wait
of the current generation by shutting down the sockets that were opened for it: a wait in gloo for a
stopped peer, in the store, or for a group to form. All of them then raise, and nothing that belongs
to the old generation can reach the new one, whose keys in the store have another prefix.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardwise.errors import RankError
from shardwise.files import parse_json
from shardwise.runtime.failures import lift_exit_limit
from shardwise.schema import Reader, Writer

ADDRESS = "SHARDWISE_ELASTIC"  # the launcher's store, for the processes that it starts
MEMBER = "SHARDWISE_MEMBER"  # the number of a process, which is never used again
POLL_S = 0.05
BEAT_S = 0.25
ENDED = "ended"  # the sign of life of a process that is about to exit
NEXT_S = 120.0  # for the launcher to begin another generation after a failure
_PREFIX = "elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The processes of a generation in rank order, and why it began.

    A planned one begins between two steps, when all ranks have seen it; any other at once.
    """

    generation: int
    members: tuple[int, ...]
    reason: str
    planned: bool = False
    began_at: float = 0.0  # seconds since the epoch

    def verify(self, before: Membership | None) -> None:
        """Refuse a generation that does not follow the one before, or repeats a process."""
        if len(set(self.members)) != len(self.members) or not self.members:
            raise RankError(f"{self} has no processes, or one of them twice")
        if before is not None and self.generation != before.generation + 1:
            raise RankError(f"{self} does not follow {before}")

    def rank_of(self, member: int) -> int | None:
        """Return the rank of a process, or None if it takes no part."""
        return self.members.index(member) if member in self.members else None

    def to_text(self) -> str:
        return json.dumps(Writer().fields(self))

    @classmethod
    def from_text(cls, text: str) -> Membership:
        result: Membership = Reader(RankError, "membership").read(
            cls, parse_json(text, RankError, where="membership")
        )
        return result

    def __str__(self) -> str:
        return f"generation {self.generation}: processes {list(self.members)} ({self.reason})"


class ElasticStore:
    """The keys of an elastic training in the launcher's store; reads never block."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._keys = PrefixStore(_PREFIX, store)

    def has(self, keys: Sequence[str]) -> bool:
        return bool(self._keys.check(list(keys)))

    def read(self, key: str) -> str | None:
        return (self._keys.get(key).decode() or None) if self.has([key]) else None

    def write(self, key: str, text: str = "1") -> None:
        self._keys.set(key, text)

    def membership(self) -> Membership | None:
        text = self.read("membership")
        return None if text is None else Membership.from_text(text)

    def begin(self, membership: Membership) -> None:
        """Begin a generation; only the launcher does."""
        membership.verify(self.membership())
        self.write("membership", membership.to_text())


class MembershipChanged(Exception):
    """Another generation has begun, in which this process may or may not take part."""


def is_member() -> bool:
    """Return whether a launcher of elastic trainings has started this process."""
    return ADDRESS in os.environ


class Member:
    """This process's part in an elastic training."""

    def __init__(self) -> None:
        host, _, port = os.environ[ADDRESS].rpartition(":")
        self.id = int(os.environ[MEMBER])
        timeout = datetime.timedelta(seconds=60)
        self._store = ElasticStore(TCPStore(host, int(port), is_master=False, timeout=timeout))
        self._own = ElasticStore(self._store.store.clone())  # the thread's connection
        self.latest: Membership | None = None
        self.seen_at = 0.0  # when the latest membership was read
        self._current: Membership | None = None
        self._before: dict[int, str] | None = None  # sockets from before the current generation
        self._sockets: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardwise-member", daemon=True)
        self._thread.start()

    def write(self, key: str) -> None:
        """Tell the launcher something: "ready/3" that process 3 can take part."""
        self._store.write(key)

    # ------------------------------------------------------------ watching
    def _watch(self) -> None:
        beats, beat_at = 0, 0.0
        with contextlib.suppress(RuntimeError):  # the launcher has ended, and ends this process
            while not self._ended.wait(POLL_S):
                if time.monotonic() - beat_at >= BEAT_S:
                    beats, beat_at = beats + 1, time.monotonic()
                    self._own.write(f"alive/{self.id}", str(beats))
                latest = self._own.membership()
                if latest is not None and latest != self.latest:
                    self.latest, self.seen_at = latest, time.monotonic()
                if self.is_over:
                    self._interrupt()

    @property
    def is_over(self) -> bool:
        """Whether the current generation has been abandoned."""
        current, latest = self._current, self.latest
        if current is None or latest is None:
            return False
        return latest.generation > current.generation and not latest.planned

    @property
    def is_change_planned(self) -> bool:
        """Whether a planned generation follows the current one."""
        current, latest = self._current, self.latest
        if current is None or latest is None:
            return False
        return latest.generation > current.generation and latest.planned

    def planned_membership(self, timeout_s: float) -> Membership:
        """Return the planned generation, which another rank has already seen."""
        _within(timeout_s, lambda: self.is_change_planned or self.is_over)
        if self.latest is None or not self.is_change_planned:
            raise MembershipChanged
        return self.latest

    def _interrupt(self) -> None:
        """End all waits of the current generation; repeated until it is left."""
        before = self._before
        opened = self._sockets
        if before is not None:  # the group is still being made
            opened = {n: s for n, s in _open_sockets().items() if before.get(n) != s}
        for number, name in opened.items():
            _shut_down(number, name)

    # ------------------------------------------------------------ generations
    def next_membership(self, after: int) -> Membership:
        """Wait until all processes of a later generation have arrived in it; return it.

        Processes that take no part do not wait for the others.
        """
        arrived = 0
        while self._thread.is_alive():
            latest = self.latest
            if latest is not None and latest.generation > after:
                if self.id not in latest.members:
                    return latest
                if latest.generation != arrived:
                    arrived = latest.generation
                    self.write(f"arrived/{arrived}/{self.id}")
                keys = [f"arrived/{arrived}/{member}" for member in latest.members]
                if self._store.has(keys):
                    return latest
            time.sleep(0.01)
        raise RankError("the launcher, which decides who takes part, is gone")

    @contextlib.contextmanager
    def generation(self, membership: Membership, backend: str, timeout_s: float) -> Iterator[None]:
        """Join the process group of a generation; leave it at the end of the body.

        An error in the body that follows from the loss of other processes is raised as
        `MembershipChanged`.
        """
        rank, size = membership.members.index(self.id), len(membership.members)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        self._before, self._sockets, self._current = _open_sockets(), {}, membership
        try:
            if size > 1:
                prefix = f"{_PREFIX}/generation/{membership.generation}"
                dist.init_process_group(
                    backend,
                    store=PrefixStore(prefix, self._store.store.clone()),
                    rank=rank,
                    world_size=size,
                    timeout=datetime.timedelta(seconds=timeout_s),
                )
            yield
        except MembershipChanged:
            raise
        except Exception as error:
            if self._is_lost(error):
                lift_exit_limit()
                raise MembershipChanged from error
            raise
        finally:
            self._current, self._before = None, None
            if dist.is_initialized():
                dist.destroy_process_group()

    def connected(self) -> None:
        """Declare that all connections of the generation are open: others are the user's."""
        before = self._before or {}
        self._sockets = {n: s for n, s in _open_sockets().items() if before.get(n) != s}
        self._before = None

    def _is_lost(self, error: Exception) -> bool:
        """Return whether the generation has ended; ask the launcher to end it after a lost rank."""
        is_rank = isinstance(error, (RankError, dist.DistError))
        if is_rank and not self.is_over and self._current is not None:
            key = f"failed/{self._current.generation}"
            self._store.write(key, str(error).partition("\n")[0])
        return _within(NEXT_S if is_rank else 1.0, lambda: self.is_over)

    def end(self) -> None:
        """Stop showing that this process is alive, before it exits."""
        self._ended.set()
        self._thread.join(1.0)
        with contextlib.suppress(RuntimeError):
            self._store.write(f"alive/{self.id}", ENDED)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait for a condition; return whether it holds in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


# ------------------------------------------------------------ sockets
# Linux names an open file of a process by its inode, so that a number that was closed and opened
# again is recognized. Only connected sockets of TCP are shut down: gloo ends the process if its
# listening socket fails.


def _open_sockets() -> dict[int, str]:
    """Return the names of this process's open sockets, by file descriptor."""
    sockets = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                sockets[number] = name
    return sockets


def _shut_down(number: int, name: str) -> None:
    """Shut down a connection, for reads and writes that are in progress too."""
    with (
        contextlib.suppress(OSError),
        socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as connection,
    ):
        is_same = os.readlink(f"/proc/self/fd/{connection.fileno()}") == name
        # A listening socket has no peer, and that of a Unix socket is a path.
        if is_same and isinstance(connection.getpeername(), tuple):
            connection.shutdown(socket.SHUT_RDWR)
