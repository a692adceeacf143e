"""Pieces of which rules and their local calls are built.

Named axes of a shape, operands in the node's order, linear sets, local positions and lengths, and
the shard patterns that local calls take as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from shardwise.ir import Ref, iter_refs
from shardwise.ir.schema import signature
from shardwise.sharding.candidates import section_pattern
from shardwise.sharding.dims import Pattern
from shardwise.sharding.placements import Coordinate, Layout, Shard, local_dim
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dim,
    Dims,
    Local,
    LocalCall,
    Localize,
    MeshAxis,
    Part,
)


def normalize(dim: int, rank: int) -> int:
    """Return a dim counted from the front; a scalar counts as having one dim.

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
    """Return how many of the dim's first `position` elements this rank holds."""
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
    """Return whether the shape broadcasts to the result's."""
    offset = len(result) - len(shape)
    return offset >= 0 and all(s in (1, result[i + offset]) for i, s in enumerate(shape))


def only_cut(local: Local, layout: Layout, axis: str, dim: int) -> tuple[Pattern, MeshAxis] | None:
    """The cut of dim `dim` by a `once` axis, and the mesh axis that cuts it; None: it is whole."""
    mesh_axis = local.axis(axis)
    if mesh_axis is None:
        return None
    shards = [shard for name, shard in layout.shards if name in mesh_axis.names]
    return next(shard.of for shard in shards if shard.dim == dim), mesh_axis


def named_arguments(call: Call) -> list[tuple[str, Any]]:
    """Return the given arguments with their schema names, in the order of `node.inputs`."""
    schema = signature(call.node.op)
    names = [name for name, _ in schema] if schema else list(map(str, range(len(call.node.args))))
    return [*zip(names, call.node.args, strict=False), *call.node.kwargs]


def operand_dims(call: Call, dims: Mapping[str, Dims | Sequence[Dims]]) -> tuple[Dims, ...]:
    """Dims by argument name as the rule's operands; a list argument has a list of dims."""
    found: list[Dims] = []
    for name, value in named_arguments(call):
        if isinstance(value, Ref):
            found.append(dims[name])  # type: ignore[arg-type]
        elif any(True for _ in iter_refs(value)):
            found.extend(dims[name])  # type: ignore[arg-type]
    return tuple(found)


def positions(call: Call, *names: str) -> frozenset[int]:
    """Return the positions in `node.inputs` of those of the tensor arguments that are given."""
    return frozenset(call.position(name) for name in names if call.has(name))


def free_axes(prefix: str, shape: Sequence[int], *, frozen: bool = False) -> dict[str, Axis]:
    """One axis for each dim: `b0`, `b1`, …"""
    return {f"{prefix}{i}": Axis(f"{prefix}{i}", n, frozen=frozen) for i, n in enumerate(shape)}


def each(names: Iterable[str]) -> Dims:
    """Return a dim for each axis.

    >>> each(["n", "c"])
    (('n',), ('c',))
    """
    return tuple((name,) for name in names)


def aligned(shape: Sequence[int], full: Sequence[int], names: Dims) -> Dims:
    """Dims of a tensor that is broadcast to `full`; `names` are the axes of each full dim.

    >>> aligned((4, 1), (2, 4, 8), each("bhs"))
    (('h',), ())
    """
    offset = len(full) - len(shape)
    return tuple(
        names[i + offset] if size != 1 or full[i + offset] == 1 else ()
        for i, size in enumerate(shape)
    )


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that these shapes are broadcast to.

    >>> broadcast((4, 1), (2, 1, 8))
    (2, 4, 8)
    """
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def is_float(call: Call) -> bool:
    """Return whether all operands and results can carry partial sums."""
    dtypes = [call.types[n].dtype for n in (*call.node.inputs, *call.node.outputs)]
    return all(d.is_floating_point or d.is_complex for d in dtypes)


def dtype_change(call: Call) -> tuple[tuple[str, Any], ...]:
    """`dtype=` where the first result's dtype is not the first operand's (autocast, `dtype`)."""
    dtype = call.types[call.node.outputs[0]].dtype
    return () if dtype == call.types[call.node.inputs[0]].dtype else (("dtype", dtype),)


def over(local: Local, names: Iterable[str]) -> MeshAxis | None:
    """Return the run-time axis of all mesh axes that cut any of these node axes, in mesh order."""
    cutting = {mesh for name in names for mesh in local.cuts.get(name, ())}
    if not cutting:
        return None
    layout = (*local.result_layouts, *local.operand_layouts)[0]
    return MeshAxis(tuple(mesh for mesh, _ in layout.axes if mesh in cutting))


def cut_of(local: Local, name: str, operand: int) -> int | Pattern:
    """How the (once cut) node axis `name` is cut on an operand: a plain size, or the pattern."""
    (mesh,) = local.cuts[name]
    shard = local.operand_layouts[operand][mesh]
    assert isinstance(shard, Shard)
    if len(shard.of) == 1 and shard.of[0][0] == shard.of[0][2] == 1:
        return shard.of[0][1]
    return shard.of


def guard_empty(call: Call, local: Local) -> LocalCall | None:
    """Return the call of a rank all of whose results are empty, for operators that refuse that."""
    if not local.results or not all(0 in shape for shape in local.results):
        return None
    operands = tuple(Ref(name) for name in dict.fromkeys(call.node.inputs))
    dtypes = tuple(call.types[name].dtype for name in call.node.outputs)
    if len(dtypes) == 1:
        return LocalCall("rt.empty_result", (local.results[0], dtypes[0], *operands))
    return LocalCall("rt.empty_results", (local.results, dtypes, *operands))


def guarded(localize: Localize | None = None) -> Localize:
    """`localize` (the plain call by default), but for ranks whose results are empty."""

    def run(call: Call, local: Local) -> LocalCall:
        empty = guard_empty(call, local)
        if empty is not None:
            return empty
        return localize(call, local) if localize else call.replace()

    return run
