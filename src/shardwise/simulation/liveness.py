"""Liveness of the values of a rank's program and of their gradients: the memory of a `Workload`.

A value that autograd saves lives from the node that makes it until, in backward, the first node
that needs it is done: `saved` counts it at the former, `freed` at the latter; values from another
block count where they enter (`entering`). With recomputation a block saves the values that enter
it, and with "selective" also the results of products.

Backward follows autograd: a gradient lives from the last use of its value to the node that made the
value; gradients of several uses are added in place where nothing else shares the memory.
"""

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

    `results` pairs every result with its memory: a new allocation, named like the result, or that
    of an operand. `gradients` are the new bytes of an operand's gradient, 0 where it shares the
    memory of a result's gradient.
    """

    node: int
    operands: tuple[str, ...]
    results: tuple[tuple[str, str], ...]  # value, memory
    saves: frozenset[str] = frozenset()  # memory of operands or results that backward needs
    own_bytes: float = 0.0  # that backward needs besides, such as a mask
    result_bytes: float = 0.0  # the part of `own_bytes` that a product makes, not its operands
    made_bytes: float = 0.0  # new results and temporary memory
    gradients: tuple[tuple[str, float], ...] = ()  # value, new bytes
    backward_temporary_bytes: float = 0.0
    product: bool = False  # selective recomputation saves its results
    defers: bool = False  # its weight's gradient may be computed later
    is_move: bool = False
    passing: bool = False  # its backward needs no values: the second forward may end before it


@dataclass(slots=True)
class _Memory:
    """One allocation: the node that makes it, and the nodes that use and save it."""

    size: float
    made: int
    home: str = ""  # the block that makes it
    used: list[tuple[int, str]] = field(default_factory=list)  # nodes and their blocks
    savers: list[int] = field(default_factory=list)
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
        self.shown = shown  # memory of the model's outputs, which live to the end of forward
        self.count = len(blocks)
        self.memory: dict[str, _Memory] = {}
        self._read()

    def _read(self) -> None:
        roots: dict[str, str] = {}
        saved_products, hoisted = self._saved_products(), self._hoisted()
        for number, moment in enumerate(self.moments):
            block = "" if number in hoisted else self.blocks[moment.node]
            for name in moment.operands:
                allocation = self.memory.get(roots.get(name, name))
                if allocation is not None:
                    allocation.used.append((moment.node, block))
            for name, memory in moment.results:
                roots[name] = memory
                if memory == name:
                    self.memory[name] = _Memory(self.sizes[name], moment.node, block)
                    self.memory[name].trained = name in self.trained
                    self.memory[name].product = number in saved_products
            for memory in moment.saves:
                if memory in self.memory:
                    self.memory[memory].savers.append(moment.node)

    def _hoisted(self) -> set[int]:
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

    def _saved_products(self) -> set[int]:
        """Return the steps whose results selective recomputation saves (`runtime.recompute`).

        These are all products of a block, except the last one if backward needs nothing after it.
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
            sizes = (moment.own_bytes,) * 3
            if self.blocks[moment.node]:
                sizes = (moment.own_bytes, moment.result_bytes if moment.product else 0.0, 0.0)
            for mode, size in zip(MODES, sizes, strict=True):
                arrays["saved" + mode][moment.node] += size
                arrays["freed" + mode][moment.node] += size
        for name, memory in self.memory.items():
            for mode, savers in zip(MODES, self._savers(memory), strict=True):
                self._place(arrays, mode, memory, savers, name in self.shown)
        for mode in MODES:
            arrays["unsaved" + mode] = np.cumsum(arrays["unsaved" + mode])
        arrays["shared"] = np.cumsum(arrays["shared"])
        arrays = {name: array[: self.count] for name, array in arrays.items()}
        return arrays | self._forward() | self._backward() | {"waiting": self._waiting()}

    def _savers(self, memory: _Memory) -> tuple[list[int], list[int], list[int]]:
        """Return the nodes whose backward needs a saved value, for each recomputation mode."""
        home = memory.home
        outside = [node for node in memory.savers if not self.blocks[node]]
        entered = [node for node, block in memory.used if block and block != home]
        full = sorted({*outside, *entered})
        selective = full
        if home and memory.product:
            inside = [node for node in memory.savers if self.blocks[node] == home]
            selective = sorted({*full, *(inside or [memory.made])})
        return memory.savers, selective, full

    def _place(
        self,
        arrays: Mapping[str, Floats],
        mode: str,
        memory: _Memory,
        savers: list[int],
        shown: bool,
    ) -> None:
        made = memory.made
        last = max((node for node, _ in memory.used), default=made)
        # A value that one block passes to the next counts where that block needs it. A value that
        # many blocks use counts once, where it is made, because a folded node would count it for
        # every layer; the function that calls the blocks refers to it until it returns.
        users = {block for _, block in memory.used}
        many = len(users | {memory.home}) > 2
        returned = bool(memory.home) and "" in users  # to a variable of that function
        last = self.count - 1 if many or shown or returned else last
        if not savers:
            _between(arrays["unsaved" + mode], made, last + 1, memory.size)
            return
        first = made if many else min(savers)
        enters = not many and self.blocks[first] != memory.home
        if enters:  # of layers that are folded into one, only the node that it enters remains
            _between(arrays["unsaved" + mode], made, first, memory.size)
            arrays["entering" + mode][first] += memory.size
        arrays["saved" + mode][first if enters else made] += memory.size
        arrays["freed" + mode][first] += memory.size
        if not mode and not memory.trained:  # a later stage recomputes it for itself
            _between(arrays["shared"], first, max(savers) + 1, memory.size)

    def _forward(self) -> dict[str, Floats]:
        """Return the peak of the results and temporary memory of each node's steps."""
        extra, made = np.zeros(self.count), np.zeros(self.count)
        for moment in self.moments:
            at = moment.node
            extra[at] = max(extra[at], made[at] + moment.made_bytes)
            made[at] += moment.own_bytes
            made[at] += sum(self.sizes[name] for name, memory in moment.results if name == memory)
        return {"forward_extra": extra}

    def _waiting(self) -> Floats:
        """Return the bytes of operands and gradients that deferred weight gradients need."""
        waiting, counted = np.zeros(self.count), set[str]()
        for moment in self.moments:
            if moment.defers:
                waiting[moment.node] += sum(self.sizes[name] for name, _ in moment.results)
                new = [m for m in moment.saves if m in self.memory and m not in counted]
                counted.update(new)
                waiting[moment.node] += sum(self.memory[m].size for m in new)
        return waiting

    def _backward(self) -> dict[str, Floats]:
        """Return the `gradients` alive when a node's backward begins, and the peak above them."""
        before, peak = np.zeros(self.count), np.zeros(self.count)
        gradients = _Gradients()
        begun: set[int] = set()  # nodes
        for moment in reversed(self.moments):
            at = moment.node
            if not begun:
                for name, _ in moment.results:  # of the loss, or received from later stages
                    if name in self.trained:
                        gradients.allocate(name, self.sizes[name])
            if at not in begun:
                begun.add(at)
                before[at] = gradients.live
            peak[at] = max(peak[at], gradients.run(moment, self.sizes))
        return {"gradients": before, "backward_extra": np.maximum(peak - before, 0.0)}


