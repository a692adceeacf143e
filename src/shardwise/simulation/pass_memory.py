"""The memory of one stage: what a micro-batch saves, and the peak of each kind of pass beside it.

Gradients of parameters appear in the first backward of a stage, from its last position on. In its
last backward they are summed over ranks (`runtime.grad_sync`): with zero 2 and 3 each becomes the
rank's shard, while up to `OUTSTANDING_BYTES` are being sent. With zero 3 a block's parameters are
gathered while it runs, together with those of the next block; those outside of blocks are gathered
for the whole step (`runtime.fsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.arrays import Floats
from shardwise.dtypes import itemsize
from shardwise.runtime.grad_sync import OUTSTANDING_BYTES
from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.stages import Layers, ParamClass


def saved_activations(first: int, end: int, layers: Layers, mode: str) -> SavedActivations:
    """Return what the stage of positions `first:end` saves, computed once."""
    key = ("saved", first, end, mode)
    if key not in layers.passes:
        layers.passes[key] = SavedActivations(first, end, layers, mode)
    activations: SavedActivations = layers.passes[key]
    return activations


class SavedActivations:
    """Bytes that a micro-batch saves at positions `first:end`, with the recomputation `mode`.

    `received` comes from the stage before, `sends` goes to the next. `begun` is what earlier stages
    save of a block that this one continues, `entered` what enters and stays; `total` is all that
    is saved.
    """

    def __init__(self, first: int, end: int, layers: Layers, mode: str) -> None:
        self.first, self.end, self.layers, self.mode = first, end, layers, mode
        crossing = layers.at_positions("crossing")
        self.received = float(crossing[first]) if first else 0.0
        self.sends = float(crossing[end]) if end < layers.fold.size else 0.0
        before = layers.at_positions("saved" + mode)[:first].sum()
        self.begun = max(float(before - layers.at_positions("freed" + mode)[:first].sum()), 0.0)
        self.entered = 0.0
        if first:  # what is received stays, needed or not; the rest each stage has for itself
            counted = self.begun + self._entering()
            self.entered = max(self.received - counted, 0.0)
            self.entered += float(layers.at_positions("shared")[first])
        self._kept = np.cumsum(self.cut("freed" + mode))
        self.total = self.entered + (float(self._kept[-1]) if end > first else 0.0)

    def cut(self, name: str) -> Floats:
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
        """What is saved when each position's backward runs, and when blocks are recomputed."""
        saved = self._kept
        if not self.mode:
            return self.entered + saved, np.zeros_like(saved)
        freed, plain = self.cut("freed" + self.mode), self.cut("freed")
        starts, ends = _blocks(self.layers.fold, self.first, self.end)
        inside = starts >= 0
        start, last = np.maximum(starts, 0), np.maximum(ends - 1, 0)
        total = np.cumsum(plain)
        kept_again = saved[start] - freed[start] + total - total[start] + plain[start]
        new = np.maximum(self.cut("saved") - self.cut("saved" + self.mode), 0.0)
        made = np.cumsum(new) - new  # before each position
        fresh = made - made[start]
        extra = self.cut("unsaved") + self.cut("forward_extra")
        again = saved[last] + fresh + extra + self.cut("gradients")[last] + self.incoming[last]
        return self.entered + np.where(inside, kept_again, saved), np.where(inside, again, 0.0)

    def _entering(self) -> float:
        """Return the bytes that enter the first block of the stage and are saved there."""
        _, _, end = next(iter(self.layers.fold.runs(self.first, self.end)))
        return float(self.layers.at_positions("entering" + self.mode)[self.first : end].sum())


