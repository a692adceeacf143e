"""The memory of one stage: what a micro-batch saves, and the peak of each kind of pass beside it.

The first backward of a stage creates gradients of parameters, from its last position to its first.
The last one reduces them over ranks (`runtime.grad_sync`): with zero 2 and 3 each becomes the
rank's shard, while up to `OUTSTANDING_BYTES` are being sent. With zero 3 a block's parameters are
gathered while it runs, together with those of the next block; those outside of blocks are gathered
for the entire step (`runtime.fsdp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.arrays import Floats
from shardwise.dtypes import itemsize
from shardwise.runtime.grad_sync import OUTSTANDING_BYTES
from shardwise.simulation.costs import cached
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.stages import Layers, LocalStage, ParamClass


class SavedActivations:
    """Bytes that a micro-batch saves at positions `first:end`, with the recomputation `mode`.

    `received` comes from the stage before, `sends` goes to the next. `begun` is what earlier stages
    save of a block that this stage continues, `entered` what enters this stage and stays; `total`
    is everything that is saved.
    """

    def __init__(self, first: int, end: int, layers: Layers, mode: str) -> None:
        self.first, self.end, self.layers, self.mode = first, end, layers, mode
        crossing = layers.at_positions("crossing")
        self.received = float(crossing[first]) if first else 0.0
        self.sends = float(crossing[end]) if end < layers.fold.size else 0.0
        before = layers.at_positions("saved" + mode)[:first].sum()
        self.begun = max(float(before - layers.at_positions("freed" + mode)[:first].sum()), 0.0)
        self.entered = 0.0
        if first:  # received values stay even if unneeded; every stage recomputes shared ones
            _, _, block_end = layers.fold.runs(first, end)[0]
            entering = float(layers.at_positions("entering" + mode)[first:block_end].sum())
            self.entered = max(self.received - (self.begun + entering), 0.0)
            self.entered += float(layers.at_positions("shared")[first])
        self._saved = np.cumsum(self.slice("freed" + mode))
        self.total = self.entered + (float(self._saved[-1]) if end > first else 0.0)

    def slice(self, name: str) -> Floats:
        """Return an array of the workload at the positions of the stage."""
        return self.layers.at_positions(name)[self.first : self.end]

    @cached_property
    def incoming(self) -> Floats:
        """Gradients from the next stage, which live until backward is done."""
        gradients = np.full(self.end - self.first, self.sends)
        gradients[-1:] = 0.0
        return gradients

    @cached_property
    def backward(self) -> tuple[Floats, Floats]:
        """Bytes saved when each position's backward runs, and when its block is recomputed."""
        saved = self._saved
        if not self.mode:
            return self.entered + saved, np.zeros_like(saved)
        freed, plain = self.slice("freed" + self.mode), self.slice("freed")
        starts, ends = _blocks(self.layers.fold, self.first, self.end)
        inside = starts >= 0
        start, last = np.maximum(starts, 0), np.maximum(ends - 1, 0)
        total = np.cumsum(plain)
        restored = saved[start] - freed[start] + total - total[start] + plain[start]
        new = np.maximum(self.slice("saved") - self.slice("saved" + self.mode), 0.0)
        before = np.cumsum(new) - new  # each position
        in_block = before - before[start]
        temporary = self.slice("unsaved") + self.slice("forward_extra")
        gradients = self.slice("gradients")[last] + self.incoming[last]
        recomputing = saved[last] + in_block + temporary + gradients
        return self.entered + np.where(inside, restored, saved), np.where(inside, recomputing, 0.0)


def _blocks(fold: FoldedGraph, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each position's block begins and ends in this stage; -1 outside of blocks."""
    starts, ends = np.full(end - first, -1), np.full(end - first, -1)
    for name, a, b in fold.runs(first, end):
        if name:
            starts[a - first : b - first] = a - first
            ends[a - first : b - first] = b - first
    return starts, ends


PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True, slots=True)
class PassPeak:
    """Bytes at the peak of a pass: parameters' gradients, saved tensors, and everything else."""

    gradients: float = 0.0
    saved: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.saved + self.rest


