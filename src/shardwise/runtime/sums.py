"""Sums of several ranks' memory, block by block, in the order of ranks.

Enters: the same range of every rank's memory, as bytes. Leaves: the sum, written to some of them.
A block fits a core's cache, so that it is read from memory once although it is written often.
numpy adds in the calling thread alone and without Python's lock; it does not know the types of
less than 32 bits that models use: these are added in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["OPERATORS", "Bytes", "add_up", "bytes_of", "is_summed"]

BLOCK_BYTES = 256 << 10
_SERIAL = 32_767  # elements of which torch makes no work for several threads

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
OPERATORS = ("sum", "max", "min")
_NUMPY: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_TORCH: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_KNOWN = {
    getattr(torch, name): np.dtype(name)
    for name in [
        *("float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ]
}


def bytes_of(flat: Tensor) -> Bytes:
    """A contiguous tensor's memory."""
    return flat.detach().view(torch.uint8).numpy()


def is_summed(dtype: torch.dtype, op: str) -> bool:
    """Whether `add_up` knows the type; complex numbers have no order."""
    return (dtype in _KNOWN or dtype.is_floating_point) and (op == "sum" or not dtype.is_complex)


def add_up(sources: Sequence[Bytes], targets: Sequence[Bytes], dtype: torch.dtype, op: str) -> None:
    """Write `sources[0] + sources[1] + …` to all targets, which may be sources themselves."""
    assert len(sources) > 1
    if dtype not in _KNOWN:
        _add_up_narrow(sources, targets, dtype, op)
        return
    terms = [source.view(_KNOWN[dtype]) for source in sources]
    results = [target.view(_KNOWN[dtype]) for target in targets]
    combine, length = _NUMPY[op], BLOCK_BYTES // dtype.itemsize
    scratch = np.empty(length if len(terms) > 2 else 0, dtype=_KNOWN[dtype])
    with np.errstate(all="ignore"):
        for first in range(0, terms[0].size, length):
            block = slice(first, first + length)
            rows = [term[block] for term in terms]
            total, *copies = [result[block] for result in results]
            so_far = rows[0]
            for row in rows[1:-1]:
                so_far = combine(so_far, row, out=scratch[: row.size])
            combine(so_far, rows[-1], out=total)
            for copy in copies:
                np.copyto(copy, total)


def _add_up_narrow(
    sources: Sequence[Bytes], targets: Sequence[Bytes], dtype: torch.dtype, op: str
) -> None:
    terms = [torch.from_numpy(source).view(dtype) for source in sources]
    results = [torch.from_numpy(target).view(dtype) for target in targets]
    combine, scratch = _TORCH[op], torch.empty(_SERIAL)
    for first in range(0, terms[0].numel(), _SERIAL):
        block = slice(first, first + _SERIAL)
        rows = [term[block] for term in terms]
        total = scratch[: rows[0].numel()].copy_(rows[0])
        for row in rows[1:]:
            combine(total, row.float(), out=total)
        for result in results:
            result[block].copy_(total)
