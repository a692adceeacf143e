"""Whole values from what every rank holds of them.

Enters: the local tensors of all ranks and a `Layout`. Leaves: the whole value, once for each set of
ranks whose copies have other bits, or why there is none: a part of the wrong shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shardwise.cluster import Mesh
from shardwise.runtime.splits import Split, assemble, local_shape
from shardwise.sharding.placements import (
    PARTIAL,
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
)

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Unassembled(Exception):
    """The parts do not make up a value; the message says why."""


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a value of this layout lies: S as S, P and R as R, R~ as P."""
    return Layout(tuple((axis, _gradient_placement(p)) for axis, p in layout.axes))


def _gradient_placement(placement: Placement) -> Placement:
    if isinstance(placement, Replicate) and placement.partial_grad:
        return PARTIAL
    return placement if not isinstance(placement, Partial | Replicate) else REPLICATE


def whole_values(
    parts: Sequence[torch.Tensor], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> list[tuple[str, torch.Tensor]]:
    """Return the value as the first ranks hold it, then every copy of it that has other bits."""
    sizes = dict(mesh.axes)
    splits = [Split(axis=axis, dim=s.dim, of=s.of) for axis, s in layout.shards]
    partial = {axis: p for axis, p in layout.axes if isinstance(p, Partial)}
    held: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for rank, tensor in enumerate(parts):
        place = mesh.coordinate(rank)
        expected = local_shape(shape, splits, place, sizes)
        if tuple(tensor.shape) != tuple(expected):
            raise Unassembled(
                f"rank {rank} holds shape {tuple(tensor.shape)}, expected {tuple(expected)}"
            )
        key = tuple(0 if axis in partial else place[axis] for axis in sizes)
        held.setdefault(key, []).append(tensor)
    op = next(iter(partial.values())).op if partial else "sum"
    sums = {key: functools.reduce(_COMBINE[op], tensors) for key, tensors in held.items()}
    cut = {axis for axis, _ in layout.shards}
    copies: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for key, tensor in sums.items():
        copy = tuple(0 if axis in cut else i for axis, i in zip(sizes, key, strict=True))
        kept = tuple(i if axis in cut else 0 for axis, i in zip(sizes, key, strict=True))
        copies.setdefault(copy, {})[kept] = tensor
    wholes: list[tuple[str, torch.Tensor]] = []
    for copy, tensors in copies.items():
        whole = assemble(tensors, shape, splits, sizes)
        if not wholes or not _same_bits(whole, wholes[0][1]):
            differing = [f"{i} of {axis}" for axis, i in zip(sizes, copy, strict=True) if i]
            wholes.append((f"ranks 0 and {', '.join(differing)}" if differing else "", whole))
    return wholes


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
