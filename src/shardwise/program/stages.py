"""A graph cut into pipeline stages, anywhere in its order.

Enters: a graph and where its stages begin. Leaves: one `Part` per stage, a graph of its own. Values
of earlier stages are received from where they are computed; or computed again, if they depend on
nothing (position tables), or on the batch alone and that is cheaper (masks). A parameter that
several stages use has its home in the first of them, and the others borrow it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import PlanError
from shardwise.ir import Buffer, Graph, Input, Node, Parameter, Ref, iter_refs, node_keys
from shardwise.ir.interpret import is_random
from shardwise.layouts.allowed import constant_values
from shardwise.layouts.costs import PER_BYTE, PER_TRANSFER, work
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.plans import Plan
from shardwise.sharding.factors import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stage's share of a graph.

    `receives` maps a value to the stage it comes from. `outputs` are the positions of the model's
    output leaves that this stage gives. `borrowed` are parameters whose home is another stage.
    """

    index: int
    graph: Graph
    receives: dict[str, int]
    outputs: tuple[int, ...]
    borrowed: frozenset[str]


def with_keys(graph: Graph) -> Graph:
    """Return the graph whose nodes carry their places, also in parts of it."""
    keys = node_keys(graph)
    named = tuple(dataclasses.replace(node, key=keys[node.name]) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=named)


