"""Plans that are too large for this machine are verified on a scaled twin."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.equivalence import check
from shardwise.equivalence.reference import widen_graph
from shardwise.equivalence.twin import build_twin, prepare_twin
from shardwise.equivalence.twin.scale import small_size
from shardwise.errors import VerifyError
from shardwise.ir.blocks import BLOCKS_PER_KIND, block_kinds, drop_blocks
from shardwise.plans.plan import block_constraints
from tests.support import zoo
from tests.unit.equivalence import mutations as m


def on_meta(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers as hf

    def tokens(*shape: int) -> dict[str, torch.Tensor]:
        return {k: torch.zeros(shape, dtype=torch.long) for k in ("input_ids", "labels")}

    with torch.device("meta"):
        if name == "llama":
            config = hf.LlamaConfig(
                vocab_size=128256,
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=4,
                num_attention_heads=32,
                num_key_value_heads=8,
                use_cache=False,
            )
            return hf.LlamaForCausalLM(config).train(), tokens(64, 8192)
        if name == "fused_gpt":
            model: nn.Module = zoo.FusedGPT(50257, 4096, 32, 12, 1024)
            return model, tokens(8, 1000)
        if name == "gpt2":
            small = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
            config = hf.GPT2Config(n_embd=1024, n_layer=6, n_head=16, **small)
            return hf.GPT2LMHeadModel(config).train(), tokens(8, 1024)
        config = hf.ViTConfig(
            hidden_size=1024,
            num_hidden_layers=4,
            num_attention_heads=16,
            intermediate_size=4096,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=1000,
        )
        batch = {"pixel_values": torch.zeros(64, 3, 224, 224), "labels": tokens(64)["labels"]}
        return hf.ViTForImageClassification(config).train(), batch


def plan_of(graph: Any, strategy: str) -> sw.Plan:
    if strategy == "hybrid":
        return sw.strategies.hybrid(graph, sw.Cluster.local(512), dp=64, tp=8)
    plan: sw.Plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(8))
    return plan


def num_layers(graph: sw.Graph, plan: sw.Plan) -> int:
    """Count the layers of the twin: two of each kind, as a plan may treat some differently."""
    (kinds,) = block_kinds(graph, 1, block_constraints(plan, graph))[1].values()
    return sum(min(BLOCKS_PER_KIND, n) for n in Counter(kinds.values()).values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "hybrid"])
@pytest.mark.parametrize("name", ["llama", "fused_gpt", "gpt2", "vit"])
def test_large_models_on_meta_are_certified(name: str, strategy: str) -> None:
    model, batch = on_meta(name)
    graph = sw.capture(model, batch)
    plan = plan_of(graph, strategy)
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)
    layers = f"layers -> {num_layers(graph, plan)}"
    assert any(layers in line for line in certificate.scaled), certificate.scaled
    assert any("1024 -> " in line or "4096 -> " in line for line in certificate.scaled)
    if strategy == "hybrid":
        assert any("mesh axis dp: 64 ranks -> " in line for line in certificate.scaled)
    assert "scaled: " in str(certificate)


@pytest.mark.slow
def test_a_wrong_plan_is_caught_on_the_twin() -> None:
    model, batch = on_meta("fused_gpt")
    graph = widen_graph(sw.capture(model, batch))
    twin = prepare_twin(graph, plan_of(graph, "tensor"), {}, batch)
    assert check(twin.program, twin.reference, twin.inputs, scaled=twin.scaled).ok
    for fn in ("rt.reduce", "rt.fanout", "rt.as_partial"):
        broken = m.drop_step(twin.program, m.find_step(twin.program, fn))
        certificate = check(broken, twin.reference, twin.inputs, scaled=twin.scaled)
        assert not certificate.ok
        assert "zoo_models.py" in str(certificate.first_difference)


@pytest.mark.parametrize(
    ("strategy", "shares", "twin"),
    [("ddp", {"dp": (700, 3, 350, 350)}, "3:1:2"), ("tensor", {"tp": (300, 101)}, "2:1")],
)
def test_a_twin_has_unequal_shares(strategy: str, shares: Any, twin: str) -> None:
    model, batch = zoo.build("fused_gpt")
    (weights,) = shares.values()
    cluster = sw.Cluster.local(len(weights))
    plan = getattr(sw.strategies, strategy)(sw.capture(model, batch), cluster, shares=shares)
    certificate = sw.verify(model, batch, plan, max_bytes=2e7)
    assert certificate.ok, str(certificate)
    assert any(re.search(f" ranks -> {twin}$", line) for line in certificate.scaled)


def test_a_real_model_is_scaled_if_it_exceeds_the_memory_limit() -> None:
    model, batch = zoo.build("fused_gpt")
    plan = sw.strategies.tensor(sw.capture(model, batch), sw.Cluster.local(2))
    full = sw.verify(model, batch, plan)
    scaled = sw.verify(model, batch, plan, max_bytes=2e7)
    assert full.ok
    assert full.scaled == ()
    assert scaled.ok, str(scaled)
    assert scaled.scaled
    with pytest.raises(VerifyError, match="smallest twin"):
        sw.verify(model, batch, plan, max_bytes=1e3)


def test_a_twin_of_more_ranks_than_rows_has_an_empty_rank() -> None:
    model, batch = zoo.build("mlp")
    graph = sw.capture(model, batch)
    twin = build_twin(graph, sw.strategies.ddp(graph, sw.Cluster.local(100)))
    rows = twin.graph.values[graph.inputs[0].value].shape[0]
    assert rows < twin.plan.mesh.size
    assert sw.verify(model, batch, sw.strategies.ddp(graph, sw.Cluster.local(100))).ok


def test_two_layers_of_each_kind_remain() -> None:
    torch.manual_seed(0)
    model = zoo.FusedGPT(layers=5)
    _, batch = zoo.build("fused_gpt")
    graph = sw.capture(model, batch)
    fewer, notes = drop_blocks(graph)
    assert notes == ("blocks: 5 layers -> 2",)
    assert {p.name.split(".")[1] for p in fewer.parameters if "blocks" in p.name} == {"0", "1"}
    fewer.verify()
    two = sw.capture(zoo.FusedGPT(layers=2), batch)
    assert [n.op for n in fewer.nodes] == [n.op for n in two.nodes]


def test_a_layer_that_the_plan_treats_differently_remains() -> None:
    model, batch = zoo.FusedGPT(layers=6), zoo.build("fused_gpt")[1]
    graph = sw.capture(model, batch)
    replicated = {"blocks.4.up.weight": {"tp": "replicate"}}
    cluster = sw.Cluster.local(2)
    for options in ({"constraints": replicated}, {"recompute": ["blocks.4"]}):
        twin = build_twin(graph, sw.strategies.tensor(graph, cluster, **options))
        assert twin.scaled[0] == "blocks: 6 layers -> 4"
        remaining = {p.name for p in twin.graph.parameters if p.name.endswith("up.weight")}
        assert remaining == {f"blocks.{i}.up.weight" for i in (0, 1, 4, 5)}  # 5 follows 4


@pytest.mark.parametrize("size", [50257, 4096, 128256, 97, 1000, 64])
def test_scaled_sizes_have_the_same_divisibility(size: int) -> None:
    small = small_size(size, 8, ((64, 2), (8, 8), (512, 16)))
    assert 8 < small <= max(size, 8)
    assert (small % 8 == 0) == (size % 8 == 0)
    assert small % 2 == size % 2


def test_a_twin_says_that_it_leaves_synchronization_out() -> None:
    with torch.device("meta"):
        model, batch = torch.nn.Linear(8, 8), (torch.zeros(4, 8),)
    graph = sw.capture(model, batch, lambda out, _: out.square().mean())
    plan = sw.strategies.parameter_server(graph, sw.Cluster.local(2))
    certificate = sw.verify(model, batch, plan, lambda out, _: out.square().mean())
    assert certificate.ok
    assert any("synchronization" in line for line in certificate.scaled)
