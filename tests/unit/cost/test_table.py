"""Times of kernels, and tables of measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Curve, Device
from shardwise.cost import (
    Kernel,
    OpTable,
    Signature,
    call_seconds,
    call_signature,
    cost_of,
    kernel_seconds,
    kernels_seconds,
    measure,
)
from shardwise.cost.table import missing
from shardwise.errors import ShardwiseError
from shardwise.ir import Ref, TensorType
from shardwise.sharding.rule import MeshAxis

A, B, C = (Ref(name) for name in "abc")


def device(kind: str = "cpu", **more: Any) -> Device:
    return Device(
        **{
            "name": f"a-{kind}",
            "kind": kind,
            "memory_bytes": 2**30,
            "matmul_flops_per_s": (("float32", Curve.constant(1e12)),),
            "attention_flops_per_s": (("float32", Curve.constant(5e11)),),
            "memory_bytes_per_s": Curve.constant(1e11),
            "overhead_s": 5e-6,
            **more,
        }
    )


def kernel(kind: str = "memory", flops: float = 0.0, num_bytes: float = 0.0) -> Kernel:
    shape = {"attention": (1, 2, 8, 8, 4), "memory": (8,)}.get(kind, (1, 8, 8, 8))
    return Kernel(op="k", kind=kind, flops=flops, bytes=num_bytes, dtype="float32", shape=shape)


def linear(rows: int = 6) -> Signature:
    types = [TensorType(s, torch.float32) for s in ((rows, 8), (4, 8), (4,))]
    every = frozenset(range(3))
    return call_signature("aten.linear.default", (A, B, C), (), types, every, every - {0})


@pytest.mark.parametrize(
    ("item", "seconds"),
    [
        (kernel(num_bytes=1e8), 1e-3),
        (kernel("matmul", 1e10), 1e-2),
        (kernel("convolution", 1e10), 1e-2),
        (kernel("attention", 1e10), 2e-2),
        (kernel("matmul", 1e6, 1e8), 1e-3),
        (kernel("matmul", 0.0, 1e8), 1e-3),
    ],
)
def test_a_kernel_takes_the_longer_of_arithmetic_and_memory(item: Kernel, seconds: float) -> None:
    assert kernel_seconds(item, device()) == pytest.approx(seconds + 5e-6)
    assert kernel_seconds(item, device("cuda")) == pytest.approx(seconds, rel=0.01)
    assert kernel_seconds(item, device("cuda", speed=0.5)) == pytest.approx(2 * seconds, rel=0.01)


def test_launches_of_a_gpu_hide_behind_kernels() -> None:
    assert kernel_seconds(kernel(num_bytes=1e3), device("cuda")) == 5e-6
    assert kernel_seconds(kernel(num_bytes=1e6), device("cuda")) == pytest.approx(10.9e-6)
    assert kernels_seconds([kernel(num_bytes=1e3)] * 3, device("cuda")) == pytest.approx(15e-6)


def test_a_dtype_without_a_rate() -> None:
    half = Kernel(op="mm", kind="matmul", flops=1e9, bytes=1.0, dtype="float16", shape=(1, 8, 8, 8))
    with pytest.raises(ShardwiseError, match="float16"):
        kernel_seconds(half, device())
    integer = Kernel(op="mm", kind="matmul", flops=1e9, bytes=1.0, dtype="int8", shape=(1, 8, 8, 8))
    assert kernel_seconds(integer, device()) == pytest.approx(1e-3 + 5e-6)


def test_computed_and_measured_times() -> None:
    call, table = linear(), OpTable()
    computed = call_seconds(call, device(), table)
    assert computed.source == "computed"
    assert computed == call_seconds(call, device())
    assert 0 < computed.weight_s < computed.backward_s
    assert (table.hits, table.misses) == (0, 1)
    table.add(str(call), "a-cpu", 1.0, 4.0)
    time = call_seconds(call, device(), table)
    share = computed.weight_s / computed.backward_s
    assert time == (1.0, 4.0, pytest.approx(4.0 * share), "measured")
    assert call_seconds(call, device(speed=0.5), table)[:2] == (2.0, 8.0)
    assert call_seconds(call, device("cuda"), table).source == "computed"
    assert (table.hits, table.misses) == (2, 2)
    assert "2 hits, 2 misses" in str(table)
    assert "on a-cuda" in str(table)


def test_a_call_that_launches_nothing_is_not_looked_up() -> None:
    kind = TensorType((3, 4), torch.float32)
    call = call_signature("aten.reshape.default", (A, (12,)), (), [kind])
    table = OpTable()
    assert call_seconds(call, device(), table)[:3] == (0.0, 0.0, 0.0)
    assert table.misses == 0
    assert missing([call], device(), table) == ()


def test_the_text_of_a_call_identifies_its_cost() -> None:
    assert str(linear()) == (
        "aten.linear.default(float32[6, 8], float32[4, 8], float32[4]) grads 0,1,2 parameters 1,2"
    )
    kind = TensorType((3, 4), torch.float32)
    twice = call_signature("aten.mul.Tensor", (A, A), (), [kind, kind])
    assert str(twice) == "aten.mul.Tensor(float32[3, 4], float32[3, 4]=%0)"
    axis = MeshAxis(("dp", "tp"))
    named = call_signature("rt.softmax", (A, axis, 1), (("key", "n"),), [kind])
    assert str(named) == "rt.softmax(float32[3, 4], dp.tp, 1)"


times = st.floats(0, 1e3, allow_nan=False)
entries = st.dictionaries(
    st.tuples(st.text(max_size=8), st.text(max_size=4)), st.tuples(times, times)
)


@given(entries=entries)
def test_json_round_trip(entries: Any) -> None:
    assert OpTable.from_json(OpTable(entries).to_json()).entries == entries


def test_saving_adds_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    OpTable({("f()", "a"): (1.0, 2.0), ("g()", "a"): (1.0, 2.0)}).save(path)
    OpTable({("f()", "a"): (3.0, 4.0), ("h()", "b"): (0.0, 0.0)}).save(path)
    assert OpTable.load(path).entries == {
        ("f()", "a"): (3.0, 4.0),
        ("g()", "a"): (1.0, 2.0),
        ("h()", "b"): (0.0, 0.0),
    }
    assert [p.name for p in tmp_path.iterdir()] == ["times.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "format version None"),
        ('{"version": 9}', "format version 9"),
        ('{"version": 1, "entries": [{"call": "f()"}]}', r"entries\[0\]"),
        (
            '{"version": 1, "entries":'
            ' [{"call": "f", "device": "d", "forward_s": -1, "backward_s": 0}]}',
            "forward_s is -1",
        ),
    ],
)
def test_malformed_files_raise(text: str, says: str) -> None:
    with pytest.raises(ShardwiseError, match=says):
        OpTable.from_json(text)


def test_measuring_on_this_machine() -> None:
    float32, int64 = torch.float32, torch.int64
    table_type, ids = TensorType((50, 8), float32), TensorType((6,), int64)
    x = TensorType((6, 8), float32)
    tp = MeshAxis(("tp",))
    calls = [
        linear(),
        call_signature("aten.embedding.default", (A, B), (), [table_type, ids], frozenset({0})),
        call_signature("aten.cross_entropy_loss.default", (A, B), (), [x, ids], frozenset({0})),
        call_signature("rt.softmax", (A, tp, 1), (), [x], frozenset({0})),
        call_signature("rt.dropout", (A, 0.1), (("shape", (12, 8)),), [x], frozenset({0})),
        call_signature("aten.arange.default", (64,)),
        call_signature("aten.nonzero.default", (A,), (), [x]),
    ]
    here = device()
    table = measure([*calls, *calls], here, budget_s=0.0)
    assert table.notes == []
    assert len(table.entries) == len(calls)
    for call in calls:
        forward, backward = table.entries[str(call), here.name]
        assert forward > 0
        assert (backward > 0) == bool(cost_of(call).backward)
        assert call_seconds(call, here, table).source == "measured"
    assert missing(calls, here, table) == ()


def test_notes_are_in_the_file_once(tmp_path: Path) -> None:
    table = OpTable()
    table.notes = ["plan ddp was not timed: rank 0 died"]
    for _ in range(2):
        table.save(tmp_path / "times.json")
    assert OpTable.load(tmp_path / "times.json").notes == table.notes
    with pytest.raises(ShardwiseError, match="notes is 3"):
        OpTable.from_json('{"version": 1, "notes": 3}')


def test_calls_that_do_not_fit_or_run_are_skipped_with_a_note() -> None:
    huge = TensorType((2**20, 2**20), torch.float32)
    calls = [
        call_signature("aten.relu.default", (A,), (), [huge]),
        call_signature("nowhere.op.default", (A,), (), [TensorType((3,), torch.float32)]),
    ]
    table = measure(calls, device(), budget_s=0.0)
    assert table.entries == {}
    assert "bytes of 1,073,741,824" in table.notes[0]
    assert "not registered" in table.notes[1]
