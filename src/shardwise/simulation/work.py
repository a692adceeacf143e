"""What one rank does for one micro-batch, node by node, before anything is timed.

Enters: the lowered program of one rank. Leaves: `Work`: kernels, collectives and bytes of every
node of the graph. Times follow from a cluster (`times`), memory from liveness (`memory`).

Nearly everything is linear in the rows of a micro-batch: `between` gives the work of any number of
rows from that of two programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import CallCost, Kernel, Signature, call_signature, cost_of
from shardwise.ir import Graph
from shardwise.program.program import RankProgram, Step

Floats = NDArray[np.float64]
FORWARD, BACKWARD, WEIGHT = 0, 1, 2  # phases; WEIGHT is what only gradients of parameters need

# Move -> (collective of forward, collective of backward); the runtime's table of duals.
TALKS = {
    "rt.gather": ("all_gather", ""),
    "rt.gather_fanout": ("all_gather", "reduce_scatter"),
    "rt.reduce": ("all_reduce", ""),
    "rt.reduce_fanout": ("all_reduce", "all_reduce"),
    "rt.reduce_scatter": ("reduce_scatter", "all_gather"),
    "rt.shard": ("", "all_gather"),
    "rt.fanout": ("", "all_reduce"),
    "rt.all_to_all": ("all_to_all", "all_to_all"),
    "rt.as_partial": ("", ""),
    "rt.take": ("", ""),
    "rt.pad": ("", ""),
    "rt.once": ("", ""),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, the node that it belongs to, and when it runs."""

    node: int
    phase: int
    kernel: Kernel
    product: bool = False  # its result is kept by selective recomputation