def stage_memory(stage: LocalStage) -> StageMemory:
    """Return the memory of a stage, computed once for equal configs."""
    execution = stage.execution
    memory_options = (
        (execution.zero, tuple(execution.zeros.items())),
        execution.offload,
        execution.precision,
        execution.recompute,
        execution.num_microbatches,
    )
    key = (stage.first, stage.end, stage.group.mesh, memory_options)
    return cached(stage.layers.cache, key, lambda: StageMemory(stage))


@dataclass(frozen=True)
class _ReducedParameters:
    """Parameters of positions `first:end` whose gradients are reduced in the same way."""

    share: ParamClass
    zero: int
    ranks: int
    first: int
    end: int

    @cached_property
    def numel(self) -> float:
        return float(self.share.numel[self.end] - self.share.numel[self.first])

    @cached_property
    def by_position(self) -> Floats:
        """Elements at every position."""
        return np.diff(self.share.numel[self.first : self.end + 1])

    @cached_property
    def complete(self) -> Floats:
        """Elements whose gradients are complete when a position's backward runs."""
        complete: Floats = self.share.numel[self.end] - self.share.numel[self.first : self.end]
        return complete

    @cached_property
    def arrived(self) -> Floats:
        """Elements that have gradients, complete or not, when a position's backward runs."""
        appeared = self.share.arrives[self.end] - self.share.arrives[self.first : self.end]
        arrived: Floats = np.maximum(appeared, self.complete)
        return arrived

    @property
    def sharded(self) -> bool:
        return self.zero > 0 and self.ranks > 1


