"""Write the body of a `forward`, with comments that name the user's modules and source lines.

Steps that backward recomputes become nested functions. Variables have readable names, which are
reused once their value is dead: Python then frees the old tensor, as it does when nested modules
return.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import nn

from shardwise.emit.blocks import BlockCall, Loop
from shardwise.emit.expressions import Own, UserFunction, render, wrap
from shardwise.emit.quote import comment, identifier, in_fstring, is_attribute, literal, unused
from shardwise.ir import Ref
from shardwise.ir.blocks import is_number
from shardwise.program import Step
from shardwise.program.recompute import keeps_products
from shardwise.scan import Scan, StepIndex
from shardwise.sharding.rule import MeshAxis

WIDTH = 100
INLINE = 72  # maximum characters of an expression that is written inside another
INDENT = " " * 4
OWN_ATTRIBUTES = frozenset(("rng", "device", "path"))  # of emitted modules, besides mesh axes
BUILT_IN = frozenset((*dir(nn.Module), *vars(nn.Module())))
OUTSIDE = "outside the model"  # label of a loss function's lines, which belong to no module
SEQUENCES = {  # operators that return a list even if it has one element
    "chunk", "split", "split_with_sizes", "unbind", "tensor_split", "meshgrid", "broadcast_tensors",
}  # fmt: skip


# ---------------------------------------------------------------- recomputed regions
@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Neighbouring steps of one recomputation group, with their inputs and outputs.

    A block whose steps are all in one group needs no region: backward recomputes the block's call.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def group(self) -> str | None:
        return self.steps[0].recompute


def recomputed(function: str, arguments: list[str], group: str | None) -> str:
    """Return a call that backward recomputes.

    Random draws are keyed by node and step, so no generator state has to be saved.
    """
    passed = ", ".join([function, *arguments])
    options = "use_reentrant=False, preserve_rng_state=False"
    if keeps_products(group):
        options += ", context_fn=rt.keep_products"
    return f"checkpoint({passed}, {options})"


def fold_regions(items: list[Any], returned: tuple[str, ...], own: Any) -> list[Any]:
    """Fold recomputed steps into regions; `own` are values that the function reads from `self`."""
    folded: list[Any] = []
    runs = [(k, list(g)) for k, g in groupby(items, lambda item: getattr(item, "recompute", None))]
    after: list[set[str]] = [set(returned)]
    for _, run in reversed(runs):
        after.append(after[-1] | {name for item in run for name in _inputs(item)})
    after.reverse()
    for index, (group, run) in enumerate(runs):
        region = None if group is None else _region(run, after[index + 1], own)
        if region is None or not region.outputs or all(step.is_move for step in run):
            folded += run
        else:
            folded.append(region)
    return folded


def _inputs(item: Any) -> list[str]:
    calls = item.calls if isinstance(item, Loop) else (item,)
    return [name for call in calls for name in call.inputs]


def _region(steps: list[Step], used_after: set[str], own: Any) -> Region:
    produced = {out for step in steps for out in step.outputs}
    inputs = [n for step in steps for n in step.inputs if n not in produced and n not in own]
    outputs = [out for step in steps for out in step.outputs if out in used_after]
    return Region(steps=tuple(steps), inputs=tuple(dict.fromkeys(inputs)), outputs=tuple(outputs))


# ---------------------------------------------------------------- names of variables
class Names:
    """Assign variable names in one function; `release` makes a name free again."""

    def __init__(self, taken: tuple[str, ...] = ()) -> None:
        self.taken = set(taken)
        self.of: dict[str, str] = {}

    def __getitem__(self, value: str) -> str:
        return self.of[value]

    def bind(self, value: str, wish: str) -> str:
        """Return a free name for a value, similar to `wish`."""
        stem = identifier(wish)
        name, count = stem, 1
        while name in self.taken:
            count += 1
            name = f"{stem}{count}" if not stem[-1].isdigit() else f"{stem}_{count}"
        self.taken.add(name)
        self.of[value] = name
        return name

    def release(self, values: Iterable[str]) -> None:
        self.taken -= {self.of[value] for value in values if value in self.of}


def wish_for(outputs: int, fn: str, module: str, leaves_module: bool) -> str:
    """Return a name for a result: its module's last name if the module returns it."""
    leaf = module.rsplit(".", 1)[-1]
    if leaves_module and leaf and not leaf.isdigit() and outputs == 1:
        return leaf
    if fn.startswith("autograd_function."):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", fn.rsplit(".", 1)[1]).lower()
    name = fn.split(".")[1] if fn.count(".") else fn
    return name.strip("_") or "x"


