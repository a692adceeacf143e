"""Calls that execute the rules of element-wise, shape, index, factory, ordering and random ops.

`EXAMPLES` maps an operator to its calls, `(args, kwargs)`. Sizes are chosen so that 2 to 5 ranks
get even, uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_generator = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def u(*shape: int) -> Tensor:
    """Numbers in (0.1, 0.9): inside the domain of logarithms, roots and powers."""
    return torch.rand(shape, dtype=torch.float64, generator=_generator) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(0, high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    """Booleans."""
    return torch.rand(shape, generator=_generator) < 0.5


def c(*shape: int) -> Tensor:
    """Complex numbers."""
    return torch.complex(f(*shape), f(*shape))


def call(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


X = (4, 6)
EXAMPLES: dict[str, list[Arguments]] = {}


def add(examples: Mapping[str, list[Arguments]]) -> None:
    for op, calls in examples.items():
        EXAMPLES.setdefault(f"aten.{op}", []).extend(calls)


UNARY = """
    abs.default alias.default ceil.default clone.default contiguous.default cos.default
    detach.default erf.default lift_fresh_copy.default exp.default gelu.default
    hardsigmoid.default hardswish.default
    hardtanh.default leaky_relu.default log_sigmoid.default nan_to_num.default neg.default
    relu.default sigmoid.default silu.default sin.default softplus.default square.default
    tanh.default real.default
