"""Operators on sharded dims that communicate or depend on positions.

This module has their common parts: sums over ranks, local ranges, empty shards and index checks.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shardwise.dtypes import torch_pairs
from shardwise.errors import BatchError, ProgramError
from shardwise.runtime import primitives
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of, runs

WIDENED = torch_pairs("widened")
Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """Exclude a function from torch.compile, which cannot trace communication and generators."""
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def summed(x: Tensor, axis: Axis | None) -> Tensor:
    """Return the sum over ranks, outside autograd."""
    return x if axis is None else primitives.all_reduce(x.detach(), axis)


def local_range(axis: Axis, of: Of) -> tuple[int, int]:
    """Return start and length of this rank's part of a dim, which is a single range."""
    pieces = runs(of, axis.shares, axis.index)
    if len(pieces) > 1:
        raise ProgramError(f"{axis!r} holds {len(pieces)} ranges of a dim split as {of}, not one")
    return pieces[0] if pieces else (0, 0)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and statistics of `dtype` are computed."""
    return WIDENED.get(dtype, dtype)


def reduced_shape(x: Tensor, dims: tuple[int, ...]) -> list[int]:
    """Return the shape with `dims` reduced to ones."""
    reduced = {d % max(x.dim(), 1) for d in dims}
    return [1 if d in reduced else n for d, n in enumerate(x.shape)]


def drop(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Remove dims of size one that a reduction left, unless `keepdim`."""
    return x if keepdim or not x.dim() else x.squeeze(tuple(dims))


# Ranks with empty shards. ATen refuses many operators on tensors without channels, groups or rows.
# Such a rank still takes part in every collective of the backward pass, so that its results, which
# have no elements, stay connected to its operands, which get zero gradients.


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
        exact = [r for r in results if not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*exact)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        result = [
            torch.zeros_like(t) if needed else None
            for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *result


def empty_results(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *operands: Tensor
) -> tuple[Tensor, ...]:
    """Return results without elements, connected to the operands, which get zero gradients."""
    results = _Zeros.apply(shapes, dtypes, *operands)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], results)


def empty_result(shape: Sequence[int], dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Return one result without elements."""
    return empty_results((shape,), (dtype,), *operands)[0]


def no_channels(
    shape: Sequence[int], dtype: torch.dtype, *operands: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return a convolution over no input channels: zeros plus this rank's term of the bias."""
    zeros = empty_result(shape, dtype, *operands)
    if bias is None:
        return zeros
    return zeros + bias.view(-1, *(1 for _ in range(operands[1].dim() - 2)))


# Indices are checked against the full dim before a rank masks out its part. A rank returns zeros
# for rows that other ranks hold, so that an index out of range would silently read zeros
# everywhere. A single device raises; so do these operators, on every rank that sees the index.


def require_in_range(
    indices: Tensor, size: int, what: str, *, low: int = 0, ignored: int | None = None
) -> None:
    """Raise unless every index is `low … size - 1`, or `ignored`.

    On CPU this is a `BatchError` with the value. On other devices, and in compiled programs, it is
    an asynchronous assertion on the device.
    """
    if not indices.numel():
        return
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        if not indices.is_meta:
            valid = (indices >= low) & (indices < size)
            if ignored is not None:
                valid = valid | (indices == ignored)
            torch._assert_async(valid.all(), _message(what, "an index", size, low, ignored))
        return
    lowest, highest = torch.aminmax(indices)
    if type(lowest) is not Tensor:  # a fake tensor: memory is being predicted
        return
    if lowest.item() >= low and highest.item() < size:
        return
    outside = indices[(indices < low) | (indices >= size)]
    if ignored is not None:
        outside = outside[outside != ignored]
    if outside.numel():
        raise BatchError(
            _message(what, f"the index {outside[0].item()}", size, low, ignored),
            hint="compare the batch with the size of the table (the vocabulary, the classes)",
        )


def _message(what: str, index: str, size: int, low: int, ignored: int | None) -> str:
    exception = "" if ignored is None or low <= ignored < size else f", or {ignored} to be ignored"
    return f"{what} got {index}, and takes {low} to {size - 1}{exception}"
