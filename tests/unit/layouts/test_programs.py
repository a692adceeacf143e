"""Layouts of real architectures resolve, lower at the predicted cost, and compute the model."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.ir import Graph
from shardwise.layouts.problem import LayoutAxis, LayoutSolution, LayoutTask
from shardwise.plans import ParameterEntry, Plan, Resolved
from shardwise.plans.resolve import resolve
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import REPLICATE, Shard
from tests.support import zoo
from tests.support.tiers import thinned
from tests.unit.layouts.exhaustive import lowered_cost, plan_for
from tests.unit.layouts.prices import LinkPrices, solve_layouts

# Rates at which sharding models of 64 features pays off.
SLOW = {
    "flops_per_s": 1e8,
    "memory_bytes_per_s": 1e10,
    "link_bytes_per_s": 1e9,
    "latency_s": 1e-7,
    "launch_s": 1e-9,
}
MESHES = {"tp4": (("tp", 4),), "dp2tp2": (("dp", 2), ("tp", 2)), "cp2tp2": (("cp", 2), ("tp", 2))}
EVERYDAY = (
    ("mlp", "tp4"),
    ("resnet", "dp2tp2"),
    ("unet", "tp4"),
    ("fused_gpt", "dp2tp2"),
    ("dlrm", "dp2tp2"),
    ("vit", "dp2tp2"),
)


def make_task(graph: Graph, mesh: str, **changes: object) -> LayoutTask:
    roles = {"dp": "batch", "cp": "sequence", "tp": "parameters"}
    axes = []
    for name, ranks in MESHES[mesh]:
        dim = 1 if name == "cp" else 0
        inputs = {
            i.value: Shard(dim, ((1, graph.values[i.value].shape[dim], 1),))
            for i in graph.inputs
            if len(graph.values[i.value].shape) > dim
        }
        free = None if name == "tp" else inputs
        axes.append(LayoutAxis(name=name, ranks=ranks, role=roles[name], inputs=free))
    return LayoutTask(axes=tuple(axes), **changes)  # type: ignore[arg-type]


def plan_of(graph: Graph, task: LayoutTask, solution: LayoutSolution) -> Plan:
    nodes, parameters = solution.as_choices()
    return plan_for(
        graph,
        task,
        inputs={i.name: 0 for i in graph.inputs} if task.names[0] == "dp" else {},
        nodes=nodes,
        parameters={name: ParameterEntry(layout=layout) for name, layout in parameters.items()},
    )


def check(graph: Graph, facts: Facts, mesh: str) -> None:
    task = make_task(graph, mesh)
    prices = LinkPrices(graph=graph, facts=facts, task=task, **SLOW)
    solution = solve_layouts(graph, facts, task, prices)
    assert solution.gap < 1e-4
    plan = plan_of(graph, task, solution)
    resolved = Resolved(graph=graph, plan=plan, facts=facts, assignments=solution.assignments)
    assert lowered_cost(resolved, task, prices) == pytest.approx(solution.cost_s, rel=1e-6)
    resolved_again = resolve(graph, plan, facts)
    for searched, assigned in zip(solution.assignments, resolved_again.assignments, strict=True):
        assert searched.nodes == assigned.nodes
        assert searched.parameters == {v: assigned.parameters[v] for v in searched.parameters}


@functools.cache
def captured(name: str) -> tuple[Graph, Facts]:
    graph = sw.capture(*zoo.build(name))
    return graph, analyze(graph)


GRID = [(name, mesh) for name in zoo.names() for mesh in ("tp4", "dp2tp2")]


@pytest.mark.parametrize(("name", "mesh"), thinned(GRID, lambda _, case: case in EVERYDAY))
def test_lowers_at_the_price_and_resolves(name: str, mesh: str) -> None:
    check(*captured(name), mesh)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mlp", "tp4"),
        ("fused_gpt", "dp2tp2"),
        pytest.param("unet", "dp2tp2", marks=pytest.mark.slow),
        pytest.param("fused_gpt", "cp2tp2", marks=pytest.mark.slow),
    ],
)
def test_plans_compute_the_model(name: str, mesh: str) -> None:
    model, batch = zoo.build(name)
    graph, facts = captured(name)
    task = make_task(graph, mesh)
    prices = LinkPrices(graph=graph, facts=facts, task=task, **SLOW)
    solution = solve_layouts(graph, facts, task, prices)
    assert sw.verify(model, batch, plan_of(graph, task, solution)).ok


@pytest.fixture(scope="module")
def llama() -> tuple[Graph, Facts]:
    """One layer of the size of Llama-3-8B, on 2 x 1,024 tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.zeros(2, 1024, dtype=torch.long, device="meta")
    graph = sw.capture(model, {"input_ids": tokens, "labels": tokens})
    return graph, analyze(graph)


def sharded_dims(solution: LayoutSolution) -> dict[str, str]:
    """Map each parameter to the dim that the last mesh axis shards, or to "replicate"."""
    axis = solution.assignments[-1].axis
    _, parameters = solution.as_choices()
    short = {name.removeprefix("model.layers.0."): c for name, c in parameters.items()}
    return {name: c[axis].split(":")[0] for name, c in short.items()}


