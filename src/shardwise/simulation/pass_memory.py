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

from shardwise.dtypes import itemsize
from shardwise.runtime.grad_sync import OUTSTANDING_BYTES
from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.gradient_traffic import ParamClass
from shardwise.simulation.stages import Layers
from shardwise.simulation.workload import Floats

# What a micro-batch keeps in a stage from its forward to its backward.


def kept_in(first: int, end: int, layers: Layers, mode: str) -> Kept:
    """Return what the stage of positions `first:end` saves, computed once."""
    key = ("kept", first, end, mode)
    if key not in layers.passes:
        layers.passes[key] = Kept(first, end, layers, mode)
    found: Kept = layers.passes[key]
    return found


class Kept:
    """Bytes at positions `first:end`; `mode` names the arrays of what is computed again.

    `received` comes from the stage before, `sends` goes to the next. `begun` is what a block that
    is cut keeps in stages before, `entered` what enters and stays; `total` is all that is kept.
    """

    def __init__(self, first: int, end: int, layers: Layers, mode: str) -> None:
        self.first, self.end, self.layers, self.mode = first, end, layers, mode
        crossing = layers.whole("crossing")
        self.received = float(crossing[first]) if first else 0.0
        self.sends = float(crossing[end]) if end < layers.fold.size else 0.0
        before = layers.whole("saved" + mode)[:first].sum()
        self.begun = max(float(before - layers.whole("held" + mode)[:first].sum()), 0.0)
        self.entered = 0.0
        if first:  # what is received stays, needed or not; the rest each stage has for itself
            counted = self.begun + self._entering()
            self.entered = max(self.received - counted, 0.0)
            self.entered += float(layers.whole("shared")[first])
        self._kept = np.cumsum(self.cut("held" + mode))
        self.total = self.entered + (float(self._kept[-1]) if end > first else 0.0)

    def cut(self, name: str) -> Floats:
        """Return an array of the workload at the positions of the stage."""
        return self.layers.whole(name)[self.first : self.end]

    @cached_property
    def incoming(self) -> Floats:
        """Gradients from the next stage, which live until backward is done."""
        held = np.full(self.end - self.first, self.sends)
        held[-1:] = 0.0
        return held

    @cached_property
    def backward(self) -> tuple[Floats, Floats]:
        """What is saved when each position's backward runs, and when blocks are recomputed."""
        kept = self._kept
        if not self.mode:
            return self.entered + kept, np.zeros_like(kept)
        held, plain = self.cut("held" + self.mode), self.cut("held")
        starts, ends = _blocks(self.layers.fold, self.first, self.end)
        inside = starts >= 0
        start, last = np.maximum(starts, 0), np.maximum(ends - 1, 0)
        whole = np.cumsum(plain)
        kept_again = kept[start] - held[start] + whole - whole[start] + plain[start]
        new = np.maximum(self.cut("saved") - self.cut("saved" + self.mode), 0.0)
        made = np.cumsum(new) - new  # before each position
        fresh = made - made[start]
        extra = self.cut("unsaved") + self.cut("forward_extra")
        again = kept[last] + fresh + extra + self.cut("gradients")[last] + self.incoming[last]
        return self.entered + np.where(inside, kept_again, kept), np.where(inside, again, 0.0)

    def _entering(self) -> float:
        """Return the bytes that enter the first block of the stage and are saved there."""
        _, _, end = next(iter(self.layers.fold.runs(self.first, self.end)))
        return float(self.layers.whole("entering" + self.mode)[self.first : end].sum())


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
    kept: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.kept + self.rest


