"""Synchronize gradients: sum them over ranks while backward still runs; scale the loss.

Each gradient belongs to a `Reduction`: an all-reduce of one large gradient in place, of a bucket
of small ones, or a reduce-scatter of a flat group (zero 2 and 3). It starts when its last gradient
has been accumulated. Gradients are summed, never averaged: the loss is the full batch's.

A step has a backward for every micro-batch of every part (pipeline stage) that this rank runs.
Autograd adds their gradients up; sums over ranks start in the last backward of a part, and for a
parameter of several parts in the last of theirs. A step without windows is one last backward.

Which parameters have gradients is agreed over all ranks in a program's first step, because a rank
with an empty shard may produce none where others do. There its gradient is zero; and reductions
with such parameters start at the same fixed points on all ranks instead of on arrival.

Programs for other batches may leave a gradient as a partial sum on other axes than those over
which it is stored (`declare`): with a batch of one row every rank computes the same, full gradient.
Where storage requires a sum nevertheless, only the first of equal ranks contributes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.runtime.memory import host_empty
from shardwise.runtime.mesh import Axis, ProcessMesh
from shardwise.runtime.parameters import Entry, FlatGroup, ParameterSpec, buckets
from shardwise.runtime.transport import Pending

__all__ = [
    "LossScaler",
    "Reducer",
    "Reduction",
    "sync_axis",
]


OUTSTANDING_BYTES = 256 << 20  # more than this in flight: wait for the oldest


@dataclass(slots=True)
class Bucket:
    """Memory that the ranks share, and the last sum in it."""

    memory: Tensor
    sum: Pending | None = None

    def fill(self, grads: Sequence[Tensor]) -> Tensor:
        """Put the gradients there, one after the other."""
        if self.sum is not None:  # of a step that failed: other ranks may still write it here
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

    `buckets` are those of all programs: the same gradients have the same memory in each.
    `arrange` makes partial sums on the axis of the group of gradients that arrive otherwise.
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
        self.wire = first.wire if axis.size > 1 else first.gradient
        self.expected: dict[Entry, int] = {}  # arrivals in the last backward; none: no early start
        self.waiting: dict[Entry, int] = {}
        self.launched = False
        self.factor = 1.0
        self.bytes = sum(e.numel * self.wire.itemsize for e in self.entries)
        self._pending: Pending | None = None
        operation = "all_reduce" if group is None else "reduce_scatter"
        joined = self.entries if group is None else group.entries
        place = (axis.name, joined)
        if place not in buckets and first.leaf.device.type == "cpu":
            memory = axis.bucket(sum(e.numel for e in joined), self.wire, operation)
            buckets[place] = None if memory is None else Bucket(memory)
        self.bucket = buckets.get(place)

    @property
    def is_resident(self) -> bool:
        """Whether gradients stay in the bucket until the next step."""
        return self.bucket is not None and self.group is None and self.wire == self.master

    def arrives(self, entry: Entry) -> bool:
        """Count an arrival in the last backward; whether it was the last one expected."""
        if entry in self.waiting:
            self.waiting[entry] -= 1
            if self.waiting[entry] == 0:
                del self.waiting[entry]
                return not self.waiting
        return False

    def launch(self) -> None:
        """Start the sum of what has arrived; what has not counts as zero."""
        self.launched = True
        if self.group is not None:
            used = set(self.entries)
            taken = [self._part(e) if e in used else _zeros(e) for e in self.group.entries]
            self._pending = self.axis.reduce_scatter(self._sent(taken), self.group.sizes)
        elif len(self.entries) == 1 and self.bucket is None:
            self._pending = self.axis.all_reduce(_taken(self.entries[0]).to(self.wire))
        else:
            sent = self._sent([_taken(e) for e in self.entries])
            self._pending = self.axis.all_reduce(sent)
        if self.bucket is not None:
            self.bucket.sum = self._pending

    def _part(self, entry: Entry) -> Tensor:
        """Return the gradient as a partial sum on the axis of the group."""
        arrange = self._arrange.get(entry)
        return _taken(entry) if arrange is None else arrange(_taken(entry))

    def _sent(self, grads: list[Tensor]) -> Tensor:
        """Return the gradients as one flat tensor, in the bucket if there is one."""
        if self.bucket is None:
            return _joined(grads).to(self.wire)
        return self.bucket.fill(grads)

    def finish(self) -> None:
        """Wait for the sum and put it where the optimizer finds it."""
        assert self._pending is not None
        result, self._pending = self._pending.wait().to(self.master), None
        if self.bucket is not None:
            self.bucket.sum = None
        if self.factor != 1.0:
            result.mul_(self.factor)
        if self.group is not None:
            self._keep_pieces(result, self.group)
        elif len(self.entries) == 1 and self.bucket is None:
            _give(self.entries[0], result)
        else:
            for entry, view in zip(self.entries, _split(result, self.entries), strict=True):
                _give(entry, view)

    def _keep_pieces(self, result: Tensor, group: FlatGroup) -> None:
        if self.entries[0].on_host:
            result = host_empty(result.shape, result.dtype, result.device).copy_(result)
        used = set(self.entries)
        for entry, grad in zip(group.entries, group.pieces_of(result), strict=True):
            if entry in used:
                before = entry.piece.grad
                entry.piece.grad = grad if before is None else before.add_(grad)

    def drop(self) -> None:
        """Forget everything, after an error."""
        self._pending, self.launched, self.waiting = None, False, dict(self.expected)


@dataclass(slots=True)
class Plan:
    """What one program's gradients are, once agreed."""

    reductions: list[Reduction] = field(default_factory=list)
    of: dict[Entry, Reduction] = field(default_factory=dict)
    used: set[Entry] = field(default_factory=set)
    known: set[Entry] = field(default_factory=set)
    sync: dict[Entry, tuple[str, ...]] = field(default_factory=dict)  # where not as stored
    complete: bool = False

    def add(self, reduction: Reduction) -> None:
        self.reductions.append(reduction)
        self.of.update(dict.fromkeys(reduction.entries, reduction))


