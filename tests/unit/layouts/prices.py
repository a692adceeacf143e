"""Prices for tests: rates and links as parameters, and prices drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import prod

from shardwise.ir import Graph, Node
from shardwise.layouts.moves import kind
from shardwise.layouts.options import Options
from shardwise.layouts.problem import LayoutSolution, LayoutTask, Placements, Prices
from shardwise.layouts.solve import solve
from shardwise.sharding.candidates import Candidate, ShardAxis
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Layout, Partial, Replicate, Shard, local_shape

# Volume that a ring algorithm sends, forward and backward, in units of the value's size: 1 for
# all-gather and reduce-scatter, 2 for all-reduce, one rank's part for all-to-all.
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
    """Prices from FLOP/s, memory bandwidth, and the latency and bandwidth of links.

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
        num_collectives = 0
        for axis, candidate in zip(self.task.axes, choice, strict=True):
            if isinstance(candidate.choice, ShardAxis):
                work /= axis.ranks
                num_collectives += rule.axes[candidate.choice.axis].num_collectives
        names = (*node.inputs, *node.outputs)
        sides = [(*c.operands, *c.results) for c in choice]
        traffic = sum(
            self._local_bytes(name, tuple(side[i] for side in sides))
            for i, name in enumerate(names)
        )
        passes = 3 if any(n in self.facts.carries_grad for n in node.outputs) else 1
        time = max(work / self.flops_per_s, traffic / self.memory_bytes_per_s)
        return passes * time + self.launch_s * passes + num_collectives * self.latency_s

    def move(self, value: str, current: Placements, needed: Placements, grad: bool) -> float:
        full = tuple(
            p if p == n or isinstance(p, Replicate) else Replicate()
            for p, n in zip(current, needed, strict=True)
        )
        size = self._local_bytes(value, full)
        total = 0.0
        for axis, p, n in zip(self.task.axes, current, needed, strict=True):
            if p == n:
                continue
            if isinstance(p, Partial) and isinstance(n, Partial):
                return float("inf")
            forward, backward = PASSES.get((kind(p), kind(n)), (0, 0))
            for passes in (forward, backward if grad else 0):
                if passes:
                    total += passes * size * (axis.ranks - 1) / axis.ranks / self.link_bytes_per_s
                    total += self.latency_s
            total += self.launch_s
        return total

    def store(self, parameter: str, stored: Placements) -> float:
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
    """Random prices that depend only on the arguments and the seed."""

    graph: Graph
    seed: int
    free: float = 0.2  # the fraction of prices that are zero
    impossible: float = 0.0  # the fraction of moves that are impossible

    def _draw(self, *key: object) -> float:
        generator = random.Random(f"{self.seed} {key}")
        return 0.0 if generator.random() < self.free else generator.uniform(0.1, 2.0)

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        return self._draw("node", node.name, *(str(c.choice) for c in choice))

    def move(self, value: str, current: Placements, needed: Placements, grad: bool) -> float:
        key = (
            str(self.graph.values[value]),
            [str(p) for p in current],
            [str(p) for p in needed],
            grad,
        )
        if random.Random(f"{self.seed} may {key}").random() < self.impossible:
            return float("inf")
        return self._draw("move", *key)

    def store(self, parameter: str, stored: Placements) -> float:
        return self._draw("hold", parameter, [str(p) for p in stored])

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        return 16.0 / 2 ** sum(isinstance(p, Shard) for p in stored)

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        return 4.0 / 2 ** sum(isinstance(c.choice, ShardAxis) for c in choice)


def solve_layouts(graph: Graph, facts: Facts, task: LayoutTask, prices: Prices) -> LayoutSolution:
    """Return the cheapest layouts of a task."""
    return solve(Options(graph, facts, task), prices, time_limit_s=30.0)
