"""The memory of one stage in a forward or backward of one micro-batch.

Enters: what every position keeps and needs (`Layers`), and how the step runs (`Setting`). Leaves:
`StageMemory`: what a micro-batch keeps, and the most that each kind of pass needs beside it.

Gradients of parameters appear in the first backward of a stage, from its last position on. In its
last one they are summed over ranks (`runtime.reducer`): with zero 2 and 3 each becomes this rank's
piece, while up to `OUTSTANDING_BYTES` are under way. With zero 3 a block's parameters are whole
while it runs, with those of the next one; those outside of blocks for the whole step
(`runtime.fsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.runtime.reducer import OUTSTANDING_BYTES
from shardwise.simulation.fold import Fold
from shardwise.simulation.setting import SIZES, Setting
from shardwise.simulation.stages import Layers
from shardwise.simulation.sums import Share
from shardwise.simulation.times import Group
from shardwise.simulation.work import Floats

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
KINDS = ("first", "middle", "last", "only")  # backwards of a step; "only" is first and last


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes of a pass at their highest: gradients of parameters, what is kept, and the rest."""

    gradients: float = 0.0
    kept: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.gradients + self.kept + self.rest


def stage_memory(
    first: int, end: int, layers: Layers, group: Group, setting: Setting, *, cuda: bool = True
) -> StageMemory:
    """The memory of the stage of positions `first:end` on a rank; made once for like settings."""
    zeros = (setting.zero, tuple(setting.zeros.items()))
    key = (first, end, group.mesh, zeros, setting.offload, setting.precision, setting.recompute,
           setting.microbatches, cuda)  # fmt: skip
    if key not in layers.passes:
        layers.passes[key] = StageMemory(first, end, layers, group, setting, cuda)
    found: StageMemory = layers.passes[key]
    return found


