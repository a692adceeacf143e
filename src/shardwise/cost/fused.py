"""The cost of attention and RMS norm, which devices run as fused kernels.

Running them on meta tensors would record composites instead, which no device runs.

Flash attention (Dao, 2023) computes 2 products in forward and 5 in backward, where it recomputes
the scores; it saves query, key, value, the result and one float32 number per row. Heads that share
keys are not copied in forward; backward on a GPU computes their gradients per query head, then sums
them.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from shardwise.cost.kernels import (
    CallCost,
    Kernel,
    Saved,
    causal_fraction,
    contiguous,
    memory_kernel,
)
from shardwise.cost.signature import Signature, broadcast_shapes
from shardwise.dtypes import dtype_name
from shardwise.ir import Ref, TensorType

_ATEN = "aten.scaled_dot_product_attention.default"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def is_fused_attention(signature: Signature) -> bool:
    """Return whether this call is one fused kernel."""
    if signature.op not in (_ATEN, "rt.attention"):
        return False
    dropout = dict(signature.kwargs).get("dropout_p")
    position = _ARGUMENTS.index("dropout_p")
    if signature.op == _ATEN and len(signature.args) > position:
        dropout = signature.args[position]
    return not dropout and len(signature.types[0].shape) >= 3


@dataclass(slots=True)
class _Sizes:
    """The sizes of one attention; `mask` is the position of the mask operand."""

    query: TensorType
    key: TensorType
    value: TensorType
    result: TensorType
    mask: int | None
    causal: bool

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
    fraction = causal_fraction(result.shape[-2], key.shape[-2]) if sizes.causal else 1.0
    flops = 2.0 * sizes.rows * key.shape[-2] * fraction
    mask_kernels, mask_bytes, new_mask_bytes = _mask(signature, sizes)
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
    forward = CallCost(
        forward=(*mask_kernels, kernel),
        results=(result,),
        strides=(_strides(signature, result.shape),),
        aliases=(None,),
    )
    differentiated = sorted({signature.firsts[i] for i in signature.grads})
    if not differentiated:
        return replace(forward, forward_temporary_bytes=new_mask_bytes + row_bytes)
    gradients = tuple((i, signature.types[i].num_bytes) for i in differentiated)
    backward = [
        replace(
            kernel,
            op="scaled_dot_product_attention_backward",
            flops=flops * (3 * query.shape[-1] + 2 * value.shape[-1]),
            bytes=float(moved + result.num_bytes + sum(size for _, size in gradients)),
        )
    ]
    temporary_bytes = 0
    if signature.device == "cuda":
        # Query gradients are added up in float32, next to a number per row (flash_bwd's dq_accum).
        half = query.dtype.itemsize < 4
        temporary_bytes = sizes.rows * (query.shape[-1] + 1) * 4 if half else row_bytes
        groups = result.shape[-3] // max(key.shape[-3], 1)
        if groups > 1:  # heads share keys: sum key and value gradients over query heads
            temporary_bytes += groups * (key.num_bytes + value.num_bytes)
            backward += [
                memory_kernel("sum", t.num_bytes * (groups + 1), t.dtype, t.shape)
                for t in (key, value)
            ]
    only_parameters = all(i in signature.parameters for i in differentiated)
    return replace(
        forward,
        backward=tuple(backward),
        weight=tuple(backward) if only_parameters else (),
        saved=_saved(signature, sizes, new_mask_bytes, row_bytes),
        gradients=gradients,
        backward_temporary_bytes=temporary_bytes,
    )


def _sizes(signature: Signature) -> _Sizes:
    named: dict[str, Any] = dict(zip(_ARGUMENTS, signature.args, strict=False))
    named |= dict(signature.kwargs)
    refs = [name for name, arg in named.items() if isinstance(arg, Ref)]
    places = {name: index for index, name in enumerate(refs)}
    query, key, value = (signature.types[places[name]] for name in ("query", "key", "value"))
    lead = broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = max(query.shape[-3], key.shape[-3])
    result = TensorType((*lead, heads, query.shape[-2], value.shape[-1]), query.dtype)
    return _Sizes(
        query=query,
        key=key,
        value=value,
        result=result,
        mask=places.get("attn_mask"),
        # The last rows of a sharded sequence see almost all keys.
        causal=bool(named.get("is_causal")) and signature.op == _ATEN,
    )


def _strides(signature: Signature, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the result: those of the query; on a CPU, heads lie inside rows."""
    strides = signature.strides[0]
    if signature.device != "cpu" and (strides is None or strides[-2] <= strides[-3]):
        return contiguous(shape)
    *lead, heads, rows, size = shape
    *outer, row, head, one = contiguous((*lead, rows, heads, size))
    return (*outer, head, row, one)


