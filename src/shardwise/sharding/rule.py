"""The rule of a node: its axes, how tensor dims are made of them, and what sharding one does.

A node has an iteration space of named axes. A tensor dim is a product of axes `("c", "h", "e")`,
a `Part` of a concatenated axis, or `()` for a broadcast dim of one. Sharding an axis over a mesh
axis shards every dim that contains it; results that lack it become what `Axis.reduce` says;
operands that lack it are used for different work on every rank (R~).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from shardwise.errors import RuleError
from shardwise.ir import Node, Ref, TensorType, iter_refs
from shardwise.ir.operators import bind, signature
from shardwise.sharding.placements import Coordinate, Layout


@dataclass(frozen=True, slots=True)
class Part:
    """Positions `start:stop` of the concatenated axis `axis`: a chunk, a slice, one of a `cat`."""

    axis: str
    start: int
    stop: int


Dim = tuple[str, ...] | Part
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a node's iteration space.

    `reduce` is what results without this axis become when it is sharded: "sum", "max" or "min" for
    a partial result, "same" if the local implementation already gives every rank the full result.
    `frozen` axes may not be sharded. `outermost` axes may only be sharded at their outermost
    factor, so that a shard is one contiguous range. Only one mesh axis may shard a `once` axis.
    `num_collectives` counts those, forward and backward, inside the local implementation. Operands
    `counts` count positions of this axis without having it: each rank needs its own count, a
    partial sum. An axis that `joins` others shards the dims of all of them; it is used only
    where a plan names it. An axis that `begins` shards the batch where no operand is sharded.
    """

    name: str
    size: int
    reduce: str = "sum"
    frozen: bool = False
    outermost: bool = False
    once: bool = False
    num_collectives: int = 0
    counts: frozenset[int] = frozenset()
    joins: tuple[str, ...] = ()
    begins: bool = False


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """Stands for the run-time axis object of these mesh axes in a local call's arguments."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """The call that one rank runs for a node: an ATen operator, or `rt.<function>`."""

    fn: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The context of a local call: which mesh axes shard which node axes, and local sizes."""

    sharded: Mapping[str, tuple[str, ...]]  # node axis -> mesh axes that shard it, in mesh order
    operands: tuple[tuple[int, ...], ...]  # local shapes, in `node.inputs` order
    results: tuple[tuple[int, ...], ...]
    result_layouts: tuple[Layout, ...]
    operand_layouts: tuple[Layout, ...]
    coordinate: Coordinate
    partial: tuple[str, ...] = ()  # mesh axes on which partial sums pass through this node

    def axis(self, name: str) -> MeshAxis | None:
        """Return the run-time axis over which node axis `name` is sharded, or None."""
        names = self.sharded.get(name, ())
        return MeshAxis(names) if names else None


Localize = Callable[["Call", Local], LocalCall]


@dataclass(frozen=True, slots=True)
class NodeRule:
    """A rule applied to one node.

    `operands` follow `node.inputs` (with repetitions), `results` follow `node.outputs`. `linear`
    lists sets of operand positions: the node is linear in those operands together while the others
    are fixed, so partial sums may pass through. `additive` operands (a bias) are added to the
    result: if it is partial, they must be partial too, so that they count once. `localize` rewrites
    the call for local sizes; without it only size arguments change. `replicated_because` is the
    reason if nothing may be sharded. With `by_size`, other sizes give other axes.
    """

    axes: Mapping[str, Axis]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    _: KW_ONLY
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    localize: Localize | None = None
    size_arg: str | None = None  # schema name of an argument that is the result's shape
    replicated_because: str | None = None
    discovered: bool = False
    by_size: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node with its arguments by schema name and the types of its operands and results."""

    node: Node
    types: Mapping[str, TensorType]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(node: Node, types: Mapping[str, TensorType]) -> Call:
        return Call(node=node, types=types, arguments=bind(node))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument by its schema name, or the default."""
        return self.arguments.get(name, default)

    def shape(self, arg: Ref | str) -> tuple[int, ...]:
        """Return the shape of a `Ref`, or of the tensor argument of this name."""
        ref: Ref = arg if isinstance(arg, Ref) else self.arguments[arg]
        return self.types[ref.name].shape

    def has(self, name: str) -> bool:
        """Return whether the argument is a tensor."""
        return isinstance(self.arguments.get(name), Ref)

    @property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.types[name].shape for name in self.node.inputs)

    @property
    def results(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.types[name].shape for name in self.node.outputs)

    def position(self, name: str) -> int:
        """Return the index in `node.inputs` of a tensor argument (of the first, for a list)."""
        names = [n for n, _ in signature(self.node.op) or ()]
        named_args = [(names[i] if names else str(i), arg) for i, arg in enumerate(self.node.args)]
        num_refs = 0
        for key, arg in (*named_args, *self.node.kwargs):
            if key == name:
                return num_refs
            num_refs += sum(1 for _ in iter_refs(arg))
        raise RuleError(f"{self.node.op} has no tensor argument {name}", where=self.node.origin)

    def replace(self, **changes: Any) -> LocalCall:
        """Return the same call with some arguments, by schema name, replaced."""
        return replace_arguments(self.node, changes)


def replace_arguments(node: Node, changes: Mapping[str, Any]) -> LocalCall:
    """Return the node's call with some arguments, by schema name, replaced."""
    names = [name for name, _ in signature(node.op) or ()]
    args = list(node.args)
    kwargs = dict(node.kwargs)
    for name, new in changes.items():
        index = names.index(name) if name in names else -1
        if 0 <= index < len(args):
            args[index] = new
        else:
            kwargs[name] = new
    return LocalCall(node.op, tuple(args), tuple(kwargs.items()))


RuleFunction = Callable[[Call], NodeRule]


def replicated_rule(call: Call, reason: str) -> NodeRule:
    """Return the rule that freezes every axis; plans show the reason."""
    axes: dict[str, Axis] = {}

    def freeze(prefix: str, shape: tuple[int, ...]) -> Dims:
        dims = []
        for i, size in enumerate(shape):
            name = f"{prefix}{i}"
            axes[name] = Axis(name, size, frozen=True)
            dims.append((name,) if size != 1 else ())
        return tuple(dims)

    operands = tuple(freeze(f"o{i}_", s) for i, s in enumerate(call.operands))
    results = tuple(freeze(f"r{i}_", s) for i, s in enumerate(call.results))
    return NodeRule(axes, operands, results, replicated_because=reason)
