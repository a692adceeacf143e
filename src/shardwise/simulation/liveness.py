"""Liveness of the values of a rank's program and of their gradients: the memory of a `Workload`.

A value that autograd saves lives from the node that makes it until, in backward, the first node
that needs it is done: `saved` counts it at the former, `freed` at the latter; values from another
block count where they enter (`entering`). With recomputation a block saves what enters it, and with
"selective" also the results of products.

Backward follows autograd: a gradient lives from the last use of its value to the node
that made it; gradients of several uses are added in place where nothing else shares the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.arrays import Floats
from shardwise.cost import Kernel
from shardwise.runtime.memory import SHORT

MODES = ("", "_selective", "_full")

# Calls whose weight gradients zero-bubble schedules compute later (`runtime.pipeline.weight_grad`).
DEFERRED = {
    "linear", "addmm", "matmul", "mm", "embedding", "convolution", "conv1d", "conv2d", "conv3d",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory of one step of a program; names are those of the rank's values.

    `results` names the memory of every result: its own, or that of an operand. `gradients` are the
    new bytes of an operand's gradient, 0 where it shares the memory of a result's gradient.
    """

    node: int
    operands: tuple[str, ...]
    results: tuple[tuple[str, str], ...]  # value, memory
    keeps: frozenset[str] = frozenset()  # memory of operands or results that backward needs
    own_bytes: float = 0.0  # kept beside them
    result_bytes: float = 0.0  # of these, what a product itself makes, not what it is made from
    made_bytes: float = 0.0  # of results with memory of their own, with what is temporary
    gradients: tuple[tuple[str, float], ...] = ()  # value, new bytes
    backward_temporary_bytes: float = 0.0
    product: bool = False  # selective recomputation keeps its results
    waits: bool = False  # its weight's gradient may be computed later
    is_move: bool = False
    passing: bool = False  # its backward needs no values: the second forward may end before it


@dataclass(slots=True)
class _Memory:
    """One allocation: the node that makes it, and the nodes that use and need it."""

    size: float
    made: int
    home: str = ""  # the block that makes it
    used: list[tuple[int, str]] = field(default_factory=list)  # nodes and their blocks
    keepers: list[int] = field(default_factory=list)
    product: bool = False
    trained: bool = False