def _mask(signature: Signature, sizes: _Sizes) -> tuple[tuple[Kernel, ...], int, int]:
    """Return the kernels that compute the mask, the bytes that attention reads, and the new bytes.

    Boolean masks are first converted to the query's dtype (`convert_boolean_attn_mask`).
    """
    if sizes.mask is None:
        return (), 0, 0
    shape, dtype = signature.types[sizes.mask].shape, signature.types[sizes.mask].dtype
    count, item = prod(shape), sizes.query.dtype.itemsize
    if dtype != torch.bool:
        return (), count * dtype.itemsize, 0
    kernel = memory_kernel("where", count * (1 + item), sizes.query.dtype, shape)
    return (kernel,), count * item, count * item


def _saved(
    signature: Signature, sizes: _Sizes, new_mask_bytes: int, row_bytes: int
) -> tuple[Saved, ...]:
    operands = {signature.firsts[i] for i in range(3)}
    if sizes.mask is not None and not new_mask_bytes:
        operands.add(signature.firsts[sizes.mask])
    saved = [Saved(operand=i, num_bytes=signature.types[i].num_bytes) for i in sorted(operands)]
    saved += [Saved(result=0, num_bytes=sizes.result.num_bytes), Saved(num_bytes=row_bytes)]
    if new_mask_bytes:
        saved.append(Saved(num_bytes=new_mask_bytes))
    return tuple(saved)


# ------------------------------------------------------------ RMS norm
#
# A GPU runs one kernel in forward and two in backward. On other devices and on meta tensors, it is
# a composite of elementwise operators and a mean.


def is_fused_norm(signature: Signature) -> bool:
    """Return whether a norm is fused: on a GPU, with weights of the input's dtype.

    See `rms_norm_symint` of layer_norm.cpp.
    """
    refs = [arg for arg in signature.args if isinstance(arg, Ref)]
    return (
        signature.op == "aten.rms_norm.default"
        and signature.device == "cuda"
        and signature.autocast is None
        and not any(signature.strides)
        and len({t.dtype for t in signature.types}) == 1
        and len(refs) == len(signature.types)
        and len(set(signature.firsts)) == len(refs)
    )


def norm_cost(signature: Signature) -> CallCost:
    """Return the cost of a norm that saves its input, its weight and a float32 number per row."""
    x = signature.types[0]
    weight = signature.types[1] if len(signature.types) > 1 else None
    inner = TensorType(tuple(signature.args[1]), x.dtype)
    row_bytes = (x.numel // max(inner.numel, 1)) * 4
    extra = (weight.num_bytes if weight else 0) + row_bytes

    def kernel(suffix: str, num_bytes: int, result: TensorType) -> Kernel:
        name = f"_fused_rms_norm{suffix}"
        return memory_kernel(name, num_bytes + extra, x.dtype, result.shape)

    forward = CallCost(
        forward=(kernel("", 2 * x.num_bytes, x),),
        results=(x,),
        strides=(contiguous(x.shape),),
        aliases=(None,),
    )
    if not signature.grads:
        return replace(forward, forward_temporary_bytes=row_bytes)
    backward = {}
    if 0 in signature.grads:
        backward[0] = kernel("_backward", 3 * x.num_bytes, x)
    if weight and 1 in signature.grads:
        backward[1] = kernel("_backward", 2 * x.num_bytes, weight)
    saved = [Saved(operand=0, num_bytes=x.num_bytes), Saved(num_bytes=row_bytes)]
    if weight:
        saved.insert(1, Saved(operand=1, num_bytes=weight.num_bytes))
    return replace(
        forward,
        backward=tuple(backward.values()),
        weight=tuple(item for i, item in backward.items() if i in signature.parameters),
        saved=tuple(saved),
        gradients=tuple((i, signature.types[i].num_bytes) for i in sorted(signature.grads)),
    )
