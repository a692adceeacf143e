"""The body of a `forward`: statements, grouped by the user's modules with their source lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import nn

from shardwise.emit.blocks import BlockCall, Loop
from shardwise.emit.expressions import Device, UserFunction, render
from shardwise.emit.quote import comment, identifier, in_fstring, is_attribute, literal
from shardwise.ir import Ref
from shardwise.program import Step
from shardwise.program.recompute import keeps_products
from shardwise.sharding.rule import MeshAxis

# Recomputed parts of a function: steps that backward computes again.
#
# A block all of whose steps are of one group needs no function: the block itself is called so.


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Neighbouring steps of one group, with what they take from outside and give to it."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def group(self) -> str | None:
        return self.steps[0].recompute


def recomputed(function: str, arguments: list[str], group: str | None) -> str:
    """Return a call whose backward computes it again.

    Random draws are keyed by node and step: they repeat without a saved state of a generator.
    """
    passed = ", ".join([function, *arguments])
    options = "use_reentrant=False, preserve_rng_state=False"
    if keeps_products(group):
        options += ", context_fn=rt.keep_products"
    return f"checkpoint({passed}, {options})"


def fold_regions(items: list[Any], returned: tuple[str, ...], own: Any) -> list[Any]:
    """Items with recomputed steps folded; `own` are values that the function finds in `self`."""
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
    calls = getattr(item, "calls", None) or (item,)
    return [name for call in calls for name in call.inputs]


def _region(steps: list[Step], used_after: set[str], own: Any) -> Region:
    made = {out for step in steps for out in step.outputs}
    inputs = dict.fromkeys(
        n for step in steps for n in step.inputs if n not in made and n not in own
    )
    outputs = [out for step in steps for out in step.outputs if out in used_after]
    return Region(steps=tuple(steps), inputs=tuple(inputs), outputs=tuple(outputs))


# Names for local variables: readable, and reused once their value is dead.
#
# A name that is reused lets Python free the old tensor, as nested modules do when they return.


class Names:
    """Hands out names in one function; `release` makes a name free again."""

    def __init__(self, taken: tuple[str, ...] = ()) -> None:
        self.taken = set(taken)
        self.of: dict[str, str] = {}

    def __getitem__(self, value: str) -> str:
        return self.of[value]

    def __contains__(self, value: str) -> bool:
        return value in self.of

    def bind(self, value: str, wish: str) -> str:
        """Return a free name like `wish` for a value."""
        stem = identifier(wish)
        name, count = stem, 1
        while name in self.taken:
            count += 1
            name = f"{stem}{count}" if not stem[-1].isdigit() else f"{stem}_{count}"
        self.taken.add(name)
        self.of[value] = name
        return name

    def release(self, value: str) -> None:
        name = self.of.get(value)
        if name is not None:
            self.taken.discard(name)


def wish_for(outputs: int, fn: str, module: str, leaves_module: bool) -> str:
    """What to call a result: its module's last name when it is what the module returns."""
    leaf = module.rsplit(".", 1)[-1]
    if leaves_module and leaf and not leaf.isdigit() and outputs == 1:
        return leaf
    if fn.startswith("autograd_function."):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", fn.rsplit(".", 1)[1]).lower()
    name = fn.split(".")[1] if fn.count(".") else fn
    return name.strip("_") or "x"


