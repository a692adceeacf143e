"""Partition a graph into pipeline stages at any of its nodes.

Every stage becomes a graph of its own, a `Part`. It receives values of earlier stages, or
recomputes them if they depend on nothing (position tables), or only on the batch and recomputing is
cheaper (masks). A parameter of several stages is owned by the first of them; the others hold
replicas.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import PlanError
from shardwise.ir import Buffer, Graph, Input, Node, Parameter, iter_refs, node_keys
from shardwise.ir.operators import is_random
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.layouts.moves import PER_BYTE, PER_TRANSFER, work
from shardwise.layouts.problem import constant_values
from shardwise.plans import Plan
from shardwise.sharding.factors import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stage's share of a graph.

    `receives` maps a value to the stage that sends it. `outputs` are the positions of the model's
    output leaves that this stage computes. `borrowed` are parameters that another stage owns.
    """

    index: int
    graph: Graph
    receives: dict[str, int]
    outputs: tuple[int, ...]
    borrowed: frozenset[str]


def with_keys(graph: Graph) -> Graph:
    """Return the graph with its node keys stored, so that parts of it have the same keys."""
    keys = node_keys(graph)
    named = tuple(dataclasses.replace(node, key=keys[node.name]) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=named)


def stage_starts(graph: Graph, plan: Plan, order: Sequence[str]) -> tuple[int, ...]:
    """Return the index of every stage's first node; `order` lists the captured graph's node keys.

    If that node is gone because its value is precomputed, the stage begins at the next one.
    """
    position = {key: i for i, key in enumerate(order)}
    at, positions = 0, []
    for node in graph.nodes:
        at = position.get(node.key, at)  # an added node takes the position of the one before it
        positions.append(at)
    firsts = [position[stage.first] for stage in plan.all_stages[1:]]
    starts = (0, *(next(i for i, p in enumerate(positions) if p >= first) for first in firsts))
    if any(b <= a for a, b in pairwise(starts)):
        raise PlanError("a stage is left without nodes", where="stages")
    return starts


def partition(graph: Graph, plan: Plan, facts: Facts, order: Sequence[str]) -> tuple[Part, ...]:
    """Return the parts of all stages; `order` as in `stage_starts`."""
    return _Partition(graph, plan, facts, stage_starts(graph, plan, order)).run()


