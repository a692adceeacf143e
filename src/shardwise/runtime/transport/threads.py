"""Ranks as threads of one process that exchange tensors in memory; the verifier runs on them.

Reductions add in rank order, or as `collective` specifies, so results do not depend on timing.
Every wait has a timeout, and the first rank that fails releases the others.
"""

import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.errors import RankError
from shardwise.runtime.transport import Flat, Group, Pending

Result = TypeVar("Result")
# Computes every rank's result of an operation from all ranks' tensors, or returns None to let this
# transport do it: (operation, ranks, tensors, sizes).
Collective = Callable[[str, tuple[int, ...], list[Tensor], tuple[int, ...]], list[Tensor] | None]
_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class _Released(Exception):
    """Raised in a rank's thread because another rank failed."""


@dataclass(slots=True)
class _Exchange:
    """One collective of one group: the kinds and tensors of the ranks that have arrived."""

    kinds: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    readers: int = 0


class _Exchanges:
    """The shared state through which the threads of one run exchange tensors."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.changed = threading.Condition()
        self.exchanges: dict[tuple[tuple[int, ...], int], _Exchange] = {}
        self.failed: dict[int, BaseException] = {}
        self.messages: dict[tuple[int, int, int], Tensor] = {}  # by source, target and number

    def post(self, source: int, target: int, number: int, tensor: Tensor) -> None:
        with self.changed:
            self.messages[source, target, number] = tensor
            self.changed.notify_all()

    def fetch(self, source: int, target: int, number: int) -> Tensor:
        key = (source, target, number)
        with self.changed:
            if not self._wait(lambda: key in self.messages):
                raise RankError(
                    f"rank {source} sent nothing to rank {target} within {self.timeout_s} s",
                    where=f"message {number}",
                )
            return self.messages.pop(key)

    def _wait(self, is_ready: Callable[[], bool]) -> bool:
        """Return whether it is ready before the timeout, unless a rank fails."""
        ready = self.changed.wait_for(lambda: is_ready() or self.failed, self.timeout_s)
        if self.failed:
            raise _Released
        return bool(ready)

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.failed.setdefault(rank, error)
            self.changed.notify_all()

    def put(
        self, group: Group, number: int, kind: str, tensors: list[Tensor]
    ) -> tuple[tuple[int, ...], int]:
        key = (group.ranks, number)
        with self.changed:
            exchange = self.exchanges.setdefault(key, _Exchange())
            exchange.kinds[group.index] = kind
            exchange.tensors[group.index] = tensors
            if len(exchange.tensors) == group.size:
                self.changed.notify_all()
        return key

    def take(self, group: Group, key: tuple[tuple[int, ...], int]) -> list[list[Tensor]]:
        with self.changed:
            exchange = self.exchanges[key]
            if not self._wait(lambda: len(exchange.tensors) == group.size):
                missing = [r for i, r in enumerate(group.ranks) if i not in exchange.tensors]
                raise RankError(
                    f"ranks {missing} did not join {exchange.kinds[group.index]} of ranks "
                    f"{list(group.ranks)} within {self.timeout_s} s",
                    where=f"collective {key[1]} of rank {group.ranks[group.index]}",
                )
            if len(set(exchange.kinds.values())) > 1:
                kinds = {group.ranks[i]: kind for i, kind in sorted(exchange.kinds.items())}
                raise RankError(
                    f"ranks call different operations: {kinds}", where=f"collective {key[1]}"
                )
            exchange.readers += 1
            if exchange.readers == group.size:
                del self.exchanges[key]
            return [exchange.tensors[i] for i in range(group.size)]


class ThreadTransport:
    """One rank's end of an in-memory exchange. Tensors are copied when they are sent."""

    in_order = False
    _sent: dict[int, Iterator[int]]  # numbers of messages to and from each rank
    _received: dict[int, Iterator[int]]

    def __init__(
        self, rank: int, exchanges: _Exchanges, collective: Collective | None = None
    ) -> None:
        self.rank, self.world_size, self._exchanges = rank, exchanges.world_size, exchanges
        self._numbers: dict[tuple[int, ...], int] = {}
        self._sent, self._received = defaultdict(itertools.count), defaultdict(itertools.count)
        self._collective = collective

    def _custom_result(
        self, operation: str, group: Group, inputs: list[Tensor], sizes: Sequence[int] = ()
    ) -> Tensor | None:
        """Return this rank's result of `collective`, if that implements the operation."""
        if self._collective is None:
            return None
        results = self._collective(operation, group.ranks, inputs, tuple(sizes))
        return None if results is None else results[group.index]

    def _exchange(
        self, kind: str, group: Group, tensors: list[Tensor], finish: Callable[..., Tensor]
    ) -> Pending:
        number = self._numbers[group.ranks] = self._numbers.get(group.ranks, -1) + 1
        key = self._exchanges.put(group, number, kind, tensors)
        return Pending(tensors[0]).then(lambda _: finish(self._exchanges.take(group, key)))

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        def finish(sent: list[list[Tensor]]) -> Tensor:
            inputs = [tensors[0] for tensors in sent]
            combined = self._custom_result("all_reduce", group, inputs) if op == "sum" else None
            if combined is None:
                combined = functools.reduce(_REDUCE[op], inputs)
            return flat.copy_(combined)

        kind = f"all_reduce {op} of {flat.numel()} {flat.dtype}"
        return self._exchange(kind, group, [flat.clone()], finish)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        assert flat.numel() == sizes[group.index], (flat.shape, sizes)

        def finish(sent: list[list[Tensor]]) -> Tensor:
            inputs = [tensors[0] for tensors in sent]
            joined = self._custom_result("all_gather", group, inputs, sizes)
            joined = torch.cat(inputs) if joined is None else joined
            return joined if out is None else out.copy_(joined)

        kind = f"all_gather of {list(sizes)} {flat.dtype}"
        return self._exchange(kind, group, [flat.clone()], finish)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        def finish(sent: list[list[Tensor]]) -> Tensor:
            inputs = [torch.cat(tensors) for tensors in sent]
            own = self._custom_result("reduce_scatter", group, inputs, sizes)
            if own is None:
                own = functools.reduce(torch.add, [tensors[group.index] for tensors in sent])
            return own

        kind = f"reduce_scatter of {list(sizes)} {flat.dtype}"
        return self._exchange(kind, group, list(torch.split(flat.clone(), list(sizes))), finish)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        def finish(sent: list[list[Tensor]]) -> Tensor:
            received = [tensors[group.index] for tensors in sent]
            assert [t.numel() for t in received] == list(out_sizes), (received, out_sizes)
            return torch.cat(received)

        kind = f"all_to_all of {flat.dtype}"
        return self._exchange(kind, group, list(torch.split(flat.clone(), list(in_sizes))), finish)

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        kind = f"broadcast from {root} of {flat.numel()} {flat.dtype}"
        return self._exchange(kind, group, [flat.clone()], lambda sent: flat.copy_(sent[root][0]))

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        for flat, target in sends:
            self._exchanges.post(self.rank, target, next(self._sent[target]), flat.clone())
        return [Pending(flat) for flat, _ in sends], [self._receive(*item) for item in receives]

    def _receive(self, flat: Tensor, source: int) -> Pending:
        number = next(self._received[source])
        fetch = functools.partial(self._exchanges.fetch, source, self.rank, number)
        return Pending(flat).then(lambda out: out.copy_(fetch()))


