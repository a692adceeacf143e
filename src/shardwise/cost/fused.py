"""Attention and RMS norm as devices run them: as fused kernels.

Meta tensors would show composites instead, which no device runs.

Flash attention (Dao, 2023) computes 2 products in forward and 5 in backward, where it recomputes
the scores; it saves query, key, value, the result and one float32 number per row. Heads that share
keys are not copied in forward; backward on a GPU makes their gradients per query head, and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardwise.cost.kernels import MEMORY, CallCost, Kernel, Saved, contiguous, seen_part
from shardwise.cost.signature import Signature, broadcast_shapes
from shardwise.dtypes import dtype_name
from shardwise.ir import Ref, TensorType

_ATEN = "aten.scaled_dot_product_attention.default"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def is_fused_attention(signature: Signature) -> bool:
    """Return whether this call is one fused kernel."""
    if signature.op not in (_ATEN, "rt.attention"):
        return False
    named = dict(signature.kwargs)
    place = _ARGUMENTS.index("dropout_p")
    if signature.op == _ATEN and len(signature.args) > place:
        named["dropout_p"] = signature.args[place]
    return not named.get("dropout_p") and len(signature.types[0].shape) >= 3


@dataclass(slots=True)
class _Sizes:
    """The sizes of one attention; `mask` is the position of the mask operand."""

    query: TensorType
    key: TensorType
    value: TensorType
    result: TensorType
    mask: int | None
    causal: bool
    rows_cut: bool

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, heads, rows, _ = self.result.shape
        return (prod(lead), heads, rows, self.key.shape[-2], self.query.shape[-1])

    @property
    def rows(self) -> int:
        return prod(self.result.shape[:-1])


def attention_cost(signature: Signature) -> CallCost:
    """Return the kernels and memory of a fused attention."""
    sizes = _sizes(signature)
    query, key, value, result = sizes.query, sizes.key, sizes.value, sizes.result
    part = seen_part(result.shape[-2], key.shape[-2]) if sizes.causal else 1.0
    flops = 2.0 * sizes.rows * key.shape[-2] * part
    made, mask_bytes, own = _mask(signature, sizes)
    row_bytes = sizes.rows * 4  # logsumexp is float32
    moved = sum(t.num_bytes for t in (query, key, value, result)) + row_bytes + mask_bytes
    kernel = Kernel(
        op="scaled_dot_product_attention",
        kind="attention",
        flops=flops * (query.shape[-1] + value.shape[-1]),
        bytes=float(moved),
        dtype=dtype_name(query.dtype),
        shape=sizes.shape,
        causal=sizes.causal,
    )
    fields: dict[str, Any] = {"forward": (*made, kernel), "results": (result,)}
    fields |= {"strides": (_strides(signature, result.shape),), "aliases": (None,)}
    wanted = sorted({signature.firsts[i] for i in signature.grads})
    if not wanted:
        return CallCost(**fields, forward_temporary_bytes=own + row_bytes)
    fields["saved"] = _saved(signature, sizes, own, row_bytes)
    gradients = tuple((i, signature.types[i].num_bytes) for i in wanted)
    back = Kernel(
        op="scaled_dot_product_attention_backward",
        kind="attention",
        flops=flops * (3 * query.shape[-1] + 2 * value.shape[-1]),
        bytes=float(moved + result.num_bytes + sum(size for _, size in gradients)),
        dtype=kernel.dtype,
        shape=sizes.shape,
        causal=sizes.causal,
    )
    temporary, spread = 0, 0
    summed: tuple[Kernel, ...] = ()
    if signature.device == "cuda":
        # Query gradients are added up in float32, next to a number per row (flash_bwd's dq_accum).
        half = query.dtype.itemsize < 4
        temporary = sizes.rows * (query.shape[-1] + 1) * 4 if half else row_bytes
        spread, summed = _shared_heads(sizes)
    backward = (back, *summed)
    only_parameters = all(i in signature.parameters for i in wanted)
    return CallCost(
        **fields,
        backward=backward,
        weight=backward if only_parameters else (),
        gradients=gradients,
        backward_temporary_bytes=temporary + spread,
    )


def _sizes(signature: Signature) -> _Sizes:
    named: dict[str, Any] = dict(zip(_ARGUMENTS, signature.args, strict=False))
    named |= dict(signature.kwargs)
    places, count = {}, 0
    for name, arg in (*zip(_ARGUMENTS, signature.args, strict=False), *signature.kwargs):
        if isinstance(arg, Ref):
            places[name] = count
            count += 1
    query, key, value = (signature.types[places[name]] for name in ("query", "key", "value"))
    lead = broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = max(query.shape[-3], key.shape[-3])
    result = TensorType((*lead, heads, query.shape[-2], value.shape[-1]), query.dtype)
    rows_cut = signature.op == "rt.attention" and bool(named.get("is_causal"))
    return _Sizes(
        query=query,
        key=key,
        value=value,
        result=result,
        mask=places.get("attn_mask"),
        causal=bool(named.get("is_causal")) and not rows_cut,
        rows_cut=rows_cut,
    )


def _strides(signature: Signature, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the result: those of the query; on a CPU, heads lie inside of rows."""
    given = signature.strides[0]
    if signature.device != "cpu" and (given is None or given[-2] <= given[-3]):
        return contiguous(shape)
    *lead, heads, rows, size = shape
    *outer, row, head, one = contiguous((*lead, rows, heads, size))
    return (*outer, head, row, one)


