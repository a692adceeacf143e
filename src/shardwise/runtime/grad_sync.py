"""Synchronize gradients: sum them over ranks while backward still runs; scale the loss.

Each gradient belongs to a `Reduction`: an all-reduce of one large gradient in place, an all-reduce
of a bucket of small ones, a reduce-scatter of a flat group (zero 2 and 3, and owners), or an
exchange of `sync_forms`. It starts when its last gradient has been accumulated. Gradients are
summed, never averaged: the loss is that of the full batch.

A step has a backward for every micro-batch of every part (pipeline stage) that this rank runs.
Autograd accumulates their gradients; sums over ranks start in the last backward of a part, and for
a parameter of several parts in the last backward of any of them. A step without windows is a
single backward.

In a program's first step, all ranks agree on which parameters have gradients, because a rank with
an empty shard may produce none where others do. Its gradient is then zero, and reductions with such
parameters start at the same fixed points on all ranks instead of on arrival.

Programs for other batches may produce a gradient that is a partial sum on other axes than those
over which it is stored (`declare`): with a batch of one row every rank computes the same, full
gradient. If storage still requires a sum, only the first of the equal ranks contributes.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.runtime.compression import joined
from shardwise.runtime.memory import host_empty
from shardwise.runtime.mesh import Axis, ProcessMesh
from shardwise.runtime.parameters import Entry, FlatGroup, ParameterSpec, buckets, limits
from shardwise.runtime.sync_forms import Exchange, RowExchange, all_reduce_by_node, gather_factors
from shardwise.runtime.sync_state import SyncState
from shardwise.runtime.transport import Pending

OUTSTANDING_BYTES = 256 << 20  # in flight, before the oldest reduction is waited for


@dataclass(slots=True)
class Bucket:
    """Memory that the ranks share, and the sum that is in flight in it."""

    memory: Tensor
    sum: Pending | None = None

    def fill(self, grads: Sequence[Tensor]) -> Tensor:
        """Copy the gradients into the bucket, one after the other."""
        if self.sum is not None:  # of a step that failed: other ranks may still be writing to it
            self.sum.wait()
        places = torch.split(self.memory, [grad.numel() for grad in grads])
        for place, grad in zip(places, grads, strict=True):
            place.copy_(grad.reshape(-1))
        return self.memory


Buckets = dict[tuple[str, tuple[Entry, ...]], Bucket | None]


def sync_axis(entry: Entry, mesh: ProcessMesh, sync: Iterable[str] | None = None) -> Axis:
    """Return the axis over which the entry's gradient is a partial sum, by default as stored."""
    names = entry.spec.sync if sync is None else sync
    return mesh.axis(*(name for name in mesh.axes if name in names))


Arrange = Callable[[Tensor], Tensor]


