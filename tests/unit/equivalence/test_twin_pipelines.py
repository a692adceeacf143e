"""Pipelines that are too large for this machine are verified on a scaled twin."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cluster import Mesh
from shardwise.equivalence import Certificate, check
from shardwise.equivalence.reference import widen_graph
from shardwise.equivalence.twin import build_twin, needed_bytes, prepare_twin
from shardwise.equivalence.twin.scale import few_microbatches, fewer_stages
from shardwise.ir import node_keys
from shardwise.ir.blocks import drop_blocks
from shardwise.runtime.pipeline.transfers import Exchange, Message, TiedParameters
from shardwise.schedules import make
from tests.support import zoo

Batch = dict[str, torch.Tensor]


def tokens(rows: int, length: int) -> Batch:
    return {k: torch.zeros(rows, length, dtype=torch.long) for k in ("input_ids", "labels")}


def gpt_on_meta(layers: int = 8, rows: int = 128) -> tuple[nn.Module, Batch]:
    with torch.device("meta"):
        return zoo.FusedGPT(50257, 1024, 16, layers, 1024), tokens(rows, 1000)


@functools.cache
def gpt_graph(layers: int = 8) -> sw.Graph:
    return sw.capture(*gpt_on_meta(layers))


def llama_on_meta() -> tuple[nn.Module, Batch]:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config).train(), tokens(256, 2048)


def t5_on_meta() -> tuple[nn.Module, Batch]:
    import transformers as hf

    config = hf.T5Config(
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=8,
        num_decoder_layers=8,
        num_heads=16,
        dropout_rate=0.0,
        use_cache=False,
    )
    decoder = torch.zeros(64, 128, dtype=torch.long)
    batch = {**tokens(64, 512), "labels": decoder, "decoder_input_ids": decoder.clone()}
    with torch.device("meta"):
        return hf.T5ForConditionalGeneration(config).train(), batch


def assert_scaled(certificate: Certificate, *lines: str) -> None:
    assert certificate.ok, str(certificate)
    for line in lines:
        assert line in certificate.scaled, certificate.scaled


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_llama_on_512_ranks_is_certified() -> None:
    model, batch = llama_on_meta()
    plan = sw.strategies.hybrid(
        sw.capture(model, batch),
        sw.Cluster.local(512),
        dp=8,
        tp=8,
        pp=8,
        num_microbatches=16,
        zero=1,
        schedule="1f1b",
    )
    certificate = sw.verify(model, batch, plan)
    (layers,) = (line for line in certificate.scaled if line.startswith("model.layers: 32 layers"))
    firsts = 7  # of stages; and two of each kind: the first layer may be sharded differently
    assert firsts + 2 <= int(layers.split()[-1]) <= firsts + 4
    assert_scaled(
        certificate,
        "mesh axis dp: 8 ranks -> 2",
        "mesh axis tp: 8 ranks -> 2",
        "micro-batches: 16 -> 9",
        "ranks: 512 -> 32",
    )
    assert "8 stages" in certificate.mesh


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_t5_is_certified() -> None:
    model, batch = t5_on_meta()
    plan = sw.strategies.hybrid(
        sw.capture(model, batch), sw.Cluster.local(128), dp=8, tp=4, pp=4, num_microbatches=8
    )
    certificate = sw.verify(model, batch, plan)
    assert_scaled(certificate, "micro-batches: 8 -> 5", "ranks: 128 -> 32")
    assert "4 stages" in certificate.mesh


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"pp": 4, "tp": 2, "dp": 16}, ("micro-batches: 8 -> 5", "ranks: 128 -> 16")),
        pytest.param(
            {"pp": 2, "tp": 1, "dp": 8, "schedule": "interleaved", "num_microbatches": 7},
            ("micro-batches: 7 -> 5", "mesh axis dp: 8 ranks -> 3"),
            marks=pytest.mark.slow,
        ),
        (
            {"pp": 3, "tp": 1, "dp": 1, "schedule": "zero_bubble", "num_microbatches": 3},
            ("blocks: 8 layers -> 3",),
        ),
        pytest.param(
            {"pp": 2, "tp": 1, "dp": 4, "per_microbatch": True},
            ("micro-batches: 8 -> 4",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 1, "tp": 2, "dp": 8, "zero": 3},
            ("micro-batches: 8 -> 4",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_tied_gpt_is_certified(options: dict[str, Any], lines: tuple[str, ...]) -> None:
    model, batch = gpt_on_meta()
    options = {"num_microbatches": 8, **options}
    ranks = options["dp"] * options["tp"] * options["pp"]
    plan = sw.strategies.hybrid(gpt_graph(), sw.Cluster.local(ranks), **options)
    assert_scaled(sw.verify(model, batch, plan), *lines)


@pytest.mark.slow
def test_broken_pipelines_are_caught_on_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = gpt_on_meta()
    graph = widen_graph(sw.capture(model, batch))
    plan = sw.strategies.hybrid(graph, sw.Cluster.local(128), dp=16, tp=2, pp=4, num_microbatches=8)
    twin = prepare_twin(graph, plan, {}, batch)

    def certificate() -> Certificate:
        return check(twin.program, twin.reference, twin.inputs, scaled=twin.scaled)

    assert certificate().ok
    with monkeypatch.context() as patch:
        patch.setattr(TiedParameters, "sum_gradients", lambda self: None)
        result = certificate()
        assert not result.ok
        assert "parameter tok.weight, tied as head.weight" in str(result.first_difference)
    send = Exchange.send

    def lose(self: Exchange, tensor: Any, message: Message) -> None:
        wrong = message == (1, self.spec.num_microbatches - 1, True)
        send(self, torch.zeros_like(tensor) if wrong else tensor, message)

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "send", lose)
        result = certificate()
        assert not result.ok
        value = twin.program.transfers[1].value  # type: ignore[union-attr]
        assert f"%{value}" in str(result.first_difference)


def test_stages_begin_at_the_same_nodes() -> None:
    graph = gpt_graph()
    plan = sw.strategies.pipeline(graph, sw.Cluster.local(4), pp=4, num_microbatches=4)
    twin = build_twin(graph, plan)
    before = {place: name for name, place in node_keys(graph).items()}
    after = {place: name for name, place in node_keys(twin.graph).items()}
    firsts = [before[stage.first] for stage in plan.stages[1:]]
    assert [after[stage.first] for stage in twin.plan.stages[1:]] == firsts
    assert twin.plan.num_microbatches == 4
    assert [p.ranks for p in twin.plan.stages] == [(0,), (1,), (2,), (3,)]


def test_a_schedule_given_as_actions_keeps_their_order() -> None:
    model, batch = gpt_on_meta(layers=4)
    graph = gpt_graph(layers=4)
    listed = make("gpipe", num_groups=2, num_microbatches=8)
    plan = sw.strategies.pipeline(
        graph, sw.Cluster.local(2), pp=2, schedule=listed, num_microbatches=8
    )
    twin = build_twin(graph, plan)
    expected = make("gpipe", num_groups=2, num_microbatches=4)
    assert twin.plan.schedule == tuple(tuple(map(str, row)) for row in expected.actions)
    assert "schedule: the listed actions of micro-batches 0 to 3" in twin.scaled
    assert sw.verify(model, batch, plan).ok


@pytest.mark.slow
def test_stages_of_different_meshes_are_all_scaled() -> None:
    model, batch = gpt_on_meta(layers=4)
    plan = sw.strategies.pipeline(
        gpt_graph(layers=4),
        sw.Cluster.local(36),
        stage_meshes=(Mesh.of(dp=16), Mesh.of(tp=16), Mesh.of(dp=2, tp=2)),
        num_microbatches=4,
    )
    certificate = sw.verify(model, batch, plan)
    assert_scaled(
        certificate, "mesh axis dp: 16 ranks -> 2", "mesh axis tp: 16 ranks -> 8", "ranks: 36 -> 14"
    )


@pytest.mark.slow
def test_many_groups_become_fewer_with_equally_many_stages_each() -> None:
    model, batch = gpt_on_meta(layers=24)
    graph = sw.capture(model, batch)
    plan = sw.strategies.hybrid(
        graph, sw.Cluster.local(12), pp=12, schedule="interleaved", num_microbatches=16
    )
    fewer, notes = fewer_stages(plan)
    assert notes == ("stages: 24 -> 16, on 12 -> 8 groups of ranks",)
    assert len(fewer.stages) == 16
    assert len(fewer.groups) == 8
    assert few_microbatches(fewer) == 16
    fewer.check(graph)


def test_alternating_kinds_of_layers_still_alternate() -> None:
    """A remaining layer follows the one before it, whatever its kind."""

    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6, bias=i % 2 == 0) for i in range(11)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.sum()

    graph = sw.capture(Alternating(), {"x": torch.zeros(2, 6)})
    keep = [n.name for n in graph.nodes if n.module == "layers.7"]
    small, notes = drop_blocks(graph, keep)
    assert notes == ("layers: 11 layers -> 7",)
    small.verify()
    remaining = [n.module for n in small.nodes if n.op.startswith("aten.linear")]
    assert remaining == [f"layers.{i}" for i in (0, 1, 2, 3, 6, 7, 10)]


def test_memory_counts_every_stage() -> None:
    graph = gpt_graph(layers=4)
    replicated = sw.strategies.ddp(graph, sw.Cluster.local(4))
    staged = sw.strategies.pipeline(graph, sw.Cluster.local(4), pp=4, num_microbatches=4)
    one = sw.strategies.ddp(graph, sw.Cluster.local(1))
    assert needed_bytes(graph, one) < needed_bytes(graph, staged) < needed_bytes(graph, replicated)
