"""Ranks as threads whose messages follow the rules of NCCL, to show hangs without a GPU.

- There are no tags: the k-th send from one rank to another in a communicator meets the k-th
  receive.
- A queue runs one operation after the other. An operation is a collective, a single send or
  receive, or a batch of them; it ends when all of its parts have met their other ends. Nothing is
  buffered: a send that no receive meets blocks its queue.
- With `queues="communicator"`, every communicator has its own queue, as in torch. A single send or
  receive uses a communicator of its two ranks for both directions, a batch that of all ranks. With
  `queues="device"`, all communicators of a rank share one queue, as if no two kernels could run at
  the same time on a GPU.

Tensors are read when both ends have met, so that a sender that overwrites its tensor is noticed.
Ranks pause at random before each operation. If all ranks wait, `Deadlock` is raised at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from shardwise.runtime.transport import Flat, Group, Pending
from shardwise.runtime.transport.threads import Collective, ThreadTransport, run_threads

Result = TypeVar("Result")
Communicator = tuple[int, ...]


class Deadlock(AssertionError):
    """All ranks wait for each other; the message has the operation of each."""


@dataclass(eq=False)
class _Part:
    """A send, a receive, or a rank's share of a collective."""

    kind: str
    peers: Communicator
    tensor: Tensor | None = None
    met: bool = False

    def __str__(self) -> str:
        size = "" if self.tensor is None else f" of {self.tensor.numel()}"
        return f"{self.kind}{size} {list(self.peers)}"


@dataclass(eq=False)
class _Operation:
    rank: int
    communicator: Communicator
    parts: list[_Part]
    done: bool = False

    def __str__(self) -> str:
        waiting = [str(part) for part in self.parts if not part.met]
        return f"rank {self.rank} at {', '.join(waiting)}"


