"""Prices for tests: rates and links as parameters, and prices drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

from shardwise.ir import Graph, Node
from shardwise.layouts.moves import kind
from shardwise.layouts.problem import LayoutTask, Placements
from shardwise.sharding.candidates import Candidate, ShardAxis
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Layout, Partial, Replicate, Shard, local_shape

# Passes over the value of a ring algorithm, forward and backward: all-gather and reduce-scatter
# are one, all-reduce is two, all-to-all is one rank's part.
PASSES = {
    ("S", "R"): (1, 0),
    ("S", "R~"): (1, 1),
    ("P", "R"): (2, 0),
    ("P", "R~"): (2, 2),
    ("P", "S"): (1, 1),
    ("R", "S"): (0, 1),
    ("R", "R~"): (0, 2),
    ("S", "S"): (0.25, 0.25),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPrices:
    """Work by iteration space, traffic by memory, communication as latency and bandwidth.

    The defaults are of the order of an H100 with NVLink.
    """

    graph: Graph
    facts: Facts
    task: LayoutTask
    flops_per_s: float = 6e14
    memory_bytes_per_s: float = 2.5e12
    link_bytes_per_s: float = 3e11
    latency_s: float = 1e-5
    launch_s: float = 3e-6
    state_bytes: float = 8.0  # per byte of a parameter: gradient and optimizer state

    def _local_bytes(self, value: str, placements: Placements) -> float:
        layout = Layout(tuple(zip(self.task.names, placements, strict=True)))
        place = {axis.name: (0, axis.ranks) for axis in self.task.axes}
        full = self.graph.values[value]
        return float(prod(local_shape(layout, full.shape, place)) * full.dtype.itemsize)

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        rule = self.facts.rules[node.name]
        if rule.size_arg and node.inputs:
            return 0.0
        work = 2.0 * prod(axis.size for axis in rule.axes.values())
        talks = 0
        for axis, candidate in zip(self.task.axes, choice, strict=True):
            if isinstance(candidate.choice, ShardAxis):
                work /= axis.ranks
                talks += rule.axes[candidate.choice.axis].num_collectives
        names = (*node.inputs, *node.outputs)
        sides = [(*c.operands, *c.results) for c in choice]
        traffic = sum(
            self._local_bytes(name, tuple(side[i] for side in sides))
            for i, name in enumerate(names)
        )
        passes = 3 if any(n in self.facts.carries_grad for n in node.outputs) else 1
        time = max(work / self.flops_per_s, traffic / self.memory_bytes_per_s)
        return passes * time + self.launch_s * passes + talks * self.latency_s

    def move(self, value: str, held: Placements, needed: Placements, grad: bool) -> float:
        whole = tuple(
            h if h == n or isinstance(h, Replicate) else Replicate()
            for h, n in zip(held, needed, strict=True)
        )
        size = self._local_bytes(value, whole)
        total = 0.0
        for axis, h, n in zip(self.task.axes, held, needed, strict=True):
            if h == n:
                continue
            if isinstance(h, Partial) and isinstance(n, Partial):
                return float("inf")
            forward, backward = PASSES.get((kind(h), kind(n)), (0, 0))
            for passes in (forward, backward if grad else 0):
                if passes:
                    total += passes * size * (axis.ranks - 1) / axis.ranks / self.link_bytes_per_s
                    total += self.latency_s
            total += self.launch_s
        return total

    def hold(self, parameter: str, stored: Placements) -> float:
        size = self._local_bytes(parameter, stored)
        time = self.state_bytes * size / self.memory_bytes_per_s
        for axis, p in zip(self.task.axes, stored, strict=True):
            if isinstance(p, Replicate) and p.partial_grad:
                time += 2 * size * (axis.ranks - 1) / axis.ranks / self.link_bytes_per_s
        return time

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        return (1 + self.state_bytes) * self._local_bytes(parameter, stored)

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        if not any(n in self.facts.carries_grad for n in node.outputs):
            return 0.0
        rows = list(zip(*(c.results for c in choice), strict=True))
        return sum(self._local_bytes(n, r) for n, r in zip(node.outputs, rows, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrices:
    """Prices that follow from nothing; equal questions have equal answers."""

    graph: Graph
    seed: int
    free: float = 0.2  # the part of prices that are zero
    impossible: float = 0.0  # the part of moves that are impossible

    def _draw(self, *what: object) -> float:
        drawn = random.Random(f"{self.seed} {what}")
        return 0.0 if drawn.random() < self.free else drawn.uniform(0.1, 2.0)

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        return self._draw("node", node.name, *(str(c.choice) for c in choice))

    def move(self, value: str, held: Placements, needed: Placements, grad: bool) -> float:
        what = (
            str(self.graph.values[value]),
            [str(p) for p in held],
            [str(p) for p in needed],
            grad,
        )
        if random.Random(f"{self.seed} may {what}").random() < self.impossible:
            return float("inf")
        return self._draw("move", *what)

    def hold(self, parameter: str, stored: Placements) -> float:
        return self._draw("hold", parameter, [str(p) for p in stored])

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        return 16.0 / 2 ** sum(isinstance(p, Shard) for p in stored)

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        return 4.0 / 2 ** sum(isinstance(c.choice, ShardAxis) for c in choice)
