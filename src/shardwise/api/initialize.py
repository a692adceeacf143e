"""Weights for a model on meta: its own initialization, done again part by part.

Enters: a model whose tensors have no data. Leaves: full tensors, one group after the other, and for
tensors that cannot be initialized the reason.

A module's `reset_parameters()` is what its `__init__` calls, and `_init_weights(module)` what many
models, those of Hugging Face among them, apply to each module afterwards. Both are called again,
first on meta, to see which tensors each writes: tensors that one call writes together form a group
and exist together, with real memory, while their calls run. So a model larger than a device can
start.

Other initialization, such as `nn.init.normal_` in `__init__` or `model.apply(function)`, cannot be
called again. It leaves a trace: every write in place counts up the `_version` of a tensor, on meta
too. A tensor that was written more or less often than the known calls do has lost its values, and
is reported. Writes through `.data` leave no trace and are looked for in the source of the classes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.frontend import skeleton

__all__ = ["initialize"]

Load = Callable[[str, Tensor], None]
InitModule = Callable[[nn.Module], object]
_LIBRARIES = ("torch", "transformers", "lightning", "shardwise")
_CALLED_AGAIN = ("reset_parameters", "_reset_parameters", "_init_weights", "forward")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that initializes: of which module, and what it writes."""

    path: str
    function: Callable[[], object]
    applied: bool  # to all modules after they were built
    writes: frozenset[int] = frozenset()  # the tensors it writes, by place in the list of all
    counted: Mapping[int, int] = field(default_factory=dict)  # by how much it raises `_version`
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of the copy: its first name, and where modules hold it."""

    name: str
    holders: list[tuple[dict[str, Any], str]]
    paths: set[str]

    @property
    def tensor(self) -> Tensor:
        owner, key = self.holders[0]
        found: Tensor = owner[key]
        return found

    def put(self, tensor: Tensor) -> None:
        for owner, key in self.holders:
            owner[key] = tensor


@torch.no_grad()
def initialize(
    model: nn.Module,
    missing: Collection[str],
    wanted: Collection[str],
    seed: int,
    load: Load,
    init: InitModule | None = None,
) -> dict[str, str]:
    """Give `load` the initial values of `wanted`; return why others of `missing` have none.

    The numbers follow from the seed and the names of tensors, not from the rank. With `init`, that
    function is called for every module instead of the model's own initialization.
    """
    twin = skeleton(model)
    slots = _slots(twin)
    calls = [_observed(call, slots) for call in _calls(twin, init)]
    reasons = {
        name: reason
        for name, reason in _unexplained(model, twin, slots, calls, given=init is not None).items()
        if name in missing
    }
    for group in _groups(slots, calls):
        names = {slots[place].name for place in group} & set(wanted) - set(reasons)
        if names:
            mine = [call for call in calls if call.writes & group]
            reasons |= _run([slots[place] for place in sorted(group)], mine, names, seed, load)
    return reasons


def _slots(model: nn.Module) -> list[_Slot]:
    """All tensors of a model; one that several modules hold comes once."""
    found: dict[int, _Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    slot = found.setdefault(id(tensor), _Slot(prefix + key, [], set()))
                    slot.paths.add(path)
                    slot.holders.append((owner, key))
    return list(found.values())


def _calls(model: nn.Module, init: InitModule | None) -> Iterator[_Call]:
    """The calls that initialize, in order: children before their parents."""
    modules = list(_children_first(model, ""))
    if init is not None:
        for path, module in modules:
            yield _Call(path, partial(init, module), applied=True)
        return
    for path, module in modules:
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, name, None)):
                yield _Call(path, reset, applied=False)
                break
    for path, module in modules:
        owner = _applied_by(model, path)
        if owner is not None:
            yield _Call(path, partial(owner._init_weights, module), applied=True)


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _applied_by(model: nn.Module, path: str) -> Any:
    """The innermost module around `path` that has `_init_weights(module)`."""
    steps = path.split(".") if path else []
    for length in range(len(steps), -1, -1):
        owner = model.get_submodule(".".join(steps[:length]))
        if callable(getattr(owner, "_init_weights", None)):
            return owner
    return None


def _observed(call: _Call, slots: list[_Slot]) -> _Call:
    """The call with what it writes, learned on meta."""
    tensors = [slot.tensor for slot in slots]
    before = [(tensor._version, _memory(tensor)) for tensor in tensors]
    error, seen = "", _Writes()
    try:
        with seen:
            call.function()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    if any(slot.tensor is not tensor for slot, tensor in zip(slots, tensors, strict=True)):
        error = "it replaces tensors instead of writing them"
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.put(tensor)
    counted, writes = {}, set()
    for place, (tensor, (version, memory)) in enumerate(zip(tensors, before, strict=True)):
        if tensor._version != version:
            counted[place] = tensor._version - version
        if place in counted or memory in seen.memory or _memory(tensor) != memory:
            writes.add(place)
    return replace(call, writes=frozenset(writes), counted=counted, error=error)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that operators write in place, also through `.data` and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for item in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(item, Tensor):
                        self.memory.add(_memory(item))
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unexplained(
    model: nn.Module, twin: nn.Module, slots: list[_Slot], calls: list[_Call], *, given: bool
) -> dict[str, str]:
    """Why the calls would not give a tensor the values it had, for tensors of which that is so."""
    reasons: dict[str, str] = {}
    buffers = dict(model.named_buffers())
    original = {**dict(model.named_parameters()), **buffers}
    hidden = "" if given else _hidden_writes(twin)
    for place, slot in enumerate(slots):
        path = slot.name.rpartition(".")[0]
        cls = type(twin.get_submodule(path))
        failed = [call for call in calls if call.error and call.path == path]
        makers = _makers(place, slot, twin, calls)
        applied = sum(c.counted.get(place, 0) for c in calls if c.applied)
        written = original[slot.name]._version
        expected = {count + applied for count in makers.values()} or {applied}
        if slot.name in buffers and cls.__module__.startswith("torch.nn."):
            expected.add(0)  # `model.double()` makes new buffers
        if failed:
            reasons[slot.name] = f"its initialization failed on meta ({failed[0].error})"
        elif not any(place in call.writes for call in calls):
            reasons[slot.name] = (
                f"nothing is known to set it: {cls.__name__} has no reset_parameters()"
            )
            if given:
                reasons[slot.name] = f"init({cls.__name__}) does not set it"
        elif given or _is_hugging_face(_applied_by(twin, path)):
            continue  # there, `_init_weights` sets all that it sets after the model is built
        elif written not in expected:
            reasons[slot.name] = (
                f"it was written {written}x while the model was built, of which "
                f"reset_parameters() and _init_weights() account for {min(expected)}x"
            )
        elif len(makers) > 1 and not any(place in c.writes for c in calls if c.applied):
            reasons[slot.name] = (
                f"several modules share it, and {' and '.join(sorted(makers))} initialize it "
                "differently: which of them made it is not known"
            )
        elif hidden:
            reasons[slot.name] = f"it may have been set through .data, at {hidden}"
    return reasons


def _makers(place: int, slot: _Slot, model: nn.Module, calls: list[_Call]) -> dict[str, int]:
    """The classes of modules that may have made a tensor: how often each counts up its version.

    Modules that share a tensor were built before they did, so that only one of them has written it.
    """
    found: dict[str, int] = {}
    around = 0
    for call in calls:
        if call.applied or place not in call.counted:
            continue
        if call.path in slot.paths:
            found[type(model.get_submodule(call.path)).__name__] = call.counted[place]
        else:
            around += call.counted[place]  # by a module around it, after it was made
    if not found and around:
        return {"": around}
    return {name: count + around for name, count in found.items()}


def _is_hugging_face(owner: Any) -> bool:
    return owner is not None and hasattr(owner, "_initialize_weights")


def _hidden_writes(model: nn.Module) -> str:
    """Where the classes, or functions that are applied, write through `.data`: `file:line`."""
    seen: set[type] = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls in seen or cls.__module__.split(".")[0] in (*_LIBRARIES, "builtins"):
                continue
            seen.add(cls)
            try:
                file = inspect.getsourcefile(cls) or ""
                lines, first = inspect.getsourcelines(cls)
                tree = _parsed(file)
            except (OSError, TypeError, SyntaxError):
                continue
            own = range(first, first + len(lines))
            for line in _data_writes(tree, own):
                return f"{file}:{line}"
    return ""


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def _data_writes(tree: ast.Module, own: range) -> Iterator[int]:
    """Lines that write through `.data`, in a class or in functions that the file applies."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    applied = {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "apply"
        for argument in node.args
        if isinstance(argument, ast.Name)
    }
    relevant: set[int] = set(own)
    for function in functions:
        lines = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
        if function.name in _CALLED_AGAIN and function.lineno in own:
            relevant -= lines
        elif function.name in applied:
            relevant |= lines
    for node in ast.walk(tree):
        if getattr(node, "lineno", -1) in relevant and _writes_data(node):
            yield node.lineno  # type: ignore[attr-defined]


