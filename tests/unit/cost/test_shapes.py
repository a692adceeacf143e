"""Compare the fast rules for results with torch's meta kernels."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost import signature as shapes

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def facts(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return [facts(item) for item in result]
    return None if result is None else (tuple(result.shape), result.dtype, result.stride())


def check(func: Any, *args: Any, **kwargs: Any) -> None:
    assert facts(shapes.call_on_meta(func, args, kwargs)) == facts(func(*args, **kwargs))


def test_layer_norm_in_float32() -> None:
    """Statistics of half precision are float32 on a GPU, unlike in torch's meta kernel."""
    x, w = meta(3, 5, 4), meta(4)
    check(aten.native_layer_norm.default, x, [4], w, w, 1e-5)
    check(aten.native_layer_norm.default, x, [5, 4], None, None, 1e-5)
    half = meta(3, 4, dtype=torch.bfloat16)
    results = shapes.call_on_meta(aten.native_layer_norm.default, (half, [4], None, None, 1e-5), {})
    assert [t.dtype for t in results] == [torch.bfloat16, torch.float32, torch.float32]


@given(
    op=st.sampled_from(["add", "mul", "div", "eq", "lt", "pow", "maximum", "remainder"]),
    first=st.sampled_from(DTYPES[:3]),
    second=st.sampled_from(DTYPES[:3]),
    sizes=st.sampled_from([((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 1), (1, 4)), ((3, 4), ())]),
)
@settings(max_examples=60, deadline=None)
def test_elementwise_results(op: str, first: Any, second: Any, sizes: Any) -> None:
    packet = getattr(aten, op)
    func = getattr(packet, "Tensor_Tensor" if op == "pow" else "Tensor", None) or packet.default
    args = meta(*sizes[0], dtype=first), meta(*sizes[1], dtype=second)
    for _ in range(2):  # the second time, the dtype is known
        check(func, *args)


@given(dtype=st.sampled_from(DTYPES[:3]), number=st.sampled_from([2, 2.5, True]))
@settings(max_examples=20, deadline=None)
def test_elementwise_with_a_number(dtype: Any, number: Any) -> None:
    for _ in range(2):
        check(aten.mul.Tensor, meta(3, 4, dtype=dtype), number)
        check(aten.gelu.default, meta(3, 4))
        check(aten.exp.default, meta(4, 3).t())
        check(aten.to.dtype, meta(3, 4, dtype=dtype), torch.bfloat16)
