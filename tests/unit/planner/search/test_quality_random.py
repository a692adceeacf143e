"""On small random graphs the planner's result is as fast as that of a brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.cluster.links import Nic
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.sharding.candidates import candidates
from shardwise.sharding.factors import analyze
from tests.unit.planner.search.test_quality import ROWS, check

FEW, MANY = 300, 10**7  # combinations of candidates that are tried
PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda last, _: F.gelu(last),
    "norm": lambda last, _: F.layer_norm(last, last.shape[-1:]),
    "add": lambda last, other: last + other,
    "mul": lambda last, other: last * other,
    "softmax": lambda last, _: last.softmax(-1),
}
KINDS = ("v100", "a100", "h100", "b200", "cpu")


class Drawn(nn.Module):
    """A few steps over values with the shape of the input; each uses one or two earlier values."""

    def __init__(self, rng: random.Random, width: int, num_steps: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, int]] = []  # an operator, and the number of an earlier value
        for at in range(num_steps):
            kind = rng.choice(("linear", "linear", "pair", *PLAIN))
            wide = width * rng.choice((1, 2, 4)) if kind == "pair" else width
            if kind in ("linear", "pair"):
                self.layers.append(nn.Linear(width, wide, bias=rng.random() < 0.3))
            if kind == "pair":
                self.layers.append(nn.Linear(wide, width, bias=False))
            self.steps.append((kind, rng.randrange(at + 1)))

    def forward(self, x: Tensor) -> Tensor:
        values, layers = [x], iter(self.layers)
        for kind, other in self.steps:
            if kind in PLAIN:
                values.append(PLAIN[kind](values[-1], values[other]))
            else:
                values.append(next(layers)(values[-1]))
                values += [next(layers)(values.pop())] if kind == "pair" else []
        return values[-1].sum()


def drawn(seed: int, max_combinations: int) -> tuple[Graph, random.Random]:
    """Draw a graph with parameters, of up to 8 nodes and `max_combinations` of their candidates."""
    rng = random.Random(seed)
    while True:
        width, length = rng.choice((64, 512, 4096)), rng.choice((1, 16, 256))
        with torch.device("meta"):
            model = Drawn(rng, width, rng.randint(1, 6))
        if not model.layers:
            continue
        graph = sw.capture(model, {"x": torch.zeros(ROWS, length, width, device="meta")})
        facts = analyze(graph)
        rows = [candidates(facts.rules[n.name], facts.structures[n.name]) for n in graph.nodes]
        if len(graph.nodes) <= 8 and math.prod(map(len, rows)) <= max_combinations:
            return graph, rng


@pytest.mark.parametrize("seed", [20, 22])
def test_matches_brute_force_on_two_ranks(seed: int) -> None:
    graph, rng = drawn(seed, FEW)
    check(graph, Cluster.preset(rng.choice(KINDS), nodes=1, devices_per_node=2))


def cluster_of(kinds: Sequence[str]) -> Cluster:
    """Return a cluster with one device of each kind, each on its own node."""
    nic = Nic(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
    nodes = []
    for number, kind in enumerate(kinds):
        (node,) = Cluster.preset(kind, devices_per_node=1).nodes
        nodes.append(replace(node, name=f"node{number}", nic=nic))
    return Cluster(name="unequal", nodes=tuple(nodes))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 140))
def test_matches_brute_force_on_up_to_four_ranks(seed: int) -> None:
    graph, rng = drawn(seed, MANY)
    nodes, devices = rng.choice(((1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (4, 1)))
    check(graph, Cluster.preset(rng.choice(KINDS), nodes=nodes, devices_per_node=devices))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(200, 210))
def test_matches_brute_force_on_unequal_devices(seed: int) -> None:
    graph, rng = drawn(seed, MANY)
    number = rng.choice((2, 3, 4))
    check(graph, cluster_of(["h100", *(rng.choice(("h100", "a100")) for _ in range(number - 1))]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(300, 336))
def test_matches_brute_force_in_little_memory(seed: int) -> None:
    graph, cluster, gib = with_need(seed)
    try:
        sw.plan(graph, cluster, memory_gib=0.8 * gib, progress=False)
    except InfeasiblePlan as error:
        check(graph, cluster, 1.001 * error.report["needs_bytes"] / 2**30)
    else:
        check(graph, cluster, 0.8 * gib)


def with_need(seed: int) -> tuple[Graph, Cluster, float]:
    """Draw a graph and a cluster, with the memory of an unrestricted plan."""
    graph, rng = drawn(seed, MANY)
    cluster = Cluster.preset(rng.choice(KINDS), nodes=1, devices_per_node=rng.choice((2, 3, 4)))
    free = sw.plan(graph, cluster, progress=False)
    return graph, cluster, free.search.best.memory.peak_bytes / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 420))
@pytest.mark.parametrize("part", [0.9, 0.75, 0.6, 0.4])
def test_fixing_an_option_is_never_faster(seed: int, part: float) -> None:
    graph, cluster, gib = with_need(seed)

    def step(**fixed: Any) -> float:
        try:
            plan = sw.plan(graph, cluster, memory_gib=part * gib, progress=False, **fixed)
        except InfeasiblePlan:
            return math.inf
        return float(plan.search.best.step_time_s)

    options = [("tp", cluster.num_ranks), ("pp", cluster.num_ranks), ("zero", 3),
               ("num_microbatches", 4), ("recompute", "full")]  # fmt: skip
    free = step()
    for name, value in options:
        assert free <= step(**{name: value}) * (1 + 1e-9), (name, value)
