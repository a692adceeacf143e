"""Initial weights: every rank begins with the same ones.

Ranks compare checksums of all parameters and buffers. What is equal on all ranks is copied from
each rank's own model. What differs, as it does where models are built without a seed, or is missing
on some ranks, comes from the first rank that has it, block by block: no rank needs more memory for
it than `BLOCK_BYTES`, or one row. What no rank has is initialized (`initialize.py`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import runtime as rt
from shardwise.errors import WeightsError
from shardwise.frontend import skeleton
from shardwise.frontend.objective import as_module
from shardwise.ir import Graph
from shardwise.runtime.rendezvous import starting

__all__ = ["initialize"]


# Weights for a model on meta: its own initialization, done again part by part.
#
# A module's `reset_parameters()` is what its `__init__` calls, and `_init_weights(module)` what
# many models, those of Hugging Face among them, apply to each module afterwards. Both are called
# again, first on meta, to see which tensors each writes: tensors that one call writes together form
# a group and exist together, with real memory, while their calls run. So a model larger than a
# device can start.
#
# Other initialization, such as `nn.init.normal_` in `__init__` or `model.apply(function)`, cannot
# be called again. It leaves a trace: every write in place counts up the `_version` of a tensor, on
# meta too. A tensor that was written more or less often than the known calls do has lost its
# values, and is reported. Writes through `.data` leave no trace and are looked for in the source of
# the classes.


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


Init = Callable[[], nn.Module] | Callable[[nn.Module], object]
BLOCK_BYTES = 64 << 20
BUILD_TIMEOUT_S = 1800.0
_DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=lambda dtype: str(dtype)
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a tensor's initial values come from.

    `owner` is the first place on the axis of all ranks that has them, None if there is none. The
    tensor `travels` if a rank that stores it has other values or none.
    """

    name: str
    owner: int | None
    dtype: torch.dtype | None
    travels: bool


