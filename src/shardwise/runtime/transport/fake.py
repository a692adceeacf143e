"""Run one rank of a program without the others, for measurements.

`FakeTransport` returns at once, with tensors of the right size and arbitrary values, and allocates
as much as the transport between processes: enough to predict memory, even on meta tensors.
`UninitializedTransport` is for programs that really compute: it fills results with values that are
safe to compute with, and measures how long that takes. `disconnect` makes a store skip agreement.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.runtime.grad_sync import Reducer
from shardwise.runtime.operators import widened
from shardwise.runtime.parameters import Entry
from shardwise.runtime.rng import Rng
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport import Flat, Group, Pending


class FakeTransport:
    """A rank's end of a transport that moves nothing.

    A sent message stays allocated until the next one to the same rank, or the next one from it.
    """

    in_order = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._sent: dict[int, Tensor] = {}

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        return _later(flat)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        if out is None:
            out = flat.new_empty(sum(sizes))
        largest = max(sizes)
        if flat.device.type == "cpu" or min(sizes) == largest:
            return _later(out)
        padded = flat.new_empty(largest)
        return _later(out, flat.new_empty(largest * group.size), padded)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        own, largest = sizes[group.index], max(sizes)
        if flat.device.type != "cpu":
            padded = () if min(sizes) == largest else (flat.new_empty(largest * group.size),)
            return _later(flat.new_empty(largest), flat, *padded).then(lambda out: out[:own])

        def add(arrived: Tensor) -> Tensor:
            return torch.add(flat[:own].to(widened(flat.dtype)), arrived[0]).to(flat.dtype)

        return _later(flat.new_empty(group.size - 1, own)).then(add)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        return _later(flat.new_empty(sum(out_sizes)), flat)

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        return _later(flat)

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        self._sent.update((target, flat) for flat, target in sends)
        arrivals = [
            Pending(flat, functools.partial(self._sent.pop, source, None))
            for flat, source in receives
        ]
        return [Pending(flat) for flat, _ in sends], arrivals


class UninitializedTransport(FakeTransport):
    """A fake transport for programs that compute: received tensors have ordinary values.

    Uninitialized memory may hold denormal numbers, which are slow, or indices out of range.
    `seconds` is the CPU time spent on filling it, to be subtracted from the program's time. On a
    GPU, kernels are asynchronous and their time does not depend on values, so that only integers
    are filled.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.seconds = 0.0

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        with self._filling():
            pending = super().all_gather(flat, sizes, group, out)
            _repeat(flat, pending.wait())
        return pending

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        if flat.device.type != "cpu":
            return super().reduce_scatter(flat, sizes, group)
        with self._filling():
            return _later(flat[: sizes[group.index]].clone(), flat)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        with self._filling():
            pending = super().all_to_all(flat, in_sizes, out_sizes, group)
            _repeat(flat, pending.wait())
        return pending

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        with self._filling():
            for flat, _ in receives:
                if not flat.is_floating_point():
                    flat.zero_()
                elif flat.device.type == "cpu":
                    flat.normal_()
        return super().exchange(sends, receives)

    @contextmanager
    def _filling(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def _repeat(values: Tensor, out: Tensor) -> None:
    """Fill `out` with repetitions of the values, which may be a part of it."""
    if out.device.type != "cpu" and out.is_floating_point():
        return
    if values.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        values = values.clone()
    size = values.numel()
    if not size:
        out.zero_()
        return
    times, remainder = divmod(out.numel(), size)
    out[: times * size].view(times, size).copy_(values)
    out[times * size :].copy_(values[:remainder])


def _later(result: Tensor, *buffers: Tensor) -> Pending:
    """Return a pending result; `buffers` stay allocated until it is waited for."""

    def wait() -> None:
        _ = buffers

    return Pending(result, wait)


class FakeRng(Rng):
    """A source of generators for tensors without data, on any device."""

    def generator(
        self, key: str, device: torch.device | str = "cpu", place: Sequence[tuple[str, int]] = ()
    ) -> torch.Generator:
        return torch.Generator("cpu")


class _SingleRankReducer(Reducer):
    """Treat this rank's gradients as those of all ranks."""

    def _agree(self, entries: list[Entry]) -> None:
        ordered = [entry for entry in self._arrived if entry in set(entries)]
        self.plan.agreed.update(entries)
        self.plan.used.update(ordered)
        for reduction in self._form(ordered):
            reduction.expected = {e: n for e in reduction.entries if (n := self._arrived[e])}
            self.plan.add(reduction)


def disconnect(store: ParameterStore, on_gradient: Callable[[Tensor], None]) -> None:
    """Let a store that has not been used run without other ranks.

    `on_gradient` is called with every parameter when autograd has accumulated its gradient.
    """

    def accumulated(leaf: Tensor) -> None:  # defined in the runtime, whose hooks steps accept
        on_gradient(leaf)

    for entry in store.entries:
        if entry.spec.requires_grad:
            entry.leaf.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
    store.reducer = _SingleRankReducer(store.mesh, store.entries)
    store.units._flush = store.reducer.flush
