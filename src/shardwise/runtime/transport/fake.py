"""One rank of a program without the others, for measurements.

`FakeTransport` returns at once, with tensors of the right size and arbitrary values, and allocates
what the transport between processes does: enough to predict memory, even on meta tensors.
`UninitializedTransport` is for programs that really compute: it returns values that are safe to
compute with, and measures how long that took. `disconnect` makes a store skip agreement.
"""

from __future__ import annotations

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
from shardwise.runtime.transport import Group, Pending

__all__ = ["FakeRng", "FakeTransport", "UninitializedTransport", "disconnect"]


class FakeTransport:
    """A rank's end of a transport that moves nothing.

    A message counts until the next one to the same rank, or the next arrival from it.
    """

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

    def send(self, flat: Tensor, target: int, tag: int) -> Pending:
        self._sent[target] = flat
        return Pending(flat)

    def receive(self, flat: Tensor, source: int, tag: int) -> Pending:
        def arrived() -> None:
            self._sent.pop(source, None)

        return Pending(flat, arrived)


class UninitializedTransport(FakeTransport):
    """The same for a program that computes: what arrives has values of a usual size.

    Memory as it comes may hold numbers that take longer, or indices that no table has. `seconds`
    is the time for this on a CPU, which is no part of the program: the time of communication is
    predicted by other means. On a GPU the time of a kernel is not known when it is issued, nor
    does it depend on values: there only integers are given some.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.seconds = 0.0

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        with self._counted():
            pending = super().all_gather(flat, sizes, group, out)
            _repeat(flat, pending.wait())
        return pending

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        if flat.device.type != "cpu":
            return super().reduce_scatter(flat, sizes, group)
        with self._counted():
            return _later(flat[: sizes[group.index]].clone(), flat)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        with self._counted():
            pending = super().all_to_all(flat, in_sizes, out_sizes, group)
            _repeat(flat, pending.wait())
        return pending

    def receive(self, flat: Tensor, source: int, tag: int) -> Pending:
        with self._counted():
            if not flat.is_floating_point():
                flat.zero_()
            elif flat.device.type == "cpu":
                flat.normal_()
        return super().receive(flat, source, tag)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def _repeat(values: Tensor, out: Tensor) -> None:
    """Fill `out` with the values, again and again; they may be a part of it."""
    if out.device.type != "cpu" and out.is_floating_point():
        return
    if values.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        values = values.clone()
    size = values.numel()
    if not size:
        out.zero_()
        return
    times, rest = divmod(out.numel(), size)
    out[: times * size].view(times, size).copy_(values)
    out[times * size :].copy_(values[:rest])


def _later(result: Tensor, *kept: Tensor) -> Pending:
    """Return a pending result; `kept` lives until it is waited for."""

    def wait() -> None:
        _ = kept

    return Pending(result, wait)


class FakeRng(Rng):
    """Draws nothing: its generators are for tensors without data, on any device."""

    def generator(
        self, key: str, device: torch.device | str = "cpu", place: Sequence[tuple[str, int]] = ()
    ) -> torch.Generator:
        return torch.Generator("cpu")


class _AloneReducer(Reducer):
    """Treats this rank's gradients as those of all ranks."""

    def _agree(self, entries: list[Entry]) -> None:
        wanted = set(entries)
        ordered = [entry for entry in self._arrived if entry in wanted]
        self.plan.known.update(wanted)
        self.plan.used.update(ordered)
        for reduction in self._form(ordered):
            reduction.expected = {e: n for e in reduction.entries if (n := self._arrived[e])}
            self.plan.add(reduction)


def disconnect(store: ParameterStore, on_gradient: Callable[[Tensor], None]) -> None:
    """Let a store that has not been used run without other ranks.

    `on_gradient` is called with every parameter whose gradient autograd has just left.
    """

    def left(leaf: Tensor) -> None:  # a hook of the runtime's own, which steps allow
        on_gradient(leaf)

    for entry in store.entries:
        if entry.spec.requires_grad:
            entry.leaf.register_post_accumulate_grad_hook(left)  # type: ignore[no-untyped-call]
    store.reducer = _AloneReducer(store.mesh, store.entries)
    store.units._flush = store.reducer.flush