def load_weights(
    model: nn.Module,
    store: rt.ParameterStore,
    seed: int,
    init: Init | None = None,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> None:
    """Fill the store with the same initial weights on every rank; all ranks call it.

    `init` gives weights to a model on meta. Without arguments it builds the model, on the first
    rank alone; with one it initializes the module it is given, on each rank that needs it.
    """
    everyone = store.mesh.everyone
    named = dict((*model.named_parameters(), *model.named_buffers()))
    names = list(named)
    rows = [_described(name, named[name], store) for name in names]
    numels = [tensor.numel() for tensor in named.values()]
    every = everyone.gather_objects(rows, store.device)
    sources = _sources(names, numels, every, everyone.ranks)
    if everyone.index == 0 and any(source.travels for source in sources):
        differing = [source.name for source in sources if source.travels]
        log.info(
            "initial values of %d of %d parameters and buffers differ between ranks or are missing "
            "on some; all ranks take those of rank %d (%s, …)",
            len(differing), len(names), everyone.ranks[0], differing[0],
        )  # fmt: skip
    store.received_weights = any(source.travels for source in sources)
    for source in sources:
        if source.owner is None:
            continue
        if source.travels:
            _stream(source, named[source.name], store)
        elif store.holds(source.name):
            store.load_full(source.name, named[source.name].detach())
    missing = [source.name for source in sources if source.owner is None]
    if init is not None and not missing:
        raise WeightsError(
            "init was given, but the model has all of its weights",
            hint='leave init out, or build the model under torch.device("meta")',
        )
    if not missing:
        return
    if init is not None and _takes_nothing(init):
        _build(init, {name: named[name] for name in missing}, store, seed, timeout_s)
        return
    with torch.random.fork_rng(devices=[]):
        store.uninitialized = initialize(
            model,
            missing,
            [name for name in missing if store.holds(name)],
            seed,
            store.load_full,
            init,  # type: ignore[arg-type]  # it takes a module
        )


def constants_of(graph: Graph) -> dict[str, str]:
    """The checksums of tensors that forward reads and that are neither parameters nor buffers.

    They are not sent to other ranks, as they are captured with the program; ranks compare them.
    """
    found = {}
    for constant in graph.constants:
        user = next((node for node in graph.nodes if constant.value in node.inputs), None)
        where = user.origin if user is not None else "its outputs"
        shape = tuple(constant.data.shape)
        what = f"a tensor of shape {shape} that forward reads at {where} and that is no buffer"
        found[f"{what} (self.register_buffer would share rank 0's)"] = str(
            int(rt.checksum(constant.data))
        )
    return found


def _takes_nothing(init: Init) -> bool:
    """Whether `init` builds a model; otherwise it initializes the module it is given."""
    try:
        parameters = list(inspect.signature(init).parameters.values())
    except (TypeError, ValueError):  # of a builtin
        return True
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise WeightsError(
            f"init takes {len(needed)} arguments: {', '.join(p.name for p in needed)}",
            hint="init=lambda: Model(config) builds the model; init=function initializes a module",
        )
    return not needed


def _build(
    init: Init, missing: Mapping[str, Tensor], store: rt.ParameterStore, seed: int, timeout_s: float
) -> None:
    """Let the first rank build the model with its weights, and give them to all."""
    everyone = store.mesh.everyone
    built: dict[str, Tensor] = {}
    with starting(max(timeout_s, BUILD_TIMEOUT_S)) as agree:
        if everyone.index == 0:
            with torch.random.fork_rng(), torch.device("cpu"):
                torch.manual_seed(seed)
                made = as_module(init())  # type: ignore[call-arg, arg-type]
            built = dict((*made.named_parameters(), *made.named_buffers()))
            for name, tensor in missing.items():
                _require_like(name, built.get(name), tensor)
        agree("built")
    for name, tensor in missing.items():
        source = Source(name=name, owner=0, dtype=tensor.dtype, travels=True)
        mine = built.pop(name, None)
        _stream(source, tensor if mine is None else mine.detach().to(tensor.dtype), store)


def _require_like(name: str, built: Tensor | None, wanted: Tensor) -> None:
    if built is None or built.shape != wanted.shape or built.is_meta:
        what = "no data" if built is not None and built.is_meta else "no counterpart"
        if built is not None and not built.is_meta:
            what = f"shape {tuple(built.shape)}"
        raise WeightsError(
            f"{name} has shape {tuple(wanted.shape)} in the model that was given to parallelize; "
            f"in the model that init builds it has {what}",
            where=name,
            hint="let init build the same model, with data (not on meta)",
        )


def _described(name: str, tensor: Tensor, store: rt.ParameterStore) -> list[int]:
    """What other ranks must know: dtype (-1: no data), checksum, NaNs, whether it is used."""
    used = int(store.holds(name))
    if tensor.is_meta:
        return [-1, 0, 0, used]
    alone = store.mesh.everyone.size == 1
    bits = 0 if alone else int(rt.checksum(tensor))
    undefined = int(torch.isnan(tensor.detach()).sum()) if tensor.is_floating_point() else 0
    return [_DTYPES.index(tensor.dtype), bits, undefined, used]


def _sources(
    names: list[str], numels: list[int], every: list[list[list[int]]], ranks: tuple[int, ...]
) -> list[Source]:
    """Decide where each tensor comes from, the same on every rank."""
    sources = []
    for place, name in enumerate(names):
        rows = [rank_rows[place] for rank_rows in every]
        owner = next((i for i, (dtype, *_) in enumerate(rows) if dtype >= 0), None)
        if owner is None:
            sources.append(Source(name=name, owner=None, dtype=None, travels=False))
            continue
        dtype, bits, undefined, _ = rows[owner]
        if undefined:
            raise WeightsError(
                f"{name} has {undefined} of {numels[place]} values that are NaN, on rank "
                f"{ranks[owner]}",
                where=name,
                hint="load or initialize the weights before parallelize",
            )
        travels = any(used and row[:2] != [dtype, bits] for *row, _, used in rows)
        sources.append(Source(name=name, owner=owner, dtype=_DTYPES[dtype], travels=travels))
    return sources


@torch.no_grad()
def _stream(source: Source, tensor: Tensor, store: rt.ParameterStore) -> None:
    """Give all ranks the owner's values, block by block."""
    everyone, shape = store.mesh.everyone, tuple(tensor.shape)
    assert source.owner is not None
    assert source.dtype is not None
    width = math.prod(shape[1:]) * source.dtype.itemsize
    count = max(1, BLOCK_BYTES // max(width, 1))
    length = shape[0] if shape else 1
    for begin in range(0, length, count):
        block = (min(count, length - begin), *shape[1:]) if shape else ()
        if everyone.index == source.owner:
            rows = tensor.detach().narrow(0, begin, block[0]) if shape else tensor.detach()
            rows = rows.to(store.device).contiguous()
        else:
            rows = torch.empty(block, dtype=source.dtype, device=store.device)
        everyone.broadcast(_bytes_of(rows), source.owner).wait()
        if store.holds(source.name):
            store.load_rows(source.name, begin, rows)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which every backend can send."""
    flat = tensor.view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
