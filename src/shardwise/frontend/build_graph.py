"""Declare the sources of a graph and build the final `Graph` from the converted nodes."""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.batch import Call, path_name
from shardwise.errors import CaptureError
from shardwise.frontend.builder import SYMBOLIC, UNKNOWN_SIZE, Alias, Builder, tensor_type
from shardwise.frontend.convert import Recorder
from shardwise.frontend.errors import DATA_DEPENDENT, EXPERTS, cure_for_operator
from shardwise.frontend.expert_loops import merge_expert_loops
from shardwise.frontend.fake import has_data
from shardwise.frontend.known_values import Question
from shardwise.frontend.objective import Step
from shardwise.frontend.python_state import Change
from shardwise.ir import (
    Buffer,
    Constant,
    Graph,
    Guard,
    Guards,
    Input,
    Node,
    Parameter,
    Ref,
    TensorType,
    iter_refs,
    map_refs,
)
from shardwise.ir.graph import live_nodes
from shardwise.ir.ragged import mark_ragged

# ---------------------------------------------------------------- nodes
_ONE_DTYPE = re.compile(
    r"aten\.(linear|mm|addmm|bmm|baddbmm|matmul|conv(_transpose)?[123]d|convolution)\."
)


class Namer:
    """Give each value a unique Python identifier: `linear`, `linear_1`, `sum_1`."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.counts: dict[str, int] = {}

    def name(self, wish: str) -> str:
        base, number = identifier(wish), 0
        reserved = keyword.iskeyword(base) or hasattr(builtins, base) or base in ("torch", "self")
        if reserved or base in self.used or base in self.counts:
            numbers = itertools.count(self.counts.get(base, 1))
            number = next(n for n in numbers if f"{base}_{n}" not in self.used)
        name = f"{base}_{number}" if number else base
        self.counts[base] = number + 1
        self.used.add(name)
        return name


def identifier(wish: str) -> str:
    """Return the most similar Python identifier.

    >>> identifier("layers.0.weight"), identifier("0"), identifier("__and__")
    ('layers_0_weight', 'v_0', 'and')
    """
    base = re.sub(r"\W", "_", wish).strip("_") or "v"
    return f"v_{base}" if base[0].isdigit() else base


def check_static(nodes: Iterable[Node], types: Mapping[str, TensorType]) -> None:
    """Refuse graphs in which a size or a number depends on the data."""
    for node in nodes:
        unknown = any(UNKNOWN_SIZE in types[output].shape for output in node.outputs)
        if node.op == SYMBOLIC or unknown:
            op = str(node.args[0]) if node.op == SYMBOLIC else node.op
            cure = cure_for_operator(op) or DATA_DEPENDENT
            places = f"{node.module} {node.module_class} {node.source_text}".lower()
            selects = op in ("aten.where.default", "aten.nonzero.default")
            experts = selects or any(word in places for word in ("expert", "moe", ".tolist()"))
            raise CaptureError(
                f"{cure.reason} ({op})",
                where=f"{node.source}: {node.source_text}" if node.source else None,
                hint=f"for a mixture of experts, {EXPERTS}; otherwise, {cure.hint}"
                if experts
                else cure.hint,
            )


def check_dtypes(nodes: Iterable[Node], types: Mapping[str, TensorType]) -> None:
    """Refuse products of different dtypes, which tracing accepts and devices do not."""
    for node in nodes:
        if not _ONE_DTYPE.match(node.op) or (node.autocast is not None and node.autocast[2]):
            continue
        used = dict.fromkeys(types[ref.name].dtype for ref in iter_refs(node.args))
        if len(used) > 1:
            raise CaptureError(
                f"{_short(node.op)} needs one dtype, but got {' and '.join(map(str, used))}",
                where=f"{node.source}: {node.source_text}" if node.source else node.module,
                hint="convert the batch to the dtype of the model's parameters (tensor.to(dtype)), "
                "or convert it in forward",
            )


def finish_nodes(
    nodes: Iterable[Node], types: Mapping[str, TensorType], names: dict[str, str], namer: Namer
) -> tuple[tuple[Node, ...], dict[str, TensorType]]:
    """Return the nodes with names and the types of their outputs; add new names to `names`."""
    done: list[Node] = []
    values: dict[str, TensorType] = {}
    for node in nodes:
        name = namer.name(_short(node.op))
        outputs: tuple[str, ...] = (name,)
        if len(node.outputs) > 1:
            outputs = tuple(namer.name(f"{name}_out{i}") for i in range(len(node.outputs)))
        args, kwargs = map_refs((node.args, node.kwargs), lambda ref: Ref(names[ref.name]))
        for old, new in zip(node.outputs, outputs, strict=True):
            names[old] = new
            values[new] = types[old]
        done.append(replace(node, name=name, args=args, kwargs=kwargs, outputs=outputs))
    return tuple(done), values


def _short(op: str) -> str:
    """Return `layer_norm` for `aten.layer_norm.default`, `swish` for a function `Swish`."""
    if op.startswith("autograd_function."):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op.rsplit(".", 1)[-1]).lower()
    return op.split(".")[-2]


# ---------------------------------------------------------------- sources
_AS_STEP = (
    "pass all modules to sw.parallelize, which passes them to a function of yours: "
    'steps={"main": lambda modules, batch: …}'
)


@dataclass(slots=True)
class Sources:
    """Everything that the graph takes from outside, with the names of its values."""

    model: nn.Module
    parameters: list[Parameter]
    buffers: list[Buffer]
    inputs: list[Input]
    types: dict[str, TensorType]
    namer: Namer
    input_constants: tuple[tuple[str, Any], ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    requires_grad_inputs: set[str] = field(default_factory=set)
    trained_outside: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # by address

    @classmethod
    def of(cls, model: nn.Module, call: Call, names: list[str]) -> Sources:
        """Return the sources of a step; `names` are those of the arguments of forward."""
        namer, types = Namer(), {}

        def declare(wish: str, tensor: torch.Tensor) -> str:
            value = namer.name(wish)
            types[value] = tensor_type(tensor)
            return value

        inputs = [
            Input(value=declare(_input_wish(path, names), tensor), name=path_name(path), path=path)
            for path, tensor in call.tensors
        ]
        tensors = zip(inputs, call.tensors, strict=True)
        requires_grad = {source.value for source, (_, tensor) in tensors if tensor.requires_grad}
        parameters = [
            Parameter(
                value=declare(f"p_{name}", tensor),
                name=name,
                aliases=tuple(aliases),
                requires_grad=tensor.requires_grad,
            )
            for (name, *aliases), tensor in _tied(model.named_parameters(remove_duplicate=False))
        ]
        temporary = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        buffers = [
            Buffer(
                value=declare(f"b_{name}", tensor),
                name=name,
                aliases=tuple(aliases),
                persistent=name not in temporary,
            )
            for (name, *aliases), tensor in _tied(model.named_buffers(remove_duplicate=False))
        ]
        constants = tuple((path_name(path), value) for path, value in call.constants)
        return cls(
            model, parameters, buffers, inputs, types, namer, constants,
            requires_grad_inputs=requires_grad,
        )  # fmt: skip

    def declare(self, builder: Builder) -> dict[str, Alias]:
        """Return the root aliases: parameters and buffers by all their names, inputs by value."""
        roots: dict[str, Alias] = {}
        self.constants.clear()
        owned: list[Parameter | Buffer] = [*self.parameters, *self.buffers]
        for source in owned:
            kind = "parameter" if isinstance(source, Parameter) else "buffer"
            grad = isinstance(source, Parameter) and source.requires_grad
            alias = builder.source(
                source.value, self.types[source.value], f"{kind} {source.name}", differentiable=grad
            )
            roots.update(dict.fromkeys((source.name, *source.aliases), alias))
        for item in self.inputs:
            grad = item.value in self.requires_grad_inputs
            roots[item.value] = builder.source(
                item.value, self.types[item.value], f"input {item.name}", differentiable=grad
            )
        return roots

    def constant(self, builder: Builder, data: Any, name: str) -> Alias:
        """Return the alias of a tensor from elsewhere; refuse the model's own weights."""
        if not isinstance(data, torch.Tensor):
            raise CaptureError(f"forward uses {name}, a {type(data).__name__}")
        if not has_data(data):
            raise CaptureError(
                f"forward uses the tensor {name}, which has no data (meta or fake) and is "
                "neither parameter nor buffer",
                hint=f'self.register_buffer("{name.rsplit(".", 1)[-1]}", ..., persistent=False)',
            )
        if owner := self._owner(data):
            raise CaptureError(
                f"forward reads {owner} not from its module but from a closure or a global",
                hint=f"read it as an attribute of self; in a loss function: {_AS_STEP}",
            )
        variable = self.trained_outside.get(data.data_ptr()) if data.numel() else None
        if variable is not None:
            raise CaptureError(
                f"{variable[0]} requires a gradient, but forward reads it from a variable, "
                "not from the captured model: nothing would train it",
                where=variable[1] or None,
                hint=f"{_AS_STEP}; requires_grad_(False) if it should not be trained",
            )
        value = f"constant:{len(self.constants)}"
        self.constants[value] = builder.constants[value] = data.detach()
        return builder.source(value, tensor_type(data), f"constant {name}", differentiable=False)

    def _owner(self, data: torch.Tensor) -> str:
        if not data.numel():
            return ""
        address = data.untyped_storage().data_ptr()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if has_data(tensor) and tensor.untyped_storage().data_ptr() == address:
                return f"parameter or buffer {name}"
        return ""