def stage_starts(graph: Graph, plan: Plan, order: Sequence[str]) -> tuple[int, ...]:
    """Return the index of every stage's first node; `order` are the places of the captured graph's
    nodes.

    A node that is gone (its value is computed beforehand) gives way to the next one.
    """
    position = {key: i for i, key in enumerate(order)}
    at, known = 0, []
    for node in graph.nodes:
        at = position.get(node.key, at)  # an added node stands where the one before it does
        known.append(at)
    firsts = [position[stage.first] for stage in plan.all_stages[1:]]
    starts = (0, *(next(i for i, p in enumerate(known) if p >= first) for first in firsts))
    if any(b <= a for a, b in pairwise(starts)):
        raise PlanError("a stage has no nodes of its own", where="stages")
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

    def run(self) -> tuple[Part, ...]:
        nodes, receives = [], []
        for stage in range(self.count):
            mine, needed = self._fetch(stage)
            nodes.append(mine)
            receives.append(needed)
        leaves = self._leaves()
        users = [
            {name for node in mine for name in node.inputs}
            | {n for i in leaves[stage] for n in _names(self.graph.outputs[i])}
            for stage, mine in enumerate(nodes)
        ]
        homes = self._homes(users)
        parts = []
        for stage in range(self.count):
            sends = [v for v, s in self.stage_of.items() if s == stage]
            sent = tuple(v for v in sends if any(v in r for r in receives[stage + 1 :]))
            parts.append(
                self._part(
                    stage, nodes[stage], receives[stage], leaves[stage], users[stage], sent, homes
                )
            )
        return tuple(parts)

    def _repeatable(self) -> frozenset[str]:
        """Values that a later stage could compute again: of the batch alone, everywhere equal."""
        changed = {b.value for b in self.graph.buffers if b.mutation}
        found = set(values_of_inputs(self.graph)) - changed
        for node in self.graph.nodes:
            drawn = is_random(node) and self.plan.rng != "exact"
            if drawn or not all(name in found for name in node.inputs):
                found -= set(node.outputs)
        return frozenset(found)

    def _fetch(self, stage: int) -> tuple[tuple[Node, ...], dict[str, int]]:
        """Return the stage's nodes, those it repeats among them,
        and what it receives from where.
        """
        mine = {node.name: node for node in self.own[stage]}
        receives: dict[str, int] = {}
        needed = [name for node in self.own[stage] for name in node.inputs]
        for name in dict.fromkeys(needed):
            source = self.stage_of.get(name, stage)
            if source >= stage or name in receives:
                continue
            again = self._closure(name, mine) if name in self.repeatable else None
            if again is not None and (name in self.tables or self._is_cheaper(again, name)):
                mine |= {node.name: node for node in again}
            else:
                receives[name] = source
        for node in list(mine.values()):  # what was repeated first may be received by now
            for name in node.inputs:
                if name in receives and any(name in n.outputs for n in mine.values()):
                    del receives[name]
        ordered = sorted(mine.values(), key=lambda node: self.order[node.name])
        return tuple(ordered), receives

    def _closure(self, name: str, have: Iterable[str]) -> list[Node]:
        """Return the nodes that compute a value, without those at hand."""
        found: dict[str, Node] = {}
        waiting, known = [name], set(have)
        while waiting:
            node = self.producer.get(waiting.pop())
            if node is not None and node.name not in known:
                known.add(node.name)
                found[node.name] = node
                waiting += node.inputs
        return list(found.values())

    def _is_cheaper(self, nodes: list[Node], name: str) -> bool:
        """Whether the nodes take less than to receive the value that they compute."""
        effort = sum(work(self.facts.calls[n.name], self.facts.rules[n.name]) for n in nodes)
        return effort <= self.graph.values[name].num_bytes * PER_BYTE + PER_TRANSFER

    def _leaves(self) -> list[list[int]]:
        """Positions of the output leaves that each stage gives; sources come from the first."""
        leaves: list[list[int]] = [[] for _ in range(self.count)]
        for position, leaf in enumerate(self.graph.outputs):
            names = _names(leaf)
            if names:
                leaves[max(self.stage_of.get(name, 0) for name in names)].append(position)
        return leaves

    def _homes(self, users: list[set[str]]) -> dict[str, int]:
        """Return the first stage that uses each parameter and buffer;
        unused ones are of the first.
        """
        homes: dict[str, int] = {}
        sources: list[Parameter | Buffer] = [*self.graph.parameters, *self.graph.buffers]
        for source in sources:
            using = [stage for stage, names in enumerate(users) if source.value in names]
            homes[source.value] = using[0] if using else 0
            if isinstance(source, Buffer) and source.mutation:
                homes[source.value] = self._changing(source, using)
        return homes

    def _changing(self, buffer: Buffer, using: list[int]) -> int:
        assert buffer.mutation is not None
        home = self.stage_of.get(buffer.mutation, using[0] if using else 0)
        others = [stage for stage in using if stage != home]
        if others:
            raise PlanError(
                f"buffer {buffer.name} is changed in stage {home} and used in stage {others[0]}",
                hint="begin the stage elsewhere, so that one stage has all uses of the buffer",
            )
        return home

    def _part(
        self,
        stage: int,
        nodes: tuple[Node, ...],
        receives: dict[str, int],
        leaves: list[int],
        used: set[str],
        sent: tuple[str, ...],
        homes: dict[str, int],
    ) -> Part:
        graph = self.graph
        made = {o for node in nodes for o in node.outputs}
        mine = used | {value for value, home in homes.items() if home == stage}
        parameters = tuple(p for p in graph.parameters if p.value in mine)
        inputs = tuple(i for i in graph.inputs if i.value in used)
        inputs += tuple(
            Input(value=v, name=v, path=(v,), kind="received") for v in receives if v in used
        )
        part = dataclasses.replace(
            graph,
            nodes=nodes,
            inputs=inputs,
            parameters=parameters,
            buffers=tuple(b for b in graph.buffers if b.value in mine),
            constants=tuple(c for c in graph.constants if c.value in used),
            loss=graph.loss if graph.loss in made and self.stage_of[graph.loss] == stage else None,
            outputs=tuple(graph.outputs[i] for i in leaves),
            sends=sent,
        )
        part.verify()
        ranks = [s.ranks for s in self.plan.all_stages]
        return Part(
            index=stage,
            graph=part,
            receives={v: s for v, s in receives.items() if v in used},
            outputs=tuple(leaves),
            borrowed=frozenset(
                p.value for p in parameters if ranks[homes[p.value]] != ranks[stage]
            ),
        )


def _names(leaf: object) -> list[str]:
    return [ref.name for ref in iter_refs(leaf)] if not isinstance(leaf, Ref) else [leaf.name]
