"""What a micro-batch keeps in a stage from its forward to its backward.

Enters: what every position keeps and needs (`Layers`), and what is computed again. Leaves: `Kept`,
which is the same however parameters are held.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from shardwise.simulation.fold import FoldedGraph
from shardwise.simulation.stages import Layers
from shardwise.simulation.work import Floats


def kept_in(first: int, end: int, layers: Layers, mode: str) -> Kept:
    """What the stage of positions `first:end` keeps; made once."""
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
        """An array of the work at the positions of the stage."""
        return self.layers.whole(name)[self.first : self.end]

    @cached_property
    def incoming(self) -> Floats:
        """Gradients from the next stage, which stay until backward has run; the last has them."""
        held = np.full(self.end - self.first, self.sends)
        held[-1:] = 0.0
        return held

    @cached_property
    def backward(self) -> tuple[Floats, Floats]:
        """What is kept when each position's backward runs, and in the second forward of blocks."""
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
        """What enters the first block of the stage, and is kept there."""
        _, _, end = next(iter(self.layers.fold.runs(self.first, self.end)))
        return float(self.layers.whole("entering" + self.mode)[self.first : end].sum())


def _blocks(fold: FoldedGraph, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """For each position where its block begins and ends in this stage; -1 outside of blocks."""
    starts, ends = np.full(end - first, -1), np.full(end - first, -1)
    for name, a, b in fold.runs(first, end):
        if name:
            starts[a - first : b - first] = a - first
            ends[a - first : b - first] = b - first
    return starts, ends