@dataclass(frozen=True, slots=True)
class Talk:
    """A collective over mesh axes that a node waits for."""

    node: int
    phase: int
    op: str
    axes: tuple[str, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as a rank holds it; `node` is the first that uses it, `others` the rest."""

    name: str
    node: int
    others: tuple[int, ...]
    numel: int
    itemsize: int
    sync: tuple[str, ...]
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arrays have one entry per node of the small graph, in bytes."""

    rows: float
    launches: tuple[Launch, ...]
    calls: tuple[tuple[int, Signature, bool], ...]  # node, call, whether a product: to look up
    talks: tuple[Talk, ...]
    parameters: tuple[Held, ...]
    saved: Floats  # made here and kept for backward
    saved_full: Floats  # the same where blocks are recomputed
    saved_selective: Floats  # the same where blocks keep their products only
    unsaved: Floats  # alive after this node without being kept
    gradients: Floats  # of values made before and used after this node, alive in its backward
    forward_extra: Floats  # results and memory of its own while the node runs
    backward_extra: Floats
    crossing: Floats  # made before this node, used by it or later: what a cut here would send
    notes: tuple[str, ...] = ()

    ARRAYS = (
        "saved", "saved_full", "saved_selective", "unsaved", "gradients", "forward_extra",
        "backward_extra", "crossing",
    )  # fmt: skip

    @property
    def flops(self) -> float:
        """Of all kernels, forward and backward."""
        return sum(launch.kernel.flops for launch in self.launches)

    def between(self, other: Work, rows: float) -> Work:
        """The work of another number of rows, on the line through this one and `other`."""
        share = (rows - self.rows) / (other.rows - self.rows)

        def line(a: float, b: float) -> float:
            return max(a + (b - a) * share, 0.0)

        return replace(
            self,
            rows=rows,
            launches=tuple(
                replace(a, kernel=_between(a.kernel, b.kernel, line))
                for a, b in zip(self.launches, other.launches, strict=True)
            ),
            talks=tuple(
                replace(a, num_bytes=line(a.num_bytes, b.num_bytes))
                for a, b in zip(self.talks, other.talks, strict=True)
            ),
            **{n: self._array(other, n, share) for n in self.ARRAYS},
        )

    def _array(self, other: Work, name: str, share: float) -> Floats:
        mine, theirs = getattr(self, name), getattr(other, name)
        return np.maximum(mine + (theirs - mine) * share, 0.0)

    def alike(self, other: Work) -> bool:
        """Whether both have the same kernels and collectives, in other sizes."""
        return [(x.node, x.phase, x.kernel.op) for x in self.launches] == [
            (x.node, x.phase, x.kernel.op) for x in other.launches
        ] and [(t.node, t.op, t.axes) for t in self.talks] == [
            (t.node, t.op, t.axes) for t in other.talks
        ]


def _between(a: Kernel, b: Kernel, line: object) -> Kernel:
    shape = tuple(max(1, round(line(x, y))) for x, y in zip(a.shape, b.shape, strict=True))  # type: ignore[operator]
    return replace(a, flops=line(a.flops, b.flops), bytes=line(a.bytes, b.bytes), shape=shape)  # type: ignore[operator]


def work_of(program: RankProgram, graph: Graph, blocks: Sequence[str], rows: float) -> Work:
    """The work of a rank's program, for a micro-batch of `rows`."""
    return _Reader(program, graph, blocks).read(rows)


class _Reader:
    """One pass over the steps of a program."""

    def __init__(self, program: RankProgram, graph: Graph, blocks: Sequence[str]) -> None:
        self.program, self.graph, self.blocks = program, graph, blocks
        self.index = {node.name: i for i, node in enumerate(graph.nodes)}
        self.parameters = {p.value for p in graph.parameters}
        sources = [*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants]
        self.sources = {s.value for s in sources}
        self.root: dict[str, str] = {}  # a view -> what has the memory
        self.made: dict[str, int] = {}  # memory -> the node that makes it
        self.used: dict[str, list[int]] = {}  # memory -> nodes that use it
        self.keepers: dict[str, list[int]] = {}  # memory -> nodes whose backward needs it
        self.products: set[str] = set()
        self.strides: dict[str, tuple[int, ...]] = {}
        self.calls: list[tuple[int, Signature, bool]] = []
        self.launches: list[Launch] = []
        self.talks: list[Talk] = []
        count = len(graph.nodes)
        self.own, self.forward, self.backward = np.zeros(count), np.zeros(count), np.zeros(count)
        self.notes: dict[str, None] = {}

    def read(self, rows: float) -> Work:
        at = 0
        for step in self.program.steps:
            at = self.index.get(step.node, at)
            if step.is_move:
                self._move(step, at)
            else:
                self._call(step, at)
        return Work(
            rows=rows,
            launches=tuple(self.launches),
            calls=tuple(self.calls),
            talks=tuple(self.talks),
            parameters=tuple(self._parameters()),
            forward_extra=self.forward,
            backward_extra=self.backward,
            notes=tuple(self.notes),
            **self._memory(),
        )

    def _bytes(self, name: str) -> int:
        return self.program.values[name].type.num_bytes

    def _has_grad(self, name: str) -> bool:
        return self.program.values[name].value in self.program.carries_grad

    def _use(self, name: str, at: int) -> str:
        root = self.root.get(name, name)
        self.used.setdefault(root, []).append(at)
        return root

    def _move(self, step: Step, at: int) -> None:
        source, target = step.inputs[0], step.outputs[0]
        self._use(source, at)
        self.made[target] = at
        whole = float(max(self._bytes(source), self._bytes(target)))
        if step.fn == "rt.all_to_all":
            whole = float(self._bytes(source))
        forward, backward = TALKS[step.fn]
        if forward:
            self.talks.append(Talk(at, FORWARD, forward, step.axes, whole))
        if backward and self._has_grad(source):
            self.talks.append(Talk(at, BACKWARD, backward, step.axes, whole))
        self.forward[at] = max(self.forward[at], self._bytes(target))
        if self._has_grad(source):
            self.backward[at] = max(self.backward[at], whole)

    def _call(self, step: Step, at: int) -> None:
        call = self._signature(step)
        cost = cost_of(call)
        if cost.note:
            self.notes.setdefault(cost.note)
        roots = [self._use(n, at) for n in step.inputs]
        self._launch(call, cost, at)
        self._define(step, cost, roots, at)
        for phase, found in ((FORWARD, cost.talks), (BACKWARD, cost.talks_backward)):
            self.talks += [Talk(at, phase, t.op, t.axes, float(t.num_bytes)) for t in found]
        for saved in cost.saved:
            if saved.operand is not None:
                self.keepers.setdefault(roots[saved.operand], []).append(at)
            elif saved.result is not None:
                out = step.outputs[saved.result]
                self.keepers.setdefault(self.root.get(out, out), []).append(at)
            else:
                self.own[at] += saved.num_bytes
        given = sum(self._bytes(o) for o in step.outputs if self._has_grad(o))
        fresh = sum(size for i, size in cost.gradients if step.inputs[i] not in self.parameters)
        if cost.backward:
            needed = given + fresh + cost.backward_temporary_bytes
            self.backward[at] = max(self.backward[at], needed)

    def _signature(self, step: Step) -> Signature:
        names = step.inputs
        trained = step.grad_enabled and any(self._has_grad(o) for o in step.outputs)
        return call_signature(
            step.fn,
            step.args,
            step.kwargs,
            [self.program.values[n].type for n in names],
            frozenset(i for i, n in enumerate(names) if trained and self._has_grad(n)),
            frozenset(i for i, n in enumerate(names) if n in self.parameters),
            results=[self.program.values[o].type for o in step.outputs],
            strides=[self.strides.get(n) for n in names],
            autocast=step.autocast,
            function=self.graph.functions.get(step.fn),
        )

    def _define(self, step: Step, cost: CallCost, roots: Sequence[str], at: int) -> None:
        """Note what a call makes: memory of its own, or other views of an operand's."""
        made = 0
        for index, out in enumerate(step.outputs):
            alias = cost.aliases[index] if index < len(cost.aliases) else None
            if alias is not None:
                self.root[out] = roots[alias]
            else:
                self.made[out] = at
                made += self._bytes(out)
            if index < len(cost.strides) and not _is_dense(
                self.program.values[out].type.shape, cost.strides[index]
            ):
                self.strides[out] = cost.strides[index]
        if any(kernel.kind != "memory" for kernel in cost.forward):
            self.products |= set(step.outputs)
        self.forward[at] = max(self.forward[at], made + cost.forward_temporary_bytes)

    def _launch(self, call: Signature, cost: CallCost, at: int) -> None:
        product = any(kernel.kind != "memory" for kernel in cost.forward)
        self.calls.append((at, call, product))
        self.launches += [Launch(at, FORWARD, k, product) for k in cost.forward]
        weight = list(cost.weight)
        for kernel in cost.backward:
            if kernel in weight:
                weight.remove(kernel)
                self.launches.append(Launch(at, WEIGHT, kernel))
            else:
                self.launches.append(Launch(at, BACKWARD, kernel))

    def _memory(self) -> dict[str, Floats]:
        count = len(self.graph.nodes)
        found = {n: np.zeros(count + 1) for n in Work.ARRAYS}
        found["saved"][:count] += self.own
        outside = np.array([not block for block in self.blocks])
        found["saved_full"][:count] += np.where(outside, self.own, 0.0)
        found["saved_selective"][:count] += np.where(outside, self.own, 0.0)
        for root, at in self.made.items():
            size, last = self._bytes(root), max(self.used.get(root, [at]))
            home, kept = self.blocks[at], self.keepers.get(root)
            leaves = any(self.blocks[u] != home for u in self.used.get(root, ()))
            if home:
                again, product = leaves, bool(kept) and root in self.products
            else:
                again = leaves or any(not self.blocks[k] for k in kept or ())
                product = False
            if kept:
                found["saved"][at] += size
            else:
                _add(found["unsaved"], at, last, size)
            found["saved_full"][at] += size * again
            found["saved_selective"][at] += size * (again or product)
            if self._has_grad(root):
                _add(found["gradients"], at, last, size)
        for name, last in self._original().items():
            at, size = self.made[name], self._bytes(name)
            found["crossing"][at + 1] += size
            found["crossing"][last + 1] -= size
        for name in ("unsaved", "gradients", "crossing"):
            found[name] = np.cumsum(found[name])
        return {
            n: found[n][:count] for n in Work.ARRAYS if n not in ("forward_extra", "backward_extra")
        }

    def _original(self) -> Mapping[str, int]:
        """Values that the graph's nodes make and later nodes use, with their last use."""
        last: dict[str, int] = {}
        for index, node in enumerate(self.graph.nodes):
            for name in node.inputs:
                root = self.root.get(name, name)
                if root in self.made and self._has_grad(root):
                    last[root] = index
        return last

    def _parameters(self) -> Iterator[Held]:
        for storage in self.program.parameters:
            users = sorted(set(self.used.get(storage.value, ())))
            if users:
                numel = int(np.prod(storage.local_shape, dtype=np.int64))
                yield Held(
                    name=storage.name,
                    node=users[0],
                    others=tuple(users[1:]),
                    numel=numel,
                    itemsize=storage.dtype.itemsize,
                    sync=storage.sync,
                    requires_grad=storage.requires_grad,
                )


def _add(array: Floats, first: int, last: int, size: float) -> None:
    """Add at the positions after `first` and before `last`, as differences."""
    if last > first:
        array[first + 1] += size
        array[last] -= size


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