def run_threads(
    num_ranks: int,
    fn: Callable[[int, ThreadTransport], Result],
    timeout_s: float = 60.0,
    collective: Collective | None = None,
) -> list[Result]:
    """Run `fn(rank, transport)` in a thread per rank and return the results in rank order.

    If a rank raises, the others are released at once and the first error is raised again with a
    note that names its rank. `timeout_s` bounds each wait for other ranks, not the entire run.
    `collective` may replace sums and gathers in rank order by another implementation.
    """
    exchanges = _Exchanges(num_ranks, timeout_s)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank, ThreadTransport(rank, exchanges, collective))
        except BaseException as error:
            exchanges.fail(rank, error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    _join(threads, exchanges)
    for rank, error in exchanges.failed.items():
        if not isinstance(error, _Released):
            error.add_note(f"on rank {rank} of {num_ranks}")
            raise error
    return [results[rank] for rank in range(num_ranks)]


def _join(threads: list[threading.Thread], exchanges: _Exchanges) -> None:
    """Wait for all threads; once one has failed, wait at most the timeout."""
    deadline: float | None = None
    while any(thread.is_alive() for thread in threads):
        if exchanges.failed and deadline is None:
            deadline = time.monotonic() + exchanges.timeout_s
        if deadline is not None and time.monotonic() > deadline:
            return
        for thread in threads:
            thread.join(0.05 if len(threads) > 1 and deadline else 0.2)