@dataclass(slots=True, eq=False)
class _Gradient:
    """The memory of one gradient, or of several that share it."""

    size: float
    num_values: int = 0


class _Gradients:
    """The gradients of values while backward runs."""

    def __init__(self) -> None:
        self.live = 0.0
        self._memory: dict[str, _Gradient] = {}  # of every value

    def allocate(self, name: str, size: float) -> None:
        self.live += size
        self._share(name, _Gradient(size))

    def _share(self, name: str, memory: _Gradient) -> None:
        self._memory[name] = memory
        memory.num_values += 1

    def _release(self, memory: _Gradient) -> None:
        memory.num_values -= 1
        if not memory.num_values:
            self.live -= memory.size

    def run(self, moment: Moment, sizes: Mapping[str, float]) -> float:
        """Run one step's backward, and return its peak."""
        names = [name for name, _ in moment.results]
        received = [self._memory.pop(name) for name in names if name in self._memory]
        if not received:
            return self.live
        peak = self.live + moment.backward_temporary_bytes
        peak += sum(size for _, size in moment.gradients)
        for name, size in moment.gradients:
            if name not in self._memory:
                if size:
                    self.allocate(name, size)
                else:
                    self._share(name, received[0])
                continue
            # One more use of the value: its gradient is added in place unless others share it.
            old = self._memory[name]
            if old.num_values > 1:
                self.allocate(name, sizes[name])
                self._release(old)
                peak = max(peak, self.live + size)
        for memory in received:
            self._release(memory)
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