def _writes_data(node: ast.AST) -> bool:
    """`x.data.normal_(…)`, `x.data[i] = …`, `x.data = …`, but not `self.data = …`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        return name.endswith("_") and not name.endswith("__") and _is_data(node.func.value)
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AugAssign) else targets
    return any(_is_data(target) for target in targets)


def _is_data(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Attribute) or node.attr != "data":
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id == "self")


def _groups(slots: list[_Slot], calls: list[_Call]) -> list[set[int]]:
    """Tensors that some call writes together, by their places, in order."""
    group_of = {place: {place} for place in range(len(slots))}
    for call in calls:
        joined: set[int] = set()
        for place in call.writes:
            joined |= group_of[place]
        for place in joined:
            group_of[place] = joined
    unique = {id(group): group for group in group_of.values()}
    return list(unique.values())


def _run(
    slots: list[_Slot], calls: list[_Call], wanted: Collection[str], seed: int, load: Load
) -> dict[str, str]:
    """Run the calls of one group of tensors on real memory; reasons for those that got no value."""
    on_meta = [slot.tensor for slot in slots]
    for slot, meta in zip(slots, on_meta, strict=True):
        real = torch.empty_like(meta, device="cpu", requires_grad=False)
        if real.is_floating_point() or real.is_complex():
            real.fill_(torch.nan)
        slot.put(nn.Parameter(real, meta.requires_grad) if isinstance(meta, nn.Parameter) else real)
    torch.manual_seed(zlib.crc32(f"{seed} {slots[0].name}".encode()))
    reasons: dict[str, str] = {}
    try:
        for call in calls:
            call.function()
        for slot in slots:
            if slot.name not in wanted:
                continue
            if slot.tensor.is_floating_point() and bool(torch.isnan(slot.tensor).any()):
                reasons[slot.name] = "its initialization leaves some of its values unset"
            else:
                load(slot.name, slot.tensor.detach())
    except Exception as error:
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        reasons |= dict.fromkeys(wanted, f"its initialization failed ({first})")
    finally:
        for slot, meta in zip(slots, on_meta, strict=True):
            slot.put(meta)
    return reasons
