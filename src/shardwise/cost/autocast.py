"""Autocast on tensors without data, which torch does not cast: what it would do to one call.

Enters: a function and the autocast region of its step. Leaves: the function with operands cast as
torch's lists say (docs of `torch.amp`, "Autocast Op Reference").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOWER = {
    "__matmul__",
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "attention",
    "einsum",
    "gru",
    "linear",
    "lstm",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "scaled_dot_product_attention",
}
_FLOAT32_CPU = {
    "avg_pool3d",
    "binary_cross_entropy",
    "cdist",
    "cosine_embedding_loss",
    "cross_entropy",
    "cross_entropy_loss",
    "grid_sampler",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "nll_loss_nd",
    "poisson_nll_loss",
    "prod",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
}
_FLOAT32_CUDA = {
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "cross_entropy_loss",
    "cumprod",
    "cumsum",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "group_norm",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "norm",
    "pow",
    "prod",
    "reciprocal",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "sum",
    "tan",
    "triplet_margin_loss",
}

Region = tuple[str, torch.dtype, bool]


def cast(op: str, function: Callable[..., Any], region: Region | None) -> Callable[..., Any]:
    """`function` as it runs inside `region`."""
    if region is None or not region[2]:
        return function
    name = op.split(".")[1] if "." in op else op
    if name in _LOWER:
        target = region[1]
    elif name in (_FLOAT32_CPU if region[0] == "cpu" else _FLOAT32_CUDA):
        target = torch.float32
    else:
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        given = {k: _to(v, target) for k, v in kwargs.items()}
        return function(*(_to(a, target) for a in args), **given)

    return called


def _to(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, Tensor):
        eligible = arg.dtype.is_floating_point and arg.dtype != torch.float64
        return arg.to(dtype) if eligible else arg
    if isinstance(arg, tuple | list):
        return tuple(_to(item, dtype) for item in arg)
    return arg