def test_llama_is_sharded_as_experts_do_it(llama: tuple[Graph, Facts]) -> None:
    """Columns, then rows; norms on sequence shards; the vocabulary sharded at the logits."""
    graph, facts = llama
    task = make_task(graph, "tp4")
    solution = solve_layouts(graph, facts, task, LinkPrices(graph=graph, facts=facts, task=task))
    dims = sharded_dims(solution)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert dims[f"{name}.weight"] == "0"
    assert dims["self_attn.o_proj.weight"] == "1"
    assert dims["mlp.gate_proj.weight"] == dims["mlp.up_proj.weight"] == "0"
    assert dims["mlp.down_proj.weight"] == "1"
    assert dims["lm_head.weight"] == "0"
    assert dims["model.embed_tokens.weight"] in ("0", "1")
    nodes, _ = solution.as_choices()
    norms = [n.name for n in graph.nodes if n.op.startswith("aten.rsqrt")]
    assert {nodes[n]["tp"] for n in norms} == {"shard d1"}


def test_norms_are_replicated_if_latency_is_high(llama: tuple[Graph, Facts]) -> None:
    graph, facts = llama
    task = make_task(graph, "tp4")
    prices = LinkPrices(graph=graph, facts=facts, task=task, latency_s=1e-3)
    solution = solve_layouts(graph, facts, task, prices)
    nodes, _ = solution.as_choices()
    norms = [n.name for n in graph.nodes if n.op.startswith("aten.rsqrt")]
    assert {nodes[n]["tp"] for n in norms} == {"same"}


def test_both_axes_are_solved_together(llama: tuple[Graph, Facts]) -> None:
    graph, facts = llama
    task = make_task(graph, "dp2tp2")
    solution = solve_layouts(graph, facts, task, LinkPrices(graph=graph, facts=facts, task=task))
    nodes, _ = solution.as_choices()
    linears = [n.name for n in graph.nodes if n.op.startswith("aten.linear")]
    assert {nodes[n]["dp"] for n in linears} == {"shard b2"}
    assert all(nodes[n]["tp"] != "same" for n in linears)
    again = solve_layouts(graph, facts, task, LinkPrices(graph=graph, facts=facts, task=task))
    assert again == solution


def test_several_axes_for_parameters_are_opened_one_at_a_time(llama: tuple[Graph, Facts]) -> None:
    graph, facts = llama
    task = LayoutTask(axes=(LayoutAxis(name="tp", ranks=8), LayoutAxis(name="tp1", ranks=2)))
    prices = LinkPrices(graph=graph, facts=facts, task=task)
    solution = solve_layouts(graph, facts, task, prices)
    assert solution.restricted == "of the axes tp, tp1 one is open at a time"
    plan = plan_of(graph, task, solution)
    resolved = Resolved(graph=graph, plan=plan, facts=facts, assignments=solution.assignments)
    assert lowered_cost(resolved, task, prices) == pytest.approx(solution.cost_s, rel=1e-6)
    single_axis = LayoutTask(axes=(LayoutAxis(name="tp", ranks=8),))
    baseline = solve_layouts(
        graph, facts, single_axis, LinkPrices(graph=graph, facts=facts, task=single_axis)
    )
    assert solution.cost_s < baseline.cost_s


def test_constraints_are_respected(llama: tuple[Graph, Facts]) -> None:
    graph, facts = llama
    gate = next(p.value for p in graph.parameters if p.name.endswith("gate_proj.weight"))
    linear = next(n for n in graph.nodes if gate in n.inputs)
    task = make_task(graph, "tp4", parameters={gate: {"tp": REPLICATE}})
    prices = LinkPrices(graph=graph, facts=facts, task=task)
    dims = sharded_dims(solve_layouts(graph, facts, task, prices))
    assert dims["mlp.gate_proj.weight"] == "replicate"
    task = make_task(graph, "tp4", nodes={linear.name: {"tp": "shard k"}})
    solution = solve_layouts(graph, facts, task, prices)
    assert str(solution.assignments[0].nodes[linear.name].choice) == "shard k"
    assert sharded_dims(solution)["mlp.gate_proj.weight"] == "1"
    with pytest.raises(PlanError, match="cannot 'shard z'"):
        solve_layouts(
            graph, facts, make_task(graph, "tp4", nodes={linear.name: {"tp": "shard z"}}), prices
        )


def test_copies_multiply_costs(llama: tuple[Graph, Facts]) -> None:
    graph, facts = llama
    names = [n.name for n in graph.nodes] + [p.value for p in graph.parameters]
    names += [name for name in graph.values if name not in names]
    task = make_task(graph, "tp4")
    prices = LinkPrices(graph=graph, facts=facts, task=task)
    once = solve_layouts(graph, facts, task, prices)
    thrice = solve_layouts(graph, facts, replace(task, copies=dict.fromkeys(names, 3)), prices)
    assert thrice.cost_s == pytest.approx(3 * once.cost_s)


def test_memory_is_weighed() -> None:
    graph, facts = captured("fused_gpt")
    task = make_task(graph, "tp4")
    fast = {**SLOW, "flops_per_s": 1e13, "latency_s": 1e-3}  # sharding never pays off
    prices = LinkPrices(graph=graph, facts=facts, task=task, **fast)

    def memory_bytes(solution: LayoutSolution) -> float:
        (tp,) = solution.assignments
        stored = sum(
            prices.stored_bytes(p.value, (tp.parameters[p.value],)) for p in graph.parameters
        )
        return stored + sum(prices.saved_bytes(n, (tp.nodes[n.name],)) for n in graph.nodes)

    free = solve_layouts(graph, facts, task, prices)
    weighed = solve_layouts(graph, facts, replace(task, memory_weight=1e-6), prices)
    assert memory_bytes(weighed) < 0.5 * memory_bytes(free)