class Reduction:
    """Gradients that are summed together, and divided by the scale of the loss.

    `buckets` are shared by all programs: the same gradients use the same memory in each.
    `arrange` converts gradients that are partial sums on other axes than the group's.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        axis: Axis,
        group: FlatGroup | None,
        buckets: Buckets,
        arrange: Mapping[Entry, Arrange] | None = None,
    ) -> None:
        self.entries, self.axis, self.group = tuple(entries), axis.about("gradients"), group
        self._arrange = arrange or {}
        first = self.entries[0]
        self.master = first.master
        self.dtype = first.reduce_dtype if axis.size > 1 else first.gradient_dtype
        self.expected: dict[Entry, int] = {}  # arrivals in the last backward, if it starts early
        self.waiting: dict[Entry, int] = {}
        self.launched = False
        self.factor, self.replicas = 1.0, 1
        dense_entries = () if first.spec.sparse else self.entries
        self.bytes = sum(e.numel * self.dtype.itemsize for e in dense_entries)
        self._pending: Pending | None = None
        self._exchange: Exchange | None = None
        operation = "all_reduce" if group is None else "reduce_scatter"
        members = self.entries if group is None else group.entries
        key = (axis.name, members)
        spec = first.spec
        self.is_exchange = spec.sparse or spec.factors or (spec.node_ranks > 1 and group is None)
        self._rows: RowExchange | None = None
        if spec.sparse and group is None:
            starts = itertools.accumulate((e.local_shape[0] for e in self.entries), initial=0)
            self._rows = RowExchange(self.axis, list(starts), first.local_shape[1:])
        if key not in buckets and first.leaf.device.type == "cpu" and not self.is_exchange:
            memory = axis.bucket(sum(e.numel for e in members), self.dtype, operation)
            buckets[key] = None if memory is None else Bucket(memory)
        self.bucket = buckets.get(key)

    @property
    def is_resident(self) -> bool:
        """Whether gradients stay in the bucket until the next step."""
        return self.bucket is not None and self.group is None and self.dtype == self.master

    def count_arrival(self, entry: Entry) -> bool:
        """Count an arrival in the last backward; return whether it was the last expected one."""
        if entry in self.waiting:
            self.waiting[entry] -= 1
            if self.waiting[entry] == 0:
                del self.waiting[entry]
                return not self.waiting
        return False

    def launch(self) -> None:
        """Start the sum; gradients that have not arrived count as zero."""
        self.launched = True
        if self.is_exchange and self.axis.size > 1:
            self._exchange = self._start()
            self.advance()
        elif self.group is not None:
            used = set(self.entries)
            grads = [self._partial_sum(e) if e in used else _zeros(e) for e in self.group.entries]
            arranged = [self.group.arranged(grad) for grad in grads]
            self._pending = self.axis.reduce_scatter(self._join(arranged), self.group.sizes)
        elif len(self.entries) == 1 and self.bucket is None:
            self._pending = self.axis.all_reduce(_take_gradient(self.entries[0]).to(self.dtype))
        else:
            joined = self._join([_take_gradient(e) for e in self.entries])
            self._pending = self.axis.all_reduce(joined)
        if self.bucket is not None:
            self.bucket.sum = self._pending

    def _start(self) -> Exchange:
        """Return the exchange of a form that takes several collectives."""
        entry, axis, dtype = self.entries[0], self.axis, self.dtype
        if entry.spec.factors:
            return gather_factors(entry.leaf, axis, dtype)
        if not entry.spec.sparse:
            joined = self._join([_take_gradient(e) for e in self.entries])
            return all_reduce_by_node(joined, axis, entry.spec.node_ranks)
        grads = [_take_rows(e) for e in self.entries]
        if self._rows is not None:
            return self._rows.gather(grads, dtype)
        assert self.group is not None
        return RowExchange(axis, self.group.row_starts, grads[0].shape[1:]).send(grads[0], dtype)

    @property
    def has_stages(self) -> bool:
        """Whether there is more to start when the first collective has ended."""
        return self._exchange is not None and self._rows is None

    def advance(self) -> None:
        """Start the next collective of an exchange; all ranks call it at the same points."""
        if self._exchange is None:
            return
        try:
            received = None if self._pending is None else self._pending.wait()
            self._pending = self._exchange.send(received)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._pending, self._exchange = stop.value, None

    def _partial_sum(self, entry: Entry) -> Tensor:
        """Return the gradient as a partial sum on the axis of the group."""
        arrange = self._arrange.get(entry)
        return _take_gradient(entry) if arrange is None else arrange(_take_gradient(entry))

    def _join(self, grads: list[Tensor]) -> Tensor:
        """Return the gradients as one flat tensor, in the bucket if there is one."""
        if self.bucket is not None:
            return self.bucket.fill(grads)
        flat = [grad.reshape(-1) for grad in grads]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.dtype)

    def finish(self) -> None:
        """Wait for the sum and make it the gradient of the leaves or pieces."""
        while self._exchange is not None:
            self.advance()
        assert self._pending is not None
        result, self._pending = self._pending.wait().to(self.master), None
        if self.bucket is not None:
            self.bucket.sum = None
        if self.factor != 1.0:
            result.mul_(self.factor)
        if self.group is not None:
            self._add_to_pieces(result, self.group)
            return
        if self._rows is not None:
            grads: Sequence[Tensor] = self._rows.split(result)
        else:
            grads = torch.split(result.view(-1), [entry.numel for entry in self.entries])
        for entry, grad in zip(self.entries, grads, strict=True):
            entry.take_gradients_in(entry.master)
            entry.leaf.grad = grad if grad.is_sparse else grad.view(entry.local_shape)

    def _add_to_pieces(self, result: Tensor, group: FlatGroup) -> None:
        if self.entries[0].on_host:
            result = host_empty(result.shape, result.dtype, result.device).copy_(result)
        used = set(self.entries)
        if result.is_sparse:
            group.changed.append(result.indices()[0])
        pieces = [result] if result.is_sparse else group.pieces_of(result)
        for entry, grad in zip(group.entries, pieces, strict=True):
            if entry in used:
                earlier = entry.piece.grad
                grad = grad if grad.is_sparse else grad.view(entry.piece.shape)
                entry.piece.grad = grad if earlier is None else summed(earlier, grad)

    def reset(self, failed: bool = False) -> None:
        """Prepare for the next step, or forget one that failed."""
        if failed and self._rows is not None:
            self._rows.forget()
        self._pending, self.launched, self.waiting = None, False, dict(self.expected)
        self._exchange = None
        for entry in self.entries:
            entry.leaf.__dict__.pop("factors", None)


class InexactReduction(Reduction):
    """Gradients that are summed by compressed messages, or arrive some steps late.

    With a `group`, they arrive at their owners.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        axis: Axis,
        state: SyncState,
        group: FlatGroup | None = None,
        arrange: Mapping[Entry, Arrange] | None = None,
    ) -> None:
        members = tuple(entries) if group is None else group.entries
        super().__init__(entries, axis, group, {(axis.name, members): None}, arrange)
        self._state = state

    def launch(self) -> None:
        if self.group is not None:
            super().launch()
            return
        self.launched = True
        grads = [_take_gradient(e).to(self.master).reshape(-1) for e in self.entries]
        if self.factor != 1.0:  # residuals must not depend on the scale of the loss
            grads = [grad.mul_(self.factor) for grad in grads]
        self._pending = self._state.start(
            self.entries, grads, self.axis, self.dtype, self._state.step
        )

    def finish(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        if self.group is not None:
            factor, master = self.factor, self.master  # those of the step that sent it
            pending = pending.then(lambda flat: flat.to(master, copy=True).mul_(factor))
            due = [grad for _, grad in self._state.arrive(self.group.entries, pending)]
            if due:
                self._add_to_pieces(joined(due), self.group)
            return
        for entry, grad in self._state.arrive(self.entries, pending):
            entry.take_gradients_in(entry.master)
            entry.leaf.grad = grad.to(entry.master).view(entry.local_shape)


@dataclass(slots=True)
class Plan:
    """One program's reductions, once ranks have agreed on which entries have gradients."""

    reductions: list[Reduction] = field(default_factory=list)
    by_entry: dict[Entry, Reduction] = field(default_factory=dict)
    used: set[Entry] = field(default_factory=set)  # with a gradient on some rank
    agreed: set[Entry] = field(default_factory=set)
    sync: dict[Entry, tuple[str, ...]] = field(default_factory=dict)  # axes other than as stored

    def add(self, reduction: Reduction) -> None:
        """Add a reduction."""
        self.reductions.append(reduction)
        self.by_entry.update(dict.fromkeys(reduction.entries, reduction))


class Reducer:
    """Synchronize the gradients of all entries, step after step."""

    def __init__(self, mesh: ProcessMesh, entries: Sequence[Entry]) -> None:
        self.mesh = mesh
        self.entries: list[Entry] = []
        self._typed: list[Entry] = []
        self.plans: dict[Hashable, Plan] = {}
        self.plan = Plan()
        self._arrived: dict[Entry, int] = {}  # final arrivals, in the order of the first arrival
        self._ahead: dict[Entry, set[Hashable]] = {}  # parts whose last backward has yet to run
        self._part: Hashable = None
        self._last = True
        self._factor = 1.0
        self._in_flight: list[Reduction] = []
        self._stash: dict[Entry, Tensor] = {}  # gradients of earlier steps
        self._memory: Buckets = {}
        self._resident: set[Entry] = set()  # their gradients are overwritten by the next step
        self.active = False
        self.state = SyncState()
        for entry in entries:
            if entry.spec.requires_grad:
                self.add(entry)

    def add(self, entry: Entry) -> None:
        """Start to synchronize this entry's gradients."""
        self.entries.append(entry)
        if entry.gradient_dtype != entry.master:
            self._typed.append(entry)
        entry.leaf.register_post_accumulate_grad_hook(self._hook(entry))  # type: ignore[no-untyped-call]

    def _hook(self, entry: Entry) -> Callable[[Tensor], None]:
        # Weak references: autograd's hooks are invisible to the cycle collector, so that a hook
        # that owned its leaf would never be freed.
        reducer_ref, entry_ref = weakref.ref(self), weakref.ref(entry)

        def on_accumulated(_: Tensor) -> None:
            reducer, accumulated = reducer_ref(), entry_ref()
            if reducer is not None and accumulated is not None and reducer.active:
                reducer._on_arrival(accumulated)

        return on_accumulated

    def declare(self, key: Hashable, specs: Iterable[ParameterSpec]) -> None:
        """Declare the axes on which gradients of the program `key` are partial sums."""
        sync = {spec.name: spec.sync for spec in specs}
        self.plans.setdefault(key, Plan()).sync = {
            entry: sync[entry.spec.name]
            for entry in self.entries
            if sync.get(entry.spec.name, entry.spec.sync) != entry.spec.sync
        }

    def forget(self, key: Hashable) -> None:
        """Forget the plan of a program that no longer exists."""
        self.plans.pop(key, None)

    def begin(self, key: Hashable, scale: float = 1.0) -> None:
        """Prepare for one step of the program `key` with a loss multiplied by `scale`."""
        self._factor = 1.0 / scale
        self.plan = self.plans.setdefault(key, Plan())
        self._arrived.clear()
        self._ahead = {}
        self._last = True
        for reduction in self.plan.reductions:
            reduction.reset()
        for entry in self.entries:
            grad, entry.leaf.grad = entry.leaf.grad, None
            if grad is not None and entry.zero < 2 and not entry.spec.borrowed:
                self._stash[entry] = grad.clone() if entry in self._resident else grad
        for entry in self._typed:
            entry.take_gradients_in(entry.gradient_dtype)
        self.active = True

    def begin_window(self, part: Hashable, last: bool) -> None:
        """Start a forward or backward of a part; `last` marks its last backward of this step."""
        if not self._ahead:
            self._ahead = {entry: set(entry.parts) for entry in self.entries}
        self._part, self._last = part, last

    def end_window(self) -> None:
        """Start the remaining sums of a part's entries, after its last backward."""
        if self._last:
            own = [entry for entry in self.entries if self._part in entry.parts]
            self.flush(own)
            for entry in own:
                self._ahead[entry].discard(self._part)
        self._last = False

    def _is_final(self, entry: Entry) -> bool:
        """Return whether no later backward adds to the entry's gradient."""
        ahead = self._ahead.get(entry)
        return not ahead or (self._last and ahead == {self._part})

    def _on_arrival(self, entry: Entry) -> None:
        final = self._is_final(entry)
        self._arrived[entry] = self._arrived.get(entry, 0) + final
        if entry not in self.plan.agreed:
            return
        reduction = self.plan.by_entry.get(entry)
        if reduction is None:
            raise ProgramError(
                f"{entry.spec.name} has a gradient in this step, but had none on any rank in the "
                "program's first step"
            )
        if reduction.launched:
            raise ProgramError(
                f"the gradient of {entry.spec.name} arrived after the backward of its unit "
                f"{entry.spec.unit!r}",
                hint='put parameters that several units use into the root unit ""',
            )
        if final and reduction.count_arrival(entry):
            self._launch(reduction)

    def _launch(self, reduction: Reduction) -> None:
        reduction.factor = self._factor * reduction.replicas
        for earlier in self._in_flight:
            if earlier.has_stages:
                earlier.advance()
        reduction.launch()
        self._in_flight.append(reduction)
        while len(self._in_flight) > 1:
            if sum(r.bytes for r in self._in_flight) <= OUTSTANDING_BYTES:
                break
            self._in_flight.pop(0).finish()

    def flush(self, entries: Iterable[Entry]) -> None:
        """Start the remaining sums of these entries; all ranks call it at the same points."""
        final = [e for e in entries if e.spec.requires_grad and self._is_final(e)]
        pending = [e for e in final if e not in self.plan.agreed]
        if pending:
            self._agree(pending)
        by_entry = self.plan.by_entry
        for reduction in dict.fromkeys(by_entry[e] for e in final if e in by_entry):
            if not reduction.launched and all(self._is_final(e) for e in reduction.entries):
                self._launch(reduction)

    def finish(self) -> set[Entry]:
        """Complete all sums; return the entries that now have a gradient."""
        self._ahead = {}
        self.flush(self.entries)
        for reduction in self._in_flight:
            reduction.finish()
        self._in_flight.clear()
        self.active = False
        for entry in self._typed:
            entry.take_gradients_in(entry.master)
        for entry, earlier in self._stash.items():
            if entry.leaf.grad is not None:
                earlier = summed(earlier, entry.leaf.grad)
            entry.leaf.grad = earlier
        self._stash.clear()
        self.state.step += 1
        return self.plan.used

    def abort(self) -> None:
        """Discard a step that failed."""
        self.active = False
        for reduction in self.plan.reductions:
            reduction.reset(failed=True)
        self._in_flight.clear()
        for entry in self.entries:
            entry.leaf.grad = None
            entry.take_gradients_in(entry.master)
            entry.leaf.grad = self._stash.pop(entry, None)

    def _agree(self, entries: list[Entry]) -> None:
        """Exchange which entries have gradients, and form their reductions."""
        counts = torch.tensor([self._arrived.get(e, 0) for e in entries], dtype=torch.int32)
        arrived = torch.tensor([e in self._arrived for e in entries], dtype=torch.int32)
        position = {e: i for i, e in enumerate(self._arrived)}
        order = torch.tensor([position.get(e, len(position)) for e in entries], dtype=torch.int64)
        device = entries[0].leaf.device
        votes = torch.stack([arrived, counts, -counts]).to(device)
        anywhere, highest, lowest = self.mesh.world.all_reduce(votes, "max").wait().tolist()
        order = self.mesh.world.broadcast(order.to(device)).wait()
        ordered = [entries[i] for i in torch.argsort(order, stable=True).tolist()]
        used = {e for e, has in zip(entries, anywhere, strict=True) if has}
        arrivals = dict(zip(entries, highest, strict=True))
        uneven = {e for e, high, low in zip(entries, highest, lowest, strict=True) if high != -low}
        self.plan.agreed.update(entries)
        self.plan.used |= used
        for reduction in self._form([e for e in ordered if e in used]):
            if not any(e in uneven for e in reduction.entries):
                reduction.expected = {e: n for e in reduction.entries if (n := arrivals[e])}
            self.plan.add(reduction)
            if reduction.is_resident:
                self._resident.update(reduction.entries)

    def _form(self, entries: list[Entry]) -> list[Reduction]:
        """Return the reductions of used entries, in the order in which gradients become ready."""

        def key(entry: Entry) -> Hashable:
            axis = self._axis(entry)
            dtypes = (entry.gradient_dtype, entry.reduce_dtype, entry.master)
            single = entry if axis.size == 1 else None
            width = entry.local_shape[1:] if entry.spec.sparse else None
            return (axis.name, *dtypes, *limits(entry), entry.spec.inexact, single, width)

        def size(entry: Entry) -> int:
            return 0 if entry.spec.sparse else entry.numel * entry.reduce_dtype.itemsize

        scattered: dict[FlatGroup, list[Entry]] = {}
        reduced: list[Entry] = []
        for entry in entries:
            if entry.group is not None and entry.zero >= 2:
                scattered.setdefault(entry.group, []).append(entry)
            else:
                reduced.append(entry)
        joined = buckets(reduced, key, size)
        arrange = {e: self._arranged(e) for e in entries if e in self.plan.sync}
        return [
            *(self._reduction(bucket, arrange) for bucket in joined),
            *(
                InexactReduction(members, group.axis, self.state, group, arrange)
                if members[0].spec.inexact
                else Reduction(members, group.axis, group, self._memory, arrange)
                for group, members in scattered.items()
            ),
        ]

    def _reduction(self, bucket: list[Entry], arrange: Mapping[Entry, Arrange]) -> Reduction:
        """Return the reduction of a bucket of gradients that all ranks need in full."""
        first, axis = bucket[0], self._axis(bucket[0])
        inexact = first.spec.inexact
        if inexact is not None and not inexact.is_local and axis.size > 1:
            return InexactReduction(bucket, axis, self.state)
        reduction = Reduction(bucket, axis, None, self._memory, arrange)
        if first.spec.is_local:  # its own rows stand for those of all ranks
            reduction.replicas = sync_axis(first, self.mesh, self.plan.sync.get(first)).size
        return reduction

    def _axis(self, entry: Entry) -> Axis:
        """Return the axis over which this program's gradient is summed: where it is a partial sum,
        but none for a replica of its own.
        """
        if entry.spec.is_local:
            return self.mesh.space_axis()
        return sync_axis(entry, self.mesh, self.plan.sync.get(entry))

    def _arranged(self, entry: Entry) -> Arrange:
        """Return the conversion of this program's gradient to a partial sum on the stored axes."""
        computed, stored = set(self.plan.sync[entry]), set(entry.spec.sync)
        extra = sync_axis(entry, self.mesh, computed - stored)
        contributes = all(
            self.mesh.coordinates[name] == 0 for name in self.mesh.axes if name in stored - computed
        )

        def arrange(grad: Tensor) -> Tensor:
            if extra.size > 1:
                grad = extra.about("gradients").all_reduce(grad).wait()
            return grad if contributes else torch.zeros_like(grad)

        return arrange


def summed(earlier: Tensor, grad: Tensor) -> Tensor:
    """Return the sum of two gradients, in place unless rows are added; each row occurs once."""
    if not earlier.is_sparse and not grad.is_sparse:
        return earlier.add_(grad)
    result = earlier + grad if grad.is_sparse or not earlier.is_sparse else grad + earlier
    return result.coalesce() if result.is_sparse else result


def dense(grad: Tensor) -> Tensor:
    """Return a gradient as a dense tensor."""
    return grad.to_dense() if grad.is_sparse else grad


def stored_values(grad: Tensor) -> Tensor:
    """Return the stored elements of a gradient; changing them changes it."""
    return grad.values() if grad.is_sparse else grad


def _zeros(entry: Entry) -> Tensor:
    return torch.zeros(entry.local_shape, dtype=entry.gradient_dtype, device=entry.leaf.device)


def _take_rows(entry: Entry) -> Tensor:
    """Remove and return the gradient as a sparse tensor, without rows if there is none."""
    grad, entry.leaf.grad = entry.leaf.grad, None
    if grad is None:
        index = entry.leaf.new_empty(1, 0, dtype=torch.int64)
        rows = entry.leaf.new_empty(0, *entry.local_shape[1:], dtype=entry.gradient_dtype)
        return torch.sparse_coo_tensor(index, rows, entry.local_shape, check_invariants=False)
    return grad if grad.is_sparse else grad.to_sparse(1)


def _take_gradient(entry: Entry) -> Tensor:
    """Remove and return the gradient that autograd has accumulated; zeros if there is none."""
    grad, entry.leaf.grad = entry.leaf.grad, None
    return _zeros(entry) if grad is None else grad


class LossScaler:
    """The factor on the loss that keeps small gradients in half precision from underflowing.

    Gradients are divided by it when they are complete; the optimizer skips a step with an infinite
    or NaN gradient on any rank, on all ranks. A dynamic factor falls after overflows and grows in
    their absence.

    >>> scaler = LossScaler(init_scale=8.0, growth_interval=2)
    >>> [scaler.update(overflow) or scaler.scale for overflow in (True, False, False)]
    [4.0, 4.0, 8.0]
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
    ) -> None:
        self.scale = float(init_scale)
        self.growth_factor, self.backoff = growth_factor, backoff
        self.growth_interval, self.dynamic = growth_interval, dynamic
        self.good_steps = 0

    @classmethod
    def static(cls, scale: float) -> LossScaler:
        """Return a scaler whose factor never changes."""
        return cls(scale, dynamic=False)

    def update(self, overflow: bool) -> None:
        """Adapt the factor to the outcome of an optimizer step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def overflow_on_any_rank(
    tensors: Iterable[Tensor], mesh: ProcessMesh, device: torch.device
) -> bool:
    """Return whether an element is infinite or NaN on any rank of the plan; all ranks call it."""
    norms = [torch.linalg.vector_norm(t, math.inf) for t in tensors if t.numel()]
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    if norms:
        overflow += ~torch.stack([torch.isfinite(norm).to(device) for norm in norms]).all()
    return bool(mesh.everyone.all_reduce(overflow, "max").wait().item())