@dataclass
class NcclRules:
    """The queues of all ranks of one run."""

    num_ranks: int
    timeout_s: float
    queues: str = "communicator"
    operations: int = 0  # that were started
    communicators: set[Communicator] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.failed: BaseException | None = None
        self._queues: dict[Any, deque[_Operation]] = {}
        self._launched: dict[Any, deque[tuple[_Operation, _Part]]] = {}
        self._waiting: dict[int, _Operation] = {}
        self._running = set(range(self.num_ranks))

    def start(self, rank: int, communicator: Communicator, parts: list[_Part]) -> _Operation:
        """Enqueue an operation."""
        operation = _Operation(rank, communicator, parts)
        with self.changed:
            self.operations += 1
            self.communicators.add(communicator)
            key = (rank, communicator if self.queues == "communicator" else None)
            queue = self._queues.setdefault(key, deque())
            queue.append(operation)
            if len(queue) == 1:
                self._launch(operation)
            self.changed.notify_all()
        return operation

    def wait(self, operation: _Operation) -> None:
        """Block this rank until an operation is done."""
        with self.changed:
            self._waiting[operation.rank] = operation
            self._look_for_deadlock()
            done = self.changed.wait_for(lambda: operation.done or self.failed, self.timeout_s)
            self._waiting.pop(operation.rank, None)
            if self.failed is not None:
                raise Deadlock(str(self.failed)) from self.failed
            if not done:
                raise Deadlock(f"{operation} for {self.timeout_s} s")

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Remove a rank that has ended; release the others if it failed."""
        with self.changed:
            self._running.discard(rank)
            if error is not None and self.failed is None:
                self.failed = error
            self._look_for_deadlock()
            self.changed.notify_all()

    def _look_for_deadlock(self) -> None:
        waiting = [op for rank, op in self._waiting.items() if rank in self._running]
        if waiting and len(waiting) == len(self._running) and not any(op.done for op in waiting):
            heads = [str(queue[0]) for queue in self._queues.values() if queue]
            self.failed = self.failed or Deadlock("; ".join(sorted(heads)))
            self.changed.notify_all()

    def _launch(self, operation: _Operation) -> None:
        """Begin an operation at the head of its queue, and those that follow it at once."""
        for part in operation.parts:
            if part.kind not in ("send", "receive"):
                self._join(operation, part)
                continue
            ends = (operation.rank, *part.peers)
            ends = ends if part.kind == "send" else ends[::-1]
            other = "receive" if part.kind == "send" else "send"
            remote = self._launched.setdefault((operation.communicator, ends, other), deque())
            if not remote:
                key = (operation.communicator, ends, part.kind)
                self._launched.setdefault(key, deque()).append((operation, part))
                continue
            owner, counterpart = remote.popleft()
            self._copy(*((part, counterpart) if part.kind == "send" else (counterpart, part)))
            part.met = counterpart.met = True
            self._finish(owner)
        self._finish(operation)

    def _join(self, operation: _Operation, part: _Part) -> None:
        joined = self._launched.setdefault((operation.communicator, "collective"), deque())
        joined.append((operation, part))
        if len(joined) == len(part.peers):
            self._launched.pop((operation.communicator, "collective"))
            for _, member in joined:
                member.met = True
            for owner, _ in joined:
                self._finish(owner)

    def _copy(self, sent: _Part, received: _Part) -> None:
        assert sent.tensor is not None
        assert received.tensor is not None
        if (
            sent.tensor.nbytes != received.tensor.nbytes
            or sent.tensor.dtype != received.tensor.dtype
        ):
            self.failed = self.failed or AssertionError(f"{sent} meets {received}")
            return
        received.tensor.copy_(sent.tensor)

    def _finish(self, operation: _Operation) -> None:
        if operation.done or not all(part.met for part in operation.parts):
            return
        operation.done = True
        key = (operation.rank, operation.communicator if self.queues == "communicator" else None)
        queue = self._queues[key]
        assert queue.popleft() is operation
        if queue:
            self._launch(queue[0])
        self.changed.notify_all()


class NcclTransport:
    """One rank's end: collectives of threads, and messages, in the order of NCCL's queues."""

    in_order = True

    def __init__(self, inner: ThreadTransport, rules: NcclRules, delay_s: float, seed: int) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner, self._rules = inner, rules
        self._random, self._delay_s = random.Random(f"{seed} {inner.rank}"), delay_s

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        return self._queued(self._inner.all_reduce(flat, op, group), "all_reduce", group)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        return self._queued(self._inner.all_gather(flat, sizes, group, out), "all_gather", group)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        return self._queued(self._inner.reduce_scatter(flat, sizes, group), "reduce_scatter", group)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        pending = self._inner.all_to_all(flat, in_sizes, out_sizes, group)
        return self._queued(pending, "all_to_all", group)

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        return self._queued(self._inner.broadcast(flat, root, group), "broadcast", group)

    def _queued(self, pending: Pending, kind: str, group: Group) -> Pending:
        operation = self._start(group.ranks, [_Part(kind, group.ranks)])

        def finish(result: Tensor) -> Tensor:
            self._rules.wait(operation)
            return pending.wait()

        return Pending(pending._result).then(finish)

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        parts = [_Part("send", (peer,), flat) for flat, peer in sends if flat.numel()]
        parts += [_Part("receive", (peer,), flat) for flat, peer in receives if flat.numel()]
        if not parts:
            return [Pending(flat) for flat, _ in sends], [Pending(flat) for flat, _ in receives]
        operation = self._start(tuple(range(self.world_size)), parts)

        def pending(flat: Tensor) -> Pending:
            return Pending(flat, lambda: self._rules.wait(operation), lambda: operation.done)

        return [pending(flat) for flat, _ in sends], [pending(flat) for flat, _ in receives]

    def single(self, kind: str, flat: Tensor, peer: int) -> Pending:
        """Start one send or receive, as `isend` and `irecv` do."""
        pair = (min(self.rank, peer), max(self.rank, peer))
        operation = self._start((*pair, -1), [_Part(kind, (peer,), flat)])
        return Pending(flat, lambda: self._rules.wait(operation), lambda: operation.done)

    def _start(self, communicator: Communicator, parts: list[_Part]) -> _Operation:
        if self._delay_s:
            time.sleep(self._random.random() ** 4 * self._delay_s)
        return self._rules.start(self.rank, communicator, parts)


def run_under_nccl_rules(
    num_ranks: int,
    fn: Callable[[int, Any], Result],
    timeout_s: float = 60.0,
    collective: Collective | None = None,
    *,
    queues: str = "communicator",
    delay_s: float = 0.0,
    seed: int = 0,
) -> list[Result]:
    """Run `fn(rank, transport)` as `run_threads` does, with messages under NCCL's rules."""
    rules = NcclRules(num_ranks, timeout_s, queues)

    def run(rank: int, inner: ThreadTransport) -> Result:
        error: BaseException | None = None
        try:
            return fn(rank, NcclTransport(inner, rules, delay_s, seed))
        except BaseException as problem:
            error = problem
            raise
        finally:
            rules.leave(rank, error)

    return run_threads(num_ranks, run, timeout_s, collective)
