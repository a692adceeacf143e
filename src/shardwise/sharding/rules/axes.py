"""Building blocks of rules: named axes of a shape, linear sets, and local positions and lengths."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from shardwise.sharding.candidates import section_pattern
from shardwise.sharding.dims import Pattern
from shardwise.sharding.placements import Coordinate, Layout, Shard, local_dim
from shardwise.sharding.rule import Axis, Call, Dim, Dims, Local, MeshAxis, Part


def normalize(dim: int, rank: int) -> int:
    """A dim counted from the front; a scalar counts as having one dim.

    >>> normalize(-1, 3)
    2
    """
    return dim % max(rank, 1)


def axes_of(
    shape: tuple[int, ...], prefix: str = "d", frozen: Iterable[int] = ()
) -> tuple[dict[str, Axis], Dims]:
    """One axis for every dim, `d0, d1, …`, and the dims made of them."""
    kept = set(frozen)
    axes = {
        f"{prefix}{i}": Axis(f"{prefix}{i}", size, frozen=i in kept) for i, size in enumerate(shape)
    }
    return axes, tuple((name,) for name in axes)


def passes(call: Call, *positions: int) -> tuple[frozenset[int], ...]:
    """Partial sums may pass from these operands, all together; never integers and booleans."""
    names = (*(call.node.inputs[i] for i in positions), *call.node.outputs)
    dtypes = [call.types[name].dtype for name in names]
    floating = all(d.is_floating_point or d.is_complex for d in dtypes)
    return (frozenset(positions),) if floating and positions else ()


def part(axes: dict[str, Axis], axis: str, start: int, stop: int) -> Dim:
    """Positions `start:stop` of an axis as a dim; an empty part has a frozen axis of its own."""
    if (start, stop) == (0, axes[axis].size):
        return (axis,)
    if start >= stop:
        axes["nothing"] = Axis("nothing", 0, frozen=True)
        return ("nothing",)
    return Part(axis, start, stop)


def local_position(layout: Layout, dim: int, position: int, coordinate: Coordinate) -> int:
    """How many of the dim's first `position` elements this rank holds."""
    if position == 0:
        return 0
    pieces = []
    for name, shard in layout.shards:
        if shard.dim == dim:
            inside = section_pattern(shard.of, 0, position)
            assert inside is not None, f"{shard} has no boundary at {position}"
            pieces.append((name, Shard(0, inside)))
    return local_dim(Layout(tuple(pieces)), 0, position, coordinate)


def axis_length(axis: Axis, local: Local, layout: Layout, dim: int, shape: tuple[int, ...]) -> int:
    """This rank's length of a node axis that is a factor of dim `dim` of a tensor of `shape`."""
    names = local.cuts.get(axis.name, ())
    if not names or not prod(shape[dim : dim + 1]):
        return axis.size
    own = Layout(tuple((name, p) for name, p in layout.axes if name in names))
    return local_dim(own, dim, shape[dim], local.coordinate) * axis.size // shape[dim]


def broadcast_dims(shape: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    """Dims of an operand aligned at the right with the result; a dim of one has no axis.

    >>> broadcast_dims((4, 1), (2, 4, 8))
    (('d1',), ())
    """
    offset = len(result) - len(shape)
    return tuple(
        (f"d{i + offset}",) if size != 1 or result[i + offset] == 1 else ()
        for i, size in enumerate(shape)
    )


def broadcastable(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether the shape broadcasts to the result's."""
    offset = len(result) - len(shape)
    return offset >= 0 and all(s in (1, result[i + offset]) for i, s in enumerate(shape))


def only_cut(local: Local, layout: Layout, axis: str, dim: int) -> tuple[Pattern, MeshAxis] | None:
    """The cut of dim `dim` by a `once` axis, and the mesh axis that cuts it; None: it is whole."""
    mesh_axis = local.axis(axis)
    if mesh_axis is None:
        return None
    shards = [shard for name, shard in layout.shards if name in mesh_axis.names]
    return next(shard.of for shard in shards if shard.dim == dim), mesh_axis