class Liveness:
    """The memory of one program, over the nodes of its graph."""

    def __init__(
        self,
        moments: Sequence[Moment],
        blocks: Sequence[str],
        sizes: Mapping[str, float],
        trained: frozenset[str],
        shown: frozenset[str] = frozenset(),
    ) -> None:
        self.moments, self.blocks, self.sizes, self.trained = moments, blocks, sizes, trained
        self.shown = shown  # memory of what the model returns, which lives to the end of forward
        self.count = len(blocks)
        self.memory: dict[str, _Memory] = {}
        self._read()

    def _read(self) -> None:
        roots: dict[str, str] = {}
        kept_products = self._kept_products()
        around = self._around()
        for number, moment in enumerate(self.moments):
            block = "" if number in around else self.blocks[moment.node]
            for name in moment.operands:
                allocation = self.memory.get(roots.get(name, name))
                if allocation is not None:
                    allocation.used.append((moment.node, block))
            for name, memory in moment.results:
                roots[name] = memory
                if memory == name:
                    self.memory[name] = _Memory(self.sizes[name], moment.node, block)
                    self.memory[name].trained = name in self.trained
                    self.memory[name].product = number in kept_products
            for memory in moment.keeps:
                if memory in self.memory:
                    self.memory[memory].keepers.append(moment.node)

    def _around(self) -> set[int]:
        """Return redistributions whose results several blocks use: they run before the first."""
        users: dict[str, set[str]] = {}
        for moment in self.moments:
            for name in moment.operands:
                users.setdefault(name, set()).add(self.blocks[moment.node])
        return {
            number
            for number, moment in enumerate(self.moments)
            if moment.is_move and any(len(users.get(name, ())) > 1 for name, _ in moment.results)
        }

    def _kept_products(self) -> set[int]:
        """Return the steps whose results selective recomputation saves (`runtime.recompute`).

        These are all products of a block, without the last one if nothing after it is needed.
        """
        numbers: set[int] = set()
        last = -1
        block, needed = "", True
        for number, moment in enumerate(self.moments):
            if self.blocks[moment.node] != block:
                if not needed:
                    numbers.discard(last)
                block, needed = self.blocks[moment.node], True
            if moment.product and block:
                numbers.add(number)
                last, needed = number, False
            elif not moment.passing:
                needed = True
        if not needed:
            numbers.discard(last)
        return numbers

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays of a `Workload` that describe memory, by their names."""
        names = ("saved", "freed", "entering", "unsaved")
        arrays = {f"{n}{m}": np.zeros(self.count + 1) for n in names for m in MODES}
        arrays["shared"] = np.zeros(self.count + 1)
        for moment in self.moments:
            inside = bool(self.blocks[moment.node])
            again = moment.result_bytes if moment.product else 0.0
            own = (moment.own_bytes, again, 0.0) if inside else (moment.own_bytes,) * 3
            for mode, size in zip(MODES, own, strict=True):
                arrays["saved" + mode][moment.node] += size
                arrays["freed" + mode][moment.node] += size
        for name, memory in self.memory.items():
            for mode, keepers in zip(MODES, self._keepers(memory), strict=True):
                self._place(arrays, mode, memory, keepers, name in self.shown)
        for mode in MODES:
            arrays["unsaved" + mode] = np.cumsum(arrays["unsaved" + mode])
        arrays["shared"] = np.cumsum(arrays["shared"])
        arrays = {name: array[: self.count] for name, array in arrays.items()}
        return arrays | self._forward() | self._backward() | {"waiting": self._waiting()}

    def _keepers(self, memory: _Memory) -> tuple[list[int], list[int], list[int]]:
        """Return the nodes whose backward needs a saved value, for each recomputation mode."""
        home = memory.home
        outside = [k for k in memory.keepers if not self.blocks[k]]
        entered = [u for u, block in memory.used if block and block != home]
        full = sorted({*outside, *entered})
        selective = full
        if home and memory.product:
            inside = [k for k in memory.keepers if self.blocks[k] == home]
            selective = sorted({*full, *(inside or [memory.made])})
        return memory.keepers, selective, full

    def _place(
        self,
        arrays: Mapping[str, Floats],
        mode: str,
        memory: _Memory,
        keepers: list[int],
        shown: bool,
    ) -> None:
        at = memory.made
        last = max((node for node, _ in memory.used), default=at)
        # A value that one block passes to the next counts where that needs it. A value of many
        # users counts once, where it is made, because a folded node would count it for every layer;
        # the function that calls the blocks holds it until it returns.
        users = {block for _, block in memory.used}
        many = len(users | {memory.home}) > 2
        returned = bool(memory.home) and "" in users  # a variable of the function around the blocks
        last = self.count - 1 if many or shown or returned else last
        if not keepers:
            _between(arrays["unsaved" + mode], at, last + 1, memory.size)
            return
        first = at if many else min(keepers)
        enters = not many and self.blocks[first] != memory.home
        if enters:  # between layers that are folded into one, only the node that it enters is there
            _between(arrays["unsaved" + mode], at, first, memory.size)
            arrays["entering" + mode][first] += memory.size
        arrays["saved" + mode][first if enters else at] += memory.size
        arrays["freed" + mode][first] += memory.size
        if not mode and not memory.trained:  # a later stage recomputes it for itself
            _between(arrays["shared"], first, max(keepers) + 1, memory.size)

    def _forward(self) -> dict[str, Floats]:
        """Return the peak of what a node's steps have made, with their temporary memory."""
        extra, made = np.zeros(self.count), np.zeros(self.count)
        for moment in self.moments:
            at = moment.node
            extra[at] = max(extra[at], made[at] + moment.made_bytes)
            made[at] += moment.own_bytes
            made[at] += sum(self.sizes[name] for name, memory in moment.results if name == memory)
        return {"forward_extra": extra}

    def _waiting(self) -> Floats:
        """Return operands and results' gradients that deferred weight gradients wait with."""
        waiting, counted = np.zeros(self.count), set[str]()
        for moment in self.moments:
            if moment.waits:
                waiting[moment.node] += sum(self.sizes[name] for name, _ in moment.results)
                new = [m for m in moment.keeps if m in self.memory and m not in counted]
                counted.update(new)
                waiting[moment.node] += sum(self.memory[m].size for m in new)
        return waiting

    def _backward(self) -> dict[str, Floats]:
        """Return `gradients` that live when a node's backward begins, and the peak on top."""
        before, peak = np.zeros(self.count), np.zeros(self.count)
        gradients = _Gradients()
        seen: set[int] = set()
        for moment in reversed(self.moments):
            at = moment.node
            if not seen:
                for name, _ in moment.results:  # the loss, or what later stages give back
                    if name in self.trained:
                        gradients.give(name, self.sizes[name])
            if at not in seen:
                seen.add(at)
                before[at] = gradients.live
            peak[at] = max(peak[at], gradients.play(moment, self.sizes))
        return {"gradients": before, "backward_extra": np.maximum(peak - before, 0.0)}


class _Gradients:
    """The gradients of values while backward runs."""

    def __init__(self) -> None:
        self.live = 0.0
        self._of: dict[str, int] = {}  # value -> memory
        self._sizes: dict[int, float] = {}
        self._shares: dict[int, int] = {}
        self._next = 0

    def give(self, name: str, size: float) -> None:
        self._next += 1
        self._sizes[self._next], self._shares[self._next] = size, 0
        self.live += size
        self._share(name, self._next)

    def _share(self, name: str, memory: int) -> None:
        self._of[name] = memory
        self._shares[memory] += 1

    def _drop(self, memory: int) -> None:
        self._shares[memory] -= 1
        if not self._shares[memory]:
            self.live -= self._sizes.pop(memory)

    def play(self, moment: Moment, sizes: Mapping[str, float]) -> float:
        """Run one step's backward, and return its peak."""
        names = [name for name, _ in moment.results]
        given = [self._of.pop(name) for name in names if name in self._of]
        if not given:
            return self.live
        peak = self.live + moment.backward_temporary_bytes
        peak += sum(size for _, size in moment.gradients)
        for name, size in moment.gradients:
            if name not in self._of:
                if size:
                    self.give(name, size)
                else:
                    self._share(name, given[0])
                continue
            old = self._of[name]  # one more use: added in place, if nothing else has the memory
            if self._shares[old] > 1:
                self.give(name, sizes[name])
                self._drop(old)
                peak = max(peak, self.live + size)
        for memory in given:
            self._drop(memory)
        return peak


def _between(array: Floats, first: int, last: int, size: float) -> None:
    """Add at the positions after `first` and before `last`, as differences."""
    if last > first + 1:
        array[first + 1] += size
        array[last] -= size


def is_cheap(kernel: Kernel) -> bool:
    """Return whether a kernel computes attention scores, which `runtime.recompute` recomputes."""
    if kernel.op not in ("bmm", "baddbmm"):
        return False
    batch, m, n, k = kernel.shape
    return k <= SHORT and batch * m * n > batch * k * (m + n)