def stage_memory(
    first: int,
    end: int,
    layers: Layers,
    group: Group,
    setting: ExecutionConfig,
    *,
    cuda: bool = True,
) -> StageMemory:
    """Return the memory of the stage of positions `first:end`, once for equal configs."""
    zeros = (setting.zero, tuple(setting.zeros.items()))
    key = (first, end, group.mesh, zeros, setting.offload, setting.precision, setting.recompute,
           setting.num_microbatches, cuda)  # fmt: skip
    if key not in layers.passes:
        layers.passes[key] = StageMemory(first, end, layers, group, setting, cuda)
    found: StageMemory = layers.passes[key]
    return found


@dataclass(frozen=True)
class _Summed:
    """Parameters of positions `first:end` whose gradients are synchronized alike."""

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
        found: Floats = self.share.numel[self.end] - self.share.numel[self.first : self.end]
        return found

    @cached_property
    def arrived(self) -> Floats:
        """Elements that have gradients then."""
        appeared = self.share.arrives[self.end] - self.share.arrives[self.first : self.end]
        found: Floats = np.maximum(appeared, self.complete)
        return found

    @property
    def sharded(self) -> bool:
        return self.zero > 0 and self.ranks > 1


class StageMemory:
    """Positions `first:end` of a model on a rank of a group.

    `kept` stays from a micro-batch's forward to its backward, `waiting` from the first half of a
    backward to the second; `received` comes from the stage before, `sends` goes to the next;
    `root` are parameters that are whole for the whole step (zero 3).
    """

    def __init__(
        self,
        first: int,
        end: int,
        layers: Layers,
        group: Group,
        setting: ExecutionConfig,
        cuda: bool,
    ) -> None:
        self.first, self.end, self.layers, self.setting = first, end, layers, setting
        self.group, self.cuda = group, cuda
        self.mode = _mode(setting)
        self.summed = list(self._summed())
        self.borrowed = sum(
            tied.numel
            for tied in layers.tied
            if tied.users[0] < first and ((tied.users >= first) & (tied.users < end)).any()
        )
        self.activations = kept_in(first, end, layers, self.mode)
        self.received, self.sends = self.activations.received, self.activations.sends
        self.kept = self.activations.total
        work = layers.work
        self.batch = work.inputs_bytes * setting.num_microbatches if cuda else work.batch_bytes
        self._needs: dict[tuple[str, str], PassPeak] = {}
        self.offloaded = 0.0  # of a micro-batch, to host memory and back
        if "activations" in setting.offload and cuda:
            self.offloaded = 0.9 * self.kept
            self.kept -= self.offloaded

    def need(self, action: str, kind: str = "") -> PassPeak:
        """Return the peak of an action F, B, I or W; `kind` says which backward of a step it is."""
        if (action, kind) not in self._needs:
            made = {"F": self._forward, "I": self._inputs}
            halves = {"B": self._backward, "W": self._weight}
            found = made[action]() if action in made else halves[action](kind)
            self._needs[action, kind] = found
        return self._needs[action, kind]

    def least(self, flying: float, gradients: bool) -> float:
        """What a rank needs at least, with this many micro-batches under way.

        With `gradients` those of parameters are there then: a forward follows a backward.
        """
        static = self.static
        always = static["parameters"] + static["optimizer"]
        return always + (static["gradients"] if gradients else 0.0) + flying * self.kept

    def cut(self, name: str) -> Floats:
        """Return an array of the workload at the positions of the stage."""
        return self.activations.cut(name)

    @cached_property
    def waiting(self) -> float:
        return float(self.cut("waiting").sum())

    @cached_property
    def talking(self) -> frozenset[tuple[str, ...]]:
        """The mesh axes along which a rank communicates, unless that is with all ranks."""
        along = {talk.axes for talk in self.layers.work.collectives}
        along |= {axes for axes, _, _ in self.layers.parameters(self.setting)}
        sizes = dict(self.group.mesh.axes)
        found = {tuple(a for a in sizes if a in axes and sizes[a] > 1) for axes in along}
        every = self.group.along(tuple(sizes)).shape[-1] == self.setting.num_ranks
        return frozenset(f for f in found if f and not (every and len(f) == len(sizes)))

    # --- parameters --------------------------------------------------------------------------

    def _summed(self) -> Iterator[_Summed]:
        for (axes, zero, _), share in self.layers.parameters(self.setting).items():
            ranks = self.group.along(axes).shape[-1]
            yield _Summed(share, zero, ranks, self.first, self.end)

    @cached_property
    def static(self) -> Mapping[str, float]:
        """Bytes that are there between passes.

        `summed` are gradients as the optimizer has them, `updated` the values that it updates, and
        `largest` the largest tensor of these; `host` is in host memory.
        """
        found = dict.fromkeys((*PARTS, "summed", "updated", "largest", "host"), 0.0)
        moved = set(self.setting.offload) - {"activations"}
        offload = moved if self.cuda else set()
        for mine in self.summed:
            size, master = mine.share.itemsize, self._master(mine)
            shard = mine.all / (mine.ranks if mine.sharded else 1)
            gone = mine.zero == 3 and mine.sharded
            found["parameters"] += 0.0 if gone else mine.all * size
            found["gradients"] += mine.all * self._gradient(mine)
            kept = mine.zero >= 2 and mine.sharded
            summed = (shard if kept else mine.all) * master
            if offload:  # pieces of gradients go to the host; zero 3 gathers from a copy
                summed = 0.0 if kept else summed
                found["parameters"] += shard * size if gone and "parameters" not in offload else 0
                found["host"] += 4.0 * shard * master  # values, their gradients, two states
                if "parameters" in offload:
                    found["host"] += (shard if gone else mine.all) * size
                if "parameters" in offload and not gone:
                    found["parameters"] -= mine.all * size
            else:
                stored = gone or master != size or bool(moved)
                found["parameters"] += shard * master if stored else 0.0
                found["optimizer"] += 2.0 * shard * master
                found["updated"] += shard * master
            found["summed"] += summed
            largest = float(mine.own.max(initial=0.0)) / (mine.ranks if mine.sharded else 1)
            found["largest"] = max(found["largest"], largest * master)
        frozen = _frozen(self.layers)
        found["parameters"] += float(frozen[self.end] - frozen[self.first])
        found["parameters"] += float(self.cut("buffers").sum())
        if self.summed:
            borrowed = self.borrowed * self.summed[0].share.itemsize
            found["parameters"] += borrowed
            found["gradients"] += self.borrowed * self._gradient(self.summed[0])
        return found

    def _master(self, mine: _Summed) -> int:
        return itemsize(self.setting.precision.master, mine.share.itemsize)

    def _gradient(self, mine: _Summed) -> int:
        precision = self.setting.precision
        return itemsize(precision.gradients or precision.master, mine.share.itemsize)

    def _parameter_gradients(self, kind: str) -> Floats:
        """Gradients of parameters when every position's backward runs."""
        total = np.zeros(self.end - self.first)
        for mine in self.summed:
            size = self._gradient(mine)
            begun = kind in ("middle", "last")
            whole = np.full_like(total, mine.all + self.borrowed) if begun else mine.arrived
            fresh = self._fresh(mine, begun)
            if kind in ("last", "only") and mine.ranks > 1:
                under_way = self._under_way(mine)
                total += under_way
                if mine.zero >= 2:
                    total += mine.complete / mine.ranks * self._master(mine)
                    whole = whole - mine.complete
                    if not self.cuda:  # gloo: everyone's parts arrive, then they are added
                        fresh = np.maximum(fresh, under_way * (1 - 1 / mine.ranks))
            total += whole * size + fresh
        return total

    def _fresh(self, mine: _Summed, begun: bool) -> Floats:
        """Return the bytes of a position's new gradients before they are added or cast."""
        size, made = self._gradient(mine), mine.share.itemsize
        each = made if begun or size != made else 0
        if begun and size != made:
            each += size  # converted, then added
        return mine.own * each

    def _under_way(self, mine: _Summed) -> Floats:
        """Copies of gradients that are being summed over ranks."""
        wire = itemsize(self.setting.precision.reduce, self._gradient(mine))
        if mine.zero < 2 and wire == self._gradient(mine):
            return np.zeros_like(mine.own)
        return np.minimum(mine.complete * wire, OUTSTANDING_BYTES + mine.own * wire)

    @cached_property
    def _units(self) -> list[tuple[float, str, int, int]]:
        """Yield the units whose parameters are gathered: bytes, name and positions in the stage."""
        shares = [s for s in self.summed if s.zero == 3 and s.sharded]
        if not shares:
            return []
        found = []
        for name, first, end in self.layers.fold.runs(self.first, self.end):
            a, b = first - self.first, end - self.first
            size = sum(float(s.own[a:b].sum()) * s.share.itemsize for s in shares)
            found.append((size, name, a, b))
        return found

    @cached_property
    def root(self) -> float:
        return sum(size for size, name, _, _ in self._units if not name)

    def _gathered(self, beside: int) -> Floats:
        """Return the bytes of gathered parameters at every position: its block's and the next."""
        found = np.zeros(self.end - self.first)
        units = [unit for unit in self._units if unit[1]]
        for i, (size, _, a, b) in enumerate(units):
            has = 0 <= i + beside < len(units)
            found[a:b] = size + (units[i + beside][0] if has else 0.0)
        return found

    # --- passes ------------------------------------------------------------------------------

    def _forward(self) -> PassPeak:
        saved, mine = self.cut("saved" + self.mode), self.activations
        kept = np.cumsum(saved) - saved
        rest = self.cut("unsaved" + self.mode) + self.cut("forward_extra") + self._gathered(1)
        entered = mine.entered + min(mine.received, mine.begun)
        return _most(np.zeros_like(kept), kept + entered, rest)

    def _backward(self, kind: str) -> PassPeak:
        gradients, mine = self._parameter_gradients(kind), self.activations
        kept, again = mine.backward
        rest = self.cut("gradients") + self.cut("backward_extra") + mine.incoming
        needed = np.maximum(kept + rest, mine.entered + again)
        return _most(gradients, kept, needed - kept + self._gathered(-1))

    def _inputs(self) -> PassPeak:
        waiting, mine = self.cut("waiting"), self.activations
        later = waiting[::-1].cumsum()[::-1] - waiting
        kept, again = mine.backward
        rest = self.cut("gradients") + self.cut("backward_extra") + mine.incoming
        rest += self._gathered(-1)
        needed = np.maximum(kept + rest, mine.entered + again)
        return _most(np.zeros_like(later), kept + later, needed - kept)

    def _weight(self, kind: str) -> PassPeak:
        gradients = self._parameter_gradients(kind)
        return _most(gradients, np.cumsum(self.cut("waiting")), np.zeros_like(gradients))


def _most(gradients: Floats, kept: Floats, rest: Floats) -> PassPeak:
    total = gradients + kept + rest
    if not len(total):
        return PassPeak()
    at = int(total.argmax())
    return PassPeak(float(gradients[at]), float(kept[at]), float(rest[at]))


def _mode(setting: ExecutionConfig) -> str:
    if setting.recompute == "none":
        return ""
    return "_selective" if setting.recompute == "selective" else "_full"


def _frozen(layers: Layers) -> Floats:
    """Bytes of parameters that are not trained, before every position."""
    if "frozen" not in layers.passes:
        count = len(layers.fold.graph.nodes)
        sizes = np.zeros(count)
        for held in layers.work.parameters:
            if not held.requires_grad:
                sizes[held.node] += held.numel * held.itemsize
        spread = layers.fold.spread(sizes)
        layers.passes["frozen"] = np.concatenate([[0.0], np.cumsum(spread)])
    result: Floats = layers.passes["frozen"]
    return result
