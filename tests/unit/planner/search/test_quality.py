"""On small graphs the planner's result is as fast as that of a brute force, by the simulator.

The brute force tries every mesh, every candidate of every node on the tensor-parallel axis, all
stage boundaries, micro-batches and ZeRO levels, and recomputation if activations do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.planner.search import SIMPLER_SLACK
from shardwise.plans import Plan
from shardwise.sharding.candidates import candidates
from shardwise.sharding.factors import analyze
from shardwise.simulation.estimate import Evaluator, workloads_of
from shardwise.simulation.workload import WorkloadModel
from tests.unit.planner.search.brute_force import fastest_below
from tests.unit.planner.search.execution_space import (
    divisors,
    execution_configs,
    fastest_recompute,
    kinds,
    plan_of,
)

ROWS = 8
SLACK = 0.03  # layouts are enumerated only if memory limits the step


class Net(nn.Module):
    """Three matrices, and a function of them."""

    def __init__(self, body: Callable[..., Tensor], width: int, wide: int) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Linear(width, wide, bias=False), nn.Linear(wide, width, bias=False)
        self.table = nn.Embedding(64 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def mlp(net: Net, x: Tensor) -> Tensor:
    return net.b(F.gelu(net.a(x))).sum()


def residual(net: Net, x: Tensor) -> Tensor:
    return (x + net.b(net.a(x))).sum()


def wide(net: Net, x: Tensor) -> Tensor:
    return net.a(x).sum()


def lookup(net: Net, x: Tensor) -> Tensor:
    return net.b(net.a(net.table(x.argmax(-1)))).sum()


def normed(net: Net, x: Tensor) -> Tensor:
    return net.a(F.layer_norm(x, x.shape[-1:])).sum()


BODIES = {f.__name__: f for f in (mlp, residual, wide, lookup, normed)}


def captured(body: Callable[..., Tensor], width: int, wide: int, length: int) -> Graph:
    with torch.device("meta"):
        net = Net(body, width, wide)
    return sw.capture(net, {"x": torch.zeros(ROWS, length, width, device="meta")})


def layouts(graph: Graph, tp: int) -> Iterator[Plan]:
    """Yield a plan for every combination of the nodes' choices."""
    facts = analyze(graph)
    rows = [candidates(facts.rules[n.name], facts.structures[n.name]) for n in graph.nodes]
    for chosen in product(*rows) if tp > 1 else [()]:
        yield plan_of(graph, chosen, tp)


def everything(graph: Graph, cluster: Cluster) -> Iterator[tuple[float, str]]:
    """Yield the step time and a description of every plan that fits."""
    ranks = cluster.num_ranks
    for tp in divisors(ranks):
        workloads: list[tuple[str, Evaluator, WorkloadModel]] = []
        for plan in layouts(graph, tp):
            try:
                fold, by_mesh = workloads_of(graph, plan)
                model = next(iter(by_mesh.values()))
                model.at(1)
            except ShardwiseError:  # these choices are incompatible
                continue
            workloads.append((str(plan.nodes), Evaluator(fold, cluster), model))
        for kind in kinds(graph, ranks):
            for what, evaluator, model in workloads if kind.tp == tp else ():
                for execution in execution_configs(graph, kind, evaluator):
                    time, _ = fastest_recompute(evaluator, model, execution)
                    yield time, f"{kind} zero={execution.zero} {what}"


def check(graph: Graph, cluster: Cluster, memory_gib: float | None = None) -> None:
    """Check that no plan is more than `SLACK` faster than the search's best, in the same memory.

    The returned plan may be a simpler one that takes up to 1 % longer.
    """
    assert len(graph.nodes) <= 8
    plan = sw.plan(graph, cluster, memory_gib=memory_gib, progress=False, all_devices=True)
    chosen = sw.simulate(graph, plan, cluster).step_time_s
    fastest = min([chosen, *(other.step_time_s for other in plan.search.runners_up)])
    assert chosen <= fastest * (1 + SIMPLER_SLACK)
    limit = float("inf") if memory_gib is None else memory_gib * 2**30
    best, what = fastest_below(graph, cluster, fastest / (1 + SLACK), limit)
    ratio = fastest / best
    assert best * (1 + SLACK) >= fastest, f"{plan.search.best} is slower than {what}: {ratio}"


@pytest.mark.parametrize("body", [wide, pytest.param(normed, marks=pytest.mark.slow)])
def test_the_brute_force_skips_only_slower_plans(body: Callable[..., Tensor]) -> None:
    graph = captured(body, 256, 1024, 16)
    cluster = Cluster.preset("a100", nodes=1, devices_per_node=2)
    best, _ = min(everything(graph, cluster))
    assert fastest_below(graph, cluster, best * 1.01)[0] == pytest.approx(best, rel=1e-12)
    assert fastest_below(graph, cluster, best * (1 - 1e-9))[0] == float("inf")


@pytest.mark.parametrize(
    ("name", "kind", "width", "length"),
    [("wide", "h100", 4096, 64), ("wide", "v100", 512, 4), ("normed", "a100", 1024, 512)],
)
def test_matches_brute_force(name: str, kind: str, width: int, length: int) -> None:
    graph = captured(BODIES[name], width, 4 * width, length)
    check(graph, Cluster.preset(kind, nodes=1, devices_per_node=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("width", "length"), [(512, 4), (4096, 256)])
@pytest.mark.parametrize("name", BODIES)
def test_matches_brute_force_on_four_ranks(name: str, width: int, length: int, nodes: int) -> None:
    graph = captured(BODIES[name], width, 4 * width, length)
    check(graph, Cluster.preset("a100", nodes=nodes, devices_per_node=4 // nodes))
