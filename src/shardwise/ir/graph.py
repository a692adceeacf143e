"""Define `Graph`, the captured step: a flat, immutable list of ATen calls over named values.

A node's arguments hold `Ref`s to values next to plain constants (numbers, strings, dtypes,
nested tuples). Nodes with several results have several output names; there is no `getitem`.
Regions (`no_grad`, autocast, activation checkpointing) are flattened: each node carries its own.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwise.dtypes import dtype_name
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.ir.guards import Guards


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a value: `TensorType((4, 16), torch.float32)`.

    One in `ragged` rows of the first dim exists (see `shardwise.routing`), the others are empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ragged: float = 1

    @property
    def expected(self) -> TensorType:
        """Return the type with the rows that exist if the ragged dim is filled evenly."""
        if self.ragged == 1:
            return self
        rows = math.ceil(self.shape[0] / self.ragged)
        return TensorType((rows, *self.shape[1:]), self.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.expected.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        rows = [f"{size}/{self.ragged}" for size in self.shape[:1]] if self.ragged > 1 else []
        sizes = [*rows, *map(str, self.shape[len(rows) :])]
        return f"{dtype_name(self.dtype)}[{', '.join(sizes)}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value `name` inside a node's arguments."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call: `outputs = op(*args, **kwargs)`, and where in the user's program it came from."""

    name: str
    op: str  # "aten.linear.default", "mylib.op.default", or "autograd_function.<module>.<Class>"
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...]
    module: str = ""  # path of the calling module: "blocks.0.attn"
    module_class: str = ""  # the module's class name: "Attention"
    source: str = ""  # "model.py:41" of the innermost user frame
    source_text: str = ""  # that line's text, stripped
    grad_enabled: bool = True  # False inside torch.no_grad()
    autocast: tuple[str, torch.dtype, bool] | None = None  # (device type, dtype, enabled)
    recompute: str | None = None  # name of the activation-checkpoint group it is in
    key: str = ""  # its key in the full graph (see `node_keys`), if the graph is part of another

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values that this node uses, in argument order, with repeats."""
        names: list[str] = []
        _add_refs(self.args, names)
        for _, value in self.kwargs:
            _add_refs((value,), names)
        return tuple(names)

    @property
    def origin(self) -> str:
        """Return the place for errors and reports: `blocks.0.attn (model.py:41)`."""
        path = self.module or "the model"
        return f"{path} ({self.source})" if self.source else path


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter: its value, its first name, and the other names of a tied parameter."""

    value: str
    name: str
    aliases: tuple[str, ...] = ()
    requires_grad: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer: its value, its names, and the value that forward writes to it, if any."""

    value: str
    name: str
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    mutation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One tensor of the batch: its value and its path, `input_ids` or `0` or `batch.mask`.

    `path` is the pytree key path. Two inputs never share a tensor: capture separates them. In a
    part of a graph, an input may also be `received` from an earlier stage, or `precomputed` from
    the full batch.
    """

    value: str
    name: str
    path: tuple[str | int, ...]
    kind: str = "batch"  # "batch", "received" or "precomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor that is neither parameter, buffer nor input; its data travels with the graph."""

    value: str
    data: torch.Tensor = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientHook:
    """A function of one parameter's full gradient that runs when the gradient is complete.

    `function(gradient, value)` returns the new gradient; only hooks with `needs_value` read the
    parameter's value. An `elementwise` hook may run on any part of the gradient. `code` is the
    traced computation with a digest of its constants; hooks with equal code are equal.
    """

    parameter: str
    accumulated: bool  # runs on the sum with earlier gradients, not on the new one alone
    name: str  # of the user's function
    source: str  # "train.py:12", where it is defined
    code: str
    elementwise: bool
    needs_value: bool
    function: Callable[..., torch.Tensor] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.parameter}: {self.name} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The forward step of one model for one batch shape, up to and including the loss.

    `outputs` are the leaves of the model's output in pytree order: a `Ref` or a constant.
    `output_spec` is the output's `TreeSpec`: `frontend.rebuild_output(spec, leaves)` uses it.
    `functions` maps `autograd_function.*` op names to the user's classes, and "gradient hooks" to
    the `hooks`; both exist in this process only. With `guards`, the graph is valid only for batches
    with the same answers to Python's questions about their values.
    """

    name: str  # the model's class name
    nodes: tuple[Node, ...]
    values: Mapping[str, TensorType]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...] = ()
    constants: tuple[Constant, ...] = ()
    loss: str | None = None
    outputs: tuple[Any, ...] = ()
    output_spec: Any = field(default=None, compare=False)
    input_constants: tuple[tuple[str, Any], ...] = ()  # non-tensor arguments, fixed in the graph
    training: bool = True
    module_classes: Mapping[str, str] = field(default_factory=dict)  # path -> class name
    functions: Mapping[str, Any] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()  # in a part of a graph: values that later stages use
    hooks: tuple[GradientHook, ...] = ()  # of parameters, in the order in which they run
    guards: Guards | None = None

    def __str__(self) -> str:
        return to_text(self)

    @property
    def producers(self) -> dict[str, Node]:
        return {out: node for node in self.nodes for out in node.outputs}

    @property
    def ends(self) -> frozenset[str]:
        """Return the loss and the new contents of buffers."""
        names = (self.loss, *(buffer.mutation for buffer in self.buffers))
        return frozenset(name for name in names if name is not None)

    @property
    def visible(self) -> frozenset[str]:
        """Return the values that are visible outside: ends, outputs, and values sent to stages."""
        return self.ends.union(self.sends, (ref.name for ref in iter_refs(self.outputs)))

    @property
    def fingerprint(self) -> str:
        """Return a hex digest of everything that determines the computation; weights do not."""
        digest = hashlib.sha256(to_text(self, provenance=False).encode(errors="backslashreplace"))
        for constant in (*self.constants, *(self.guards.graph.constants if self.guards else ())):
            digest.update(tensor_bytes(constant.data))
        return digest.hexdigest()[:16]

    def verify(self) -> None:
        """Raise if the graph is malformed: undefined, twice defined or untyped values."""
        defined: set[str] = set()

        def define(name: str, where: str) -> None:
            if name in defined:
                raise ShardwiseError(f"value %{name} is defined twice", where=where)
            if name not in self.values:
                raise ShardwiseError(f"value %{name} has no type", where=where)
            defined.add(name)

        sources: list[Input | Parameter | Buffer | Constant] = []
        sources += (*self.inputs, *self.parameters, *self.buffers, *self.constants)
        for source in sources:
            define(source.value, f"graph source {source.value}")
        for node in self.nodes:
            for name in node.inputs:
                if name not in defined:
                    raise ShardwiseError(f"{node.name} uses undefined %{name}", where=node.origin)
            for name in node.outputs:
                define(name, node.origin)
        leaves = [leaf.name for leaf in self.outputs if isinstance(leaf, Ref)]
        mutations = [b.mutation for b in self.buffers if b.mutation]
        for name in (*leaves, *mutations, *([self.loss] if self.loss else [])):
            if name not in defined:
                raise ShardwiseError(f"graph output %{name} is undefined", where=self.name)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the contents of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def node_keys(graph: Graph) -> dict[str, str]:
    """Map each node's name to its key: module path, operator, and a number within the module.

    Keys do not depend on a plan, nor on batch sizes and dtypes: they key random draws and say where
    a pipeline stage begins. `blocks.0.drop.dropout_0` is the first dropout of blocks.0.drop.
    """
    counts: Counter[str] = Counter()
    keys: dict[str, str] = {}
    for node in graph.nodes:
        op = node.op.split(".")[1] if "." in node.op else node.op
        stem = f"{node.module}.{op}" if node.module else op
        keys[node.name] = node.key or f"{stem}_{counts[stem]}"
        counts[stem] += 1
    return keys


def drop_unused(graph: Graph, nodes: Iterable[Node], ends: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes of a changed graph that `ends` need, or whose results nothing used before.

    `graph` is the graph before the change.
    """
    nodes, used_before = tuple(nodes), {name for node in graph.nodes for name in node.inputs}
    results = (name for n in nodes if used_before.isdisjoint(n.outputs) for name in n.outputs)
    return live_nodes(nodes, (*ends, *results))