class Reducer:
    """Synchronizes the gradients of all entries, step after step."""

    def __init__(self, mesh: ProcessMesh, entries: Sequence[Entry]) -> None:
        self.mesh = mesh
        self.entries: list[Entry] = []
        self._typed: list[Entry] = []
        self.plans: dict[Hashable, Plan] = {}
        self.plan = Plan()
        self._arrived: dict[Entry, int] = {}  # in the order of the first arrival; how many final
        self._ahead: dict[Entry, set[Hashable]] = {}  # parts whose last backward is to come
        self._part: Hashable = None
        self._last = True
        self._factor = 1.0
        self._flying: list[Reduction] = []
        self._stash: dict[Entry, Tensor] = {}
        self._memory: Buckets = {}
        self._resident: set[Entry] = set()  # whose gradients the next step writes over
        self.active = False
        for entry in entries:
            if entry.spec.requires_grad:
                self.add(entry)

    def add(self, entry: Entry) -> None:
        """Start to synchronize this entry's gradients."""
        self.entries.append(entry)
        if entry.gradient != entry.master:
            self._typed.append(entry)
        entry.leaf.register_post_accumulate_grad_hook(self._hook(entry))  # type: ignore[no-untyped-call]

    def _hook(self, entry: Entry) -> Callable[[Tensor], None]:
        # A hook that held its leaf would be a cycle that nothing frees.
        reducer, held = weakref.ref(self), weakref.ref(entry)

        def arrived(_: Tensor) -> None:
            own, result = reducer(), held()
            if own is not None and result is not None and own.active:
                own._on_arrival(result)

        return arrived

    def declare(self, key: Hashable, specs: Iterable[ParameterSpec]) -> None:
        """Declare the axes on which gradients of the program `key` are partial sums."""
        sync = {spec.name: spec.sync for spec in specs}
        self.plans.setdefault(key, Plan()).sync = {
            entry: sync[entry.spec.name]
            for entry in self.entries
            if sync.get(entry.spec.name, entry.spec.sync) != entry.spec.sync
        }

    def forget(self, key: Hashable) -> None:
        """Forget what was agreed for a program that no longer exists."""
        self.plans.pop(key, None)

    def begin(self, key: Hashable, scale: float = 1.0) -> None:
        """Prepare for one step of the program `key` with a loss multiplied by `scale`."""
        self._factor = 1.0 / scale
        self.plan = self.plans.setdefault(key, Plan())
        self._arrived.clear()
        self._ahead = {}
        self._last = True
        for reduction in self.plan.reductions:
            reduction.drop()
        for entry in self.entries:
            grad, entry.leaf.grad = entry.leaf.grad, None
            if grad is not None and entry.zero < 2 and not entry.spec.borrowed:
                self._stash[entry] = grad.clone() if entry in self._resident else grad
        for entry in self._typed:
            entry.take_gradients_in(entry.gradient)
        self.active = True

    def begin_window(self, part: Hashable, last: bool) -> None:
        """Start a forward or backward of a part; `last`: its last backward of this step."""
        if not self._ahead:
            self._ahead = {entry: set(entry.parts) for entry in self.entries}
        self._part, self._last = part, last

    def end_window(self) -> None:
        """Start the sums that a part's entries still need, in its last backward."""
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
        if entry not in self.plan.known:
            return
        reduction = self.plan.of.get(entry)
        if reduction is None:
            raise ProgramError(
                f"{entry.spec.name} has a gradient in this step but had none on any rank in the "
                "program's first step"
            )
        if reduction.launched:
            raise ProgramError(
                f"the gradient of {entry.spec.name} arrived after the backward of its unit "
                f"{entry.spec.unit!r}",
                hint='put parameters that several units use into the root unit ""',
            )
        if final and reduction.arrives(entry):
            self._launch(reduction)

    def _launch(self, reduction: Reduction) -> None:
        reduction.factor = self._factor
        reduction.launch()
        self._flying.append(reduction)
        while len(self._flying) > 1 and sum(r.bytes for r in self._flying) > OUTSTANDING_BYTES:
            self._flying.pop(0).finish()

    def flush(self, entries: Iterable[Entry]) -> None:
        """Start what these entries still have to sum; a fixed point of all ranks' programs."""
        wanted = [e for e in entries if e.spec.requires_grad and self._is_final(e)]
        unknown = [e for e in wanted if e not in self.plan.known]
        if unknown:
            self._agree(unknown)
        for reduction in dict.fromkeys(self.plan.of[e] for e in wanted if e in self.plan.of):
            if not reduction.launched and all(self._is_final(e) for e in reduction.entries):
                self._launch(reduction)

    def finish(self) -> set[Entry]:
        """Complete all sums; return the entries that now have a gradient."""
        self._ahead = {}
        self.flush(self.entries)
        for reduction in self._flying:
            reduction.finish()
        self._flying.clear()
        self.active = False
        for entry in self._typed:
            entry.take_gradients_in(entry.master)
        for entry, before in self._stash.items():
            if entry.leaf.grad is not None:
                before.add_(entry.leaf.grad)
            entry.leaf.grad = before
        self._stash.clear()
        return self.plan.used

    def abort(self) -> None:
        """Discard a step that failed."""
        self.active = False
        for reduction in self.plan.reductions:
            reduction.drop()
        self._flying.clear()
        for entry in self.entries:
            entry.leaf.grad = None
            entry.take_gradients_in(entry.master)
            entry.leaf.grad = self._stash.pop(entry, None)

    def _agree(self, entries: list[Entry]) -> None:
        """Exchange which entries have gradients, and form their reductions."""
        counts = torch.tensor([self._arrived.get(e, 0) for e in entries], dtype=torch.int32)
        here = torch.tensor([e in self._arrived for e in entries], dtype=torch.int32)
        place = {e: i for i, e in enumerate(self._arrived)}
        order = torch.tensor([place.get(e, len(place)) for e in entries], dtype=torch.int64)
        device = entries[0].leaf.device
        votes = torch.stack([here, counts, -counts]).to(device)
        some, most, least = self.mesh.world.all_reduce(votes, "max").wait().tolist()
        order = self.mesh.world.broadcast(order.to(device)).wait()
        ordered = [entries[i] for i in torch.argsort(order, stable=True).tolist()]
        used = {e for e, has in zip(entries, some, strict=True) if has}
        arrivals = dict(zip(entries, most, strict=True))
        uneven = {e for e, x, y in zip(entries, most, least, strict=True) if x != -y}
        self.plan.known.update(entries)
        self.plan.used |= used
        for reduction in self._form([e for e in ordered if e in used]):
            if not any(e in uneven for e in reduction.entries):
                reduction.expected = {e: n for e in reduction.entries if (n := arrivals[e])}
            self.plan.add(reduction)
            if reduction.is_resident:
                self._resident.update(reduction.entries)

    def _form(self, entries: list[Entry]) -> list[Reduction]:
        """Return the reductions of used entries, in the order in which gradients become ready."""
        grouped: dict[FlatGroup, list[Entry]] = {}
        others: list[Entry] = []
        for entry in entries:
            if entry.group is not None and entry.zero >= 2:
                grouped.setdefault(entry.group, []).append(entry)
            else:
                others.append(entry)
        result = [(b, self._axis(b[0]), None) for b in self._buckets(others)]
        full = [(members, group.axis, group) for group, members in grouped.items()]
        arrange = {e: self._arranged(e) for e in entries if e in self.plan.sync}
        return [Reduction(*each, self._memory, arrange) for each in (*result, *full)]

    def _axis(self, entry: Entry) -> Axis:
        """Return the axis on which this program leaves the gradient as a partial sum."""
        return sync_axis(entry, self.mesh, self.plan.sync.get(entry))

    def _arranged(self, entry: Entry) -> Arrange:
        """Return how a gradient of this program becomes a partial sum on its storage's axis."""
        arrives, stored = set(self.plan.sync[entry]), set(entry.spec.sync)
        more = sync_axis(entry, self.mesh, arrives - stored)
        equal = [name for name in self.mesh.axes if name in stored - arrives]
        first = all(self.mesh.coordinates[name] == 0 for name in equal)

        def arrange(grad: Tensor) -> Tensor:
            if more.size > 1:
                grad = more.about("gradients").all_reduce(grad).wait()
            return grad if first else torch.zeros_like(grad)

        return arrange

    def _buckets(self, entries: list[Entry]) -> list[list[Entry]]:
        def key(entry: Entry) -> Hashable:
            axis = self._axis(entry)
            alone = entry if axis.size == 1 else None
            return (axis.name, entry.gradient, entry.wire, entry.master, alone)

        return buckets(entries, key, _wire_bytes)


