"""The workload of one rank for one micro-batch, node by node: kernels, collectives and bytes.

A workload is read from a lowered program, and `costs` turns it into times on a cluster. Since
nearly everything is linear in the rows of a micro-batch, `WorkloadModel` lowers a few programs and
interpolates between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np

from shardwise.arrays import Floats, float_arrays
from shardwise.cluster import Mesh
from shardwise.cost import CallCost, Kernel, Signature, call_signature, cost_of
from shardwise.ir import Graph, Ref
from shardwise.layouts.problem import Assignment
from shardwise.plans import Plan, Resolved, model_fingerprint
from shardwise.program.lower import lower_place
from shardwise.program.program import RankProgram, Step
from shardwise.redistribution import REDISTRIBUTIONS
from shardwise.runtime.memory import PASSING
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Shard
from shardwise.shares import AxisSize, Shares, num_ranks, part
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.liveness import DEFERRED, Liveness, Moment, is_cheap

FORWARD, BACKWARD, WEIGHT = 0, 1, 2  # phases; WEIGHT is the part of backward for parameters


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, the node that it belongs to, and when it runs."""

    node: int
    phase: int
    kernel: Kernel
    product: bool = False  # selective recomputation saves its result


@dataclass(frozen=True, slots=True)
class NodeCollective:
    """A collective over mesh axes that a node waits for."""

    node: int
    phase: int
    op: str
    axes: tuple[str, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A rank's part of a parameter; `node` is the first that uses it, `others` are all later."""

    name: str
    node: int
    others: tuple[int, ...]
    numel: int
    itemsize: int
    sync: tuple[str, ...]
    requires_grad: bool
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a rank for a micro-batch; arrays have the bytes of every node of the small graph.

    Arrays that end in `_full` and `_selective` are for blocks that are recomputed, entirely or
    except for their products.
    """

    rows: float
    launches: tuple[Launch, ...]
    calls: tuple[tuple[int, Signature, bool], ...]  # node, call, whether it is a product
    collectives: tuple[NodeCollective, ...]
    parameters: tuple[LocalParameter, ...]
    saved: Floats  # made here and saved for backward
    saved_full: Floats
    saved_selective: Floats
    freed: Floats  # saved bytes at the first node that needs them, whose backward frees them
    freed_full: Floats
    freed_selective: Floats
    entering: Floats  # the part of `freed` that comes from another block
    entering_full: Floats
    entering_selective: Floats
    unsaved: Floats  # alive after this node without being saved
    unsaved_full: Floats
    unsaved_selective: Floats
    shared: Floats  # saved across this node and computed from the batch alone, by every stage
    gradients: Floats  # of values, alive when the node's backward begins
    forward_extra: Floats  # results and temporary memory while the node runs
    backward_extra: Floats
    waiting: Floats  # operands and gradients that deferred weight gradients need
    crossing: Floats  # made before this node, used by it or later: what a boundary here would send
    buffers: Floats  # buffers and constants that are first used here
    inputs_bytes: float  # the rank's part of the batch
    batch_bytes: float  # the full batch
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """The floating-point operations of all kernels, forward and backward."""
        return sum(launch.kernel.flops for launch in self.launches)

    @property
    def moved_bytes(self) -> float:
        """The bytes that all kernels read and write."""
        return sum(launch.kernel.bytes for launch in self.launches)

    def between(self, other: Workload, rows: float) -> Workload:
        """Return the workload of another number of rows, interpolated between this and `other`."""
        share = (rows - self.rows) / (other.rows - self.rows)

        def line(a: float, b: float) -> float:
            return max(a + (b - a) * share, 0.0)

        def array(name: str) -> Any:
            low, high = getattr(self, name), getattr(other, name)
            return np.maximum(low + (high - low) * share, 0.0)

        return replace(
            self,
            rows=rows,
            inputs_bytes=line(self.inputs_bytes, other.inputs_bytes),
            launches=tuple(
                replace(a, kernel=_between(a.kernel, b.kernel, line))
                for a, b in zip(self.launches, other.launches, strict=True)
            ),
            collectives=tuple(
                replace(a, num_bytes=line(a.num_bytes, b.num_bytes))
                for a, b in zip(self.collectives, other.collectives, strict=True)
            ),
            **{name: array(name) for name in float_arrays(Workload)},
        )

    def has_same_calls(self, other: Workload) -> bool:
        """Return whether both have the same kernels and collectives, possibly of other sizes."""
        return self._calls == other._calls

    @property
    def _calls(self) -> object:
        kernels = [(x.node, x.phase, x.kernel.op, len(x.kernel.shape)) for x in self.launches]
        return kernels, [(c.node, c.op, c.axes) for c in self.collectives]


def _between(a: Kernel, b: Kernel, line: Callable[[float, float], float]) -> Kernel:
    shape = tuple(max(1, round(line(x, y))) for x, y in zip(a.shape, b.shape, strict=True))
    return replace(a, flops=line(a.flops, b.flops), bytes=line(a.bytes, b.bytes), shape=shape)


class _Reader:
    """Read the workload of a rank's program in one pass over its steps."""

    def __init__(self, program: RankProgram, graph: Graph, blocks: Sequence[str]) -> None:
        self.program, self.graph, self.blocks = program, graph, blocks
        self.index = {node.name: i for i, node in enumerate(graph.nodes)}
        self.parameters = {p.value for p in graph.parameters}
        self.root: dict[str, str] = {}  # a view -> the value that owns its memory
        self.made: dict[str, int] = {}  # memory -> the node that makes it
        self.used: dict[str, list[int]] = {}  # memory -> nodes that use it
        self.moments: list[Moment] = []
        self.strides: dict[str, tuple[int, ...]] = {}
        self.calls: list[tuple[int, Signature, bool]] = []
        self.launches: list[Launch] = []
        self.collectives: list[NodeCollective] = []
        self.notes: dict[str, None] = {}

    def read(self, rows: float) -> Workload:
        at = 0
        for step in self.program.steps:
            at = self.index.get(step.node, at)
            if step.is_move:
                self._move(step, at)
            else:
                self._call(step, at)
        return Workload(
            rows=rows,
            launches=tuple(self.launches),
            calls=tuple(self.calls),
            collectives=tuple(self.collectives),
            parameters=tuple(self._parameters()),
            inputs_bytes=float(sum(self._bytes(i.value) for i in self.graph.inputs)),
            batch_bytes=float(sum(self.graph.values[i.value].num_bytes for i in self.graph.inputs)),
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
        move = REDISTRIBUTIONS[step.fn]
        size = move.num_bytes(float(self._bytes(source)), float(self._bytes(target)))
        for phase, op in ((FORWARD, move.forward.collective), (BACKWARD, move.backward.collective)):
            if op and (phase == FORWARD or self._has_grad(source)):
                self.collectives.append(NodeCollective(at, phase, op, step.axes, size))
        copies, grad_copies = move.forward.copies, move.backward.copies
        if step.fn in ("rt.shard", "rt.take") and self._is_outermost(step):
            copies = 0  # a view of the full value
        if not copies:
            self.root[target] = self.root.get(source, source)
            del self.made[target]
        size, from_size = float(self._bytes(target)), float(self._bytes(source))
        self.moments.append(
            Moment(
                node=at,
                operands=(source,),
                results=((target, self.root.get(target, target)),),
                made_bytes=size * min(copies, 1) + max(size, from_size) * max(copies - 1, 0),
                gradients=((source, from_size * min(grad_copies, 1)),)
                if self._has_grad(source)
                else (),
                backward_temporary_bytes=max(size, from_size) * max(grad_copies - 1, 0),
                is_move=True,
                passing=True,
            )
        )

    def _is_outermost(self, step: Step) -> bool:
        """Return whether all dims before the one that a move shards have one element."""
        dim = next((arg for arg in step.args if isinstance(arg, int)), 0)
        shape = self.program.values[step.inputs[0]].type.shape
        return all(size == 1 for size in shape[: dim % max(len(shape), 1)])

    def _call(self, step: Step, at: int) -> None:
        call = self._signature(step)
        cost = cost_of(call)
        if cost.note:
            self.notes.setdefault(cost.note)
        roots = [self._use(n, at) for n in step.inputs]
        self._launch(call, cost, at)
        self._define(step, cost, roots, at)
        for phase, calls in ((FORWARD, cost.collectives), (BACKWARD, cost.backward_collectives)):
            self.collectives += [
                NodeCollective(at, phase, c.op, c.axes, float(c.num_bytes)) for c in calls
            ]
        self.moments.append(self._moment(step, cost, roots, at))

    def _moment(self, step: Step, cost: CallCost, roots: Sequence[str], at: int) -> Moment:
        memory = [self.root.get(out, out) for out in step.outputs]
        saves: set[str] = set()
        own: list[float] = []
        for saved in cost.saved:
            if saved.operand is not None:
                saves.add(roots[saved.operand])
            elif saved.result is not None:
                saves.add(memory[saved.result])
            else:
                own.append(float(saved.num_bytes))
        made = sum(self._bytes(o) for o, m in zip(step.outputs, memory, strict=True) if o == m)
        trained = [(step.inputs[i], float(size)) for i, size in cost.gradients]
        return Moment(
            node=at,
            operands=step.inputs,
            results=tuple(zip(step.outputs, memory, strict=True)),
            saves=frozenset(saves),
            own_bytes=sum(own),
            result_bytes=own[0] if own else 0.0,
            made_bytes=made + sum(own) + cost.forward_temporary_bytes,
            gradients=tuple((n, size) for n, size in trained if n not in self.parameters),
            backward_temporary_bytes=float(cost.backward_temporary_bytes),
            product=any(k.kind != "memory" and not is_cheap(k) for k in cost.forward),
            defers=bool(cost.weight) and step.fn.split(".")[1] in DEFERRED,
            passing="::".join(step.fn.split(".")[:2]) in PASSING,
        )

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
        """Record which results of a call are new memory, and which are views."""
        for index, out in enumerate(step.outputs):
            alias = cost.aliases[index] if index < len(cost.aliases) else None
            if alias is not None:
                self.root[out] = roots[alias]
            else:
                self.made[out] = at
            if index < len(cost.strides) and not _is_dense(
                self.program.values[out].type.shape, cost.strides[index]
            ):
                self.strides[out] = cost.strides[index]

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
        values = self.program.values
        trained = frozenset(n for n, v in values.items() if v.value in self.program.carries_grad)
        sizes = {n: float(v.type.num_bytes) for n, v in values.items()}
        shown = {leaf.name for leaf in self.graph.outputs if isinstance(leaf, Ref)}
        shown = {self.root.get(name, name) for name in shown}
        arrays = Liveness(self.moments, self.blocks, sizes, trained, frozenset(shown)).arrays()
        count = len(self.graph.nodes)
        crossing = np.zeros(count + 1)
        for name, last in self._original().items():
            at, size = self.made[name], self._bytes(name)
            crossing[at + 1] += size
            crossing[last + 1] -= size
        arrays["crossing"] = np.cumsum(crossing)[:count]
        arrays["buffers"] = np.zeros(count)
        fixed = [b.value for b in self.graph.buffers] + [c.value for c in self.graph.constants]
        for value in fixed:
            if users := self.used.get(value):
                arrays["buffers"][min(users)] += self.graph.values[value].num_bytes
        return arrays

    def _original(self) -> Mapping[str, int]:
        """Return the last use of every value that one node makes and another uses."""
        last: dict[str, int] = {}
        for index, node in enumerate(self.graph.nodes):
            for name in node.inputs:
                root = self.root.get(name, name)
                if root in self.made and self._has_grad(root):
                    last[root] = index
        return last

    def _parameters(self) -> Iterator[LocalParameter]:
        for storage in self.program.parameters:
            users = sorted(set(self.used.get(storage.value, ())))
            if users:
                yield LocalParameter(
                    name=storage.name,
                    node=users[0],
                    others=tuple(users[1:]),
                    numel=int(np.prod(storage.local_shape, dtype=np.int64)),
                    itemsize=storage.dtype.itemsize,
                    sync=storage.sync,
                    requires_grad=storage.requires_grad,
                    shape=storage.local_shape,
                )


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


# ------------------------------------------------------------ any number of rows
TOLERANCE = 0.02  # relative, of flops and bytes, up to which a workload counts as linear in rows


class WorkloadModel:
    """The workload of a rank as a function of the rows of its micro-batch.

    `assignments` are valid for every number of ranks along batch axes.
    """

    def __init__(
        self,
        fold: FoldedGraph,
        facts: Facts,
        assignments: tuple[Assignment, ...],
        roles: dict[str, str],
    ) -> None:
        self.fold, self.facts, self.assignments, self.roles = fold, facts, assignments, roles
        self.batch = [a.axis for a in assignments if roles[a.axis] == "batch"]
        # Ranks along an axis of experts exchange their rows: its size is that of the plan.
        batch = [a for a in assignments if a.axis in self.batch]
        experts = [a for a in batch if any(isinstance(p, Shard) for p in a.parameters.values())]
        self._fixed = {a.axis for a in experts}
        self._free = next((axis for axis in self.batch if axis not in self._fixed), None)
        self.rows = batch_rows(fold.graph)
        self._graph_rows = -(-self.rows // prod(num_ranks(a.ranks) for a in experts))
        self._exact: dict[AxisSize, Workload] = {}  # by parts, even or `Shares`
        self._between: dict[float, Workload] = {}
        self._line: tuple[Workload, Workload] | None = None

    def with_rows(self, rows: int) -> WorkloadModel:
        """Return the model for a batch of fewer rows, each with the same workload."""
        smaller = copy(self)
        smaller.rows = rows if self.batch else self.rows
        return smaller

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the workload of a rank whose micro-batch has `rows` of the batch.

        With `exact`, a program is lowered for these rows, so that every call has its real shapes.
        """
        if self._free is None or self._graph_rows <= 1 or rows >= self._graph_rows:
            return self._lowered(1)
        if exact:
            return self._lowered(self._division(min(self._graph_rows, max(1, round(rows)))))
        if self._line is None:
            self._line = self._find_line()
        low, high = self._line
        if low is high:  # not linear, because other axes shard the rows as well
            return self._lowered(max(1, min(self._graph_rows, round(self._graph_rows / rows))))
        if rows not in self._between:
            self._between[rows] = low.between(high, rows)
        return self._between[rows]

    def _find_line(self) -> tuple[Workload, Workload]:
        """Return workloads of two small batches that larger ones are in line with, or one twice."""
        if self._graph_rows < 4:
            one, more = self._lowered(self._graph_rows), self._lowered(1)
            return one, more if one.rows < more.rows and one.has_same_calls(more) else one
        for fewest in (2, 1, 4):  # a single row may be a view where more rows need a copy
            one, two, more = (
                self._lowered(-(-self._graph_rows // (fewest * k))) for k in (1, 2, 4)
            )
            grows = (
                one.rows < two.rows < more.rows
                and one.has_same_calls(two)
                and one.has_same_calls(more)
            )
            if grows and all(_on_line(one, two, other) for other in (more, self._lowered(1))):
                return one, two
        return one, one

    def _division(self, rows: int) -> AxisSize:
        """Return a division of the batch whose first part has `rows`."""
        parts = -(-self._graph_rows // rows)
        is_even = -(-self._graph_rows // parts) == rows
        return parts if is_even else Shares.of([rows, self._graph_rows - rows])

    def _lowered(self, parts: AxisSize) -> Workload:
        if parts not in self._exact:
            rows = part(self._graph_rows, parts, 0)[1] if self.batch else self._graph_rows
            program = lower_place(self._resolved(parts), 0)
            blocks = [""] * len(self.fold.graph.nodes)  # of every node of the small graph
            for node, block in zip(self.fold.order, self.fold.blocks, strict=True):
                if node >= 0 and not blocks[node]:
                    blocks[node] = block
            self._exact[parts] = _Reader(program, self.fold.graph, blocks).read(rows)
        return self._exact[parts]

    def _resolved(self, parts: AxisSize) -> Resolved:
        assignments = []
        for assignment in self.assignments:
            ranks = assignment.ranks
            if assignment.axis in self.batch and assignment.axis not in self._fixed:
                if parts == 1:  # nothing is sharded: a plan's mesh has no such axis
                    continue
                ranks = parts if assignment.axis == self._free else 1
            assignments.append(replace(assignment, ranks=ranks))
        graph = self.fold.graph
        plan = Plan(
            name="work",
            model=graph.name,
            fingerprint=model_fingerprint(graph),
            mesh=Mesh(axes=tuple((a.axis, a.ranks) for a in assignments)),
            roles={a.axis: self.roles[a.axis] for a in assignments},
        )
        return Resolved(graph=graph, plan=plan, facts=self.facts, assignments=tuple(assignments))


Workloads: TypeAlias = Mapping[Mesh, WorkloadModel] | WorkloadModel  # by mesh where groups differ


def workload_on(workloads: Workloads, mesh: Mesh) -> WorkloadModel:
    """Return the workload of the ranks of a mesh."""
    return workloads if isinstance(workloads, WorkloadModel) else workloads[mesh]


def _on_line(one: Workload, two: Workload, other: Workload) -> bool:
    """Return whether a third workload's flops and bytes are on the line through two."""
    line = one.between(two, other.rows)
    return all(
        abs(getattr(line, name) - getattr(other, name)) <= TOLERANCE * getattr(other, name)
        for name in ("flops", "moved_bytes")
    )


def batch_rows(graph: Graph) -> int:
    """Return the rows of the batch: the most common first size of the inputs."""
    sizes = [graph.values[i.value].shape[0] for i in graph.inputs if graph.values[i.value].shape]
    return max(set(sizes), key=lambda s: (sizes.count(s), s), default=1)