def live_nodes(nodes: Iterable[Node], ends: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes that some of the values `ends` need, in order."""
    needed, live = set(ends), list[Node]()
    for node in reversed(tuple(nodes)):
        if not needed.isdisjoint(node.outputs):
            live.append(node)
            needed.update(node.inputs)
    return tuple(reversed(live))


def iter_refs(arg: Any) -> Iterator[Ref]:
    """Yield all `Ref`s in a nested argument, in order."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from iter_refs(item)


def _add_refs(args: Iterable[Any], names: list[str]) -> None:
    """Append the names of `iter_refs`, without generators: searches read inputs very often."""
    for arg in args:
        if isinstance(arg, Ref):
            names.append(arg.name)
        elif isinstance(arg, tuple | list):
            _add_refs(arg, names)


def map_refs(arg: Any, replace: Any) -> Any:
    """Return `arg` with every `Ref` replaced by `replace(ref)`; lists become tuples."""
    if isinstance(arg, Ref):
        return replace(arg)
    if isinstance(arg, tuple | list):
        return tuple(map_refs(item, replace) for item in arg)
    return arg


def format_arg(arg: Any) -> str:
    """Return one argument as text, the same in every process."""
    if isinstance(arg, tuple | list):
        return "[" + ", ".join(format_arg(item) for item in arg) + "]"
    if isinstance(arg, Ref | int | float | bool | torch.dtype | torch.device):
        return str(arg)
    return repr(arg)


def to_text(graph: Graph, *, provenance: bool = True) -> str:
    """Return the graph as readable text; the fingerprint hashes it without provenance."""
    lines = [f"graph {graph.name} training={graph.training}", *_source_lines(graph)]
    lines += [_node_line(graph, node, provenance) for node in graph.nodes]
    for hook in graph.hooks:
        when = "accumulated gradient" if hook.accumulated else "gradient"
        label = str(hook) if provenance else f"{hook.parameter}: {hook.code}"
        lines.append(f"  hook on the {when} of {label}")
    lines.append(f"  loss %{graph.loss}")
    lines.append(f"  outputs {format_arg(graph.outputs)}")
    lines += [f"  sends {', '.join(f'%{name}' for name in graph.sends)}"] if graph.sends else []
    return "\n".join([*lines, *_guard_lines(graph.guards, provenance)])


def _guard_lines(guards: Guards | None, provenance: bool) -> Iterator[str]:
    """Yield the number of guards, the nodes that compute their values, and each guard."""
    if guards is None:
        return
    yield f"  guards {len(guards)}"
    yield from (f"  {_node_line(guards.graph, node, provenance)}" for node in guards.graph.nodes)
    for guard in guards.checks:
        text = str(guard)
        short = textwrap.shorten(text, 120, placeholder=" ...")
        yield f"    {short}  # {guard.source}" if provenance else f"    {text}"


def _source_lines(graph: Graph) -> Iterator[str]:
    types = graph.values
    for kind, sources in (
        ("input", graph.inputs),
        ("parameter", graph.parameters),
        ("buffer", graph.buffers),
        ("constant", graph.constants),
    ):
        for source in sources:
            names = (getattr(source, "name", ""), *getattr(source, "aliases", ()))
            extra = ""
            if isinstance(source, Parameter) and not source.requires_grad:
                extra = " frozen"
            if isinstance(source, Buffer) and source.mutation:
                extra = f" <- %{source.mutation}"
            label = " = ".join(filter(None, names))
            yield f"  {kind} %{source.value}: {types[source.value]} {label}{extra}".rstrip()
    for key, constant in graph.input_constants:
        yield f"  argument {key} = {format_arg(constant)}"


def _node_line(graph: Graph, node: Node, provenance: bool) -> str:
    outs = ", ".join(f"%{o}: {graph.values[o]}" for o in node.outputs)
    args = [format_arg(a) for a in node.args]
    args += [f"{k}={format_arg(v)}" for k, v in node.kwargs]
    flags = "" if node.grad_enabled else " no_grad"
    flags += f" autocast={node.autocast}" if node.autocast else ""
    flags += f" recompute={node.recompute}" if node.recompute else ""
    line = f"  {outs} = {node.op}({', '.join(args)}){flags}"
    return f"{line}  # {node.origin}" if provenance else line