# ---------------------------------------------------------------- function bodies
@dataclass(frozen=True, slots=True)
class Scope:
    """The module of a function: its path and the attributes of parameters, buffers, constants."""

    path: str
    attribute: Mapping[str, str]  # value -> "self.attn.qkv.weight"

    probe: bool = False
    recompute: bool = False  # whether to write recomputed regions and blocks as such
    members: frozenset[str] = frozenset()  # attributes that the user's module already has
    axes: frozenset[str] = frozenset()  # of the mesh
    functions: Mapping[str, str] = field(default_factory=dict)  # op -> name of a user's function

    def own(self, name: str) -> str:
        """Return the attribute for `rng`, `device` or `path`."""
        while name in self.members:
            name += "_"
        return f"self.{name}"

    def axis(self, names: tuple[str, ...]) -> str:
        """Return the attribute of some mesh axes, `self.dp_tp`; it shadows no other attribute."""
        name = "_".join(names)
        if len(names) > 1 and (name in self.axes or any("_" in part for part in names)):
            name = "_".join([name, *(str(len(part)) for part in names)])
        wish, others = name, self.axes - set(names if len(names) == 1 else ())
        hidden = self.members | BUILT_IN | OWN_ATTRIBUTES | others
        while name in hidden or not is_attribute(name) or name.startswith("constant_"):
            name = f"axis_{wish}" if name == wish else f"{name}_"
        return f"self.{name}"


