"""Arrange ranks in a mesh of named axes.

A `Mesh` converts between ranks and coordinates and lists the groups of ranks that communicate along
some axes. It creates no process groups: the compiler uses it as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwise.errors import ClusterError, did_you_mean
from shardwise.shares import AxisSize, axes_of, num_ranks, written

MAX_AXES = 16
MAX_RANKS = 1 << 22  # more than a cluster has, because micro-batches may be an axis as well
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes and their sizes, in order; ranks are row-major, the last axis fastest.

    A size is a number of ranks that take equal shards. `Shares(2, 1)`, or a tuple or list of
    weights, is an axis of ranks that take unequal shards of whatever is sharded over it.

    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> mesh.coordinate(1)
    {'dp': 0, 'tp': 1}
    >>> mesh.groups(["dp"])
    ((0, 2), (1, 3))
    >>> print(Mesh.of(dp=(2, 1), tp=2))
    Mesh(dp=2:1, tp=2)
    """

    axes: tuple[tuple[str, AxisSize], ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise ClusterError(
                    f"mesh axis {name[:80]!r} is not a name of letters, digits and _",
                    hint="Mesh.of(dp=2, tp=2)",
                )
        if len(self.axes) > MAX_AXES:
            raise ClusterError(f"a mesh of {len(self.axes)} axes exceeds the limit of {MAX_AXES}")
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated:
            raise ClusterError(f"mesh axis {repeated[0]} is given twice in {self}")
        object.__setattr__(self, "axes", tuple(axes_of(self.axes).items()))
        if self.size > MAX_RANKS:
            raise ClusterError(f"a mesh of {self.size:,} ranks exceeds the limit of {MAX_RANKS:,}")

    @classmethod
    def of(cls, **sizes: int | Sequence[int]) -> Mesh:
        """Return a mesh of these axes in order: `Mesh.of(dp=2, tp=2)`, `Mesh.of(dp=(2, 1))`."""
        return cls(axes=tuple(axes_of(sizes).items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of ranks along the axes."""
        return tuple(num_ranks(size) for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks; a mesh without axes has one."""
        return prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along the axis `name`."""
        self._check_known([name])
        return num_ranks(dict(self.axes)[name])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis."""
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank {rank} is outside {self} with {self.size} ranks")
        indices: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.shape), strict=True):
            rank, indices[name] = divmod(rank, size)
        return {name: indices[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at `coordinate`, which names every axis."""
        self._check_known(coordinate)
        rank = 0
        for name, size in zip(self.names, self.shape, strict=True):
            if name not in coordinate:
                raise ClusterError(f"coordinate {dict(coordinate)} has no axis {name} of {self}")
            index = coordinate[name]
            if not 0 <= index < size:
                raise ClusterError(f"index {index} on axis {name} is outside {self}")
            rank = rank * size + index
        return rank

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only along `axes`; every rank is in one.

        Inside a group the ranks follow `axes` in the order given, the last one fastest; the
        groups follow the remaining axes in the mesh's order.
        """
        inner = tuple(axes)
        self._check_known(inner)
        if len(set(inner)) != len(inner):
            raise ClusterError(f"axes {inner} repeat a name", where=str(self))
        outer = tuple(name for name in self.names if name not in inner)
        return tuple(
            tuple(self.rank(fixed | varied) for varied in self._coordinates(inner))
            for fixed in self._coordinates(outer)
        )

    def _coordinates(self, names: tuple[str, ...]) -> list[dict[str, int]]:
        sizes = dict(zip(self.names, self.shape, strict=True))
        ranges = (range(sizes[name]) for name in names)
        return [dict(zip(names, indices, strict=True)) for indices in itertools.product(*ranges)]

    def _check_known(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                raise ClusterError(f"{self} has no axis {name!r}{did_you_mean(name, self.names)}")

    def to_json(self) -> dict[str, Any]:
        """Return `{"dp": 2}`, or `{"dp": [2, 1]}` if ranks take unequal shards."""
        return {name: written(size) for name, size in self.axes}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Mesh:
        """Read a mesh from plain data."""
        return Mesh(axes=tuple(data.items()))

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"
