"""The prices of layouts: the same costs that the simulator plays, node by node.

Enters: a graph on a mesh, a device and the cluster's clock. Leaves: `CallPrices`, which the inner
problem asks for nodes, moves and parameters.
"""

from __future__ import annotations

from math import prod

from shardwise.cluster import Device
from shardwise.cost import CallCost, Signature, adamw, call_cost, call_signature, kernel_seconds
from shardwise.ir import Graph, Node, Parameter, TensorType
from shardwise.layouts.moves import plan_moves
from shardwise.layouts.problem import LayoutTask, Placements
from shardwise.program.local import local_call
from shardwise.redistribution import REDISTRIBUTIONS
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Layout, Replicate, local_shape
from shardwise.simulation.times import Clock, Group

EXPOSED = 0.3  # the part of gradient synchronization that backward does not hide, as a guess


class CallPrices:
    """Seconds of one micro-batch on one rank.

    `task` has the mesh by which shapes follow: its batch axis stands for data parallelism and
    micro-batches together. `group` are the ranks that talk. What is paid once a step counts
    `1 / num_microbatches`.
    """

    def __init__(
        self,
        graph: Graph,
        facts: Facts,
        task: LayoutTask,
        group: Group,
        device: Device,
        clock: Clock,
        num_microbatches: float = 1.0,
    ) -> None:
        self.graph, self.facts, self.device, self.clock = graph, facts, device, clock
        self.group, self.num_microbatches = group, num_microbatches
        self.names = task.names
        self.sizes = task.sizes
        self.coordinate = {axis.name: (0, axis.ranks) for axis in task.axes}
        self.parameters = {p.value: p for p in graph.parameters}
        self.by_name = {p.name: p for p in graph.parameters}
        self.whole = {i.value for i in graph.inputs} | {b.value for b in graph.buffers}
        self.whole |= {c.value for c in graph.constants}
        self._kinds: dict[str, Signature] = {}
        self._costs: dict[tuple[Signature, tuple[Candidate, ...]], CallCost] = {}

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Forward and backward of a node on its local shapes."""
        cost = self._cost(node, choice)
        seconds = sum(kernel_seconds(k, self.device) for k in (*cost.forward, *cost.backward))
        for talk in (*cost.talks, *cost.talks_backward):
            seconds += self.clock.talk(talk.op, self.group, talk.axes, talk.num_bytes)
        return seconds

    def move(self, value: str, held: Placements, needed: Placements, grad: bool) -> float:
        """Communication of forward, and with `grad` of backward."""
        seconds = 0.0
        for move in plan_moves(self._layout(held), self._layout(needed), self.sizes, grad):
            found = REDISTRIBUTIONS[move.fn]
            before, after = self._bytes(value, move.before), self._bytes(value, move.layout)
            size = found.num_bytes(before, after)
            for op in (found.forward.collective, found.backward.collective if grad else ""):
                if op and value not in self.whole:
                    seconds += self.clock.talk(op, self.group, move.axes, size)
        return seconds

    def hold(self, parameter: str, stored: Placements) -> float:
        """Synchronizing the gradient, and the optimizer's work, per micro-batch."""
        found = self._parameter(parameter)
        layout = self._layout(stored)
        sync = tuple(
            a
            for a, p in layout.axes
            if isinstance(p, Replicate) and p.differs and self.sizes[a] > 1
        )
        size = self._bytes(found.value, layout)
        if not found.requires_grad:
            return 0.0
        seconds = EXPOSED * self.clock.talk("all_reduce", self.group, sync, size)
        numel = size / self.graph.values[found.value].dtype.itemsize
        update = self.clock.update(self.device, numel, numel, 1)
        if update is None:
            update = adamw.fused_seconds(numel, self.device, calls=0)
        return (seconds + update) / self.num_microbatches

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        """A parameter with its gradient and optimizer state."""
        found = self._parameter(parameter)
        kind = self.graph.values[found.value].dtype.itemsize
        size = self._bytes(found.value, self._layout(stored))
        return size + (adamw.STATE_BYTES * size / kind if found.requires_grad else 0.0)

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """What a node keeps for backward."""
        cost = self._cost(node, choice)
        return float(sum(s.num_bytes for s in cost.saved if s.operand is None))

    def _parameter(self, name: str) -> Parameter:
        return self.by_name.get(name) or self.parameters[name]

    def _layouts(
        self, node: Node, choice: tuple[Candidate, ...]
    ) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        needs = tuple(
            self._layout(tuple(c.operands[i] for c in choice)) for i in range(len(node.inputs))
        )
        gives = tuple(
            self._layout(tuple(c.results[i] for c in choice)) for i in range(len(node.outputs))
        )
        return needs, gives

    def _layout(self, placements: Placements) -> Layout:
        return Layout(tuple(zip(self.names, placements, strict=True)))

    def _bytes(self, value: str, layout: Layout) -> float:
        kind = self.graph.values[value]
        return float(prod(local_shape(layout, kind.shape, self.coordinate)) * kind.dtype.itemsize)

    def _cost(self, node: Node, choice: tuple[Candidate, ...]) -> CallCost:
        """The cost of a node's call on its local shapes, once for equal nodes of all layers."""
        if node.name not in self._kinds:
            self._kinds[node.name] = self._kind(node)
        key = (self._kinds[node.name], choice)
        if key not in self._costs:
            self._costs[key] = self._find_cost(node, choice)
        return self._costs[key]

    def _kind(self, node: Node) -> Signature:
        """The node's call on whole values."""
        grads, values = self._grads(node), self.graph.values
        return call_signature(
            node.op,
            node.args,
            node.kwargs,
            [values[n] for n in node.inputs],
            grads,
            frozenset(i for i, n in enumerate(node.inputs) if n in self.parameters),
            results=[values[n] for n in node.outputs],
            autocast=node.autocast,
            function=self.graph.functions.get(node.op),
        )

    def _grads(self, node: Node) -> frozenset[int]:
        """The operands that get a gradient."""
        grads = self.facts.carries_grad
        trained = node.grad_enabled and any(o in grads for o in node.outputs)
        return frozenset(i for i, n in enumerate(node.inputs) if trained and n in grads)

    def _find_cost(self, node: Node, choice: tuple[Candidate, ...]) -> CallCost:
        needs, gives = self._layouts(node, choice)
        call = local_call(
            node,
            self.facts,
            self.graph.values,
            [(axis, c.choice) for axis, c in zip(self.names, choice, strict=True)],
            needs,
            gives,
            self.coordinate,
        )
        return call_cost(
            call.fn,
            call.args,
            call.kwargs,
            [self._local(n, layout) for n, layout in zip(node.inputs, needs, strict=True)],
            self._grads(node),
            frozenset(i for i, n in enumerate(node.inputs) if n in self.parameters),
            results=[self._local(n, layout) for n, layout in zip(node.outputs, gives, strict=True)],
            autocast=node.autocast,
            function=self.graph.functions.get(call.fn),
            device=self.device.kind,
        )

    def _local(self, value: str, layout: Layout) -> TensorType:
        kind = self.graph.values[value]
        return TensorType(local_shape(layout, kind.shape, self.coordinate), kind.dtype)
