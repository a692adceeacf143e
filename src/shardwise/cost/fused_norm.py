"""RMS norm as a GPU runs it: one kernel forward, two backward.

Enters: a `Signature` of `aten.rms_norm`. Leaves: its `CallCost`. Elsewhere, and on
meta tensors, it is a composite of elementwise operators and a mean.
"""

from __future__ import annotations

from shardwise.cost.kernels import MEMORY, CallCost, Kernel, Saved, contiguous
from shardwise.cost.signature import Signature
from shardwise.dtypes import dtype_name
from shardwise.ir import Ref, TensorType


def is_fused(signature: Signature) -> bool:
    """On a GPU, where the weight has the input's dtype (`rms_norm_symint` of layer_norm.cpp)."""
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


def cost(signature: Signature) -> CallCost:
    """Reads the input once, keeps it with its weight and a float32 number per row."""
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