# ---------------------------------------------------------------- the graph
def assemble(
    builder: Builder,
    sources: Sources,
    roots: dict[str, Alias],
    step: Step,
    results: tuple[Any, ...],
    recorder: Recorder,
) -> Graph:
    """Return the finished graph."""
    report = step.outputs[0]
    values = [builder.read(alias) for alias in results]
    loss = values.pop(0) if report.has_loss else None
    leaves = [Ref(values.pop(0)) if leaf is torch.Tensor else leaf for leaf in report.leaves]
    count = len(report.assigned)
    cached, guarded = count + len(report.cached), values[count + len(report.cached) :]
    _check_cached(builder, sources, report.cached, values[count:cached])
    for name, value in zip(report.assigned, values[:count], strict=True):
        builder.write(roots[name], value)
    contents = {b.value: builder.read(roots[b.name]) for b in sources.buffers}
    mutations = {old: new for old, new in contents.items() if new != old}
    outputs = [leaf.name for leaf in leaves if isinstance(leaf, Ref)]
    needed = [v for v in (loss, *outputs, *mutations.values()) if v is not None]
    raw = live_nodes(builder.nodes, needed)
    raw = live_nodes(merge_expert_loops([*raw], builder.types), needed)
    check_static(raw, builder.types)
    check_dtypes(raw, builder.types)

    names = {value: value for value in sources.types}
    used = {name for node in raw for name in node.inputs} | set(needed)
    read = [value for value in sources.constants if value in used]
    names |= {value: sources.namer.name(f"c_{i}") for i, value in enumerate(read)}
    constants = [Constant(value=names[value], data=sources.constants[value]) for value in read]
    _check_replaced(constants, report.replaced)
    mark_ragged(raw, builder.types)
    nodes, types = finish_nodes(raw, builder.types, names, sources.namer)
    types = sources.types | {c.value: tensor_type(c.data) for c in constants} | types
    guards = _guards(builder, sources, report.asked, guarded, mutations)
    graph = Graph(
        name=type(sources.model).__name__,
        nodes=nodes,
        values=types,
        inputs=tuple(sources.inputs),
        parameters=tuple(sources.parameters),
        buffers=tuple(
            replace(b, mutation=names[mutations[b.value]]) if b.value in mutations else b
            for b in sources.buffers
        ),
        constants=tuple(constants),
        loss=names[loss] if loss else None,
        outputs=tuple(Ref(names[x.name]) if isinstance(x, Ref) else x for x in leaves),
        output_spec=report.spec,
        input_constants=sources.input_constants,
        training=step.model.training,
        module_classes={p: type(m).__name__ for p, m in sources.model.named_modules()},
        functions={call.op: call.cls for call in recorder.calls},
        warnings=tuple(dict.fromkeys((*report.warnings, *builder.warnings))),
        guards=guards,
    )
    graph.verify()
    return graph


