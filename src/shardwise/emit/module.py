"""Write a rank program as a readable Python file.

The file needs only torch and `shardwise.runtime`: `Model(mesh)` is the module, and the tables
`PARAMETERS`, `BUFFERS` and `INPUTS` describe its state and its arguments.
"""

import ast
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.collectives.messages import CollectiveChoice
from shardwise.dtypes import dtype_name
from shardwise.emit.blocks import BlockCall, Item, Loop, final_values, find_blocks, fold_loops
from shardwise.emit.expressions import wrap
from shardwise.emit.function import INDENT, Body, Scope, attribute_path, scan_lines
from shardwise.emit.quote import (
    RESERVED,
    TABLES,
    comment,
    described,
    identifier,
    in_fstring,
    is_attribute,
    is_importable,
    literal,
    unused,
)
from shardwise.ir import Graph, Ref
from shardwise.plans import Plan
from shardwise.program import Program, RankProgram, Step, Storage
from shardwise.runtime.parameters import BufferSpec, ParameterSpec
from shardwise.runtime.splits import Split
from shardwise.scan import Scan
from shardwise.sharding.placements import Layout
from shardwise.sharding.rule import MeshAxis
from shardwise.shares import num_ranks
from shardwise.version import __version__

HOW_TO_CHECK = "Safe to edit; check it with: shardwise verify MODEL.py:FUNCTION --program FOLDER"
WIDTH = 90  # of docstrings
SMALL_CONSTANT = 16  # elements; larger constants are passed to `Model`


# ---------------------------------------------------------------- tables at the head of a file
def splits(layout: Layout) -> tuple[Split, ...]:
    """Return the shards of a layout as the runtime describes them."""
    return tuple(Split(axis=axis, dim=shard.dim, of=shard.of) for axis, shard in layout.shards)


def _dtypes(storage: Storage, plan: Plan) -> dict[str, Any]:
    """Return the dtypes of a parameter's master copy, its gradient and the gradient's reduction.

    A dtype is given only if it differs from the one before.
    """
    dtypes: dict[str, Any] = {}
    precision, last = plan.precision, dtype_name(storage.dtype)
    for name, dtype in (
        ("master", precision.master),
        ("gradient", precision.gradients),
        ("reduce", storage.form.dtype or precision.reduce),
    ):
        if dtype and dtype != last:
            dtypes[name] = dtype
        last = dtype or last
    return dtypes if storage.dtype.is_floating_point else {}


def _synchronization(storage: Storage, plan: Plan) -> dict[str, Any]:
    """Return how a gradient is summed over ranks."""
    form, sizes = storage.form, dict(plan.mesh.axes)
    return {
        "sync": storage.sync,
        "zero": storage.zero,
        "owners": form.weights(math.prod(num_ranks(sizes.get(a, 1)) for a in storage.sync)),
        "dim": 0 if form.sparse == "rows" else form.dim,
        "bucket": round(form.bucket_mib * (1 << 20)),
        "chunk": form.chunk,
        "node_ranks": form.hierarchical,
        "factors": form.factors,
    }


def parameter_spec(storage: Storage, plan: Plan) -> str:
    """Return the `rt.ParameterSpec(…)` of a parameter."""
    offload = tuple(kind for kind in plan.offload if kind != "activations")
    offload = offload or ("optimizer",) * storage.form.host
    spec = ParameterSpec(
        name=storage.name,
        shape=storage.shape,
        dtype=dtype_name(storage.dtype),
        aliases=storage.aliases,
        splits=splits(storage.layout),
        **(_synchronization(storage, plan) if storage.sync else {}),
        sparse=bool(storage.form.sparse),
        unit=storage.unit,
        requires_grad=storage.requires_grad,
        **_dtypes(storage, plan),
        offload=() if storage.borrowed else offload,
        borrowed=storage.borrowed,
        inexact=storage.inexact,
    )
    return described(spec, *(["zero"] if storage.sync else []))