WIDTH = 100
INLINE = 72
INDENT = " " * 4
_NUMBER = re.compile(r"0|[1-9][0-9]*")  # what a list counts by; "007" is a name
OURS = frozenset(("rng", "device", "path"))  # what emitted modules hold besides mesh axes
BUILT_IN = frozenset((*dir(nn.Module), *vars(nn.Module())))
OUTSIDE = "outside the model"  # a loss function's lines, which are of no module


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a function lives: its module path and how it spells parameters, buffers, constants."""

    path: str
    attribute: Mapping[str, str]  # value -> "self.attn.qkv.weight"
    class_of: Callable[[BlockCall], str]
    probe: bool = False
    recompute: bool = False  # whether groups of steps and blocks are recomputed
    members: frozenset[str] = frozenset()  # what the user's module already calls its own

    axes: frozenset[str] = frozenset()  # the mesh's
    functions: Mapping[str, str] = field(default_factory=dict)  # op -> name of a user's function

    def own(self, name: str) -> str:
        """Return the attribute that holds one of ours: `rng`, `device` or `path`."""
        while name in self.members:
            name += "_"
        return f"self.{name}"

    def axis(self, names: tuple[str, ...]) -> str:
        """Return the attribute of some mesh axes, `self.dp_tp`; it hides no other one."""
        name = "_".join(names)
        if len(names) > 1 and (name in self.axes or any("_" in part for part in names)):
            name = "_".join([name, *(str(len(part)) for part in names)])
        wish, others = name, self.axes - set(names if len(names) == 1 else ())
        hidden = self.members | BUILT_IN | OURS | others
        while name in hidden or not is_attribute(name) or name.startswith("constant_"):
            name = f"axis_{wish}" if name == wish else f"{name}_"
        return f"self.{name}"


class Body:
    """Writes one function body."""

    def __init__(self, scope: Scope, arguments: dict[str, str]) -> None:
        self.scope = scope
        self.names = Names((*arguments.values(), *scope.functions.values()))
        self.names.of.update(arguments)
        self.lines: list[str] = []
        self.stems: dict[str, str] = dict(arguments)
        self.inlined: dict[str, str] = {}
        self.context: tuple[Any, ...] = (True, None)
        self.group = "" if scope.path else "\0"  # a block's docstring has its own line
        self.regions = 0

    def write(self, items: list[Any], returned: tuple[str, ...]) -> None:
        """All statements; names are reused after a value's last use."""
        if self.scope.recompute:
            items = fold_regions(items, returned, self.scope.attribute)
        uses = _uses(items, returned)
        for index, item in enumerate(items):
            dying = [v for v, (last, _) in uses.items() if last == index]
            if isinstance(item, Step):
                self._step(item, items, index, uses, dying)
            elif isinstance(item, Region):
                self._flush_context((True, None))
                self._region(item, dying, uses)
            else:
                self._flush_context((True, None))
                self._call(item, dying, uses)

    # ------------------------------------------------------------ statements

    def _step(self, step: Step, items: list[Any], index: int, uses: Any, dying: list[str]) -> None:
        expression = self._expression(step)
        if self._may_inline(step, items, index, uses, expression):
            self.inlined[step.outputs[0]] = expression
            return
        self._flush_context((step.grad_enabled, step.autocast))
        self._comment(step)
        for value in dying:
            self.names.release(value)
        leaves = _leaves_module(step, items, index)
        if step.is_move:
            source = step.inputs[0]
            wish = self.stems.get(source) or self._value(Ref(source)).rsplit(".", 1)[-1]
        else:
            wish = wish_for(len(step.outputs), step.fn, self._relative(step.module), leaves)
        targets = [self._target(out, wish, uses) for out in step.outputs]
        left = ", ".join(targets) if targets else ""
        if len(targets) == 1 and _returns_sequence(step):
            left += ","
        self._line(f"{left} = {expression}")
        if self.scope.probe and step.node:
            for out, target in zip(step.outputs, targets, strict=True):
                if target != "_":
                    self._line(f"rt.probe({literal(out)}, {target})")
        for out in step.outputs:
            if out not in uses:
                self.names.release(out)

    def _region(self, region: Region, dying: list[str], uses: Mapping[str, Any]) -> None:
        """A function that backward calls again; it sees only what it is given, and `self`."""
        given = {value: self._value(Ref(value)) for value in region.inputs}
        names = Names(tuple(self.scope.functions.values()))
        arguments = {v: names.bind(v, self.stems.get(v, "x")) for v in region.inputs}
        inner = Body(replace(self.scope, recompute=False), arguments)
        inner.write(list(region.steps), region.outputs)
        self.regions += 1
        name = f"recomputed_{self.regions}"
        self._comment_text("")
        self._line(f"def {name}({', '.join(arguments.values())}):")
        for line in inner.lines:
            self._line(f"{INDENT}{line}")
        self._line(f"{INDENT}return {', '.join(inner._value(Ref(o)) for o in region.outputs)}")
        self.lines.append("")
        for value in dying:
            self.names.release(value)
        targets = [self._target(o, inner.stems.get(o, "x"), uses) for o in region.outputs]
        call = recomputed(name, list(given.values()), region.group)
        self._line(f"{', '.join(targets)} = {call}")

    def _target(self, out: str, wish: str, uses: Mapping[str, Any]) -> str:
        if out not in uses and not self.scope.probe:
            return "_"
        self.stems[out] = wish
        return self.names.bind(out, wish)

    def _call(self, item: BlockCall | Loop, dying: list[str], uses: Mapping[str, Any]) -> None:
        self._comment_text("")
        if isinstance(item, BlockCall):
            arguments = [self._value(Ref(v)) for v in item.inputs]
            for value in dying:
                self.names.release(value)
            wish = item.path.rsplit(".", 2)[-2] if "." in item.path else "x"
            targets = [
                self._target(o, self._block_wish(item, i, wish), uses)
                for i, o in enumerate(item.outputs)
            ]
            left = ", ".join(targets)
            called = self._called(attribute_path("self", item.path), arguments, item)
            self._line(f"{left} = {called}")
            return
        first, last = item.calls[0], item.calls[-1]
        carried = dict(item.carried)
        held = [self._value(Ref(v)) for v in first.inputs]
        outs = [""] * len(first.outputs)
        for position, output in carried.items():
            outs[output] = held[position]
        entering = {first.inputs[p] for p in carried}
        ends_here = all(v in dying for v in entering) and all(o.isidentifier() for o in outs)
        if not ends_here:  # the entering value is still needed: carry a copy of the name
            for position, output in carried.items():
                fresh = self.names.bind(f"{last.path}:{output}", "x")
                self._line(f"{fresh} = {held[position]}")
                held[position] = outs[output] = fresh
        parent, _, start = first.path.rpartition(".")
        stop = int(last.path.rpartition(".")[2]) + 1
        loop = self._loop_source(parent, int(start), stop)
        self._line(f"for block in {loop}:")
        self._line(f"{INDENT}{', '.join(outs)} = {self._called('block', held, first)}")
        for value in dying:
            if value not in entering:
                self.names.release(value)
        for name, out in zip(outs, last.outputs, strict=True):
            self.names.taken.add(name)
            self.names.of[out] = name

    def _called(self, block: str, arguments: list[str], item: BlockCall) -> str:
        if self.scope.recompute and item.group is not None:
            return recomputed(block, arguments, item.group)
        return f"{block}({', '.join(arguments)})"

    def _loop_source(self, parent: str, start: int, stop: int) -> str:
        holder = attribute_path("self", parent)
        return f"{holder}[{start}:{stop}]" if start else f"{holder}[:{stop}]"

    def _block_wish(self, item: BlockCall, index: int, wish: str) -> str:
        return "x" if index == 0 else f"{wish}_{index}"

    # ------------------------------------------------------------ expressions

    def _expression(self, step: Step) -> str:
        kwargs = dict(step.kwargs)
        if "key" in kwargs:  # a random operator
            kwargs["key"] = _Key(kwargs["key"])
            kwargs["rng"] = _Raw(self.scope.own("rng"))
        if step.fn == "rt.draw" or (step.fn.startswith("rt.") and "device" in kwargs):
            kwargs["device"] = Device()
        for name in ("of", "to_of"):
            cut = kwargs.get(name)
            if cut is not None and len(cut) == 1 and cut[0][0] == cut[0][2] == 1:
                kwargs[name] = cut[0][1]
        return render(step.fn, step.args, kwargs, self._value)

    def _value(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            if arg.name in self.inlined:
                return self.inlined[arg.name]
            if arg.name in self.names:
                return self.names[arg.name]
            return self.scope.attribute[arg.name]
        if isinstance(arg, MeshAxis):
            return self.scope.axis(tuple(arg.names))
        if isinstance(arg, Device):
            return self.scope.own("device")
        if isinstance(arg, UserFunction):
            return self.scope.functions[arg.op]
        if isinstance(arg, _Raw):
            return arg.text
        if isinstance(arg, _Key):
            prefix = f"{self.scope.path}."
            if self.scope.path and arg.text.startswith(prefix):
                mine = self.scope.own("path")
                return f'f"{{{mine}}}.{in_fstring(arg.text.removeprefix(prefix))}"'
            return literal(arg.text)
        if isinstance(arg, tuple | list) and any(_has_value(a) for a in arg):
            inner = ", ".join(self._value(a) for a in arg)
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        return literal(arg)

    def _may_inline(
        self, step: Step, items: list[Any], index: int, uses: Any, expression: str
    ) -> bool:
        """Short values that only the next statement uses, once, are written inside it."""
        if self.scope.probe or len(step.outputs) != 1 or step.is_move or index + 1 >= len(items):
            return False
        following = items[index + 1]
        out = step.outputs[0]
        last, count = uses.get(out, (None, 0))
        return (
            isinstance(following, Step)
            and last == index + 1
            and count == 1
            and len(expression) <= INLINE
            and not following.is_move
            and not following.fn.startswith("rt.")
            and _returns_tensor(step)
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
        if module == self.group and step.module:
            return
        if not step.module and self.group == "":
            return
        label = " ".join(filter(None, (module, step.module_class))) or OUTSIDE
        source = f"  ({step.source})" if step.source else ""
        self.group = module
        self._comment_text(comment(f"{label}{source}"))

    def _comment_text(self, text: str) -> None:
        if text:
            self._line(f"# {text}"[: WIDTH - 12])
        else:
            self.group = "\0"


@dataclass(frozen=True, slots=True)
class _Raw:
    text: str


@dataclass(frozen=True, slots=True)
class _Key:
    text: str


def attribute_path(root: str, path: str) -> str:
    """`self.model.layers[0]` for a dotted path with numbers, or names that Python does not take.

    >>> attribute_path("self", "blocks.0.attn"), attribute_path("self", "heads.a-b")
    ('self.blocks[0].attn', 'self.heads["a-b"]')
    """
    text = root
    for piece in path.split(".") if path else ():
        if is_attribute(piece):
            text += f".{piece}"
        else:
            text += f"[{piece}]" if _NUMBER.fullmatch(piece) else f"[{literal(piece)}]"
    return text


def _has_value(arg: Any) -> bool:
    if isinstance(arg, tuple | list):
        return any(_has_value(a) for a in arg)
    return isinstance(arg, Ref | MeshAxis | Device | _Raw | _Key)


def _item_inputs(item: Any) -> list[str]:
    if isinstance(item, Loop):
        return [v for call in item.calls for v in call.inputs]
    return list(item.inputs)


def _uses(items: list[Any], returned: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Value -> (index of its last use, number of uses)."""
    uses: dict[str, tuple[int, int]] = {}
    for index, item in enumerate(items):
        for value in _item_inputs(item):
            uses[value] = (index, uses.get(value, (0, 0))[1] + 1)
    for value in returned:
        uses[value] = (len(items), uses.get(value, (0, 0))[1] + 1)
    return uses


def _leaves_module(step: Step, items: list[Any], index: int) -> bool:
    """Whether this is the last step of its module's call."""
    following = items[index + 1] if index + 1 < len(items) else None
    return not isinstance(following, Step) or not (
        following.module == step.module or following.module.startswith(f"{step.module}.")
    )


def _returns_sequence(step: Step) -> bool:
    """Operators that give a list even when it has one element."""
    name = step.fn.split(".")[1] if step.fn.count(".") else ""
    return name in {
        "chunk",
        "split",
        "split_with_sizes",
        "unbind",
        "tensor_split",
        "meshgrid",
        "broadcast_tensors",
    }


def _returns_tensor(step: Step) -> bool:
    return not _returns_sequence(step) and not step.fn.startswith("rt.")
