"""Gradients that refuse to be taken for whole ones.

A sharded parameter's gradient is this rank's part. Its norm is not the gradient's norm, and
`torch.nn.utils.clip_grad_norm_` would silently clip each rank differently; so such gradients are
of tensor types that raise on norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import OptimizerError

__all__ = ["AbsentGradient", "ShardGradient", "absent", "guard", "unguard"]

_NORM_NAMES = {"norm", "_foreach_norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"}
_NORM_NAMES |= {"frobenius_norm", "nuclear_norm", "vector_norm", "matrix_norm"}
_METADATA = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "detach", "__repr__"}
_CLIP_HINT = "sw.clip_grad_norm_(pm, max_norm), which counts every rank's part once"


class ShardGradient(Tensor):
    """This rank's part of a gradient: a plain tensor but for norms, which raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse norms; do anything else as a plain tensor would."""
        if getattr(func, "__name__", "") in _NORM_NAMES:
            raise OptimizerError(
                f"{func.__name__} of a sharded gradient would be this rank's part only",
                hint=_CLIP_HINT,
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class AbsentGradient(Tensor):
    """The gradient of a whole parameter of which this rank keeps a part elsewhere (zero 2)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about shape and type, and nothing else."""
        name = getattr(func, "__name__", "")
        if name not in _METADATA:
            raise OptimizerError(
                f"{name} of a gradient of which this rank only keeps a part (zero 2)",
                hint=f"pm.gather_gradients() for the whole; to clip: {_CLIP_HINT}",
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def guard(grad: Tensor) -> Tensor:
    """The same memory as a tensor that refuses norms."""
    return grad.as_subclass(ShardGradient)


def unguard(grad: Tensor) -> Tensor:
    """The same memory as a plain tensor."""
    return grad.as_subclass(Tensor) if type(grad) is ShardGradient else grad


def absent(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient for a parameter, without memory."""
    scalar = torch.zeros((), dtype=dtype, device=parameter.device)
    return scalar.expand(parameter.shape).as_subclass(AbsentGradient)