@dataclass(frozen=True, slots=True)
class _Summed:
    """Parameters of a stage whose gradients are summed in the same way."""

    share: Share
    zero: int
    ranks: int
    own: Floats  # elements at every position
    arrived: Floats  # elements that have gradients when a position's backward runs
    complete: Floats  # elements whose gradients are complete

    @property
    def all(self) -> float:
        return float(self.own.sum())

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
        self, first: int, end: int, layers: Layers, group: Group, setting: Setting, cuda: bool
    ) -> None:
        self.first, self.end, self.layers, self.setting = first, end, layers, setting
        self.group, self.cuda = group, cuda
        self.mode = _mode(setting)
        self.summed = list(self._summed())
        self.borrowed = sum(
            numel for numel, users in _tied(layers)
            if users[0] < first and any(first <= u < end for u in users[1:])
        )  # fmt: skip
        self.received = float(self.whole("crossing")[first]) if first else 0.0
        self.sends = float(self.whole("crossing")[end]) if end < layers.fold.size else 0.0
        self.waiting = float(self.cut("waiting").sum())
        work = layers.work
        self.batch = work.inputs_bytes * setting.microbatches if cuda else work.batch_bytes
        self._needs: dict[tuple[str, str], Need] = {}
        self._gathered()
        self._activations()
        self.offloaded = 0.0  # of a micro-batch, to host memory and back
        if "activations" in setting.offload and cuda:
            self.offloaded = 0.9 * self.kept
            self.kept -= self.offloaded

    def need(self, action: str, kind: str = "") -> Need:
        """The most that an action F, B, I or W needs; `kind` says which backward of a step."""
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

    def whole(self, name: str) -> Floats:
        """An array of the work at every position of the model."""
        key = ("spread", name)
        if key not in self.layers.passes:
            self.layers.passes[key] = self.layers.fold.spread(getattr(self.layers.work, name))
        found: Floats = self.layers.passes[key]
        return found

    def cut(self, name: str) -> Floats:
        """An array of the work at the positions of the stage."""
        return self.whole(name)[self.first : self.end]

    @cached_property
    def talking(self) -> frozenset[tuple[str, ...]]:
        """The mesh axes along which a rank talks, where that is not with all ranks."""
        along = {talk.axes for talk in self.layers.work.talks}
        along |= {axes for axes, _, _ in self.layers.parameters(self.setting)}
        sizes = dict(self.group.mesh.axes)
        found = {tuple(a for a in sizes if a in axes and sizes[a] > 1) for axes in along}
        every = self.group.along(tuple(sizes)).shape[-1] == self.setting.num_ranks
        return frozenset(f for f in found if f and not (every and len(f) == len(sizes)))

    # --- parameters --------------------------------------------------------------------------

    def _summed(self) -> Iterator[_Summed]:
        first, end = self.first, self.end
        for (axes, zero, _), share in self.layers.parameters(self.setting).items():
            own = np.diff(share.numel[first : end + 1])
            complete = share.numel[end] - share.numel[first:end]
            arrived = np.maximum(share.arrives[end] - share.arrives[first:end], complete)
            ranks = self.group.along(axes).shape[-1]
            yield _Summed(share, zero, ranks, own, arrived, complete)

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
        return SIZES.get(self.setting.precision.master, mine.share.itemsize)

    def _gradient(self, mine: _Summed) -> int:
        precision = self.setting.precision
        return SIZES.get(precision.gradients or precision.master, mine.share.itemsize)

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
        """What a position's own gradients need before they are added, or are of their type."""
        size, made = self._gradient(mine), mine.share.itemsize
        each = made if begun or size != made else 0
        if begun and size != made:
            each += size  # converted, then added
        return mine.own * each

    def _under_way(self, mine: _Summed) -> Floats:
        """Copies of gradients that are being summed over ranks."""
        wire = SIZES.get(self.setting.precision.reduce, self._gradient(mine))
        if mine.zero < 2 and wire == self._gradient(mine):
            return np.zeros_like(mine.own)
        return np.minimum(mine.complete * wire, OUTSTANDING_BYTES + mine.own * wire)

    def _gathered(self) -> None:
        """Bytes of parameters that are whole, at every position of forward and of backward."""
        shape = self.end - self.first
        self.whole_forward, self.whole_backward = np.zeros(shape), np.zeros(shape)
        self.root = 0.0
        shares = [s for s in self.summed if s.zero == 3 and s.sharded]
        if not shares:
            return
        runs = [(n, a - self.first, b - self.first)
                for n, a, b in self.layers.fold.runs(self.first, self.end)]  # fmt: skip
        sizes = [
            sum(float(s.own[a:b].sum()) * s.share.itemsize for s in shares) for _, a, b in runs
        ]
        self.root = sum(size for size, (name, _, _) in zip(sizes, runs, strict=True) if not name)
        units = [(size, a, b) for size, (name, a, b) in zip(sizes, runs, strict=True) if name]
        for i, (size, a, b) in enumerate(units):
            following = units[i + 1][0] if i + 1 < len(units) else 0.0
            self.whole_forward[a:b] = size + following
            self.whole_backward[a:b] = size + (units[i - 1][0] if i else 0.0)

    # --- activations -------------------------------------------------------------------------

    def _activations(self) -> None:
        """What is kept at every position in backward, and the second forward of blocks."""
        held, plain = self.cut("held" + self.mode), self.cut("held")
        # What of the stages before is kept here: of a block that is cut, or as it enters the first.
        before = self.whole("saved" + self.mode)[: self.first].sum()
        self.begun = max(float(before - self.whole("held" + self.mode)[: self.first].sum()), 0.0)
        self.entered = 0.0
        if self.first:  # what is received stays, needed or not; the rest each stage has for itself
            counted = self.begun + self._entering()
            self.entered = max(self.received - counted, 0.0)
            self.entered += float(self.whole("shared")[self.first])
        kept = np.cumsum(held)
        self.kept = self.entered + (float(kept[-1]) if len(kept) else 0.0)
        self.again = np.zeros_like(kept)
        if self.mode:
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
            self.again = np.where(inside, again, 0.0)
            kept = np.where(inside, kept_again, kept)
        self.kept_at = self.entered + kept

    @cached_property
    def incoming(self) -> Floats:
        """Gradients from the next stage, which stay until backward has run; the last has them."""
        held = np.full(self.end - self.first, self.sends)
        held[-1:] = 0.0
        return held

    def _entering(self) -> float:
        """What enters the first block of the stage, and is kept there."""
        _, _, end = next(iter(self.layers.fold.runs(self.first, self.end)))
        return float(self.whole("entering" + self.mode)[self.first : end].sum())

    def _forward(self) -> Need:
        saved = self.cut("saved" + self.mode)
        kept = np.cumsum(saved) - saved
        rest = self.cut("unsaved" + self.mode) + self.cut("forward_extra") + self.whole_forward
        entered = self.entered + min(self.received, self.begun)
        return _most(np.zeros_like(kept), kept + entered, rest)

    def _backward(self, kind: str) -> Need:
        gradients = self._parameter_gradients(kind)
        rest = self.cut("gradients") + self.cut("backward_extra") + self.incoming
        needed = np.maximum(self.kept_at + rest, self.entered + self.again)
        return _most(gradients, self.kept_at, needed - self.kept_at + self.whole_backward)

    def _inputs(self) -> Need:
        waiting = self.cut("waiting")
        later = waiting[::-1].cumsum()[::-1] - waiting
        rest = self.cut("gradients") + self.cut("backward_extra") + self.incoming
        rest += self.whole_backward
        needed = np.maximum(self.kept_at + rest, self.entered + self.again)
        return _most(np.zeros_like(later), self.kept_at + later, needed - self.kept_at)

    def _weight(self, kind: str) -> Need:
        gradients = self._parameter_gradients(kind)
        return _most(gradients, np.cumsum(self.cut("waiting")), np.zeros_like(gradients))


def _most(gradients: Floats, kept: Floats, rest: Floats) -> Need:
    total = gradients + kept + rest
    if not len(total):
        return Need()
    at = int(total.argmax())
    return Need(float(gradients[at]), float(kept[at]), float(rest[at]))


def _mode(setting: Setting) -> str:
    if setting.recompute == "none":
        return ""
    return "_selective" if setting.recompute == "selective" else "_full"


def _blocks(fold: Fold, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """For each position where its block begins and ends in this stage; -1 outside of blocks."""
    starts, ends = np.full(end - first, -1), np.full(end - first, -1)
    for name, a, b in fold.runs(first, end):
        if name:
            starts[a - first : b - first] = a - first
            ends[a - first : b - first] = b - first
    return starts, ends


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


def _tied(layers: Layers) -> list[tuple[float, list[int]]]:
    """Parameters of one position that are used at others, too: elements, and positions."""
    if "tied" not in layers.passes:
        fold, found = layers.fold, []
        for held in layers.work.parameters:
            if held.others and held.requires_grad and fold.copies[held.node] == 1:
                users = np.flatnonzero(np.isin(fold.index, (held.node, *held.others)))
                found.append((float(held.numel), users.tolist()))
        layers.passes["tied"] = found
    result: list[tuple[float, list[int]]] = layers.passes["tied"]
    return result