def _docstring(program: Program, ranks: RankProgram, stage: int | None) -> str:
    plan, graph = program.plan, program.graph
    part = "" if stage is None else f"stage {stage} of "
    title = comment(f"{part}{graph.name} on {plan.mesh}, plan {plan.name}")
    return (
        f'"""{title}: {_places(program, ranks)}'
        f".\n\nWritten by shardwise {__version__} for the graph "
        f"{comment(graph.fingerprint)}.\n{HOW_TO_CHECK}\n"
        f'{guards_text(graph)}{collectives_text(plan.collectives)}"""\n'
    )


def guards_text(graph: Graph) -> str:
    """List the values that Python saw: the code is valid only for batches that have them."""
    if graph.guards is None:
        return ""
    lines = dict.fromkeys(
        f"  {textwrap.shorten(comment(f'{g.source} -> {g.answer}'), WIDTH, placeholder=' ...')}\n"
        for g in graph.guards.checks
    )
    return f"Valid only for batches with these values, as parallelize checks:\n{''.join(lines)}"


def collectives_text(choices: Sequence[CollectiveChoice]) -> str:
    """List the collectives for which `parallelize` does not use the library, with their speed."""
    texts = [comment(str(choice)) for choice in choices if not choice.is_library]
    if not texts:
        return ""
    listed = "\n".join(
        textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="    ") for text in texts
    )
    return f"\nCollectives that plan.json selects (all others use the library's):\n{listed}\n"


