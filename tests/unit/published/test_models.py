"""Transformers from dims: the variant and its number of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.published.models import Shape, build, shape_of
from shardwise.published.rows import Row, Sharding

TINY = Shape(
    layers=2,
    hidden=32,
    ffn_hidden=64,
    heads=4,
    kv_heads=2,
    vocab=100,
    positions=0,
    gated=True,
    tied=False,
)
ROW = Row(
    row_id="r",
    model="m",
    params_b=None,
    params_tolerance_b=0.5,
    layers=32,
    hidden=4096,
    ffn_hidden=14336,
    heads=32,
    kv_heads=8,
    vocab=128256,
    seq_len=2048,
    gpu="H100",
    gpus=8,
    gpus_per_node=8,
    interconnect="",
    dtype="bfloat16",
    tp=1,
    pp=1,
    vpp=1,
    cp=1,
    dp=8,
    sharding=Sharding(level=0),
    micro_batch=1,
    global_batch=8,
    recompute="none",
)


@settings(deadline=None, max_examples=20)
@given(
    gated=st.booleans(),
    tied=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 3),
)
def test_number_of_parameters(gated: bool, tied: bool, kv_heads: int, layers: int) -> None:
    positions = 0 if gated else 16
    shape = replace(
        TINY, gated=gated, tied=tied, kv_heads=kv_heads, layers=layers, positions=positions
    )
    model, _ = build(shape, batch=2, seq_len=16, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters


@pytest.mark.parametrize(
    ("params_b", "tolerance", "change", "gated", "tied"),
    [
        (8.0, 0.5, {}, True, False),  # Llama-3-8B
        (8.03, 0.005, {}, True, False),
        (None, 0.5, {}, True, False),
        (None, 0.5, {"ffn_hidden": 4 * 4096}, False, True),
        (70.6, 0.05, {"layers": 80, "hidden": 8192, "ffn_hidden": 28672, "heads": 64}, True, False),
        (
            124.4e-3,
            5e-5,
            {"layers": 12, "hidden": 768, "ffn_hidden": 3072, "heads": 12, "kv_heads": 12}
            | {"vocab": 50257, "seq_len": 1024},
            False,
            True,
        ),
        (
            15,
            0.5,
            {"hidden": 6144, "ffn_hidden": 24576, "heads": 48, "vocab": 256000},
            False,
            False,
        ),
    ],
)
def test_the_variant_is_chosen_by_its_parameters(
    params_b: float | None, tolerance: float, change: dict[str, int], gated: bool, tied: bool
) -> None:
    row = replace(ROW, params_b=params_b, params_tolerance_b=tolerance, **change)  # type: ignore[arg-type]
    shape = shape_of(row)
    assert (shape.gated, shape.tied) == (gated, tied)


@pytest.mark.parametrize("change", [{}, {"gated": False, "positions": 16, "tied": True}])
def test_models_can_be_captured(change: dict[str, bool]) -> None:
    graph = sw.capture(*build(replace(TINY, **change), batch=2, seq_len=16, dtype=torch.bfloat16))  # type: ignore[arg-type]
    assert sum("attention" in node.op for node in graph.nodes) == 2


def test_attention_of_old_stacks_is_not_one_kernel() -> None:
    row = replace(ROW, dtype="float16", kv_heads=32, gpu="A100")
    assert shape_of(replace(row, gpu="H100")).fused
    shape = replace(shape_of(row), layers=1, hidden=32, ffn_hidden=64, heads=4, kv_heads=4)
    graph = sw.capture(*build(shape, batch=2, seq_len=16, dtype=torch.float16))
    assert not any("attention" in node.op for node in graph.nodes)