def _wire_bytes(entry: Entry) -> int:
    return entry.numel * entry.wire.itemsize


def _zeros(entry: Entry) -> Tensor:
    return torch.zeros(entry.local_shape, dtype=entry.gradient, device=entry.leaf.device)


def _taken(entry: Entry) -> Tensor:
    """Return the gradient that autograd has left; zeros if there is none."""
    grad, entry.leaf.grad = entry.leaf.grad, None
    return _zeros(entry) if grad is None else grad


def _joined(grads: list[Tensor]) -> Tensor:
    """Return the gradients as one flat tensor, without a copy where possible."""
    flat = [grad.reshape(-1) for grad in grads]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _split(flat: Tensor, entries: Sequence[Entry]) -> list[Tensor]:
    parts = torch.split(flat, [entry.numel for entry in entries])
    return [part.view(e.local_shape) for part, e in zip(parts, entries, strict=True)]


def _give(entry: Entry, grad: Tensor) -> None:
    entry.take_gradients_in(entry.master)
    entry.leaf.grad = grad


class LossScaler:
    """The factor on the loss that keeps small gradients in half precision from underflowing.

    Gradients are divided by it when they are complete; a step with an infinite or NaN gradient on
    any rank is skipped by the optimizer on all of them. A dynamic factor falls after overflows and
    grows in their absence.

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
        """Note the outcome of an optimizer step."""
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
        """Return what `load_state_dict` continues from."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def overflow_on_any_rank(tensors: Iterable[Tensor], mesh: ProcessMesh, near: torch.device) -> bool:
    """Return whether an element is infinite or NaN on any rank of the plan; all ranks call it."""
    norms = [torch.linalg.vector_norm(t, math.inf) for t in tensors if t.numel()]
    result = torch.zeros(1, dtype=torch.int32, device=near)
    if norms:
        finite = torch.stack([torch.isfinite(norm).to(near) for norm in norms]).all()
        result += ~finite
    return bool(mesh.everyone.all_reduce(result, "max").wait().item())
