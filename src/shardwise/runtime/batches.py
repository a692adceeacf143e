"""Batches as the runtime sees them: their leaves, their signature, and that all ranks have one.

Every rank is given the same whole batch, of which it reads its part. A data loader that is seeded
differently on one rank would train it on other data without any error, so ranks compare checksums
of their batches: in the first steps, and later in every `CHECK_EVERY`th.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import BatchError
from shardwise.runtime.mesh import Axis

__all__ = ["CHECK_EVERY", "BatchCheck", "check_same_batch", "leaves", "signature"]

FIRST_CHECKS = 3  # the first steps are compared one by one,
CHECK_EVERY = 32  # and then every so many: ranks that differ are found within as many steps


def leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """The leaves of a batch with their paths; containers are dicts, sequences and dataclasses."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def signature(batch: Any) -> Hashable:
    """Shapes and types of the tensors, and the values of everything else."""
    return tuple(
        (path, tuple(v.shape), str(v.dtype)) if isinstance(v, Tensor) else (path, repr(v))
        for path, v in leaves(batch)
    )


class BatchCheck:
    """Compares the batches of all ranks now and then, at the same steps on every rank."""

    def __init__(self, axis: Axis, device: torch.device | str) -> None:
        self._axis, self._device = axis, device
        self._steps = 0

    def __call__(self, batch: Any) -> None:
        """Count a step, and raise if it is one of those that are checked and ranks differ."""
        due = self._steps < FIRST_CHECKS or self._steps % CHECK_EVERY == 0
        self._steps += 1
        if due:
            check_same_batch(batch, self._axis, self._device)


def check_same_batch(batch: Any, axis: Axis, device: torch.device | str = "cpu") -> None:
    """Refuse batches that differ between ranks, naming the ranks and the input."""
    if axis.size == 1:
        return
    found = list(leaves(batch))
    shape = [len(found), zlib.crc32(repr(signature(batch)).encode())]
    _compare(shape, ["the batch's shapes, types or plain values"] * 2, axis, device)
    _compare([_checksum(value) for _, value in found], [path for path, _ in found], axis, device)


def _compare(numbers: list[int], names: list[str], axis: Axis, device: torch.device | str) -> None:
    count = len(numbers)
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = axis.all_gather(mine, [count] * axis.size).wait().view(axis.size, count)
    for column, name in enumerate(names):
        values = every[:, column].tolist()
        different = [rank for rank, value in enumerate(values) if value != values[0]]
        if different:
            raise BatchError(
                f"ranks {different} have other data than rank 0",
                where=name,
                hint="give every rank the same whole batch (seed the data loader alike), or each "
                "its part with train_step(pm.local_batch(batch), local=True)",
            )


def _checksum(value: Any) -> int:
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    flat = value.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
