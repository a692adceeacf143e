"""Calls of ranks that hold nothing: results without elements, whose gradients are zeros.

ATen refuses many operators on tensors without channels, groups or rows. Such a rank still takes
part in every collective of the backward pass, so its results stay connected to its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["empty_result", "empty_results", "no_channels"]


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        device = operands[0].device
        results = tuple(
            torch.zeros(tuple(shape), dtype=dtype, device=device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        whole_numbers = [r for r in results if not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*whole_numbers)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            torch.zeros_like(t) if needed else None
            for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *found


def empty_results(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *operands: Tensor
) -> tuple[Tensor, ...]:
    """Results without elements, connected to the operands, which get zero gradients."""
    results = _Zeros.apply(shapes, dtypes, *operands)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], results)


def empty_result(shape: Sequence[int], dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """One result without elements."""
    return empty_results((shape,), (dtype,), *operands)[0]


def no_channels(
    shape: Sequence[int], dtype: torch.dtype, *operands: Tensor, bias: Tensor | None = None
) -> Tensor:
    """A convolution over no input channels: zeros, and this rank's term of the bias."""
    zeros = empty_result(shape, dtype, *operands)
    if bias is None:
        return zeros
    return zeros + bias.view(-1, *(1 for _ in range(operands[1].dim() - 2)))