def _guards(
    builder: Builder,
    sources: Sources,
    asked: list[Question],
    values: list[str],
    mutations: Mapping[str, str],
) -> Guards | None:
    """Return the guards, with the graph of the values that Python looked at."""
    if not asked:
        return None
    raw = live_nodes(builder.nodes, values)
    check_static(raw, builder.types)
    used = {name for node in raw for name in node.inputs} | set(values)
    names = {value: value for value in sources.types}
    constants = [value for value in sources.constants if value in used]
    names |= {value: sources.namer.name(f"c_guard_{i}") for i, value in enumerate(constants)}
    nodes, types = finish_nodes(raw, builder.types, names, sources.namer)
    buffers = tuple(b for b in sources.buffers if b.value in used)
    for buffer in buffers:
        if buffer.value in mutations:
            raise CaptureError(
                f"Python looks at a value that depends on buffer {buffer.name}, which forward "
                "changes in every step",
                where=asked[0].source,
                hint="torch.where(condition, a, b), which computes both",
            )
    inputs = tuple(i for i in sources.inputs if i.value in used)
    kinds = {names[v]: builder.types[v] for v in constants} | types
    kinds |= {value: kind for value, kind in sources.types.items() if value in used}
    graph = Graph(
        name="guards",
        nodes=nodes,
        values=kinds,
        inputs=inputs,
        parameters=(),
        buffers=buffers,
        constants=tuple(Constant(value=names[v], data=sources.constants[v]) for v in constants),
        outputs=tuple(Ref(names[value]) for value in values),
    )
    graph.verify()
    checks = tuple(
        Guard(value=names[value], question=q.question, answer=q.answer, source=q.source)
        for q, value in zip(asked, values, strict=True)
    )
    return Guards(graph=graph, checks=checks)


