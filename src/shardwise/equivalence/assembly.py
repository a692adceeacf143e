"""Whole values from what every rank holds of them.

Enters: the local tensors of all ranks and a `Layout`. Leaves: the whole value, or why there is
none: a part of the wrong shape, or ranks that should hold the same and do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from shardwise.cluster import Mesh
from shardwise.equivalence.certificate import TOLERANCE, relative_error
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
    """How the gradient of a value of this layout lies: S as S, P and R= as R=, R≠ as P."""
    return Layout(tuple((axis, _gradient_placement(p)) for axis, p in layout.axes))


def _gradient_placement(placement: Placement) -> Placement:
    if isinstance(placement, Replicate) and placement.differs:
        return PARTIAL
    return placement if not isinstance(placement, Partial | Replicate) else REPLICATE


def whole_value(
    parts: Sequence[torch.Tensor], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> torch.Tensor:
    """The value that the ranks' parts stand for."""
    sizes = dict(mesh.axes)
    splits = [Split(axis=axis, dim=s.dim, of=s.of) for axis, s in layout.shards]
    partial = {axis: p for axis, p in layout.axes if isinstance(p, Partial)}
    held: dict[tuple[int, ...], list[tuple[int, torch.Tensor]]] = {}
    for rank, tensor in enumerate(parts):
        place = mesh.coordinate(rank)
        expected = local_shape(shape, splits, place, sizes)
        if tuple(tensor.shape) != tuple(expected):
            raise Unassembled(
                f"rank {rank} holds shape {tuple(tensor.shape)}, expected {tuple(expected)}"
            )
        key = tuple(0 if axis in partial else place[axis] for axis in sizes)
        held.setdefault(key, []).append((rank, tensor))
    op = next(iter(partial.values())).op if partial else "sum"
    sums = {
        key: functools.reduce(_COMBINE[op], [t for _, t in found]) for key, found in held.items()
    }
    _require_equal(sums, layout, sizes)
    cut = {axis for axis, _ in layout.shards}
    kept = {
        key: tensor
        for key, tensor in sums.items()
        if all(i == 0 or axis in cut for axis, i in zip(sizes, key, strict=True))
    }
    return assemble(kept, shape, splits, sizes)


def _require_equal(
    found: dict[tuple[int, ...], torch.Tensor], layout: Layout, sizes: dict[str, int]
) -> None:
    """Ranks that differ only on axes without a cut must hold the same."""
    same = {axis for axis, p in layout.axes if isinstance(p, Replicate)}
    for key, tensor in found.items():
        for position, axis in enumerate(sizes):
            if axis not in same or key[position] == 0:
                continue
            other = found[(*key[:position], 0, *key[position + 1 :])]
            error = relative_error(tensor, other)
            if error > TOLERANCE:
                raise Unassembled(
                    f"ranks 0 and {key[position]} of {axis} should hold the same and differ by "
                    f"{error:.1e}"
                )
