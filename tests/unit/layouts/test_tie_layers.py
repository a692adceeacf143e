"""Equal blocks make equal choices, and written plans have the planned cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Cluster
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.layouts.build import build
from shardwise.layouts.options import Options
from shardwise.layouts.solve import LayoutMilp
from shardwise.layouts.tie_layers import roots_of, tie_layers
from shardwise.planner.plan import _prepare
from shardwise.planner.write import write_plan
from shardwise.plans import Precision
from shardwise.plans.search_result import ParallelConfig
from shardwise.sharding.factors import analyze
from shardwise.simulation.folded_graph import FoldedGraph
from tests.support.tiers import thinned
from tests.unit.layouts.exhaustive import lowered_cost, resolutions
from tests.unit.layouts.prices import RandomPrices, solve_layouts
from tests.unit.layouts.test_optimality import make_task

TEXT = torch.zeros(2, 16, dtype=torch.long, device="meta")
IMAGE = torch.zeros(2, 3, 32, 32, device="meta")


def llama() -> Graph:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return captured(lambda: LlamaForCausalLM(config), input_ids=TEXT, labels=TEXT)


def gpt2() -> Graph:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=4, n_head=8, use_cache=False)
    return captured(lambda: GPT2LMHeadModel(config), input_ids=TEXT, labels=TEXT)


def t5() -> Graph:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=128, d_model=64, d_kv=8, d_ff=128, num_layers=4, num_heads=8, use_cache=False
    )
    batch = {"input_ids": TEXT, "decoder_input_ids": TEXT, "labels": TEXT}
    return captured(lambda: T5ForConditionalGeneration(config), **batch)


def vit() -> Graph:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=8, intermediate_size=128,
        image_size=32, patch_size=8, num_labels=16,
    )  # fmt: skip
    labels = torch.zeros(2, dtype=torch.long, device="meta")
    return captured(lambda: ViTForImageClassification(config), pixel_values=IMAGE, labels=labels)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (32,)))))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x)


class Nested(nn.Module):
    """Blocks in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Outer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def nested() -> Graph:
    return captured(Nested, x=torch.zeros(2, 8, 32, device="meta"))


def captured(build: Callable[[], nn.Module], **batch: Tensor) -> Graph:
    with torch.device("meta"):
        model = build()
    return sw.capture(model, batch)


MODELS = {f.__name__: f for f in (llama, gpt2, t5, vit, nested)}
LONG = ("llama", "t5", "gpt2", "vit")


class Chain(nn.Module):
    """Blocks of one node, so that tied nodes both produce and use a value."""

    def __init__(self, layers: int, reused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(layers))
        self.reused = reused

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        for layer in self.layers:
            y = layer(y)
        return (y + x if self.reused else y).sum()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in MODELS]
)
def test_written_plans_have_the_planned_cost(name: str) -> None:
    graph = MODELS[name]()
    cluster = Cluster.preset("a100", nodes=2, devices_per_node=4)
    search = _prepare(graph, cluster, {}, None, Precision.of("bf16"), None, lambda _: None)
    for tp, pp, layout in [(4, 2, 0), (4, 1, 1), (2, 2, 1)]:
        schedule = "1f1b" if pp > 1 else ""
        config = ParallelConfig(
            dp=8 // tp // pp, tp=tp, pp=pp, num_microbatches=2 // (8 // tp // pp), zero=0,
            recompute="selective", layout=layout, schedule=schedule,
        )  # fmt: skip
        simulated = search.simulate(config)
        plan = write_plan(graph, search.fold, simulated, Precision.of("bf16"))
        estimate = sw.simulate(graph, plan, cluster)
        assert estimate.step_time_s == pytest.approx(simulated.estimate.step_time_s, rel=1e-6)
        assert estimate.peak.peak_bytes == pytest.approx(
            simulated.estimate.peak.peak_bytes, rel=1e-6
        )


@pytest.mark.parametrize("seed", thinned(range(3), lambda i, _: i == 0))
@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_tied_nodes_cost_as_much_as_the_best_program_with_equal_choices(
    mesh: str, reused: bool, seed: int
) -> None:
    graph = sw.capture(Chain(2, reused), {"x": torch.ones(4, 8)})
    facts = analyze(graph)
    first, second = (n.name for n in graph.nodes if n.module.startswith("layers."))
    task = make_task(graph, mesh, tied={second: first}, move_parameters=True)
    prices = RandomPrices(graph=graph, seed=seed)
    solution = solve_layouts(graph, facts, task, prices)
    assignment = solution.assignments[0]
    weights = [p.value for p in graph.parameters]
    assert str(assignment.nodes[first].choice) == str(assignment.nodes[second].choice)
    assert assignment.parameters[weights[0]] == assignment.parameters[weights[1]]
    best = min(
        lowered_cost(r, task, prices)
        for r in resolutions(graph, facts, task)
        for a in r.assignments
        if str(a.nodes[first].choice) == str(a.nodes[second].choice)
        if a.parameters[weights[0]] == a.parameters[weights[1]]
    )
    assert solution.cost_s == pytest.approx(best, rel=1e-6)
    built = build(Options(graph, facts, task), prices)
    assert LayoutMilp(built.model).solve(30.0).cost == pytest.approx(best, rel=1e-6)


def test_transitions_between_blocks_are_counted() -> None:
    graph = sw.capture(Chain(6, False), {"x": torch.ones(4, 8)})
    fold = FoldedGraph.of(graph)
    ties = tie_layers(fold, graph)
    linears = [n for n in fold.graph.nodes if n.module.startswith("layers.")]
    assert ties.tied == {linears[1].name: linears[0].name}
    assert [ties.copies[n.name] for n in linears] == [1, 5]
    assert [ties.moves[n.outputs[0]] for n in linears] == [5, 1]
    assert [ties.copies[p.value] for p in fold.graph.parameters] == [1, 5]


def test_blocks_are_not_tied_if_nothing_is_folded() -> None:
    graph = sw.capture(Chain(2, False), {"x": torch.ones(4, 8)})
    assert tie_layers(FoldedGraph.of(graph), graph).tied == {}


def test_nested_blocks_are_all_tied_together() -> None:
    graph = nested()
    fold = FoldedGraph.of(graph)
    roots = roots_of(tie_layers(fold, graph).tied)
    ups = [n.name for n in fold.graph.nodes if n.module.endswith(".up")]
    assert len(ups) == 4
    assert {roots.get(name, name) for name in ups} == {ups[0]}


def test_unknown_nodes_are_reported() -> None:
    graph = sw.capture(Chain(2, False), {"x": torch.ones(4, 8)})
    task = make_task(graph, "tp2", tied={"linear_9": "linear"})
    with pytest.raises(ShardwiseError, match="linear_9"):
        Options(graph, analyze(graph), task)