@dataclass(slots=True)
class StaticMemory:
    """Bytes that persist between passes, on the device except for `host`."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    reduced: float = 0.0  # gradients as the optimizer reads them
    updated: float = 0.0  # values that the optimizer updates
    largest: float = 0.0  # the largest tensor of these
    host: float = 0.0


class StageMemory:
    """The bytes of positions `first:end` of a model on a rank of a group.

    `saved` lives from a micro-batch's forward to its backward, `waiting` from the first half of a
    backward to the second; `received` comes from the stage before, `sends` goes to the next;
    `root` is for parameters that are gathered for the entire step (zero 3).
    """

    def __init__(self, stage: LocalStage) -> None:
        self.first, self.end, self.layers, self.group, self.execution = stage
        first, end, layers, group, execution = stage
        self.cuda, self.mode = layers.device.kind == "cuda", execution.recompute_suffix
        self.reduced = [
            _ReducedParameters(share, zero, group.along(axes).shape[-1], first, end)
            for (axes, zero, _, _), share in layers.parameters(execution).items()
        ]
        self.replicas = sum(  # elements of tied parameters that an earlier stage owns
            tied.numel
            for tied in layers.tied
            if tied.users[0] < first and ((tied.users >= first) & (tied.users < end)).any()
        )
        self.activations = cached(
            layers.cache,
            ("saved", first, end, self.mode),
            lambda: SavedActivations(first, end, layers, self.mode),
        )
        self.received, self.sends = self.activations.received, self.activations.sends
        self.saved = self.activations.total
        work = layers.work
        local_bytes = work.inputs_bytes * execution.num_microbatches
        self.batch = local_bytes if self.cuda else work.batch_bytes
        self._peaks: dict[tuple[str, str], PassPeak] = {}
        self.offloaded = 0.0  # of a micro-batch, moved to host memory and back
        if "activations" in execution.offload and self.cuda:
            self.offloaded = 0.9 * self.saved
            self.saved -= self.offloaded

    def peak(self, action: str, kind: str = "") -> PassPeak:
        """Return the peak of an action F, B, I or W.

        The `kind` of a B or W is "first", "middle" or "last" of a step, or "only" if it is both.
        """
        if (action, kind) not in self._peaks:
            passes = {"F": self._forward, "I": self._inputs}
            with_weights = {"B": self._backward, "W": self._weight}
            peak = passes[action]() if action in passes else with_weights[action](kind)
            self._peaks[action, kind] = peak
        return self._peaks[action, kind]

    def lower_bound(self, flying: float, gradients: bool) -> float:
        """Return a lower bound on a rank's bytes, with this many micro-batches under way.

        `gradients` says whether parameters have gradients then, as after the first backward.
        """
        static = self.static
        always = static.parameters + static.optimizer
        return always + (static.gradients if gradients else 0.0) + flying * self.saved

    def slice(self, name: str) -> Floats:
        """Return an array of the workload at the positions of the stage."""
        return self.activations.slice(name)

    @cached_property
    def waiting(self) -> float:
        return float(self.slice("waiting").sum())

    @cached_property
    def communicating_axes(self) -> frozenset[tuple[str, ...]]:
        """The mesh axes along which a rank communicates, unless that is with all ranks."""
        along = {collective.axes for collective in self.layers.work.collectives}
        along |= {axes for axes, *_ in self.layers.parameters(self.execution)}
        sizes = dict(self.group.mesh.axes)
        axes_used = {tuple(a for a in sizes if a in axes and sizes[a] != 1) for axes in along}
        has_all = self.group.along(tuple(sizes)).shape[-1] == self.execution.num_ranks
        return frozenset(u for u in axes_used if u and not (has_all and len(u) == len(sizes)))

    # --- parameters --------------------------------------------------------------------------

    @cached_property
    def static(self) -> StaticMemory:
        """Bytes that persist between passes."""
        static = StaticMemory()
        offloaded = set(self.execution.offload) - {"activations"}
        for params in self.reduced:
            item_bytes, master = params.share.itemsize, self._master(params)
            num_shards = params.ranks if params.sharded else 1
            full, shard = params.numel * item_bytes, params.numel / num_shards
            is_gathered = params.zero == 3 and params.sharded  # for use, block by block
            is_scattered = params.zero >= 2 and params.sharded
            reduced = (shard if is_scattered else params.numel) * master
            static.gradients += params.numel * self._gradient(params)
            if offloaded and self.cuda:
                # Shards of gradients move to the host; zero 3 gathers from a copy of the shard.
                device_bytes = shard * item_bytes if is_gathered else full
                if "parameters" in offloaded:
                    static.host += device_bytes
                else:
                    static.parameters += device_bytes
                static.host += 4.0 * shard * master  # values, their gradients, two states
                static.reduced += 0.0 if is_scattered else reduced
            else:
                has_master = is_gathered or master != item_bytes or bool(offloaded)
                static.parameters += 0.0 if is_gathered else full
                static.parameters += shard * master if has_master else 0.0
                static.optimizer += 2.0 * shard * master
                static.updated += shard * master
                static.reduced += reduced
            largest = float(params.by_position.max(initial=0.0)) / num_shards * master
            static.largest = max(static.largest, largest)
        for parameter in self.layers.work.parameters:
            form = self.execution.syncs.get(parameter.name)
            if form is not None and parameter.requires_grad:
                copies = form.inexact.state_copies * int(self.layers.fold.copies[parameter.node])
                master = itemsize(self.execution.precision.master, parameter.itemsize)
                static.optimizer += float(copies * parameter.numel * master)
        frozen = self.layers.frozen_bytes
        static.parameters += float(frozen[self.end] - frozen[self.first])
        static.parameters += float(self.slice("buffers").sum())
        if self.reduced:
            static.parameters += self.replicas * self.reduced[0].share.itemsize
            static.gradients += self.replicas * self._gradient(self.reduced[0])
        return static

    def _master(self, params: _ReducedParameters) -> int:
        return itemsize(self.execution.precision.master, params.share.itemsize)

    def _gradient(self, params: _ReducedParameters) -> int:
        return itemsize(self.execution.precision.gradients, self._master(params))

    def _parameter_gradients(self, kind: str) -> Floats:
        """Return the bytes of parameters' gradients while each position's backward runs."""
        total = np.zeros(self.end - self.first)
        for params in self.reduced:
            size = self._gradient(params)
            begun = kind in ("middle", "last")
            total_numel = (
                np.full_like(total, params.numel + self.replicas) if begun else params.arrived
            )
            computed = params.share.itemsize
            item_bytes = computed if begun or size != computed else 0
            if begun and size != computed:
                item_bytes += size  # converted, then added
            fresh = params.by_position * item_bytes  # new gradients, before they are added or cast
            if kind in ("last", "only") and params.ranks > 1:
                under_way = self._under_way(params)
                total += under_way
                if params.zero >= 2:
                    total += params.complete / params.ranks * self._master(params)
                    total_numel = total_numel - params.complete
                    if not self.cuda:  # gloo: everyone's parts arrive, then they are added
                        fresh = np.maximum(fresh, under_way * (1 - 1 / params.ranks))
            total += total_numel * size + fresh
        return total

    def _under_way(self, params: _ReducedParameters) -> Floats:
        """Return the bytes of copies of gradients while they are reduced over ranks."""
        item_bytes = itemsize(self.execution.precision.reduce, self._gradient(params))
        if params.zero < 2 and item_bytes == self._gradient(params):
            return np.zeros_like(params.by_position)
        return np.minimum(
            params.complete * item_bytes, OUTSTANDING_BYTES + params.by_position * item_bytes
        )

    @cached_property
    def _units(self) -> list[tuple[float, str, int, int]]:
        """The units whose parameters are gathered: bytes, name and positions in the stage."""
        shares = [s for s in self.reduced if s.zero == 3 and s.sharded]
        if not shares:
            return []
        units = []
        for name, first, end in self.layers.fold.runs(self.first, self.end):
            a, b = first - self.first, end - self.first
            size = sum(float(s.by_position[a:b].sum()) * s.share.itemsize for s in shares)
            units.append((size, name, a, b))
        return units

    @cached_property
    def root(self) -> float:
        return sum(size for size, name, _, _ in self._units if not name)

    def _gathered(self, beside: int) -> Floats:
        """Return the bytes of gathered parameters at every position: its block's and the next."""
        gathered = np.zeros(self.end - self.first)
        units = [unit for unit in self._units if unit[1]]
        for i, (size, _, a, b) in enumerate(units):
            has = 0 <= i + beside < len(units)
            gathered[a:b] = size + (units[i + beside][0] if has else 0.0)
        return gathered

    # --- passes ------------------------------------------------------------------------------

    def _forward(self) -> PassPeak:
        saved, activations = self.slice("saved" + self.mode), self.activations
        before = np.cumsum(saved) - saved
        rest = self.slice("unsaved" + self.mode) + self.slice("forward_extra") + self._gathered(1)
        entered = activations.entered + min(activations.received, activations.begun)
        return _highest(np.zeros_like(before), before + entered, rest)

    def _backward(self, kind: str) -> PassPeak:
        gradients, activations = self._parameter_gradients(kind), self.activations
        saved, again = activations.backward
        rest = self.slice("gradients") + self.slice("backward_extra") + activations.incoming
        needed = np.maximum(saved + rest, activations.entered + again)
        return _highest(gradients, saved, needed - saved + self._gathered(-1))

    def _inputs(self) -> PassPeak:
        waiting, activations = self.slice("waiting"), self.activations
        later = waiting[::-1].cumsum()[::-1] - waiting
        saved, again = activations.backward
        rest = self.slice("gradients") + self.slice("backward_extra") + activations.incoming
        rest += self._gathered(-1)
        needed = np.maximum(saved + rest, activations.entered + again)
        return _highest(np.zeros_like(later), saved + later, needed - saved)

    def _weight(self, kind: str) -> PassPeak:
        gradients = self._parameter_gradients(kind)
        return _highest(gradients, np.cumsum(self.slice("waiting")), np.zeros_like(gradients))


def _highest(gradients: Floats, saved: Floats, rest: Floats) -> PassPeak:
    total = gradients + saved + rest
    if not len(total):
        return PassPeak()
    at = int(total.argmax())
    return PassPeak(float(gradients[at]), float(saved[at]), float(rest[at]))
