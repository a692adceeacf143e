"""Indices that are checked against the whole dim they index, before a rank masks out its part.

A rank that holds some rows of a table answers zeros for all others, so an index that no rank holds
would silently read zeros. One device raises; so do these operators, on every rank that sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.errors import BatchError

__all__ = ["require_in_range"]


def require_in_range(
    indices: Tensor, size: int, what: str, *, low: int = 0, ignored: int | None = None
) -> None:
    """Raise unless every index is `low … size - 1`, or `ignored`.

    On CPU this is a `BatchError` with the value. On other devices, and in compiled programs, it is
    an assertion on the device, which does not wait for it.
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
    least, most = torch.aminmax(indices)
    if type(least) is not Tensor:  # a tensor without data: memory is being predicted
        return
    if least.item() >= low and most.item() < size:
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
    besides = "" if ignored is None or low <= ignored < size else f", or {ignored} to be ignored"
    return f"{what} got {index}, and takes {low} to {size - 1}{besides}"