class _Partition:
    def __init__(self, graph: Graph, plan: Plan, facts: Facts, starts: tuple[int, ...]) -> None:
        self.graph, self.plan, self.facts = graph, plan, facts
        self.count = len(starts)
        ends = (*starts[1:], len(graph.nodes))
        self.own = [graph.nodes[a:b] for a, b in zip(starts, ends, strict=True)]
        self.stage_of = {o: s for s, nodes in enumerate(self.own) for n in nodes for o in n.outputs}
        self.producer = self.graph.producers
        self.order = {node.name: i for i, node in enumerate(graph.nodes)}
        self.repeatable = self._repeatable()
        self.tables = constant_values(graph)
        fetched = [self._fetch(stage) for stage in range(self.count)]
        self.nodes, self.receives = [n for n, _ in fetched], [received for _, received in fetched]
        self.leaves = self._leaves()
        self.users = [
            {name for node in nodes for name in node.inputs}
            | {ref.name for i in leaves for ref in iter_refs(graph.outputs[i])}
            for nodes, leaves in zip(self.nodes, self.leaves, strict=True)
        ]
        self.owners = self._owners()

    def run(self) -> tuple[Part, ...]:
        return tuple(map(self._part, range(self.count)))

    def _repeatable(self) -> frozenset[str]:
        """Return the values that any later stage can recompute with the same result."""
        changed = {b.value for b in self.graph.buffers if b.mutation}
        values = set(values_of_inputs(self.graph)) - changed
        for node in self.graph.nodes:
            random = is_random(node) and self.plan.rng != "exact"
            if random or not all(name in values for name in node.inputs):
                values -= set(node.outputs)
        return frozenset(values)

    def _fetch(self, stage: int) -> tuple[tuple[Node, ...], dict[str, int]]:
        """Return the stage's nodes, including recomputed ones, and the sources of its inputs."""
        nodes = {node.name: node for node in self.own[stage]}
        receives: dict[str, int] = {}
        needed = [name for node in self.own[stage] for name in node.inputs]
        for name in dict.fromkeys(needed):
            source = self.stage_of.get(name, stage)
            if source >= stage or name in receives:
                continue
            closure = self._closure(name, nodes) if name in self.repeatable else None
            if closure is not None and (name in self.tables or self._is_cheaper(closure, name)):
                nodes |= {node.name: node for node in closure}
            else:
                receives[name] = source
        for node in list(nodes.values()):  # a later closure may recompute a received value
            for name in node.inputs:
                if name in receives and any(name in n.outputs for n in nodes.values()):
                    del receives[name]
        ordered = sorted(nodes.values(), key=lambda node: self.order[node.name])
        return tuple(ordered), receives

    def _closure(self, name: str, present: Iterable[str]) -> list[Node]:
        """Return the nodes that compute a value, without those already present."""
        needed: dict[str, Node] = {}
        waiting, visited = [name], set(present)
        while waiting:
            node = self.producer.get(waiting.pop())
            if node is not None and node.name not in visited:
                visited.add(node.name)
                needed[node.name] = node
                waiting += node.inputs
        return list(needed.values())

    def _is_cheaper(self, nodes: list[Node], name: str) -> bool:
        """Return whether computing these nodes costs less than receiving their result."""
        effort = sum(work(self.facts.calls[n.name], self.facts.rules[n.name]) for n in nodes)
        return effort <= self.graph.values[name].num_bytes * PER_BYTE + PER_TRANSFER

    def _leaves(self) -> list[list[int]]:
        """Return the output leaves of each stage; graph inputs count to the first stage."""
        leaves: list[list[int]] = [[] for _ in range(self.count)]
        for position, leaf in enumerate(self.graph.outputs):
            stages = [self.stage_of.get(ref.name, 0) for ref in iter_refs(leaf)]
            if stages:
                leaves[max(stages)].append(position)
        return leaves

    def _owners(self) -> dict[str, int]:
        """Return the stage that owns each parameter and buffer: the first user, or stage 0."""
        owners: dict[str, int] = {}
        sources: list[Parameter | Buffer] = [*self.graph.parameters, *self.graph.buffers]
        for source in sources:
            using = [stage for stage, names in enumerate(self.users) if source.value in names]
            owners[source.value] = using[0] if using else 0
            if isinstance(source, Buffer) and source.mutation:
                owners[source.value] = self._changing(source, using)
        return owners

    def _changing(self, buffer: Buffer, using: list[int]) -> int:
        assert buffer.mutation is not None
        owner = self.stage_of.get(buffer.mutation, using[0] if using else 0)
        others = [stage for stage in using if stage != owner]
        if others:
            raise PlanError(
                f"buffer {buffer.name} is changed in stage {owner} and used in stage {others[0]}",
                hint="move the stage boundary so that one stage has all uses of the buffer",
            )
        return owner

    def _part(self, stage: int) -> Part:
        graph, used, owners = self.graph, self.users[stage], self.owners
        receives = {v: s for v, s in self.receives[stage].items() if v in used}
        local = used | {value for value, owner in owners.items() if owner == stage}
        parameters = tuple(p for p in graph.parameters if p.value in local)
        inputs = tuple(i for i in graph.inputs if i.value in used)
        inputs += tuple(Input(value=v, name=v, path=(v,), kind="received") for v in receives)
        sends = [v for v, s in self.stage_of.items() if s == stage]
        part = dataclasses.replace(
            graph,
            nodes=self.nodes[stage],
            inputs=inputs,
            parameters=parameters,
            buffers=tuple(b for b in graph.buffers if b.value in local),
            constants=tuple(c for c in graph.constants if c.value in used),
            loss=graph.loss if self.stage_of.get(graph.loss or "") == stage else None,
            outputs=tuple(graph.outputs[i] for i in self.leaves[stage]),
            sends=tuple(v for v in sends if any(v in r for r in self.receives[stage + 1 :])),
        )
        part.verify()
        ranks = [s.ranks for s in self.plan.all_stages]
        return Part(
            index=stage,
            graph=part,
            receives=receives,
            outputs=tuple(self.leaves[stage]),
            borrowed=frozenset(
                p.value for p in parameters if ranks[owners[p.value]] != ranks[stage]
            ),
        )
