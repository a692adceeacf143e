"""Building blocks of rules and local calls.

Axes and dims of a shape, operands in the node's order, linear operands, local positions and
lengths, and the shard patterns that local calls take as arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from shardwise.ir import Ref, iter_refs
from shardwise.ir.operators import signature
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
    NodeRule,
    Part,
)


# ---------------------------------------------------------------- axes and dims
def normalize(dim: int, rank: int) -> int:
    """Return a dim counted from the front; a scalar counts as having one dim.

    >>> normalize(-1, 3)
    2
    """
    return dim % max(rank, 1)


def axes_of(
    shape: Sequence[int], prefix: str = "d", frozen: Iterable[int] = ()
) -> tuple[dict[str, Axis], Dims]:
    """Return one axis for every dim, `d0, d1, …`, and the dims made of them."""
    fixed = set(frozen)
    names = [f"{prefix}{i}" for i in range(len(shape))]
    axes = {n: Axis(n, shape[i], frozen=i in fixed) for i, n in enumerate(names)}
    return axes, each(names)


def frozen_axes(sizes: Mapping[str, int]) -> dict[str, Axis]:
    """Return axes of these names and sizes that may not be sharded."""
    return {name: Axis(name, size, frozen=True) for name, size in sizes.items()}


def each(names: Iterable[str]) -> Dims:
    """Return a dim for each axis.

    >>> each(["n", "c"])
    (('n',), ('c',))
    """
    return tuple((name,) for name in names)


def with_dim(dims: Dims, at: int, *new: Dim) -> Dims:
    """Return the dims with the one at position `at` replaced; by nothing, it is removed."""
    return (*dims[:at], *new, *dims[at + 1 :])


def part(axes: dict[str, Axis], axis: str, start: int, stop: int) -> Dim:
    """Return positions `start:stop` of an axis as a dim; an empty part gets a frozen axis."""
    if (start, stop) == (0, axes[axis].size):
        return (axis,)
    if start >= stop:
        axes["nothing"] = Axis("nothing", 0, frozen=True)
        return ("nothing",)
    return Part(axis, start, stop)


def aligned(shape: Sequence[int], full: Sequence[int], names: Dims) -> Dims:
    """Return the dims of a tensor that is broadcast to `full`, whose dims are `names`.

    >>> aligned((4, 1), (2, 4, 8), each("bhs"))
    (('h',), ())
    """
    offset = len(full) - len(shape)
    return tuple(
        names[i + offset] if size != 1 or full[i + offset] == 1 else ()
        for i, size in enumerate(shape)
    )


def broadcastable(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Return whether the shape broadcasts to the result's."""
    offset = len(result) - len(shape)
    return offset >= 0 and all(s in (1, result[i + offset]) for i, s in enumerate(shape))


# ---------------------------------------------------------------- operands
def op_name(call: Call) -> str:
    """Return the operator's name without namespace and overload."""
    return call.node.op.split(".")[1]


def operand_dims(call: Call, **dims: Dims | Sequence[Dims]) -> tuple[Dims, ...]:
    """Return dims by argument name as the rule's operands; a list argument has a list of dims."""
    schema = signature(call.node.op)
    names = [name for name, _ in schema] if schema else list(map(str, range(len(call.node.args))))
    operands: list[Dims] = []
    for name, value in (*zip(names, call.node.args, strict=False), *call.node.kwargs):
        if isinstance(value, Ref):
            operands.append(dims[name])  # type: ignore[arg-type]
        elif any(True for _ in iter_refs(value)):
            operands.extend(dims[name])  # type: ignore[arg-type]
    return tuple(operands)


def positions(call: Call, *names: str) -> tuple[int, ...]:
    """Return the positions in `node.inputs` of those of the arguments that are tensors."""
    return tuple(call.position(name) for name in names if call.has(name))