def _mask(signature: Signature, sizes: _Sizes) -> tuple[tuple[Kernel, ...], int, int]:
    """Return the kernels that make the mask, the bytes that attention reads, and the new bytes.

    Boolean masks are first converted to the query's dtype (`convert_boolean_attn_mask`). So are the
    rows of a causal mask that a rank of sharded queries has.
    """
    if sizes.rows_cut:
        shape: tuple[int, ...] = (sizes.result.shape[-2], sizes.key.shape[-2])
        truth, kind = prod(shape), torch.bool
    elif sizes.mask is not None:
        given = signature.types[sizes.mask]
        shape, truth, kind = given.shape, 0, given.dtype
    else:
        return (), 0, 0
    count, item = prod(shape), sizes.query.dtype.itemsize
    made = [_memory("ge", truth, torch.bool, shape)] if truth else []
    if kind != torch.bool:
        return tuple(made), count * kind.itemsize, 0
    made.append(_memory("where", count * (1 + item), sizes.query.dtype, shape))
    return tuple(made), count * item, count * item


def _memory(op: str, moved: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Kernel:
    return Kernel(
        op=op, kind=MEMORY, flops=0.0, bytes=float(moved), dtype=dtype_name(dtype), shape=shape
    )


def _saved(signature: Signature, sizes: _Sizes, own: int, row_bytes: int) -> tuple[Saved, ...]:
    operands = {signature.firsts[i] for i in range(3)}
    if sizes.mask is not None and not own:
        operands.add(signature.firsts[sizes.mask])
    saved = [Saved(operand=i, num_bytes=signature.types[i].num_bytes) for i in sorted(operands)]
    saved.append(Saved(result=0, num_bytes=sizes.result.num_bytes))
    saved.append(Saved(num_bytes=row_bytes))
    if own:
        saved.append(Saved(num_bytes=own))
    return tuple(saved)


def _shared_heads(sizes: _Sizes) -> tuple[int, tuple[Kernel, ...]]:
    """Return bytes and sums of key and value gradients per query head, where heads share keys."""
    groups = sizes.result.shape[-3] // max(sizes.key.shape[-3], 1)
    if groups <= 1:
        return 0, ()
    kernels = [
        _memory("sum", t.num_bytes * (groups + 1), t.dtype, t.shape)
        for t in (sizes.key, sizes.value)
    ]
    return groups * (sizes.key.num_bytes + sizes.value.num_bytes), tuple(kernels)


# ------------------------------------------------------------ RMS norm
#
# A GPU runs one kernel forward and two backward. Elsewhere, and on meta tensors, it is a composite
# of elementwise operators and a mean.


def is_fused_norm(signature: Signature) -> bool:
    """Return whether a norm is fused: on a GPU, with weights of the input's dtype.

    See `rms_norm_symint` of layer_norm.cpp.
    """
    kinds = {t.dtype for t in signature.types}
    plain = signature.autocast is None and not any(signature.strides)
    refs = [arg for arg in signature.args if isinstance(arg, Ref)]
    return (
        signature.op == "aten.rms_norm.default"
        and signature.device == "cuda"
        and plain
        and len(kinds) == 1
        and len(refs) == len(signature.types)
        and len(set(signature.firsts)) == len(refs)
    )


def norm_cost(signature: Signature) -> CallCost:
    """Return the cost of a norm that saves its input, its weight and a float32 number per row."""
    x = signature.types[0]
    weight = signature.types[1] if len(signature.types) > 1 else None
    inner = TensorType(tuple(signature.args[1]), x.dtype)
    rows = (x.numel // max(inner.numel, 1)) * 4
    scale = weight.num_bytes if weight else 0

    def kernel(suffix: str, moved: int, result: TensorType) -> Kernel:
        return Kernel(
            op=f"_fused_rms_norm{suffix}",
            kind=MEMORY,
            flops=0.0,
            bytes=float(moved),
            dtype=dtype_name(x.dtype),
            shape=result.shape,
        )

    forward = (kernel("", 2 * x.num_bytes + scale + rows, x),)
    strides = contiguous(x.shape)
    if not signature.grads:
        return CallCost(
            forward=forward,
            forward_temporary_bytes=rows,
            results=(x,),
            strides=(strides,),
            aliases=(None,),
        )
    backward, weights = [], []
    if 0 in signature.grads:
        backward.append(kernel("_backward", 3 * x.num_bytes + scale + rows, x))
    if weight and 1 in signature.grads:
        weights.append(kernel("_backward", 2 * x.num_bytes + scale + rows, weight))
    saved = [Saved(operand=0, num_bytes=x.num_bytes), Saved(num_bytes=rows)]
    if weight:
        saved.insert(1, Saved(operand=1, num_bytes=weight.num_bytes))
    return CallCost(
        forward=forward,
        backward=(*backward, *weights),
        weight=tuple(
            item
            for place, items in ((0, backward), (1, weights))
            for item in items
            if place in signature.parameters
        ),
        saved=tuple(saved),
        results=(x,),
        strides=(strides,),
        aliases=(None,),
        gradients=tuple((i, signature.types[i].num_bytes) for i in sorted(signature.grads)),
    )