def _check_replaced(constants: list[Constant], replaced: list[tuple[str, torch.Tensor]]) -> None:
    """Refuse a plain tensor that forward reads and replaces: state that would be lost."""
    for where, old in replaced:
        if has_data(old) and any(c.data.data_ptr() == old.data_ptr() for c in constants):
            raise CaptureError(
                f"forward assigns the tensor attribute {where}, which it also reads",
                hint=f'self.register_buffer("{where.rsplit(".", 1)[-1]}", ...) makes it state',
            )


def _check_cached(
    builder: Builder, sources: Sources, cached: list[Change], values: list[str]
) -> None:
    """Refuse tensors that forward saves for the next step, unless they never change."""
    if not cached:
        return
    fixed = {b.value for b in sources.buffers} | set(sources.constants)
    varying = set(sources.types) - fixed
    for node in builder.nodes:
        if "rand" in node.op or "dropout" in node.op or varying.intersection(node.inputs):
            varying.update(node.outputs)
    for change, value in zip(cached, values, strict=True):
        if value in varying:
            raise change.refusal("the tensor saved for the next step depends on this one")


def _tied(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[list[str], torch.Tensor]]:
    """Group the names of the same tensor, in order of the first."""
    groups: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(groups.values())


def _input_wish(path: tuple[str | int, ...], argument_names: list[str]) -> str:
    first, *inner = path
    if isinstance(first, int):
        first = argument_names[first] if first < len(argument_names) else f"arg_{first}"
    return "_".join(map(str, (first, *inner)))