def passes(call: Call, *operands: int) -> tuple[frozenset[int], ...]:
    """Let partial sums pass from these operands, all together; never integers and booleans."""
    names = (*(call.node.inputs[i] for i in operands), *call.node.outputs)
    return (frozenset(operands),) if operands and _are_float(call, names) else ()


def linear_rule(
    call: Call,
    axes: dict[str, Axis],
    operand: Dims,
    *results: Dims,
    localize: Localize | None = None,
) -> NodeRule:
    """Return the rule of a call that is linear in its only tensor operand."""
    return NodeRule(axes, (operand,), results, linear=passes(call, 0), localize=localize)


def is_float(call: Call) -> bool:
    """Return whether all operands and results can carry partial sums."""
    return _are_float(call, (*call.node.inputs, *call.node.outputs))


def _are_float(call: Call, names: Iterable[str]) -> bool:
    dtypes = [call.types[name].dtype for name in names]
    return all(d.is_floating_point or d.is_complex for d in dtypes)


# ---------------------------------------------------------------- local calls
def local_position(layout: Layout, dim: int, position: int, coordinate: Coordinate) -> int:
    """Return how many of the dim's first `position` elements are on this rank."""
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
    """Return this rank's length of an axis that is a factor of dim `dim` of a tensor of `shape`."""
    names = local.sharded.get(axis.name, ())
    if not names or not prod(shape[dim : dim + 1]):
        return axis.size
    own = Layout(tuple((name, p) for name, p in layout.axes if name in names))
    return local_dim(own, dim, shape[dim], local.coordinate) * axis.size // shape[dim]


def single_shard(
    local: Local, layout: Layout, axis: str, dim: int
) -> tuple[Pattern, MeshAxis] | None:
    """Return how a `once` axis shards dim `dim`, and over which mesh axis; None if it does not."""
    mesh_axis = local.axis(axis)
    if mesh_axis is None:
        return None
    shards = [shard for name, shard in layout.shards if name in mesh_axis.names]
    return next(shard.of for shard in shards if shard.dim == dim), mesh_axis


def shard_argument(local: Local, name: str, operand: int) -> int | Pattern:
    """Return how a `once` axis is sharded on an operand: a plain size, or the pattern."""
    (mesh,) = local.sharded[name]
    shard = local.operand_layouts[operand][mesh]
    assert isinstance(shard, Shard)
    if len(shard.of) == 1 and shard.of[0][0] == shard.of[0][2] == 1:
        return shard.of[0][1]
    return shard.of


def over(local: Local, names: Iterable[str]) -> MeshAxis | None:
    """Return the run-time axis of all mesh axes that shard any of these axes, in mesh order."""
    sharding = {mesh for name in names for mesh in local.sharded.get(name, ())}
    if not sharding:
        return None
    layout = (*local.result_layouts, *local.operand_layouts)[0]
    return MeshAxis(tuple(mesh for mesh, _ in layout.axes if mesh in sharding))


def dtype_change(call: Call) -> tuple[tuple[str, Any], ...]:
    """Return `dtype=` if the first result's dtype is not the first operand's (autocast)."""
    dtype = call.types[call.node.outputs[0]].dtype
    return () if dtype == call.types[call.node.inputs[0]].dtype else (("dtype", dtype),)


def communicating(
    names: Iterable[str], make: Callable[[Call, Local, MeshAxis], LocalCall]
) -> Localize:
    """Return the plain call unless one of the axes is sharded; `make` gets their mesh axes."""
    names = tuple(names)

    def localize(call: Call, local: Local) -> LocalCall:
        axis = over(local, names)
        return call.replace() if axis is None else make(call, local, axis)

    return localize


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
    """Return `localize` (the plain call by default), except on ranks whose results are empty."""

    def run(call: Call, local: Local) -> LocalCall:
        empty = guard_empty(call, local)
        if empty is not None:
            return empty
        return localize(call, local) if localize else call.replace()

    return run