"""
add({name: [call(f(*X))] for name in UNARY.split()})
add({f"{name}.default": [call(u(*X))] for name in ("log", "rsqrt", "sqrt", "reciprocal")})
add({f"{name}.Scalar": [call(i(3, *X), 1)] for name in ("eq", "ne", "lt", "le", "gt", "ge")})
add({f"{name}.Tensor": [call(i(3, *X), i(3, 6))] for name in ("eq", "ne", "lt", "le", "gt", "ge")})
add({f"__{name}__.Tensor": [call(b(*X), b(4, 1))] for name in ("and", "or")})
add({f"bitwise_{name}.Tensor": [call(b(*X), b(6))] for name in ("and", "or")})
add({f"logical_{name}.default": [call(b(*X), b(6))] for name in ("and", "or")})
add(
    {
        "add.Tensor": [call(f(*X), f(6)), call(f(*X), 2.0), call(f(1, 5), f(4, 1), alpha=3)],
        "sub.Tensor": [call(f(*X), f(4, 1)), call(f(*X), 1)],
        "mul.Tensor": [call(f(*X), f(6)), call(f(*X), 2.0), call(f(7), f())],
        "div.Tensor": [call(f(*X), u(6)), call(f(*X), 2.0)],
        "div.Tensor_mode": [call(f(*X), u(6), rounding_mode="floor")],
        "floor_divide.default": [call(i(9, *X), 2)],
        "remainder.Scalar": [call(i(9, *X), 4)],
        "remainder.Tensor": [call(i(9, *X), i(3, 6) + 1)],
        "rsub.Scalar": [call(f(*X), 1.0)],
        "maximum.default": [call(f(*X), f(6))],
        "minimum.default": [call(f(*X), f(6))],
        "max.other": [call(f(*X), f(*X))],
        "min.other": [call(f(*X), f(6))],
        "pow.Tensor_Scalar": [call(u(*X), 3)],
        "pow.Scalar": [call(2.0, f(*X))],
        "pow.Tensor_Tensor": [call(u(*X), f(6))],
        "xlogy.Tensor": [call(u(*X), u(6))],
        "polar.default": [call(u(*X), f(*X))],
        "bitwise_not.default": [call(b(*X))],
        "clamp.default": [call(f(*X), -0.5, 0.5)],
        "clamp.Tensor": [call(f(*X), f(6) - 2, None)],
        "clamp_min.default": [call(f(*X), 0.0)],
        "clamp_max.default": [call(f(*X), 0.0)],
        "where.self": [call(b(*X), f(*X), f(6)), call(b(6), f(4, 1), f())],
        "where.ScalarOther": [call(b(*X), f(*X), 0.0), call(b(*X), f(*X), 1.0)],
        "where.ScalarSelf": [call(b(*X), 0.0, f(*X)), call(b(*X), 1.0, f(*X))],
        "where.Scalar": [call(b(*X), 1.0, 0.0)],
        "masked_fill.Scalar": [call(f(*X), b(6), 0.0), call(f(*X), b(*X), 1.0)],
        "masked_fill.Tensor": [call(f(*X), b(6), f())],
        "to.dtype": [call(f(*X), torch.float32), call(f(*X).float(), torch.float64)],
        "to.dtype_layout": [call(f(*X), dtype=torch.float64)],
        "to.device": [call(f(*X), "cpu", torch.float64)],
        "_to_copy.default": [call(f(*X)), call(f(*X), dtype=torch.bool)],
        "type_as.default": [call(f(*X), f(6)), call(f(*X).float(), f(5, 5, 5))],
        "copy.default": [call(f(*X), f(6))],
        "fill.Tensor": [call(f(*X), f())],
        "fill.Scalar": [call(f(*X), 3.0)],
        "lerp.Tensor": [call(f(*X), f(6), f(4, 1))],
        "addcmul.default": [call(f(*X), f(6), f(*X))],
        "addcdiv.default": [call(f(*X), f(6), u(*X))],
        "prelu.default": [call(f(2, 4, 3), f(4)), call(f(2, 4, 3), f(1))],
    }
)
add(
    {
        "view.default": [
            call(f(4, 12), (4, 3, 4)),
            call(f(2, 3, 12), (6, -1)),
            call(f(4, 6), (3, 8)),
            call(f(1, 4, 1), (4,)),
            call(f(0, 4), (4, 0)),
        ],
        "view.dtype": [call(f(*X), torch.int64)],
        "reshape.default": [call(f(4, 12), (4, 2, 2, 3)), call(f(2, 6), (12,))],
        "_unsafe_view.default": [call(f(12, 5), (3, 4, 5))],
        "flatten.using_ints": [call(f(2, 3, 4), 1), call(f())],
        "unflatten.int": [call(f(4, 12), 1, (3, 4)), call(f(4, 12), -1, (-1, 2))],
        "unsqueeze.default": [call(f(4, 6), 1), call(f(4), -1)],
        "squeeze.dim": [call(f(4, 1, 6), 1), call(f(4, 2), 1)],
        "squeeze.default": [call(f(4, 1, 2, 1))],
        "squeeze.dims": [call(f(4, 1, 2, 1), (0, 1))],
        "view_as_complex.default": [call(f(4, 3, 2))],
        "view_as_real.default": [call(c(4, 3))],
        "permute.default": [call(f(2, 3, 4), (2, 0, 1))],
        "transpose.int": [call(f(2, 3, 4), -1, 1)],
        "t.default": [call(f(4, 6)), call(f(4))],
        "numpy_T.default": [call(f(4, 6))],
        "mT.default": [call(f(2, 4, 6))],
        "movedim.int": [call(f(2, 3, 4), 0, -1)],
        "roll.default": [call(f(4, 6, 5), (1, 2), (1, 2)), call(f(4, 6), (2,))],
        "flip.default": [call(f(4, 6), (1,))],
        "fft_fftn.default": [call(f(4, 3, 6), None, (1, 2))],
        "fft_rfft.default": [call(f(4, 6))],
        "diagonal.default": [call(f(4, 3, 5), 1, 1, 2)],
        "diag_embed.default": [call(f(4, 3))],
        "glu.default": [call(f(4, 12)), call(f(6, 4), 0)],
        "expand.default": [call(f(4, 1), (4, 6)), call(f(6), (3, -1)), call(f(1, 1), (1, 5))],
        "expand_as.default": [call(f(4, 1), f(4, 6))],
        "broadcast_to.default": [call(f(4, 1), (2, 4, 3))],
        "broadcast_tensors.default": [call([f(4, 1), f(6), f()])],
        "meshgrid.indexing": [call([f(4), f(6)], indexing="xy"), call([f(4), f(3)], indexing="ij")],
        "meshgrid.default": [call([f(4), f(6), f(2)])],
        "repeat.default": [call(f(4, 3), (2, 5)), call(f(3), (4, 1, 2))],
        "tile.default": [call(f(4, 3), (2,)), call(f(3), (4, 2))],
        "repeat_interleave.self_int": [
            call(f(2, 4, 3), 3, 1),
            call(f(2, 2), 3, 1, output_size=6),
            call(f(4, 3), 2),
        ],
        "repeat_interleave.self_Tensor": [call(f(4, 3), torch.tensor([2, 0, 1]), 1)],
    }
)
add(
    {
        f"{name}.default": [
            call([f(4, 3), f(4, 5)], 1),
            call([f(4, 6), f(4, 6), f(4, 6)], -1),
            call([f(0), f(4, 6)]),
            call([f(4, 0), f(4, 6)], 1),
        ]
        for name in ("cat", "concat", "concatenate")
    }
)
add(
    {
        "stack.default": [call([f(4, 6), f(4, 6)], 1)],
        "chunk.default": [call(f(4, 12), 3, 1), call(f(7, 2), 3), call(f(6, 2), 4)],
        "split.Tensor": [call(f(4, 12), 4, 1), call(f(7, 2), 3)],
        "split_with_sizes.default": [call(f(4, 12), (8, 2, 2), 1), call(f(6, 2), (6,))],
        "tensor_split.sections": [call(f(7, 3), 3)],
        "unbind.int": [call(f(4, 3), 1)],
        "slice.Tensor": [
            call(f(4, 12), 1, 4, 8),
            call(f(4, 12), 1, 3, -2),
            call(f(4, 12), 0, 0, 9223372036854775807),
            call(f(4, 12), 1, 1, 9223372036854775807, 2),
            call(f(4, 12), 1, 1, 9, 3),
            call(f(4, 12), 1, 5, 2),
        ],
        "narrow.default": [call(f(4, 12), 1, 2, 6)],
        "slice_scatter.default": [
            call(f(4, 12), f(4, 4), 1, 4, 8),
            call(f(4, 12), f(4, 12), 1),
            call(f(4, 12), f(4, 6), 1, 0, 12, 2),
        ],
        "select.int": [call(f(4, 3), 1, -1)],
        "select_scatter.default": [call(f(4, 3), f(4), 1, 2)],
        "pad.default": [
            call(f(4, 6), (2, 3)),
            call(f(4, 6), (1, 1, 2, 0), "constant", 1.0),
            call(f(4, 6), (-2, -1)),
            call(f(4, 6), (-2, 1)),
            call(f(4, 2, 6), (1, 1), "reflect"),
        ],
        "constant_pad_nd.default": [call(f(4, 6), (0, 2))],
        "reflection_pad1d.default": [call(f(4, 2, 6), (1, 2))],
        "diagonal_scatter.default": [call(f(4, 5, 6), f(4, 5), 0, 1, 2)],
        "unfold.default": [call(f(4, 6), 1, 2, 2), call(f(4, 6), 1, 3, 1)],
        "im2col.default": [call(f(2, 4, 5, 5), (2, 2), (1, 1), (0, 0), (1, 1))],
        "col2im.default": [call(f(2, 16, 16), (5, 5), (2, 2), (1, 1), (0, 0), (1, 1))],
        "index.Tensor": [
            call(f(5, 4, 6), [i(5, 7)]),
            call(f(5, 4, 6), [None, i(4, 3, 2)]),
            call(f(5, 4), [None, i(4)]),
            call(f(5, 4, 6), [i(5, 7, 1), i(4, 3)]),
            call(f(5, 4, 6), [i(5, 7), None, i(6, 7)]),
            call(f(5, 4, 6), [None, i(4, 2, 1), i(6, 3)]),
            call(f(5, 4, 6), [torch.tensor([True, False, True, True, False])]),
        ],
        "index_put.default": [
            call(f(5, 4, 6), [torch.tensor([0, 3, 1, 4])], f(4, 4, 6)),
            call(f(5, 4, 6), [i(5, 7)], f(7, 1, 6), True),
            call(f(5, 4, 6), [i(5, 7), None, i(6, 7)], f(7, 4), True),
            call(f(5, 4), [b(5, 4)], f()),
            call(f(5, 4, 6), [b(5, 4)], f(6)),
            call(f(5, 4), [torch.tensor([True, False, True, False, False])], f(2, 4)),
            call(i(9, 5, 4), [i(5, 7)], i(9, 7, 4), True),
        ],
        "index_select.default": [call(f(5, 4, 6), 1, i(4, 7))],
        "index_add.default": [
            call(f(5, 4), 0, i(5, 7), f(7, 4)),
            call(f(5, 4), 1, i(4, 3), f(5, 3)),
        ],
        "gather.default": [call(f(5, 4), 1, i(4, 5, 7)), call(f(5, 4), 0, i(5, 2, 2))],
        "take_along_dim.default": [call(f(5, 4), i(4, 1, 7), 1), call(f(5, 4), i(4, 5, 2), 1)],
        "scatter.value": [call(f(5, 4), 1, i(4, 5, 1), 1.0), call(f(5, 4), 1, i(4, 5, 1), 0.0)],
        "scatter.src": [call(f(5, 4), 1, torch.tensor([[1, 0]] * 5), f(5, 2))],
        "scatter_add.default": [
            call(f(5, 4), 1, i(4, 5, 7), f(5, 7)),
            call(i(9, 5, 4), 0, i(5, 3, 2), i(9, 3, 4)),
            call(i(9, 5, 4), 0, i(5, 3, 2), i(9, 4, 4)),
            call(i(9, 5, 4), 1, i(4, 5, 7), i(9, 5, 7)),
        ],
        "scatter_reduce.two": [
            call(f(5, 4), 1, i(4, 5, 7), f(5, 7), "sum"),
            call(f(5, 4), 1, i(4, 5, 7), f(5, 7), "amax"),
            call(f(5, 4), 1, i(4, 5, 7), f(5, 7), "mean", include_self=False),
        ],
        "one_hot.default": [call(i(6, 5, 2), 6), call(i(6, 5), -1)],
        "masked_scatter.default": [call(f(5, 4), b(5, 4), f(20))],
        "nonzero.default": [call(b(5, 4))],
    }
)
add(
    {
        "zeros.default": [call((4, 6), dtype=torch.float64)],
        "ones.default": [call((4, 6))],
        "full.default": [call((4, 6), 2.5)],
        "empty.memory_format": [call((4, 6))],
        "scalar_tensor.default": [call(2.0)],
        "zeros_like.default": [call(f(*X))],
        "ones_like.default": [call(f(*X))],
        "full_like.default": [call(f(*X), 2)],
        "empty_like.default": [call(f(*X))],
        "new_zeros.default": [call(f(*X), (4, 5, 2))],
        "new_ones.default": [call(f(*X), (6,))],
        "new_full.default": [call(f(*X), (6, 2), 3.0)],
        "new_empty.default": [call(f(*X), (6,))],
        "arange.default": [call(7), call(4.5)],
        "arange.start": [call(2, 9)],
        "arange.start_step": [call(1.0, 7.0, 0.5), call(9, 1, -2, dtype=torch.float64)],
        "linspace.default": [call(0.0, 1.0, 7, dtype=torch.float64)],
        "linspace.Tensor_Tensor": [call(f(), f(), 7, dtype=torch.float64)],
        "eye.default": [call(7)],
        "eye.m": [call(5, 6)],
        "tril.default": [call(f(2, 6, 5)), call(f(6, 7), -1)],
        "triu.default": [call(f(2, 6, 5), 1), call(b(6, 6), 1)],
        "tril_indices.default": [call(4, 5)],
        "sort.default": [call(f(4, 7), 1, True)],
        "argsort.default": [call(f(4, 7))],
        "topk.default": [call(f(4, 7), 3)],
        "argmax.default": [call(f(4, 7), -1), call(f(4, 7)), call(f(4, 7), 0, True)],
        "argmin.default": [call(f(4, 7), 1)],
        "cumsum.default": [call(f(4, 7), 1), call(i(9, 4, 7), 0)],
        "bucketize.Tensor": [call(f(4, 6), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))],
        "searchsorted.Tensor": [call(f(4, 6).sort().values, f(4, 3))],
        "histc.default": [call(u(4, 6), 5, 0, 1), call(u(4, 6), 5)],
        "unique_consecutive.default": [call(i(3, 7))],
        "_unique2.default": [call(i(3, 7))],
    }
)
RANDOM: dict[str, list[Arguments]] = {
    "aten.dropout.default": [call(f(4, 6), 0.4, True), call(f(4, 6), 0.4, False)],
    "aten.native_dropout.default": [call(f(4, 6), 0.4, True)],
    "aten.alpha_dropout.default": [call(f(4, 6), 0.4, True)],
    "aten.feature_dropout.default": [call(f(4, 6, 3), 0.4, True), call(f(4, 6), 0.4, False)],
    "aten.feature_alpha_dropout.default": [call(f(4, 6, 3), 0.4, True)],
    "aten.randperm.default": [call(7)],
    "aten.rand.default": [call((4, 6))],
    "aten.randn.default": [call((4, 6), dtype=torch.float64)],
    "aten.randint.default": [call(5, (4, 6))],
    "aten.rand_like.default": [call(f(4, 6))],
    "aten.randn_like.default": [call(f(4, 6))],
    "aten.uniform.default": [call(f(4, 6), 1.0, 2.0)],
    "aten.exponential.default": [call(f(4, 6), 2.0)],
    "aten.bernoulli.default": [call(u(4, 6))],
    "aten.bernoulli.p": [call(f(4, 6), 0.3)],
    "aten.multinomial.default": [call(u(4, 6), 3), call(u(4, 6), 8, True)],
}