class Body:
    """Write one function body."""

    def __init__(self, scope: Scope, arguments: dict[str, str]) -> None:
        self.scope = scope
        self.names = Names((*arguments.values(), *scope.functions.values()))
        self.names.of.update(arguments)
        self.lines: list[str] = []
        self.stems: dict[str, str] = dict(arguments)
        self.inlined: dict[str, str] = {}
        self.context: tuple[Any, ...] = (True, None)
        self.group = "" if scope.path else "\0"  # a block's docstring names its own line
        self.regions = 0

    def write(self, items: list[Any], returned: tuple[str, ...]) -> None:
        """Write all statements; names are reused after a value's last use."""
        if self.scope.recompute:
            items = fold_regions(items, returned, self.scope.attribute)
        uses = _uses(items, returned)
        for index, item in enumerate(items):
            dying = [v for v, (last, _) in uses.items() if last == index]
            if isinstance(item, Step):
                self._step(item, items, index, uses, dying)
                continue
            self._flush_context((True, None))
            if isinstance(item, Region):
                self._region(item, dying, uses)
            elif isinstance(item, Loop):
                self._loop(item, dying)
            else:
                self._call(item, dying, uses)

    # ------------------------------------------------------------ statements
    def _step(self, step: Step, items: list[Any], index: int, uses: Any, dying: list[str]) -> None:
        expression = self._expression(step)
        if self._may_inline(step, items, index, uses, expression):
            self.inlined[step.outputs[0]] = expression
            return
        self._flush_context((step.grad_enabled, step.autocast))
        self._comment(step)
        self.names.release(dying)
        leaves = _leaves_module(step, items, index)
        if step.is_move:
            source = step.inputs[0]
            wish = self.stems.get(source) or self._value(Ref(source)).rsplit(".", 1)[-1]
        else:
            wish = wish_for(len(step.outputs), step.fn, self._relative(step.module), leaves)
        targets = [self._target(out, wish, uses) for out in step.outputs]
        left = ", ".join(targets) + ("," if len(targets) == 1 and _returns_sequence(step) else "")
        self._line(f"{left} = {expression}")
        if self.scope.probe and step.node:
            for out, target in zip(step.outputs, targets, strict=True):
                if target != "_":
                    self._line(f"rt.probe({literal(out)}, {target})")
        self.names.release(out for out in step.outputs if out not in uses)

    def _region(self, region: Region, dying: list[str], uses: Mapping[str, Any]) -> None:
        """Write a function that backward calls again; it uses only its arguments and `self`."""
        passed = [self._value(Ref(value)) for value in region.inputs]
        names = Names(tuple(self.scope.functions.values()))
        arguments = {v: names.bind(v, self.stems.get(v, "x")) for v in region.inputs}
        inner = Body(replace(self.scope, recompute=False), arguments)
        inner.write(list(region.steps), region.outputs)
        self.regions += 1
        name = f"recomputed_{self.regions}"
        self.group = "\0"
        self._line(f"def {name}({', '.join(arguments.values())}):")
        for line in inner.lines:
            self._line(f"{INDENT}{line}")
        self._line(f"{INDENT}return {', '.join(inner._value(Ref(o)) for o in region.outputs)}")
        self.lines.append("")
        self.names.release(dying)
        targets = [self._target(o, inner.stems.get(o, "x"), uses) for o in region.outputs]
        self._line(f"{', '.join(targets)} = {recomputed(name, passed, region.group)}")

    def _target(self, out: str, wish: str, uses: Mapping[str, Any]) -> str:
        if out not in uses and not self.scope.probe:
            return "_"
        self.stems[out] = wish
        return self.names.bind(out, wish)

    def _call(self, call: BlockCall, dying: list[str], uses: Mapping[str, Any]) -> None:
        self.group = "\0"
        arguments = [self._value(Ref(v)) for v in call.inputs]
        self.names.release(dying)
        wish = call.path.rsplit(".", 2)[-2] if "." in call.path else "x"
        targets = [
            self._target(out, f"{wish}_{i}" if i else "x", uses)
            for i, out in enumerate(call.outputs)
        ]
        called = self._called(attribute_path("self", call.path), arguments, call)
        self._line(f"{', '.join(targets)} = {called}")

    def _loop(self, item: Loop, dying: list[str]) -> None:
        """Write a loop over blocks; the values that they pass on have fixed names."""
        self.group = "\0"
        first, last = item.calls[0], item.calls[-1]
        carried = dict(item.carried)
        arguments = [self._value(Ref(v)) for v in first.inputs]
        outs = [""] * len(first.outputs)
        for position, output in carried.items():
            outs[output] = arguments[position]
        entering = {first.inputs[p] for p in carried}
        ends_here = all(v in dying for v in entering) and all(o.isidentifier() for o in outs)
        if not ends_here:  # the first input is used after the loop: rename the loop variable
            for position, output in carried.items():
                name = self.names.bind(f"{last.path}:{output}", "x")
                self._line(f"{name} = {arguments[position]}")
                arguments[position] = outs[output] = name
        parent, _, start = first.path.rpartition(".")
        stop = int(last.path.rpartition(".")[2]) + 1
        span = f"{int(start) or ''}:{stop}"
        self._line(f"for block in {attribute_path('self', parent)}[{span}]:")
        self._line(f"{INDENT}{', '.join(outs)} = {self._called('block', arguments, first)}")
        self.names.release(value for value in dying if value not in entering)
        for name, out in zip(outs, last.outputs, strict=True):
            self.names.taken.add(name)
            self.names.of[out] = name

    def _called(self, block: str, arguments: list[str], item: BlockCall) -> str:
        if self.scope.recompute and item.group is not None:
            return recomputed(block, arguments, item.group)
        return f"{block}({', '.join(arguments)})"

    # ------------------------------------------------------------ expressions
    def _expression(self, step: Step) -> str:
        kwargs = dict(step.kwargs)
        if "key" in kwargs:  # a random operator
            kwargs["key"] = _Key(kwargs["key"])
            kwargs["rng"] = Own("rng")
        if step.fn == "rt.draw" or (step.fn.startswith("rt.") and "device" in kwargs):
            kwargs["device"] = Own("device")
        for name in ("of", "to_of"):
            pattern = kwargs.get(name)
            if pattern is not None and len(pattern) == 1 and pattern[0][0] == pattern[0][2] == 1:
                kwargs[name] = pattern[0][1]
        return render(step.fn, step.args, kwargs, self._value)

    def _value(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            if arg.name in self.inlined:
                return self.inlined[arg.name]
            return self.names.of.get(arg.name) or self.scope.attribute[arg.name]
        if isinstance(arg, MeshAxis):
            return self.scope.axis(tuple(arg.names))
        if isinstance(arg, Own):
            return self.scope.own(arg.name)
        if isinstance(arg, UserFunction):
            return self.scope.functions[arg.op]
        if isinstance(arg, _Key):
            prefix = f"{self.scope.path}."
            if self.scope.path and arg.text.startswith(prefix):
                own = self.scope.own("path")
                return f'f"{{{own}}}.{in_fstring(arg.text.removeprefix(prefix))}"'
            return literal(arg.text)
        if isinstance(arg, tuple | list) and any(_has_value(a) for a in arg):
            inner = ", ".join(self._value(a) for a in arg)
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        return literal(arg)

    def _may_inline(
        self, step: Step, items: list[Any], index: int, uses: Any, expression: str
    ) -> bool:
        """Return whether to write a value inside the next statement: short, and used only there."""
        if self.scope.probe or len(step.outputs) != 1 or step.is_move or index + 1 >= len(items):
            return False
        following = items[index + 1]
        return (
            isinstance(following, Step)
            and uses.get(step.outputs[0]) == (index + 1, 1)
            and len(expression) <= INLINE
            and not following.is_move
            and not following.fn.startswith("rt.")
            and not _returns_sequence(step)
            and not step.fn.startswith("rt.")
            and (step.grad_enabled, step.autocast) == (following.grad_enabled, following.autocast)
            and step.module == following.module
            and step.recompute == following.recompute
            and expression.count("(") <= 2
        )

    # ------------------------------------------------------------ layout of the text
    def _flush_context(self, context: tuple[Any, ...]) -> None:
        """Open `with` lines where the gradient mode or autocast changes."""
        if context == self.context:
            return
        self.context = context
        grad, autocast = context
        if not grad or autocast:
            managers = [] if grad else ["torch.no_grad()"]
            if autocast:
                device, dtype, enabled = autocast
                options = f"dtype={literal(dtype)}, enabled={literal(enabled)}"
                managers.append(f"torch.autocast({literal(device)}, {options})")
            self.lines.append(f"with {', '.join(managers)}:")

    def _line(self, text: str) -> None:
        nested = self.context != (True, None)
        self.lines.append((INDENT if nested else "") + text)

    def _relative(self, module: str) -> str:
        path = self.scope.path
        return module.removeprefix(path).lstrip(".") if path else module

    def _comment(self, step: Step) -> None:
        module = self._relative(step.module)
        if self.group == (module if step.module else ""):
            return
        label = " ".join(filter(None, (module, step.module_class))) or OUTSIDE
        source = f"  ({step.source})" if step.source else ""
        self.group = module
        self._line(f"# {comment(f'{label}{source}')}"[: WIDTH - 12])


def scan_lines(name: str, scan: Scan) -> list[str]:
    """Return the function of one step, and the scan that calls it."""
    assert scan.body is not None
    names: dict[str, str] = {}

    def bind(values: Iterable[str]) -> str:
        for value in values:
            names[value] = unused(identifier(value), {"t", *names.values()})
        return ", ".join(names[value] for value in values)

    def value(arg: Any) -> str:
        if isinstance(arg, tuple) and not all(isinstance(item, int) for item in arg):
            return f"({''.join(f'{value(item)}, ' for item in arg)})"
        if isinstance(arg, Ref):
            return names[arg.name]
        return str(arg) if isinstance(arg, StepIndex) else literal(arg)

    lines = ["", "", f"def {name}_step(t, {bind(scan.body.arguments)}):"]
    for node in scan.body.nodes:
        if "StepIndex" in repr((node.args, node.kwargs)):  # numbers that only the step knows
            given = [value(arg) for arg in node.args]
            given += [f"{key}={value(arg)}" for key, arg in node.kwargs]
            expression = f"torch.ops.{node.op}({', '.join(given)})"
        else:
            expression = render(node.op, node.args, dict(node.kwargs), value)
        lines.append(wrap(f"{INDENT}{bind(node.outputs)} = {expression}"))
    results = "".join(f"{names[result]}, " for result in scan.body.results)
    lines.append(wrap(f"{INDENT}return ({results.strip()})"))
    settings = [
        f"{field}={getattr(scan, field)!r}"
        for field in ("trips", "carried", "elements", "last", "collected")
    ]
    return [*lines, "", "", wrap(f"{name} = Scan(step={name}_step, {', '.join(settings)})")]


@dataclass(frozen=True, slots=True)
class _Key:
    text: str


def attribute_path(root: str, path: str) -> str:
    """Return `self.model.layers[0]` for a dotted path with numbers or invalid Python names.

    >>> attribute_path("self", "blocks.0.attn"), attribute_path("self", "heads.a-b")
    ('self.blocks[0].attn', 'self.heads["a-b"]')
    """
    text = root
    for piece in path.split(".") if path else ():
        if is_attribute(piece):
            text += f".{piece}"
        else:
            text += f"[{piece}]" if is_number(piece) else f"[{literal(piece)}]"
    return text


def _has_value(arg: Any) -> bool:
    if isinstance(arg, tuple | list):
        return any(_has_value(a) for a in arg)
    return isinstance(arg, Ref | MeshAxis | Own | _Key)


def _uses(items: list[Any], returned: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Map values to the index of their last use and the number of uses."""
    uses: dict[str, tuple[int, int]] = {}
    for index, values in enumerate([*map(_inputs, items), returned]):
        for value in values:
            uses[value] = (index, uses.get(value, (0, 0))[1] + 1)
    return uses


def _leaves_module(step: Step, items: list[Any], index: int) -> bool:
    """Return whether this is the last step of its module's call."""
    following = items[index + 1] if index + 1 < len(items) else None
    return not isinstance(following, Step) or not (
        following.module == step.module or following.module.startswith(f"{step.module}.")
    )


def _returns_sequence(step: Step) -> bool:
    return step.fn.count(".") > 0 and step.fn.split(".")[1] in SEQUENCES