def _blocks(fold: FoldedGraph, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each position's block begins and ends in this stage; -1 outside of blocks."""
    starts, ends = np.full(end - first, -1), np.full(end - first, -1)
    for name, a, b in fold.runs(first, end):
        if name:
            starts[a - first : b - first] = a - first
            ends[a - first : b - first] = b - first
    return starts, ends


PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
KINDS = ("first", "middle", "last", "only")  # backwards of a step; "only" is first and last


@dataclass(frozen=True, slots=True)
class PassPeak:
    """The peak of a pass: bytes of parameters' gradients, of saved tensors, and of the rest."""

    gradients: float = 0.0
    saved: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.saved + self.rest


def stage_memory(
    first: int,
    end: int,
    layers: Layers,
    group: Group,
    execution: ExecutionConfig,
    *,
    cuda: bool = True,
) -> StageMemory:
    """Return the memory of the stage of positions `first:end`, once for equal configs."""
    memory_options = (
        (execution.zero, tuple(execution.zeros.items())),
        execution.offload,
        execution.precision,
        execution.recompute,
        execution.num_microbatches,
    )
    key = (first, end, group.mesh, memory_options, cuda)
    if key not in layers.passes:
        layers.passes[key] = StageMemory(first, end, layers, group, execution, cuda)
    memory: StageMemory = layers.passes[key]
    return memory


@dataclass(frozen=True)
class _Summed:
    """Parameters of positions `first:end` whose gradients are synchronized in the same way."""

    share: ParamClass
    zero: int
    ranks: int
    first: int
    end: int

    @cached_property
    def all(self) -> float:
        """Elements."""
        return float(self.share.numel[self.end] - self.share.numel[self.first])

    @cached_property
    def own(self) -> Floats:
        """Elements at every position."""
        return np.diff(self.share.numel[self.first : self.end + 1])

    @cached_property
    def complete(self) -> Floats:
        """Elements whose gradients are complete when a position's backward runs."""
        complete: Floats = self.share.numel[self.end] - self.share.numel[self.first : self.end]
        return complete

    @cached_property
    def arrived(self) -> Floats:
        """Elements that have gradients then."""
        appeared = self.share.arrives[self.end] - self.share.arrives[self.first : self.end]
        arrived: Floats = np.maximum(appeared, self.complete)
        return arrived

    @property
    def sharded(self) -> bool:
        return self.zero > 0 and self.ranks > 1


class StageMemory:
    """Positions `first:end` of a model on a rank of a group.

    `saved` lives from a micro-batch's forward to its backward, `waiting` from the first half of a
    backward to the second; `received` comes from the stage before, `sends` goes to the next;
    `root` are parameters that are gathered for the entire step (zero 3).
    """

    def __init__(
        self,
        first: int,
        end: int,
        layers: Layers,
        group: Group,
        execution: ExecutionConfig,
        cuda: bool,
    ) -> None:
        self.first, self.end, self.layers, self.execution = first, end, layers, execution
        self.group, self.cuda = group, cuda
        self.mode = _mode(execution)
        self.summed = list(self._summed())
        self.borrowed = sum(
            tied.numel
            for tied in layers.tied
            if tied.users[0] < first and ((tied.users >= first) & (tied.users < end)).any()
        )
        self.activations = saved_activations(first, end, layers, self.mode)
        self.received, self.sends = self.activations.received, self.activations.sends
        self.saved = self.activations.total
        work = layers.work
        self.batch = work.inputs_bytes * execution.num_microbatches if cuda else work.batch_bytes
        self._needs: dict[tuple[str, str], PassPeak] = {}
        self.offloaded = 0.0  # of a micro-batch, to host memory and back
        if "activations" in execution.offload and cuda:
            self.offloaded = 0.9 * self.saved
            self.saved -= self.offloaded

    def need(self, action: str, kind: str = "") -> PassPeak:
        """Return the peak of an action F, B, I or W; `kind` says which backward of a step it is."""
        if (action, kind) not in self._needs:
            made = {"F": self._forward, "I": self._inputs}
            halves = {"B": self._backward, "W": self._weight}
            peak = made[action]() if action in made else halves[action](kind)
            self._needs[action, kind] = peak
        return self._needs[action, kind]

    def lower_bound(self, flying: float, gradients: bool) -> float:
        """Return a lower bound on a rank's bytes, with this many micro-batches under way.

        `gradients` says whether parameters have gradients then, as after the first backward.
        """
        static = self.static
        always = static["parameters"] + static["optimizer"]
        return always + (static["gradients"] if gradients else 0.0) + flying * self.saved

    def cut(self, name: str) -> Floats:
        """Return an array of the workload at the positions of the stage."""
        return self.activations.cut(name)

    @cached_property
    def waiting(self) -> float:
        return float(self.cut("waiting").sum())

    @cached_property
    def communicating_axes(self) -> frozenset[tuple[str, ...]]:
        """The mesh axes along which a rank communicates, unless that is with all ranks."""
        along = {collective.axes for collective in self.layers.work.collectives}
        along |= {axes for axes, _, _ in self.layers.parameters(self.execution)}
        sizes = dict(self.group.mesh.axes)
        axes_used = {tuple(a for a in sizes if a in axes and sizes[a] > 1) for axes in along}
        every = self.group.along(tuple(sizes)).shape[-1] == self.execution.num_ranks
        return frozenset(f for f in axes_used if f and not (every and len(f) == len(sizes)))

    # --- parameters --------------------------------------------------------------------------

    def _summed(self) -> Iterator[_Summed]:
        for (axes, zero, _), share in self.layers.parameters(self.execution).items():
            ranks = self.group.along(axes).shape[-1]
            yield _Summed(share, zero, ranks, self.first, self.end)

    @cached_property
    def static(self) -> Mapping[str, float]:
        """Bytes that are there between passes.

        `summed` are gradients as the optimizer has them, `updated` the values that it updates, and
        `largest` the largest tensor of these; `host` is in host memory.
        """
        static = dict.fromkeys((*PARTS, "summed", "updated", "largest", "host"), 0.0)
        moved = set(self.execution.offload) - {"activations"}
        offload = moved if self.cuda else set()
        for params in self.summed:
            size, master = params.share.itemsize, self._master(params)
            shard = params.all / (params.ranks if params.sharded else 1)
            gone = params.zero == 3 and params.sharded
            static["parameters"] += 0.0 if gone else params.all * size
            static["gradients"] += params.all * self._gradient(params)
            scattered = params.zero >= 2 and params.sharded
            summed = (shard if scattered else params.all) * master
            if offload:  # pieces of gradients go to the host; zero 3 gathers from a copy
                summed = 0.0 if scattered else summed
                static["parameters"] += shard * size if gone and "parameters" not in offload else 0
                static["host"] += 4.0 * shard * master  # values, their gradients, two states
                if "parameters" in offload:
                    static["host"] += (shard if gone else params.all) * size
                if "parameters" in offload and not gone:
                    static["parameters"] -= params.all * size
            else:
                stored = gone or master != size or bool(moved)
                static["parameters"] += shard * master if stored else 0.0
                static["optimizer"] += 2.0 * shard * master
                static["updated"] += shard * master
            static["summed"] += summed
            largest = float(params.own.max(initial=0.0)) / (params.ranks if params.sharded else 1)
            static["largest"] = max(static["largest"], largest * master)
        frozen = _frozen(self.layers)
        static["parameters"] += float(frozen[self.end] - frozen[self.first])
        static["parameters"] += float(self.cut("buffers").sum())
        if self.summed:
            borrowed = self.borrowed * self.summed[0].share.itemsize
            static["parameters"] += borrowed
            static["gradients"] += self.borrowed * self._gradient(self.summed[0])
        return static

    def _master(self, params: _Summed) -> int:
        return itemsize(self.execution.precision.master, params.share.itemsize)

    def _gradient(self, params: _Summed) -> int:
        precision = self.execution.precision
        return itemsize(precision.gradients or precision.master, params.share.itemsize)

    def _parameter_gradients(self, kind: str) -> Floats:
        """Return the bytes of parameters' gradients while each position's backward runs."""
        total = np.zeros(self.end - self.first)
        for params in self.summed:
            size = self._gradient(params)
            begun = kind in ("middle", "last")
            total_numel = (
                np.full_like(total, params.all + self.borrowed) if begun else params.arrived
            )
            fresh = self._fresh(params, begun)
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

    def _fresh(self, params: _Summed, begun: bool) -> Floats:
        """Return the bytes of a position's new gradients before they are added or cast."""
        size, made = self._gradient(params), params.share.itemsize
        each = made if begun or size != made else 0
        if begun and size != made:
            each += size  # converted, then added
        return params.own * each

    def _under_way(self, params: _Summed) -> Floats:
        """Return the bytes of copies of gradients while they are reduced over ranks."""
        item_bytes = itemsize(self.execution.precision.reduce, self._gradient(params))
        if params.zero < 2 and item_bytes == self._gradient(params):
            return np.zeros_like(params.own)
        return np.minimum(params.complete * item_bytes, OUTSTANDING_BYTES + params.own * item_bytes)

    @cached_property
    def _units(self) -> list[tuple[float, str, int, int]]:
        """The units whose parameters are gathered: bytes, name and positions in the stage."""
        shares = [s for s in self.summed if s.zero == 3 and s.sharded]
        if not shares:
            return []
        units = []
        for name, first, end in self.layers.fold.runs(self.first, self.end):
            a, b = first - self.first, end - self.first
            size = sum(float(s.own[a:b].sum()) * s.share.itemsize for s in shares)
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
        saved, activations = self.cut("saved" + self.mode), self.activations
        before = np.cumsum(saved) - saved
        rest = self.cut("unsaved" + self.mode) + self.cut("forward_extra") + self._gathered(1)
        entered = activations.entered + min(activations.received, activations.begun)
        return _highest(np.zeros_like(before), before + entered, rest)

    def _backward(self, kind: str) -> PassPeak:
        gradients, activations = self._parameter_gradients(kind), self.activations
        saved, again = activations.backward
        rest = self.cut("gradients") + self.cut("backward_extra") + activations.incoming
        needed = np.maximum(saved + rest, activations.entered + again)
        return _highest(gradients, saved, needed - saved + self._gathered(-1))

    def _inputs(self) -> PassPeak:
        waiting, activations = self.cut("waiting"), self.activations
        later = waiting[::-1].cumsum()[::-1] - waiting
        saved, again = activations.backward
        rest = self.cut("gradients") + self.cut("backward_extra") + activations.incoming
        rest += self._gathered(-1)
        needed = np.maximum(saved + rest, activations.entered + again)
        return _highest(np.zeros_like(later), saved + later, needed - saved)

    def _weight(self, kind: str) -> PassPeak:
        gradients = self._parameter_gradients(kind)
        return _highest(gradients, np.cumsum(self.cut("waiting")), np.zeros_like(gradients))


def _highest(gradients: Floats, saved: Floats, rest: Floats) -> PassPeak:
    total = gradients + saved + rest
    if not len(total):
        return PassPeak()
    at = int(total.argmax())
    return PassPeak(float(gradients[at]), float(saved[at]), float(rest[at]))


def _mode(execution: ExecutionConfig) -> str:
    if execution.recompute == "none":
        return ""
    return "_selective" if execution.recompute == "selective" else "_full"


def _frozen(layers: Layers) -> Floats:
    """Return the bytes of parameters that are not trained, before every position."""
    if "frozen" not in layers.passes:
        count = len(layers.fold.graph.nodes)
        sizes = np.zeros(count)
        for parameter in layers.work.parameters:
            if not parameter.requires_grad:
                sizes[parameter.node] += parameter.numel * parameter.itemsize
        spread = layers.fold.spread(sizes)
        layers.passes["frozen"] = np.concatenate([[0.0], np.cumsum(spread)])
    result: Floats = layers.passes["frozen"]
    return result
