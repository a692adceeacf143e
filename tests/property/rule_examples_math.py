"""Calls that execute the rules of products, reductions, norms, losses, attention, convolutions.

`EXAMPLES` maps an operator to its calls, `(args, kwargs)`. Sizes are chosen so that 2 to 5 ranks
get even, uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise import runtime as operators

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_generator = torch.Generator().manual_seed(1)
EXAMPLES: dict[str, list[Arguments]] = {}


# Operators that torch does not know.
RUN: dict[str, Callable[..., Any]] = {"shardwise.batch_norm.default": operators.batch_norm}

# Positions of operands for which the operator has no derivative.
CONSTANT: dict[str, tuple[int, ...]] = {
    "aten.binary_cross_entropy.default": (2,),
    "aten.binary_cross_entropy_with_logits.default": (2, 3),
    "aten.batch_norm.default": (3, 4),
    "aten._native_batch_norm_legit_no_training.default": (3, 4),
    "shardwise.batch_norm.default": (3, 4),
    "aten.cross_entropy_loss.default": (2,),
    "aten.nll_loss.default": (2,),
    "aten.nll_loss2d.default": (2,),
    "aten.soft_margin_loss.default": (1,),
    "aten.histc.default": (0,),
}


def f(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=_generator)


def u(*shape: int) -> Tensor:
    """Numbers in (0.1, 0.9)."""
    return torch.rand(*shape, dtype=torch.float64, generator=_generator) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(0, high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    """Booleans."""
    return torch.rand(*shape, generator=_generator) < 0.5


def add(op: str, *args: Any, **kwargs: Any) -> None:
    name = op if op.startswith(("shardwise.", "transformers.")) else f"aten.{op}"
    EXAMPLES.setdefault(name, []).append((args, kwargs))


def ignoring(target: Tensor, every: int = 3, index: int = -100) -> Tensor:
    """Return labels, every third of which is ignored."""
    target = target.clone()
    target.view(-1)[::every] = index
    return target


# Products
add("linear.default", f(4, 6), f(5, 6), f(5))
add("linear.default", f(2, 3, 4), f(5, 4))
add("mm.default", f(4, 6), f(6, 3))
add("bmm.default", f(4, 2, 6), f(4, 6, 3))
add("mv.default", f(4, 6), f(6))
add("dot.default", f(6), f(6))
add("outer.default", f(4), f(6))
add("matmul.default", f(4, 6), f(6, 3))
add("matmul.default", f(6), f(6, 3))
add("matmul.default", f(2, 1, 4, 6), f(3, 6, 5))
add("matmul.default", f(2, 3, 4), f(4))
add("addmm.default", f(5), f(4, 6), f(6, 5))
add("addmm.default", f(4, 1), f(4, 6), f(6, 5), beta=0.5, alpha=2.0)
add("baddbmm.default", f(4, 1, 5), f(4, 3, 6), f(4, 6, 5), beta=0.5)
add("addbmm.default", f(3, 5), f(4, 3, 6), f(4, 6, 5))
add("addmv.default", f(4), f(4, 6), f(6))
add("addr.default", f(4, 6), f(4), f(6))
add("bilinear.default", f(4, 3), f(4, 2), f(5, 3, 2), f(5))
add("einsum.default", "bqhd,bkhd->bhqk", [f(2, 3, 4, 5), f(2, 6, 4, 5)])
add("einsum.default", "...ij,jk", [f(2, 3, 4), f(4, 5)])
add("einsum.default", "i,j->ij", [f(4), f(6)])
add("einsum.default", "bij,bjk,k->bi", [f(4, 3, 2), f(4, 2, 6), f(6)])
add("einsum.default", "bc...,c->b...", [f(2, 3, 1, 5), f(3)])
add("einsum.default", "ii->i", [f(4, 4)])
add("chain_matmul.default", [f(4, 3), f(3, 6), f(6, 5)])
add("linalg_multi_dot.default", [f(3), f(3, 6), f(6, 5)])
add("tensordot.default", f(4, 3, 2), f(3, 2, 6), (1, 2), (0, 1))
add("inner.default", f(2, 4, 6), f(3, 6))
add("kron.default", f(2, 3), f(4, 2))
add("cdist.default", f(2, 4, 3), f(2, 6, 3))
add("cdist.default", f(4, 3), f(6, 3), 1.0)
add("cdist.default", f(27, 3), f(6, 3))

# Reductions
add("histc.default", f(4, 6), 5, -1.0, 1.0)
X = (4, 6, 3)
for _name in ("sum", "mean", "amax", "amin", "any", "all"):
    _x = b(*X) if _name in ("any", "all") else f(*X)
    if _name not in ("amax", "amin"):
        add(f"{_name}.default", _x)
for _name, _overload in (("sum", "dim_IntList"), ("mean", "dim")):
    add(f"{_name}.{_overload}", f(*X), (-1, 0), True)
    add(f"{_name}.{_overload}", f(*X), (1,))
    add(f"{_name}.{_overload}", f(*X), None)
add("sum.dim_IntList", i(9, *X), (1,))
add("sum.default", b(4, 6))
add("mean.dim", i(9, *X), (1,), dtype=torch.float64)
add("nansum.default", f(*X), (1,))
add("count_nonzero.default", b(4, 6), 1)
for _name in ("var", "std"):
    add(f"{_name}.default", f(4, 6))
    add(f"{_name}.dim", f(*X), (1,), False)
    add(f"{_name}.correction", f(*X), (0, 2), correction=1, keepdim=True)
    add(f"{_name}_mean.correction", f(*X), (1,), correction=0)
add("std.dim", torch.ones(4, 6, dtype=torch.float64), (1,))
for _name in ("amax", "amin"):
    add(f"{_name}.default", f(*X), (0, 1))
    add(f"{_name}.default", i(3, 4, 6).double(), (1,), True)
    add(f"{_name}.default", i(9, 4, 6), (1,))
for _name in ("max", "min"):
    add(f"{_name}.default", f(4, 6))
    add(f"{_name}.dim", f(*X), 1)
    add(f"arg{_name}.default", f(*X), 1, True)
    add(f"arg{_name}.default", f(4, 6))
for _name in ("any", "all"):
    add(f"{_name}.dim", b(*X), 1)
    add(f"{_name}.dims", b(*X), (0, 2), True)
add("_is_all_true.default", b(4, 6))
add("prod.dim_int", f(*X), 1)
add("prod.default", f(4, 6))
add("aminmax.default", f(*X), dim=1)
add("median.dim", f(*X), 1)
add("mode.default", f(*X))
add("logsumexp.default", f(*X), (1,))
add("logsumexp.default", f(*X), (0, 2), True)
add("linalg_vector_norm.default", f(*X), 2, (1,))
add("linalg_vector_norm.default", f(*X), 1, None, True)
add("linalg_vector_norm.default", f(*X), float("inf"), (1,))
add("linalg_vector_norm.default", torch.zeros(4, 6, dtype=torch.float64), 2, (1,))
add("norm.Scalar", f(4, 6))
add("norm.ScalarOpt_dim", f(*X), 2, (1,), True)
add("linalg_norm.default", f(4, 6), None, (1,))
add("cosine_similarity.default", f(4, 1, 5), f(6, 5), 2)
add("pairwise_distance.default", f(4, 6), f(4, 6))
add("histc.default", u(20), 5, 0, 1)

# Norms and softmax
add("layer_norm.default", f(2, 4, 6), (6,), f(6), f(6))
add("layer_norm.default", f(4, 3, 6), (3, 6), f(3, 6))
add("layer_norm.default", f(4, 6), (6,), None, f(6), 1e-3)
add("rms_norm.default", f(2, 4, 6), (6,), f(6))
add("rms_norm.default", f(4, 6), (6,), None, 1e-6)
add("native_layer_norm.default", f(4, 6), (6,), f(6), f(6), 1e-5)
add("_fused_rms_norm.default", f(4, 6), (6,), f(6), 1e-5)
add("group_norm.default", f(3, 8, 5), 4, f(8), f(8))
add("group_norm.default", f(4, 6, 2, 2), 3)
add("native_group_norm.default", f(3, 8, 5), f(8), f(8), 3, 8, 5, 4, 1e-5)
add("instance_norm.default", f(4, 6, 5), f(6), f(6), None, None, True, 0.1, 1e-5, True)
add("batch_norm.default", f(4, 6, 5), f(6), f(6), f(6), u(6), False, 0.1, 1e-5, True)
add("batch_norm.default", f(4, 6), None, None, None, None, True, 0.1, 1e-5, True)
add("_native_batch_norm_legit_no_training.default", f(4, 6), f(6), f(6), f(6), u(6), 0.1, 1e-5)
add("shardwise.batch_norm.default", f(4, 6, 5), f(6), f(6), f(6), u(6), 0.1, 1e-5)
add("shardwise.batch_norm.default", f(4, 6), None, None, f(6), u(6), 0.1, 1e-5)
add("shardwise.batch_norm.default", f(4, 6, 2, 2), f(6), f(6), None, None, 0.1, 1e-5)
add("_weight_norm.default", f(6, 4, 3), u(6, 1, 1), 0)
add("_weight_norm.default", f(6, 4, 3), u(1, 1, 3), 2)
for _name in ("softmax", "log_softmax"):
    add(f"{_name}.int", f(2, 4, 6), -1)
    add(f"{_name}.int", f(4, 6, 2), 1)
    add(f"{_name}.int", f(4, 6).float(), 1, torch.float64)
    add(f"_{_name}.default", f(4, 6), 1, False)

# Embeddings and losses
add("embedding.default", f(7, 6), i(7, 4, 3))
add("embedding.default", f(7, 6), i(7, 4), 5)
add("embedding.default", f(4, 6), i(4, 3), 1, True)
add(
    "embedding_bag.padding_idx",
    f(7, 6),
    i(7, 8),
    torch.tensor([0, 3, 5]),
    False,
    0,
    False,
    None,
    False,
    None,
)
add("embedding_bag.default", f(7, 6), i(7, 8), torch.tensor([0, 3, 5]), False, 0, False, f(8))
add("embedding_bag.default", f(7, 6), i(7, 8), torch.tensor([0, 3, 5]), False, 1)
add(
    "embedding_bag.default",
    f(7, 6),
    i(7, 8),
    torch.tensor([0, 3, 3, 8]),
    False,
    2,
    False,
    None,
    True,
)
for _reduction in (0, 1, 2):
    for _op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        add(f"{_op}.default", f(4, 6), f(4, 6), _reduction)
    add("binary_cross_entropy.default", u(4, 6), u(4, 6), u(6), _reduction)
    add("binary_cross_entropy_with_logits.default", f(4, 6), u(4, 6), u(6), u(6), _reduction)
    add("kl_div.default", f(4, 6), u(4, 6), _reduction)
    add("soft_margin_loss.default", f(4, 6), f(4, 6).sign(), _reduction)
    add("poisson_nll_loss.default", f(4, 6), u(4, 6), True, False, 1e-8, _reduction)
    add("hinge_embedding_loss.default", f(4, 6), f(4, 6).sign(), 1.0, _reduction)
    add("margin_ranking_loss.default", f(4), f(4), f(4).sign(), 0.5, _reduction)
    add("cosine_embedding_loss.default", f(4, 6), f(4, 6), f(4).sign(), 0.0, _reduction)
    add("triplet_margin_loss.default", f(4, 6), f(4, 6), f(4, 6), reduction=_reduction)
    _labels = ignoring(i(7, 4))
    add("cross_entropy_loss.default", f(4, 7), _labels, None, _reduction)
    add("cross_entropy_loss.default", f(4, 7), _labels, u(7), _reduction, -100, 0.2)
    add("cross_entropy_loss.default", f(4, 7, 3), ignoring(i(7, 4, 3), 2, 5), u(7), _reduction, 5)
    _likely = f(4, 7, 2).softmax(1)
    add("cross_entropy_loss.default", f(4, 7, 2), _likely, u(7), _reduction, -100, 0.1)
    add("cross_entropy_loss.default", f(7), i(7).squeeze(), None, _reduction)
    add("nll_loss.default", f(4, 7), _labels, u(7), _reduction)
    add("nll_loss_nd.default", f(4, 7, 3), i(7, 4, 3), None, _reduction)
    add("nll_loss2d.default", f(3, 7, 2, 2), ignoring(i(7, 3, 2, 2)), u(7), _reduction)
add("cross_entropy_loss.default", f(6, 5), torch.tensor([0, 4, -100, -100, -100, -100]))
add("cross_entropy_loss.default", f(4, 5), torch.tensor([-100] * 4))

# Attention
add("scaled_dot_product_attention.default", f(2, 4, 3, 5), f(2, 4, 6, 5), f(2, 4, 6, 2))
add(
    "scaled_dot_product_attention.default",
    f(2, 4, 5, 3),
    f(2, 4, 5, 3),
    f(2, 4, 5, 3),
    None,
    0.0,
    True,
    scale=0.3,
)
add(
    "scaled_dot_product_attention.default",
    f(2, 4, 3, 5),
    f(2, 4, 6, 5),
    f(2, 4, 6, 5),
    f(1, 4, 3, 6),
)
add(
    "scaled_dot_product_attention.default",
    f(4, 2, 3, 5),
    f(4, 2, 6, 5),
    f(4, 2, 6, 5),
    torch.ones(4, 1, 1, 6, dtype=torch.bool),
)
add(
    "scaled_dot_product_attention.default",
    f(2, 6, 4, 3),
    f(2, 2, 4, 3),
    f(2, 2, 4, 3),
    None,
    0.0,
    True,
    enable_gqa=True,
)
add(
    "scaled_dot_product_attention.default",
    f(2, 6, 4, 3),
    f(2, 2, 4, 3),
    f(2, 2, 4, 3),
    f(2, 6, 4, 4),
    enable_gqa=True,
)
add("scaled_dot_product_attention.default", f(4, 3, 5), f(4, 6, 5), f(4, 6, 5), f(3, 6))

# Convolutions
add("conv1d.default", f(4, 6, 8), f(5, 6, 3), f(5), [2], [1])
add("conv1d.default", f(2, 4, 8), f(4, 1, 3), f(4), [1], [1], [1], 4)
add("conv1d.default", f(6, 8), f(5, 6, 3), f(5))
add("conv1d.padding", f(2, 3, 8), f(4, 3, 3), None, [1], "same")
add("conv2d.default", f(3, 4, 5, 5), f(6, 4, 3, 3), f(6))
add("conv2d.default", f(2, 6, 4, 4), f(9, 2, 2, 2), f(9), [1, 1], [0, 0], [1, 1], 3)
add("conv2d.padding", f(2, 6, 4, 4), f(6, 1, 3, 3), f(6), [1, 1], "same", [1, 1], 6)
add("conv3d.default", f(2, 3, 3, 3, 3), f(4, 3, 2, 2, 2), f(4))
add("conv_transpose1d.default", f(2, 4, 5), f(4, 3, 3), f(3), [2])
add("conv_transpose2d.input", f(2, 4, 3, 3), f(4, 3, 2, 2), f(3), [2, 2])
add("conv_transpose2d.input", f(2, 6, 3, 3), f(6, 2, 2, 2), f(6), [1, 1], [0, 0], [0, 0], 3)
add("conv_transpose3d.input", f(2, 3, 2, 2, 2), f(3, 4, 2, 2, 2), f(4))
add("convolution.default", f(2, 4, 6), f(6, 2, 3), f(6), [1], [0], [1], False, [0], 2)

# Images
add("avg_pool1d.default", f(2, 4, 6), [2])
add("avg_pool2d.default", f(2, 4, 4, 4), [2, 2])
add("avg_pool3d.default", f(2, 3, 4, 4, 4), [2, 2, 2])
add("max_pool1d.default", f(2, 4, 6), [2])
add("max_pool2d.default", f(2, 4, 4, 4), [2, 2])
add("max_pool2d_with_indices.default", f(2, 4, 4, 4), [2, 2])
add("max_pool3d.default", f(2, 3, 4, 4, 4), [2, 2, 2])
add("adaptive_avg_pool1d.default", f(2, 4, 6), [3])
add("adaptive_avg_pool2d.default", f(2, 4, 4, 4), [1, 1])
add("adaptive_avg_pool2d.default", f(2, 4, 5, 5), [2, 3])
add("adaptive_avg_pool3d.default", f(2, 3, 4, 4, 4), [2, 2, 2])
add("adaptive_max_pool1d.default", f(2, 4, 6), [3])
add("adaptive_max_pool2d.default", f(2, 4, 4, 4), [2, 2])
add("upsample_nearest1d.vec", f(2, 4, 3), None, [2.0])
add("upsample_nearest2d.vec", f(2, 4, 3, 3), None, [2.0, 2.0])
add("upsample_bilinear2d.vec", f(2, 4, 3, 3), [5, 5], False, None)
add("upsample_bicubic2d.vec", f(2, 4, 3, 3), [5, 5], True, None)
add("_upsample_bilinear2d_aa.vec", f(2, 4, 6, 6), [3, 3], False, None)
add("upsample_linear1d.vec", f(2, 4, 3), [5], False, None)
add("upsample_trilinear3d.vec", f(2, 3, 2, 2, 2), [3, 3, 3], False, None)
add("reflection_pad1d.default", f(2, 4, 5), [1, 2])
add("replication_pad2d.default", f(2, 4, 3, 3), [1, 2, 1, 1])
add("grid_sampler.default", f(2, 4, 5, 5), u(2, 3, 4, 2) * 2 - 1, 0, 0, False)
add("pixel_shuffle.default", f(2, 12, 3, 4), 2)
add("pixel_unshuffle.default", f(2, 3, 6, 4), 2)
add("channel_shuffle.default", f(2, 6, 4), 2)
add("im2col.default", f(2, 4, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1])
add("col2im.default", f(2, 16, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1])
add("fft_fftn.default", f(4, 6, 3), None, [1])
add("fft_fft.default", f(4, 6))
add("fft_rfft.default", f(4, 6))
add("fft_fft2.default", f(2, 3, 4, 4))

# Recurrent layers
_lstm = [f(12, 4), f(12, 3), f(12), f(12)]
_gru = [f(9, 4), f(9, 3), f(9), f(9)]
add("lstm.input", f(4, 5, 4), [f(1, 4, 3), f(1, 4, 3)], _lstm, True, 1, 0.0, True, False, True)
add("gru.input", f(5, 4, 4), f(1, 4, 3), _gru, True, 1, 0.0, True, False, False)
add("rnn_tanh.input", f(5, 4, 4), f(1, 4, 3), [f(3, 4), f(3, 3)], False, 1, 0.0, True, False, False)
