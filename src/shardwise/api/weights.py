"""Give every rank the same initial weights.

Ranks compare checksums of all parameters and buffers. A tensor that is equal on all ranks is copied
from each rank's own model. One that differs, because models were built without a seed, or is
missing on some ranks, is sent by the first rank that has it, block by block: no rank needs more
memory for it than `BLOCK_BYTES`, or one row. A tensor that no rank has is initialized.
"""

import ast
import contextlib
import functools
import inspect
import logging
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

Init = Callable[[], nn.Module] | Callable[[nn.Module], object]
BLOCK_BYTES = 64 << 20
FREE_SHARE = 0.5  # of the free memory, that the initialization of a tensor may take
BUILD_TIMEOUT_S = 1800.0
_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a tensor's initial values."""

    name: str
    owner: int | None = None  # the first position among all ranks that has values
    dtype: torch.dtype | None = None
    is_sent: bool = False  # to ranks that store the tensor and have other values or none


def load_weights(
    model: nn.Module,
    store: rt.ParameterStore,
    seed: int,
    init: Init | None = None,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> None:
    """Fill the store with the same initial weights on every rank; all ranks call it.

    `init` gives weights to a model on meta: as a function without arguments it builds the model on
    the first rank; as a function of a module it initializes that module on each rank that needs it.
    """
    everyone = store.mesh.everyone
    named = dict((*model.named_parameters(), *model.named_buffers()))
    rows = [_describe(name, tensor, store) for name, tensor in named.items()]
    all_rows = everyone.gather_objects(rows, store.device)
    sources = _sources(named, all_rows, everyone.ranks)
    sent = [source.name for source in sources if source.is_sent]
    if everyone.index == 0 and sent:
        log.info(
            "initial values of %d of %d parameters and buffers differ between ranks or are missing "
            "on some; all ranks take those of rank %d (%s, …)",
            len(sent), len(named), everyone.ranks[0], sent[0],
        )  # fmt: skip
    store.received_weights = bool(sent)
    for source in sources:
        if source.is_sent:
            _send(source, named[source.name], store)
        elif source.owner is not None and store.holds(source.name):
            store.load_full(source.name, named[source.name].detach())
    missing = [source.name for source in sources if source.owner is None]
    if init is not None and not missing:
        raise WeightsError(
            "init is not needed: the model already has all of its weights",
            hint='leave init out, or build the model under torch.device("meta")',
        )
    if not missing:
        return
    if init is not None and _builds_model(init):
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


def constant_checksums(graph: Graph) -> dict[str, str]:
    """Return checksums of the tensors that forward reads besides parameters and buffers.

    Such constants are captured with the program and not sent to other ranks; ranks compare them.
    """
    checksums = {}
    for constant in graph.constants:
        user = next((node for node in graph.nodes if constant.value in node.inputs), None)
        where = user.origin if user is not None else "its outputs"
        shape = tuple(constant.data.shape)
        tensor = f"a tensor of shape {shape} that forward reads at {where} and that is not a buffer"
        key = f"{tensor} (self.register_buffer would share rank 0's)"
        checksums[key] = str(int(rt.checksum(constant.data)))
    return checksums


def _builds_model(init: Init) -> bool:
    """Return whether `init` builds a model; otherwise it initializes a module."""
    try:
        parameters = list(inspect.signature(init).parameters.values())
    except (TypeError, ValueError):  # builtins have no signature
        return True
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise WeightsError(
            f"init takes {len(required)} arguments: {', '.join(required)}",
            hint="init=lambda: Model(config) builds the model; init=function initializes a module",
        )
    return not required


def _build(
    init: Init, missing: Mapping[str, Tensor], store: rt.ParameterStore, seed: int, timeout_s: float
) -> None:
    """Build the model with its weights on the first rank, and send them to all."""
    everyone = store.mesh.everyone
    built: dict[str, Tensor] = {}
    with starting(max(timeout_s, BUILD_TIMEOUT_S)) as agree:
        if everyone.index == 0:
            with torch.random.fork_rng(), torch.device("cpu"):
                torch.manual_seed(seed)
                model = as_module(init())  # type: ignore[call-arg, arg-type]
            built = dict((*model.named_parameters(), *model.named_buffers()))
            for name, tensor in missing.items():
                _check_built(name, built.get(name), tensor)
        agree("built")
    for name, tensor in missing.items():
        source = Source(name=name, owner=0, dtype=tensor.dtype, is_sent=True)
        values = built.pop(name, tensor).detach().to(tensor.dtype)  # other ranks only need a shape
        _send(source, values, store)


def _check_built(name: str, built: Tensor | None, expected: Tensor) -> None:
    if built is not None and built.shape == expected.shape and not built.is_meta:
        return
    difference = "no counterpart" if built is None else f"shape {tuple(built.shape)}"
    if built is not None and built.is_meta:
        difference = "no data"
    raise WeightsError(
        f"{name} has shape {tuple(expected.shape)} in the model that was given to parallelize; in "
        f"the model that init builds it has {difference}",
        where=name,
        hint="let init build the same model, with data (not on meta)",
    )


def _describe(name: str, tensor: Tensor, store: rt.ParameterStore) -> list[int]:
    """Return what ranks compare: dtype (-1: no data), checksum, NaNs, whether it is stored."""
    is_stored = int(store.holds(name))
    if tensor.is_meta:
        return [-1, 0, 0, is_stored]
    checksum = int(rt.checksum(tensor)) if store.mesh.everyone.size > 1 else 0
    nans = int(torch.isnan(tensor.detach()).sum()) if tensor.is_floating_point() else 0
    return [_DTYPES.index(tensor.dtype), checksum, nans, is_stored]


def _sources(
    named: Mapping[str, Tensor], all_rows: list[list[list[int]]], ranks: tuple[int, ...]
) -> list[Source]:
    """Decide where each tensor comes from, the same on every rank."""
    sources = []
    for (name, tensor), *rows in zip(named.items(), *all_rows, strict=True):
        owner = next((i for i, (dtype, *_) in enumerate(rows) if dtype >= 0), None)
        if owner is None:
            sources.append(Source(name=name))
            continue
        dtype, checksum, nans, _ = rows[owner]
        if nans:
            raise WeightsError(
                f"{name} has {nans} NaNs among its {tensor.numel()} values on rank {ranks[owner]}",
                where=name,
                hint="load or initialize the weights before parallelize",
            )
        is_sent = any(is_stored and row[:2] != [dtype, checksum] for *row, _, is_stored in rows)
        sources.append(Source(name=name, owner=owner, dtype=_DTYPES[dtype], is_sent=is_sent))
    return sources


@torch.no_grad()
def _send(source: Source, tensor: Tensor, store: rt.ParameterStore) -> None:
    """Send the owner's values to all ranks, block by block."""
    everyone, shape = store.mesh.everyone, tuple(tensor.shape)
    assert source.owner is not None
    assert source.dtype is not None
    row_bytes = math.prod(shape[1:]) * source.dtype.itemsize
    rows_per_block = max(1, BLOCK_BYTES // max(row_bytes, 1))
    length = shape[0] if shape else 1
    for begin in range(0, length, rows_per_block):
        block = (min(rows_per_block, length - begin), *shape[1:]) if shape else ()
        if everyone.index == source.owner:
            rows = tensor.detach().narrow(0, begin, block[0]) if shape else tensor.detach()
            rows = rows.to(store.device).contiguous()
        else:
            rows = torch.empty(block, dtype=source.dtype, device=store.device)
        everyone.broadcast(_as_bytes(rows), source.owner).wait()
        if store.holds(source.name):
            store.load_rows(source.name, begin, rows)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View the same memory as bytes, which every backend can send."""
    flat = tensor.view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


# ------------------------------------------------------------ models on meta
# A model on meta is initialized by repeating its own initialization, part by part. A module's
# `reset_parameters()` is called by its `__init__`, and many models, those of transformers among
# them, apply `_init_weights(module)` to each module afterwards. Both are called again, first on
# meta, to see which tensors each writes. Tensors that one call writes together form a group; only
# one group at a time has real memory, so that a model larger than a device can start.
#
# Other initialization, such as `nn.init.normal_` in `__init__` or `model.apply(function)`, cannot
# be repeated. It leaves a trace: every write in place raises the `_version` of a tensor, also on
# meta. A tensor that was written more or less often than by the known calls has lost its values,
# and is reported. Writes through `.data` leave no trace and are looked up in the classes' source.

_LIBRARIES = ("torch", "transformers", "lightning", "shardwise")
_REPEATED = ("reset_parameters", "_reset_parameters", "_init_weights", "forward")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that initializes the module at `path`, and the tensors that it writes."""

    path: str
    function: Callable[[], object]
    is_applied: bool  # to all modules after they were built
    writes: frozenset[int] = frozenset()  # indices of slots
    version_counts: Mapping[int, int] = field(default_factory=dict)  # how far it raises `_version`
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor of the copy: its first name, and the modules that refer to it."""

    name: str
    references: list[tuple[dict[str, Any], str]]
    paths: set[str]

    @property
    def tensor(self) -> Tensor:
        members, key = self.references[0]
        tensor: Tensor = members[key]
        return tensor

    def put(self, tensor: Tensor) -> None:
        for members, key in self.references:
            members[key] = tensor


@torch.no_grad()
def initialize(
    model: nn.Module,
    missing: Collection[str],
    names: Collection[str],
    seed: int,
    load: Callable[[str, Tensor], None],
    init: Callable[[nn.Module], object] | None = None,
) -> dict[str, str]:
    """Pass initial values of the tensors `names` to `load`.

    Return why some of the `missing` tensors cannot be initialized, by name. Values depend on the
    seed and on the tensors' names, not on the rank. With `init`, that function is called for every
    module instead of the model's own initialization.
    """
    twin = skeleton(model)
    slots = _slots(twin)
    calls = [_observe(call, slots) for call in _calls(twin, init)]
    reasons = _unexplained(model, twin, slots, calls, uses_init=init is not None)
    reasons = {name: reason for name, reason in reasons.items() if name in missing}
    for group in _groups(slots, calls):
        loaded = {slots[index].name for index in group} & set(names) - set(reasons)
        if loaded:
            own = [call for call in calls if call.writes & group]
            reasons |= _run([slots[index] for index in sorted(group)], own, loaded, seed, load)
    return reasons


def _slots(model: nn.Module) -> list[_Slot]:
    """Return all tensors of a model, each once."""
    slots: dict[int, _Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for members in (module._parameters, module._buffers):
            for key, tensor in members.items():
                if tensor is not None:
                    slot = slots.setdefault(id(tensor), _Slot(prefix + key, [], set()))
                    slot.paths.add(path)
                    slot.references.append((members, key))
    return list(slots.values())


def _calls(model: nn.Module, init: Callable[[nn.Module], object] | None) -> Iterator[_Call]:
    """Yield the calls that initialize, in order: children before their parents."""
    modules = list(_children_first(model, ""))
    if init is not None:
        for path, module in modules:
            yield _Call(path, functools.partial(init, module), is_applied=True)
        return
    for path, module in modules:
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, name, None)):
                yield _Call(path, reset, is_applied=False)
                break
    for path, module in modules:
        owner = _init_weights_owner(model, path)
        if owner is not None:
            yield _Call(path, functools.partial(owner._init_weights, module), is_applied=True)


def _children_first(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _init_weights_owner(model: nn.Module, path: str) -> Any:
    """Return the innermost module around `path` that has `_init_weights(module)`."""
    pieces = path.split(".") if path else []
    for length in range(len(pieces), -1, -1):
        owner = model.get_submodule(".".join(pieces[:length]))
        if callable(getattr(owner, "_init_weights", None)):
            return owner
    return None


def _observe(call: _Call, slots: list[_Slot]) -> _Call:
    """Run a call on meta, and return it with the tensors that it writes."""
    tensors = [slot.tensor for slot in slots]
    before = [(tensor._version, _memory(tensor)) for tensor in tensors]
    error, written = "", _WrittenMemory()
    try:
        with written:
            call.function()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    if any(slot.tensor is not tensor for slot, tensor in zip(slots, tensors, strict=True)):
        error = "it replaces tensors instead of writing them"
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.put(tensor)
    counts, writes = {}, set()
    for index, (tensor, (version, memory)) in enumerate(zip(tensors, before, strict=True)):
        if tensor._version != version:
            counts[index] = tensor._version - version
        if index in counts or memory in written.memory or _memory(tensor) != memory:
            writes.add(index)
    return replace(call, writes=frozenset(writes), version_counts=counts, error=error)


class _WrittenMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the memory that operators write in place, also through `.data` and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for item in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(item, Tensor):
                        self.memory.add(_memory(item))
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unexplained(
    model: nn.Module, twin: nn.Module, slots: list[_Slot], calls: list[_Call], *, uses_init: bool
) -> dict[str, str]:
    """Return the tensors to which the calls would not give their former values, with reasons."""
    reasons: dict[str, str] = {}
    buffers = dict(model.named_buffers())
    original = {**dict(model.named_parameters()), **buffers}
    hidden = "" if uses_init else _hidden_writes(twin)
    for index, slot in enumerate(slots):
        path = slot.name.rpartition(".")[0]
        cls = type(twin.get_submodule(path))
        failed = [call for call in calls if call.error and call.path == path]
        creators = _creators(index, slot, twin, calls)
        applied = sum(c.version_counts.get(index, 0) for c in calls if c.is_applied)
        num_writes = original[slot.name]._version
        expected = {count + applied for count in creators.values()} or {applied}
        if slot.name in buffers and cls.__module__.startswith("torch.nn."):
            expected.add(0)  # `model.double()` makes new buffers
        reason = ""
        if failed:
            reason = f"its initialization failed on meta ({failed[0].error})"
        elif not any(index in call.writes for call in calls):
            reason = f"nothing is known to set it: {cls.__name__} has no reset_parameters()"
            if uses_init:
                reason = f"init({cls.__name__}) does not set it"
        elif uses_init or hasattr(_init_weights_owner(twin, path), "_initialize_weights"):
            pass  # in transformers, `_init_weights` repeats all initialization after building
        elif num_writes not in expected:
            reason = (
                f"it was written {num_writes}x while the model was built, of which "
                f"reset_parameters() and _init_weights() account for {min(expected)}x"
            )
        elif len(creators) > 1 and not any(index in c.writes for c in calls if c.is_applied):
            reason = (
                f"several modules share it, and {' and '.join(sorted(creators))} initialize it "
                "differently: it is not known which of them created it"
            )
        elif hidden:
            reason = f"it may have been set through .data, at {hidden}"
        if reason:
            reasons[slot.name] = reason
    return reasons


def _creators(index: int, slot: _Slot, model: nn.Module, calls: list[_Call]) -> dict[str, int]:
    """Return the classes that may have created a tensor, with how often they raise its version.

    Modules that share a tensor were built before they did, so that only one of them has written it.
    """
    counts: dict[str, int] = {}
    enclosing = 0  # writes by enclosing modules, after the tensor was created
    for call in calls:
        if call.is_applied or index not in call.version_counts:
            continue
        if call.path in slot.paths:
            cls = type(model.get_submodule(call.path))
            counts[cls.__name__] = call.version_counts[index]
        else:
            enclosing += call.version_counts[index]
    if not counts and enclosing:
        return {"": enclosing}
    return {name: count + enclosing for name, count in counts.items()}


def _hidden_writes(model: nn.Module) -> str:
    """Return `file:line` where a class, or an applied function, writes through `.data`."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    for cls in classes:
        if cls.__module__.split(".")[0] in (*_LIBRARIES, "builtins"):
            continue
        try:
            file = inspect.getsourcefile(cls) or ""
            lines, first = inspect.getsourcelines(cls)
            tree = _parse(file)
        except (OSError, TypeError, SyntaxError):
            continue
        for line in _data_writes(tree, range(first, first + len(lines))):
            return f"{file}:{line}"
    return ""


@functools.lru_cache(maxsize=64)
def _parse(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def _data_writes(tree: ast.Module, own: range) -> Iterator[int]:
    """Yield lines that write through `.data`, in a class or in functions that the file applies."""
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
        if function.name in _REPEATED and function.lineno in own:
            relevant -= lines
        elif function.name in applied:
            relevant |= lines
    for node in ast.walk(tree):
        if getattr(node, "lineno", -1) in relevant and _writes_data(node):
            yield node.lineno  # type: ignore[attr-defined]


def _writes_data(node: ast.AST) -> bool:
    """Recognize `x.data.normal_(…)`, `x.data[i] = …`, `x.data = …`, but not `self.data = …`."""
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
    """Return the indices of tensors that some call writes together, in order."""
    group_of = {index: {index} for index in range(len(slots))}
    for call in calls:
        joined: set[int] = set().union(*(group_of[index] for index in call.writes))
        for index in joined:
            group_of[index] = joined
    return list({id(group): group for group in group_of.values()}.values())


def _memory_like(meta: Tensor) -> Tensor:
    """Return memory for a tensor on meta: in a temporary file if it takes most of what is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if meta.nbytes < FREE_SHARE * free:
        with contextlib.suppress(RuntimeError):  # a limit of this process
            return torch.empty_like(meta, device="cpu", requires_grad=False)
    with tempfile.NamedTemporaryFile(prefix="shardwise-") as file:
        size, dtype = meta.numel(), meta.dtype
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(meta.shape)


def _run(
    slots: list[_Slot],
    calls: list[_Call],
    names: Collection[str],
    seed: int,
    load: Callable[[str, Tensor], None],
) -> dict[str, str]:
    """Run the calls of one group on real memory; return why some tensors got no value."""
    on_meta = [slot.tensor for slot in slots]
    for slot, meta in zip(slots, on_meta, strict=True):
        real = _memory_like(meta)
        if real.is_floating_point() or real.is_complex():
            real.fill_(torch.nan)
        slot.put(nn.Parameter(real, meta.requires_grad) if isinstance(meta, nn.Parameter) else real)
    torch.manual_seed(zlib.crc32(f"{seed} {slots[0].name}".encode()))
    reasons: dict[str, str] = {}
    try:
        for call in calls:
            call.function()
        for slot in slots:
            if slot.name not in names:
                continue
            drawn = slot.tensor.is_floating_point() and slot.tensor.numel() > 0
            if drawn and bool(slot.tensor.amin().isnan()):  # which needs no memory
                reasons[slot.name] = "its initialization leaves some of its values unset"
            else:
                load(slot.name, slot.tensor.detach())
    except Exception as error:
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        reasons |= dict.fromkeys(names, f"its initialization failed ({first})")
    finally:
        for slot, meta in zip(slots, on_meta, strict=True):
            slot.put(meta)
    return reasons