def _places(program: Program, ranks: RankProgram) -> str:
    """Name the ranks that run the file, and the micro-batches if it is not for all of them."""
    mesh, time = program.mesh, program.time_axis
    if time is None:
        return _numbers("rank", ranks.ranks)
    count = mesh.axis_size(time)
    size = mesh.size // count
    numbers = tuple(dict.fromkeys(place % size for place in ranks.ranks))
    batches = tuple(dict.fromkeys(place // size for place in ranks.ranks))
    if len(batches) == count:
        return _numbers("rank", numbers)
    return f"{_numbers('rank', numbers)}, {_numbers('micro-batch', batches)}"


def _numbers(noun: str, numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"{noun}{'s' * (len(numbers) > 1)} {shown}"


def _imports(body: str, names: Mapping[str, str], functions: Mapping[str, Any]) -> list[str]:
    scans = {
        name: "\n".join(scan_lines(name, function))
        for op, name in names.items()
        if isinstance(function := functions.get(op), Scan)
    }
    tree = ast.walk(ast.parse("\n".join([body, *scans.values()])))
    used = {node.id for node in tree if isinstance(node, ast.Name)}
    lines = ["import math\n"] if "math" in used else []
    lines += ["import torch"] if "torch" in used else []
    lines += ["import torch.nn.functional as F"] if "F" in used else []
    lines += ["from torch import nn"] if "nn" in used else []
    lines += ["from torch.utils.checkpoint import checkpoint"] if "checkpoint" in used else []
    lines += [""] if lines and lines[-1] else []
    lines += ["from shardwise import runtime as rt"]
    lines += ["from shardwise.scan import Scan, StepIndex"] if scans else []
    for op, name in names.items():
        lines.append(scans.get(name) or _function_import(op, name, functions.get(op)))
    return lines


def _function_import(op: str, name: str, cls: Any) -> str:
    """Import a user's `autograd.Function`; the loader passes in one that cannot be imported."""
    module = sys.modules.get(getattr(cls, "__module__", ""))
    # A name that was bound again imports another class than the captured one.
    is_current = cls is not None and getattr(module, cls.__qualname__, None) is cls
    if is_current and is_importable(cls.__module__, cls.__qualname__):
        renamed = "" if name == cls.__qualname__ else f" as {name}"
        return f"from {cls.__module__} import {cls.__qualname__}{renamed}"
    return f"{name} = FUNCTIONS[{literal(op)}]  # noqa: F821 - passed in by the loader"


def _tables(program: Program, ranks: RankProgram) -> Iterator[str]:
    """Yield the lines of the tables: the module's state, inputs and outputs."""
    graph = program.graph
    yield from table("PARAMETERS", (parameter_spec(s, program.plan) for s in ranks.parameters))
    yield from table("BUFFERS", _buffer_specs(graph))
    yield "INPUTS = {"
    for item in ranks.inputs:
        if item.kind == "batch":
            yield f"{INDENT}{literal(item.name)}: {literal(splits(item.layout))},"
    yield "}"
    for name, kind in (("PRECOMPUTED", "precomputed"), ("RECEIVED", "received")):
        names = tuple(i.name for i in ranks.inputs if i.kind == kind)
        if names:
            yield f"{name} = {literal(names)}"
    local = {parameter.name for parameter in ranks.parameters}
    hooks = [comment(str(hook)) for hook in graph.hooks if hook.parameter in local]
    if hooks:
        yield from ("", "# `parallelize` passes in these hooks and runs them on full gradients:")
        yield from (f"# {hook}" for hook in hooks)
        yield 'HOOKS = FUNCTIONS["gradient hooks"]  # noqa: F821'
    if graph.sends:
        yield f"SENT = {literal(graph.sends)}"


def table(name: str, rows: Iterable[str]) -> list[str]:
    """Return the lines of a tuple with one row per line."""
    lines = [f"{INDENT}{row}," for row in rows]
    return [f"{name} = (", *lines, ")"] if lines else [f"{name} = ()"]


def _buffer_specs(graph: Graph) -> Iterator[str]:
    for buffer in graph.buffers:
        kind = graph.values[buffer.value]
        spec = BufferSpec(
            name=buffer.name,
            shape=kind.shape,
            dtype=dtype_name(kind.dtype),
            aliases=buffer.aliases,
            persistent=buffer.persistent,
        )
        yield literal(spec)


# ---------------------------------------------------------------- the file
def emit(program: Program, rank: int = 0, *, probe: bool = False, stage: int | None = None) -> str:
    """Return the source of the program that `rank` runs.

    In a program with micro-batches, `rank` counts pairs of micro-batch and rank. As a pipeline's
    `stage`, forward also returns the values that later stages use. With `probe`, every result is
    passed to `rt.probe`.
    """
    return _File(program, program.of_rank(rank), probe, stage).text()


class _File:
    """Write one file."""

    def __init__(
        self, program: Program, ranks: RankProgram, probe: bool, stage: int | None
    ) -> None:
        self.program, self.ranks, self.probe, self.stage = program, ranks, probe, stage
        self.graph = program.graph
        self.owners = {s.value: s.name for s in ranks.parameters}
        self.owners |= {b.value: b.name for b in self.graph.buffers}
        self.storages = {s.value: s for s in ranks.parameters}
        items: list[Item] = list(ranks.steps) if probe else find_blocks(ranks, self.owners)
        self.items = fold_loops(items, Counter(v for i in items for v in i.inputs))
        self.blocks = [c for item in self.items for c in _calls(item)]
        self.functions = _name_functions(ranks)
        self.classes = self._name_classes()
        self.recompute = not probe
        self.axes = frozenset(program.mesh.names)

    def text(self) -> str:
        classes = [self._block_class(key, name) for key, name in self.classes.items()]
        body = "\n\n\n".join([*classes, self._model_class()])
        docstring = _docstring(self.program, self.ranks, self.stage)
        imports = _imports(body, self.functions, self.graph.functions)
        tables = [wrap(line) for line in _tables(self.program, self.ranks)]
        head = "\n".join([docstring, *imports, "", *tables])
        return f"{head}\n\n\n{body}\n"

    def _name_classes(self) -> dict[str, str]:
        """Map each block's signature to a unique, readable class name."""
        names: dict[str, str] = {}
        taken = {"Model", *TABLES, *RESERVED, *self.functions.values()}
        for block in self.blocks:
            if block.key in names:
                continue
            stem = identifier(self.graph.module_classes.get(block.path, "Block"))
            stem = {"ModuleDict": "Block", "Sequential": "Block"}.get(stem, stem)
            names[block.key] = name = unused(stem, taken)
            taken.add(name)
        return names

    def _block_class(self, key: str, name: str) -> str:
        blocks = [b for b in self.blocks if b.key == key]
        block = blocks[0]
        own = {v: self.owners[v].removeprefix(f"{block.path}.") for v in block.own}
        attribute = {v: attribute_path("self", name) for v, name in own.items()}
        arguments = _arguments(block.inputs, self._wishes(block), self.functions.values())
        inside = self.recompute and block.group is None  # else backward recomputes the full call
        scope = self._scope(block.path, attribute, own.values(), inside)
        body = Body(scope, arguments)
        body.write(list(block.steps), block.outputs)
        returned = ", ".join(body.names[o] for o in block.outputs)
        where = block.path if len(blocks) == 1 else f"{block.path} … {blocks[-1].path}"
        where = comment(where)
        source = comment(next((s.source for s in block.steps if s.source), ""))
        return _class(
            f"{name}({_base(own.values())})",
            f"{where} ({source})." if source else f"{where}.",
            self._init(block.steps, block.own, scope, path_argument=True),
            f"self, {', '.join(arguments.values())}",
            [*body.lines, f"return {returned}"],
        )

    def _scope(
        self, path: str, attribute: Mapping[str, str], members: Iterable[str], recompute: bool
    ) -> Scope:
        """Return the scope of a module; `members` are the dotted names of what it contains."""
        return Scope(
            path,
            attribute,
            probe=self.probe,
            recompute=recompute,
            members=frozenset(name.split(".")[0] for name in members),
            axes=self.axes,
            functions=self.functions,
        )

    def _wishes(self, block: BlockCall) -> dict[str, str]:
        """Return argument names: `x` for the previous block's result, else the value's name."""
        names, wishes = self._input_names(), {}
        for value in block.inputs:
            full = self.ranks.values[value].value
            wishes[value] = names.get(full) or _stem(full)
        previous = {o for b in self.blocks for o in b.outputs}
        chained = [v for v in block.inputs if v in previous]
        first = chained[0] if chained else (block.inputs[0] if block.inputs else None)
        if first is not None:
            wishes[first] = "x"
        return wishes

    def _input_names(self) -> dict[str, str]:
        received = [i for i in self.graph.inputs if i.kind == "received"]
        names = {i.value: i.name for i in self.graph.inputs if i.kind == "batch"}
        names |= {
            i.value: _stem(i.value.removesuffix("_of_batch"))
            for i in self.graph.inputs
            if i.kind == "precomputed"
        }
        taken = set(names.values())
        carried = [i.value for i in received if i.value in self.ranks.carries_grad]
        for item in received:
            wish = "x" if carried[:1] == [item.value] and "x" not in taken else _stem(item.value)
            names[item.value] = wish
        return names

    def _model_class(self) -> str:
        own = [v for v in self.owners if not any(v in b.own for b in self.blocks)]
        attribute = {v: attribute_path("self", self.owners[v]) for v in self.owners}
        for index, constant in enumerate(self.graph.constants):
            attribute[constant.value] = f"self.constant_{index}"
        arguments = _arguments(
            tuple(i.value for i in self.graph.inputs), self._input_names(), self.functions.values()
        )
        members = [*self.owners.values(), *(b.path for b in self.blocks)]
        scope = self._scope("", attribute, members, self.recompute)
        body = Body(scope, arguments)
        body.write(self.items, final_values(self.ranks))
        self._close(body)
        steps = [item for item in self.items if isinstance(item, Step)]
        steps += self.ranks.output_steps
        return _class(
            f"Model({_base(members)})",
            f"This rank's part of {comment(self.graph.name)}.",
            self._init(tuple(steps), tuple(own), scope, path_argument=False),
            ", ".join(["self", *arguments.values(), "outputs=False"]),
            body.lines,
        )

    def _close(self, body: Body) -> None:
        """Update buffers, return the loss, and the outputs if they are requested."""
        body.context = (True, None)
        if self.ranks.mutations:
            time = self.program.time_axis
            indent = INDENT if time else ""
            body.lines += [f"if {body.scope.axis((time,))}.final:"] if time else []
            body.lines.append(f"{indent}with torch.no_grad():")
            for name, value in self.ranks.mutations:
                target = attribute_path("self", name)
                body.lines.append(f"{indent}{INDENT}{target}.copy_({body._value(Ref(value))})")
        loss = self.ranks.loss
        first = body._value(Ref(loss)) if loss is not None else "None"
        if self.stage is not None:
            first += f", {_tuple([body._value(Ref(name)) for name in self.ranks.sends])}"
        if loss is not None or self.stage is not None:
            body.lines += ["if not outputs:", f"{INDENT}return {first}"]
        if self.ranks.output_steps:
            body.context = (False, None)
            body.lines.append("with torch.no_grad():")
            for step in self.ranks.output_steps:
                name = body.names.bind(step.outputs[0], "full")
                body._line(f"{name} = {body._expression(step)}")
            body.context = (True, None)
        leaves = [body._value(leaf) for leaf in self.ranks.outputs]
        body.lines.append(f"return {first}, {_tuple(leaves)}")

    def _init(
        self, steps: tuple[Step, ...], own: tuple[str, ...], scope: Scope, *, path_argument: bool
    ) -> list[str]:
        """Write `__init__`: mesh axes, parameters, buffers, blocks, constants."""
        parameters = "mesh, rng, device, path" if path_argument else 'mesh, rng=None, device="cpu"'
        if not path_argument and any("constants[" in line for line in self._constants()):
            parameters += ", constants=None"
        lines = [f"def __init__(self, {parameters}):"]
        body = ["super().__init__()"]
        axes = {a.names for s in steps for a in _mesh_axes((s.args, s.kwargs))}
        time = self.program.time_axis
        axes |= {(time,)} if time and self.ranks.mutations and not path_argument else set()
        for names in sorted(axes):
            listed = ", ".join(map(literal, names))
            body.append(f"{scope.axis(names)} = mesh.axis({listed})")
        if any("key" in dict(s.kwargs) for s in steps):
            body.append(f"{scope.own('rng')} = rng")
            body += [f"{scope.own('path')} = path"] if path_argument else []
        body.append(f"{scope.own('device')} = device")
        # Attaching a block would replace parameters that were declared below its path before.
        paths = [] if path_argument else [f"{c.path}." for i in self.items for c in _calls(i)]
        inside = [value for value in own if self.owners[value].startswith(tuple(paths))]
        body += [self._declaration(value, scope.path) for value in own if value not in inside]
        if not path_argument:
            body += self._attachments()
            body += [self._declaration(value, scope.path) for value in inside]
            body += self._constants()
        lines += [f"{INDENT}{line}" for line in body]
        return _indented(map(wrap, lines))

    def _declaration(self, value: str, path: str) -> str:
        name = self.owners[value].removeprefix(f"{path}.") if path else self.owners[value]
        storage = self.storages.get(value)
        if storage is not None:
            frozen = "" if storage.requires_grad else ", requires_grad=False"
            shape, dtype = literal(storage.local_shape), dtype_name(storage.dtype)
            return f'rt.declare(self, {literal(name)}, {shape}, "{dtype}"{frozen})'
        kind = self.graph.values[value]
        buffer = next(b for b in self.graph.buffers if b.value == value)
        temporary = "" if buffer.persistent else ", persistent=False"
        return (
            f"rt.declare_buffer(self, {literal(name)}, {literal(kind.shape)}, "
            f'"{dtype_name(kind.dtype)}"{temporary})'
        )

    def _attachments(self) -> list[str]:
        lines: list[str] = []
        for item in self.items:
            calls = _calls(item)
            if not calls:
                continue
            name = self.classes[calls[0].key]
            if len(calls) == 1:
                path = literal(calls[0].path)
                lines.append(f"rt.attach(self, {path}, {name}(mesh, rng, device, {path}))")
                continue
            parent, _, start = calls[0].path.rpartition(".")
            prefix = f"{parent}." if parent else ""
            first = f"{start}, " if int(start) else ""
            lines.append(f"for i in range({first}{int(start) + len(calls)}):")
            path = f'f"{in_fstring(prefix)}{{i}}"'
            lines.append(f"{INDENT}rt.attach(self, {path}, {name}(mesh, rng, device, {path}))")
        return lines

    def _constants(self) -> list[str]:
        lines = []
        for index, constant in enumerate(self.graph.constants):
            data = constant.data.detach().cpu()
            if data.numel() > SMALL_CONSTANT or data.is_complex():
                expression = f"constants[{literal(constant.value)}].to(device)"
            else:
                content = data.tolist() if data.numel() else tuple(data.shape)
                make = "torch.tensor" if data.numel() else "torch.zeros"
                expression = f"{make}({literal(content)}, dtype={data.dtype}, device=device)"
            lines.append(f"self.constant_{index} = {expression}")
        return lines


def _name_functions(ranks: RankProgram) -> dict[str, str]:
    """Map operators to unique names of the user's `autograd.Function`s."""
    names: dict[str, str] = {}
    steps = (*ranks.steps, *ranks.output_steps)
    for op in dict.fromkeys(s.fn for s in steps if s.fn.startswith("autograd_function.")):
        wish = identifier(op.rsplit(".", 1)[1])
        names[op] = unused(wish, {"Model", *TABLES, *names.values()})
    return names


def _class(
    header: str, docstring: str, init: list[str], arguments: str, body: Iterable[str]
) -> str:
    """Return the source of a module class with `__init__` and `forward`."""
    forward = [f"def forward({arguments}):", *(f"{INDENT}{line}" for line in body)]
    lines = [f'{INDENT}"""{docstring}"""', "", *init, "", *_indented(map(wrap, forward))]
    return "\n".join([f"class {header}:", *lines])


def _base(paths: Iterable[str]) -> str:
    """Return the base class of a module with members at these paths; `self[0]` needs indexing."""
    return "rt.Scope" if any(not is_attribute(p.split(".")[0]) for p in paths) else "nn.Module"


def _calls(item: Item | Loop) -> tuple[BlockCall, ...]:
    if isinstance(item, Loop):
        return item.calls
    return (item,) if isinstance(item, BlockCall) else ()


def _tuple(items: Iterable[str]) -> str:
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def _arguments(
    values: tuple[str, ...], wishes: Mapping[str, str], taken: Iterable[str]
) -> dict[str, str]:
    names: dict[str, str] = {}
    for value in values:
        names[value] = unused(identifier(wishes.get(value, value)), (*taken, *names.values()))
    return names


def _stem(value: str) -> str:
    return value.rstrip("0123456789").rstrip("_") or "x"


def _mesh_axes(arg: Any) -> list[MeshAxis]:
    if isinstance(arg, MeshAxis):
        return [arg]
    if isinstance(arg, tuple | list):
        return [a for item in arg for a in _mesh_axes(item)]
    return []


def _indented(lines: Iterable[str]) -> list[str]:
    pieces = [piece for line in lines for piece in line.split("\n")]
    return [f"{INDENT}{piece}" if piece.strip() else "" for piece in pieces]
