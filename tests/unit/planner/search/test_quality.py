"""On small graphs the planner finds what trying everything finds, with the simulator as judge.

Everything: every mesh, every candidate of every node on the tensor-parallel axis, every place to
cut stages, all micro-batches, ZeRO levels and, where activations do not fit, ways to recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster, Mesh
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.planner.places import unfit
from shardwise.plans import ParameterEntry, Plan, model_fingerprint
from shardwise.sharding.candidates import candidates
from shardwise.sharding.factors import analyze
from shardwise.sharding.placements import Shard, format_shard
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.setting import Setting
from shardwise.simulation.simulate import works_of
from shardwise.simulation.times import Group
from shardwise.simulation.works import Works

ROWS = 8
SCHEDULES = ("1f1b", "zb_h1")


class Net(nn.Module):
    """Three matrices for a function of them."""

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


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def layouts(graph: Graph, dp: int, tp: int) -> Iterator[Plan]:
    """A plan for every choice of every node; parameters are stored as their first use asks."""
    facts = analyze(graph)
    rows = [candidates(facts.rules[n.name], facts.structures[n.name]) for n in graph.nodes]
    names = {p.value: p.name for p in graph.parameters}
    for chosen in product(*rows) if tp > 1 else [None]:
        entries: dict[str, ParameterEntry] = {}
        for node, choice in zip(graph.nodes, chosen or (), strict=False):
            for value, need in zip(node.inputs, choice.operands, strict=True):
                if value in names:
                    cut = format_shard(need) if isinstance(need, Shard) else "whole"
                    entries.setdefault(names[value], ParameterEntry(layout={"tp": cut}))
        axes = (("dp", dp), ("tp", tp)) if tp > 1 else (("dp", dp),)
        yield Plan(
            name="tried",
            model=graph.name,
            fingerprint=model_fingerprint(graph),
            mesh=Mesh(axes=axes),
            roles={a: "batch" if a == "dp" else "parameters" for a, _ in axes},
            inputs={"x": 0},
            parameters=entries,
            nodes={
                n.name: {"tp": str(c.choice)}
                for n, c in zip(graph.nodes, chosen or (), strict=False)
            },
        )


def settings(graph: Graph, dp: int, tp: int, pp: int, evaluator: Evaluator) -> Iterator[Setting]:
    """Every way to run a step on a mesh."""
    axes = ((("dp", dp),) if dp > 1 else ()) + ((("tp", tp),) if tp > 1 else ())
    size = dp * tp
    groups = tuple(
        Group(mesh=Mesh(axes=axes), ranks=tuple(range(g * size, (g + 1) * size))) for g in range(pp)
    )
    places = [i for i in range(1, len(graph.nodes)) if i not in unfit(graph)]
    for later in combinations(places, pp - 1):
        for count in divisors(ROWS // dp):
            for name in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                schedule = None
                if pp > 1 or count > 1:
                    schedule = evaluator.schedule(name, pp, count, pp)
                for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                    yield Setting(
                        groups=groups, cuts=(0, *later), placement=tuple(range(pp)),
                        schedule=schedule, microbatches=count, zero=zero,
                    )  # fmt: skip


def everything(graph: Graph, cluster: Cluster) -> Iterator[tuple[float, str]]:
    """The step time of everything that fits, and what it is."""
    ranks = cluster.num_ranks
    for tp in divisors(ranks):
        works: list[tuple[str, Evaluator, Works]] = []
        for plan in layouts(graph, 2, tp):
            try:
                fold, found = works_of(graph, plan)
                mine = next(iter(found.values()))
                mine.at(1)
            except ShardwiseError:  # such choices do not go together
                continue
            works.append((str(plan.nodes), Evaluator(fold, cluster), mine))
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            for what, evaluator, mine in works:
                for setting in settings(graph, dp, tp, pp, evaluator):
                    seconds = quickest(evaluator, mine, setting)
                    how = f"dp={dp} tp={tp} pp={pp} {setting.microbatches} zero={setting.zero}"
                    yield seconds, f"{how} {what}"


def quickest(evaluator: Evaluator, works: Works, setting: Setting) -> float:
    """The step, with activations recomputed only where they do not fit."""
    for recompute in ("none", "selective", "full"):
        estimate = evaluator.estimate(works, replace(setting, recompute=recompute))
        if estimate.fits:
            return estimate.step_time_s
    return float("inf")


def check(graph: Graph, cluster: Cluster) -> None:
    assert len(graph.nodes) <= 8
    plan = sw.plan(graph, cluster, progress=False)
    ours = sw.simulate(graph, plan, cluster).step_time_s
    best, what = min(everything(graph, cluster))
    assert ours <= best * (1 + 1e-6), f"{plan.search['best']} is slower than {what}: {ours / best}"


@pytest.mark.parametrize(
    ("name", "kind", "width", "length"),
    [("wide", "h100", 4096, 64), ("wide", "v100", 512, 4), ("normed", "a100", 1024, 512)],
)
def test_equals_trying_everything(name: str, kind: str, width: int, length: int) -> None:
    graph = captured(BODIES[name], width, 4 * width, length)
    check(graph, Cluster.preset(kind, nodes=1, devices_per_node=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("width", "length"), [(512, 4), (4096, 256)])
@pytest.mark.parametrize("name", BODIES)
def test_equals_trying_everything_on_four_ranks(
    name: str, width: int, length: int, nodes: int
) -> None:
    graph = captured(BODIES[name], width, 4 * width, length)
    check(graph, Cluster.preset("a100", nodes=nodes, devices_per_node=4 // nodes))
