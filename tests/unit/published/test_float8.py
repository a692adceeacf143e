"""Products of layers are computed in float8; all else keeps its dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.published.machines import FLOAT8, cluster_of
from shardwise.published.models import prepare
from shardwise.published.rows import Unusable
from shardwise.simulation.workload import Workload
from tests.unit.published.test_models import ROW

LLAMA = replace(
    ROW,
    layers=4,
    hidden=512,
    ffn_hidden=1024,
    heads=8,
    kv_heads=2,
    vocab=4000,
    seq_len=256,
    gpu="H100 (DGX)",
)


def work(dtype: str, tp: int = 1) -> Workload:
    row = replace(LLAMA, dtype=dtype, tp=tp, dp=8 // tp)
    return prepare(row, num_microbatches=2).workloads.at(1.0)


def test_operands_are_converted_once() -> None:
    wide, narrow = work("bfloat16"), work("float8")
    products = [x for x in narrow.launches if x.kernel.dtype == FLOAT8 and x.kernel.flops]
    assert len(products) == 2 * 7 * 3  # two layers of seven weights: output and both gradients
    assert sum(x.kernel.flops for x in narrow.launches) == pytest.approx(wide.flops)
    made = [x.kernel for x in narrow.launches if x.kernel.op == "to_float8"]
    # of a layer: four operands (query, key and value share one, gate and up too), 7 gradients
    assert len(made) == len(narrow.launches) - len(wide.launches) == 2 * (4 + 7)
    last = [x.kernel for x in narrow.launches if x.kernel.kind == "matmul"][-3:]
    assert all(kernel.dtype == "bfloat16" for kernel in last)


def test_operands_are_sent_in_float8() -> None:
    wide, narrow = work("bfloat16", tp=2), work("float8", tp=2)
    for a, b in zip(wide.collectives, narrow.collectives, strict=True):
        assert b.num_bytes == a.num_bytes / (2 if a.op == "all_gather" else 1)


def test_devices_without_float8_raise() -> None:
    with pytest.raises(Unusable, match="does not support float8"):
        cluster_of(replace(LLAMA, dtype="float8", gpu="A100-80GB"))
