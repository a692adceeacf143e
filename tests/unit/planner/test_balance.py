"""Stage boundaries: balanced, narrow, at valid places, or where the user puts them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.ir import Graph, Input, Node, Parameter, Ref, TensorType, node_keys
from shardwise.ir.operators import is_random
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.planner.stage_balance import (
    HALVINGS,
    SLACKS,
    Costs,
    _Chain,
    _minima,
    balance,
    crossing_bytes,
    find_places,
    node_work,
    unfit,
)
from shardwise.sharding.factors import Facts, analyze
from tests.support import zoo
from tests.support.tiers import thinned
from tests.support.work import calls


@functools.cache
def gpt(layers: int = 12) -> tuple[sw.Graph, Facts]:
    _, batch = zoo.build("fused_gpt")
    graph = sw.capture(zoo.FusedGPT(layers=layers).train(), batch)
    return graph, analyze(graph)


def stage_work(graph: sw.Graph, facts: Facts, starts: Sequence[int]) -> list[float]:
    """Return the work of every stage, from the first node of each."""
    costs = node_work(graph, facts)
    return [sum(costs[a:b]) for a, b in pairwise((*starts, len(costs)))]


@functools.cache
def captured(name: str, dropout: float = 0.0) -> tuple[sw.Graph, Facts]:
    graph = sw.capture(*zoo.build(name, dropout=dropout))
    return graph, analyze(graph)


def places(graph: sw.Graph, starts: tuple[int, ...]) -> list[str]:
    keys = list(node_keys(graph).values())
    return [keys[start] for start in starts]


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_a_gpt_is_balanced_and_cut_in_its_residual_stream(stages: int) -> None:
    graph, facts = gpt()
    starts = balance(graph, facts, [1] * stages)
    work = stage_work(graph, facts, starts)
    assert max(work) / (sum(work) / stages) < 1.15
    for place in places(graph, starts)[1:]:
        assert place.startswith("blocks."), place
        assert place.endswith(("n1.layer_norm_0", "n2.layer_norm_0")), place


def test_larger_groups_get_more_work() -> None:
    graph, facts = gpt()
    work = stage_work(graph, facts, balance(graph, facts, (1, 2, 1)))
    assert 1.6 < work[1] / work[0] < 2.4
    assert 1.6 < work[1] / work[2] < 2.4


def test_if_one_stage_is_longest_the_others_are_level() -> None:
    _, batch = zoo.build("fused_gpt")
    graph = sw.capture(zoo.FusedGPT(vocab=20000, layers=8).train(), batch)
    facts = analyze(graph)
    work = stage_work(graph, facts, balance(graph, facts, [1] * 5))
    assert work[-1] == max(work)
    assert max(work[:-1]) < 1.6 * min(work[:-1])


@pytest.mark.parametrize(
    "name", thinned(["llama", "vit", "t5", "bert", "mamba"], lambda i, _: i == 0)
)
def test_no_stage_begins_at_random_or_free_nodes(name: str) -> None:
    graph, facts = captured(name, 0.1)
    free = values_of_inputs(graph)
    parameters = {p.value for p in graph.parameters}
    for stages in range(2, 9):
        starts = balance(graph, facts, [1] * stages)
        assert len(set(starts)) == stages
        assert starts == tuple(sorted(starts))
        for first, end in itertools.pairwise((*starts, len(graph.nodes))):
            node = graph.nodes[first]
            assert first == 0 or not is_random(node)
            assert first == 0 or not set(node.outputs) <= free
            used = {name for node in graph.nodes[first:end] for name in node.inputs}
            assert used & parameters


def test_statistics_stay_with_their_batch_norm() -> None:
    graph, _ = captured("hf_resnet")
    changed = {b.value for b in graph.buffers if b.mutation}
    reasons = unfit(graph)
    assert changed
    for buffer in changed:
        uses = [i for i, node in enumerate(graph.nodes) if buffer in node.inputs]
        assert all(i in reasons for i in range(uses[0] + 1, uses[-1] + 1))


# ---------------------------------------------------------------- the search


def chain(widths: list[int], seed: int) -> Graph:
    """Return a chain of layers of different widths, some without parameters."""
    draw = random.Random(seed)
    values = {"x": TensorType((8, widths[0]), torch.float32)}
    nodes, parameters, last = [], [], "x"
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        name = f"v{i}"
        values[name] = TensorType((8, b), torch.float32)
        if a != b or draw.random() < 0.5:
            values[f"w{i}"] = TensorType((b, a), torch.float32)
            parameters.append(Parameter(value=f"w{i}", name=f"l{i}.weight"))
            args, op = (Ref(last), Ref(f"w{i}")), "aten.linear.default"
        else:
            args, op = (Ref(last),), "aten.relu.default"
        nodes.append(Node(name=f"n{i}", op=op, args=args, outputs=(name,), module=f"l{i}"))
        last = name
    values["loss"] = TensorType((), torch.float32)
    nodes.append(Node(name="loss", op="aten.sum.default", args=(Ref(last),), outputs=("loss",)))
    return Graph(
        name="Chain",
        nodes=tuple(nodes),
        values=values,
        inputs=(Input(value="x", name="x", path=("x",)),),
        parameters=tuple(parameters),
        loss="loss",
        outputs=(Ref("loss"),),
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_stage_is_near_the_best_of_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    graph = chain([draw.choice([16, 16, 32, 64]) for _ in range(14)], seed)
    facts = analyze(graph)
    ranks = [draw.choice([1, 2]) for _ in range(3)]
    speeds = [r / (sum(ranks) / len(ranks)) for r in ranks]
    reasons, owners = unfit(graph), {p.value for p in graph.parameters}

    def longest(starts: tuple[int, ...]) -> float:
        work = stage_work(graph, facts, starts)
        return max(w / s for w, s in zip(work, speeds, strict=True))

    def owning(starts: tuple[int, ...]) -> bool:
        ends = itertools.pairwise((*starts, len(graph.nodes)))
        return all(any(set(n.inputs) & owners for n in graph.nodes[a:b]) for a, b in ends)

    fit = [i for i in range(len(graph.nodes)) if i not in reasons]
    candidates = [(0, *cuts) for cuts in itertools.combinations(fit, 2)]
    best = min(longest(starts) for starts in candidates if owning(starts))
    starts = balance(graph, facts, ranks)
    assert owning(starts)
    assert longest(starts) <= best * (1 + SLACKS[-1]) * 1.0001
    crossing = crossing_bytes(graph, facts)
    within = [s for s in candidates if owning(s) and longest(s) <= best * (1 + SLACKS[0])]
    narrowest = min(sum(crossing[i] for i in s) for s in within)
    assert sum(crossing[i] for i in starts) <= narrowest


@pytest.mark.slow
def test_ten_thousand_nodes_are_balanced_quickly() -> None:
    graph = chain([16] * 10_000, 0)
    facts = analyze(graph)
    starts: list[int] = []
    assert calls(lambda: starts.extend(balance(graph, facts, [1] * 16))) < 2_000_000
    work = stage_work(graph, facts, starts)
    assert max(work) < 1.05 * sum(work) / 16


def test_minima_of_ranges() -> None:
    draw = np.random.default_rng(0)
    for _ in range(3):
        values = draw.integers(0, 5, 37).astype(np.float64)
        first, last = draw.integers(0, 37, 37), draw.integers(0, 37, 37)
        minima = _minima(values, first, last)
        for at in range(37):
            assert minima[at] == values[first[at] : last[at] + 1].min(initial=np.inf)


@pytest.mark.parametrize("speeds", [[1.0] * 7, [1.0, 2.0, 0.5, 1.0]])
def test_min_bound_equals_plain_bisection(speeds: list[float]) -> None:
    draw = np.random.default_rng(1)
    for count in (9, 40, 121):
        work = np.tile(draw.random(9), 14)[:count]
        costs = Costs(work, np.ones(count), 0.0)
        chain = _Chain([True] * count, costs, list(range(1, count)), speeds, owning=True)
        low, high = 0.0, float(chain.work[-1] / chain.speeds.min())
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if chain._reaches(middle) else (middle, high)
        assert chain.min_bound() == high


# ---------------------------------------------------------------- work and bytes


def test_work_counts_multiply_adds() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 64)
            self.conv = nn.Conv1d(64, 64, 3)
            self.out = nn.Linear(64, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids).unsqueeze(1)
            x = nn.functional.scaled_dot_product_attention(x, x, x).squeeze(1)
            return self.out(self.conv(x.transpose(1, 2)).transpose(1, 2)).sum()

    graph = sw.capture(Net(), {"ids": torch.zeros(2, 102, dtype=torch.long)})
    work = dict(zip(node_keys(graph).values(), node_work(graph, analyze(graph)), strict=True))
    assert work["conv.conv1d_0"] == 3 * (2 * 100 * 64 * 64 * 3)
    assert work["out.linear_0"] == 3 * (2 * 100 * 64 * 64)
    # Queries, keys and values are one value here, with one gradient.
    assert work["scaled_dot_product_attention_0"] == 2 * (2 * 102 * 102 * (64 + 64))
    rows, ids = 2 * 102 * 64 * 4, 2 * 102 * 8
    assert work["table.embedding_0"] == 2 * 2.0 * (rows + ids), "rows, not the table"


def test_crossing_bytes_count_values_and_gradients() -> None:
    graph, facts = captured("unet")
    crossing = dict(zip(node_keys(graph).values(), crossing_bytes(graph, facts), strict=True))
    skip = 4 * 8 * 16 * 16 * 8
    deep = 4 * 16 * 8 * 8 * 8
    assert crossing["down1.conv2d_0"] == 0
    assert crossing["down2.conv2d_0"] == 2 * skip
    assert crossing["mid.conv2d_0"] == 2 * (skip + deep)


# ---------------------------------------------------------------- boundaries set by the user


def test_cuts_are_places_or_modules() -> None:
    graph, _ = gpt()
    starts = find_places(graph, ["blocks.3", "blocks.6.n2.layer_norm_0", "head"])
    assert places(graph, starts)[1:] == [
        "blocks.3.n1.layer_norm_0",
        "blocks.6.n2.layer_norm_0",
        "head.linear_0",
    ]
    plan = sw.strategies.pipeline(graph, sw.Cluster.local(2), cuts=["blocks.6"], num_microbatches=2)
    assert [s.first for s in plan.stages] == ["", "blocks.6.n1.layer_norm_0"]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["block.3"], "no such node or module; did you mean 'blocks.3"),
        (["blocks.6", "blocks.3"], "cut 'blocks.3' is node"),
        (["blocks.6", "blocks.6"], "in the order of the model"),
        (["arange_0"], "it depends on the batch alone"),
        (["arange_0"], "the next place is 'pos.embedding_0'"),
        (["tok"], "none of its 1 nodes can be the first (it is the first node of the model)"),
    ],
)
def test_invalid_cuts_are_refused(cuts: list[str], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        find_places(gpt()[0], cuts)
    assert message in str(caught.value)


def test_no_stage_begins_at_a_random_node() -> None:
    graph, _ = captured("gpt2", 0.1)
    drops = [k for k in node_keys(graph).values() if k.endswith("dropout_0")]
    with pytest.raises(PlanError, match="it draws random numbers"):
        find_places(graph, drops[:1])
