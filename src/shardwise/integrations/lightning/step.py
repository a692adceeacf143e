"""Make a step of a LightningModule a model that can be captured.

`step_model(module)` is a twin of the module, with the same parameters under the same names, whose
`forward` is one of its steps. Inside it, logging and metrics are recorded on a tape, and values
that change from step to step without being a tensor of the batch (the index of the batch, the
trainer) are refused, because a captured step would keep their first value.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, partialmethod, reduce
from operator import attrgetter, getitem
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, OptimizerError
from shardwise.frontend.errors import Frame, is_user_code
from shardwise.integrations.lightning.library import (
    LightningModule,
    is_overridden,
    is_param_in_hook_signature,
)

# ------------------------------------------------------------ Python state that a step changes
# `self.outputs.append(loss)` is repeated after every run. Any other change of Python state would
# happen once, when the step is captured, and never again; it is therefore an error.

_SKIPPED = ("_parameters", "_buffers", "_modules", "forward", "training")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Path = tuple[Any, ...]


def snapshot(module: nn.Module) -> dict[Path, Any]:
    """Return the containers and plain values whose changes can be detected, by their path."""
    values: dict[Path, Any] = {}
    for name, value in vars(module).items():
        if name not in _SKIPPED and not isinstance(value, torch.Tensor | nn.Module):
            values.update(_walk((name,), value))
    return values


def growth(before: Mapping[Path, Any], module: nn.Module) -> Iterator[tuple[Path, list[Any]]]:
    """Yield the paths of lists, and the items that were appended to them."""
    after = snapshot(module)
    for path, new in after.items():
        old = before.get(path)
        if isinstance(new, list) and isinstance(old, list):
            same = all(a is b for a, b in zip(old, new, strict=False))
            if not same or len(new) < len(old):
                raise _changed(path, type(module))
            if len(new) > len(old):
                yield path, new[len(old) :]
        elif path not in before or not _same(old, new):
            raise _changed(path, type(module))
    for path in before.keys() - after.keys():
        raise _changed(path, type(module))


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, list):
        yield path, value.copy()
    elif isinstance(value, dict):
        yield path, tuple(value)
        for key, item in value.items():
            yield from _walk((*path, key), item)
    else:
        yield path, value


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, _PLAIN) and isinstance(new, _PLAIN):
        return type(old) is type(new) and (old == new or old != old)
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(a is b or a == b for a, b in zip(old, new, strict=True))
    return old is new


def _changed(path: Path, cls: type[Any]) -> CaptureError:
    attribute = f"self.{path[0]}" + "".join(f"[{key!r}]" for key in path[1:])
    return CaptureError(
        f"the step changes {attribute}; a captured step would not change it again",
        where=_line_of(cls, path[0]),
        hint="change it in on_train_batch_end, append to a list, or use register_buffer",
    )


def _line_of(cls: type[Any], attribute: str) -> str | None:
    """Return the user's first line outside of `__init__` that seems to change an attribute."""
    changes = re.compile(rf"\bself\.{attribute}\b(?:[^=]*[^=!<>]=[^=]|.*\.\w+\()")
    for member in (m for base in cls.__mro__ for m in vars(base).values()):
        code = getattr(member, "__code__", None)
        if code is not None and code.co_name != "__init__" and is_user_code(code.co_filename):
            for line in sorted({line for *_, line in code.co_lines() if line}):
                text = linecache.getline(code.co_filename, line).strip()
                if changes.search(text):
                    return str(Frame(code.co_filename, line, code.co_name, text))
    return None


# ------------------------------------------------------------ the tape: logging and metrics
# A step is captured once and then runs as a compiled program. Calls with effects outside of it
# (`self.log`, metrics, lists that grow) are recorded during the capture, their tensors become
# further outputs of the program, and the calls are repeated after every run with its values.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One of the tensors that the program returns."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRef:
    """A submodule, such as a metric."""

    path: str


class Deferred:
    """The future result of a recorded call, to be passed to `self.log` and other such calls."""

    def __init__(self, slot: int, source: str) -> None:
        self.slot, self.source = slot, source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"the step uses the value of {self.source}, which is known only after the step",
            hint="pass it to self.log or self.log_dict, or compute it from tensors in the step",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A method call on the module at `path`, or items appended to the list there."""

    path: tuple[Any, ...]
    method: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The effects of one captured step, in order, and its return value."""

    effects: tuple[Effect, ...]
    returned: Any

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the step's return value, with the tensors of one run."""
        return pytree.tree_map(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, TensorRef) else leaf, self.returned
        )


class Tape:
    """Records one step at a time; copies of a module share their tape."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.tensors: list[torch.Tensor] = []
        self._effects: list[Effect] = []
        self._paths: dict[int, str] = {}
        self._slots = 0

    def __deepcopy__(self, memo: Any) -> Tape:
        return self

    def begin(self, module: nn.Module) -> None:
        """Start to record a step of this module."""
        self.recording = None
        self.tensors, self._effects, self._slots = [], [], 0
        self._paths = {id(child): path for path, child in module.named_modules()}

    def add(
        self, path: tuple[Any, ...], method: str, source: str, /, *args: Any, **kwargs: Any
    ) -> Deferred | None:
        """Record a call; `source` describes where its result comes from, if it has one."""
        slot = None
        if source:
            slot, self._slots = self._slots, self._slots + 1
        self._effects.append(
            Effect(
                path=path,
                method=method,
                args=self._frozen(args),
                kwargs=tuple(self._frozen(kwargs).items()),
                slot=slot,
            )
        )
        return None if slot is None else Deferred(slot, source)

    def end(self, returned: Any) -> None:
        """Finish the recording of a step that has returned this value."""
        self.recording = Recording(effects=tuple(self._effects), returned=self._frozen(returned))

    def _frozen(self, tree: Any) -> Any:
        return pytree.tree_map(self._reference, tree)

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            for index, tensor in enumerate(self.tensors):
                if tensor is leaf:
                    return TensorRef(index=index)
            self.tensors.append(leaf)
            return TensorRef(index=len(self.tensors) - 1)
        if isinstance(leaf, nn.Module):
            path = self._paths.get(id(leaf))
            if path is None:
                kind = type(leaf).__name__
                raise CaptureError(
                    f"the step uses a {kind} that is not an attribute of the module",
                    hint=f"self.{kind.lower()} = {kind}(…) in __init__",
                )
            return ModuleRef(path=path)
        return leaf


def replay(recording: Recording, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Repeat the effects of a captured step on `module`, with the tensors of one run."""
    slots: dict[int, Any] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return tensors[leaf.index]
        if isinstance(leaf, Deferred):
            return slots[leaf.slot]
        if isinstance(leaf, ModuleRef):
            return module.get_submodule(leaf.path)
        return leaf

    for effect in recording.effects:
        args = [pytree.tree_map(value, arg) for arg in effect.args]
        kwargs = {name: pytree.tree_map(value, arg) for name, arg in effect.kwargs}
        if effect.method == "extend":
            reduce(getitem, effect.path[1:], getattr(module, effect.path[0])).extend(*args)
            continue
        target = module.get_submodule(effect.path[0])
        result = getattr(target, effect.method)(*args, **kwargs)
        if effect.slot is not None:
            slots[effect.slot] = result


# ------------------------------------------------------------ the twin of a module
_METRIC_CALLS = ("forward", "update", "compute", "reset")
_CHANGES = (
    "changes from step to step outside of the batch; a captured step would keep its first value"
)


def step_model(
    module: LightningModule, tape: Tape | None = None, device: torch.device | str = "cpu"
) -> nn.Module:
    """Return the module with a step as its `forward`, which takes batches of `step_batch`.

    It shares parameters and submodules with `module`.
    """
    twin: nn.Module = object.__new__(_twin_class(type(module)))
    vars(twin).update(_tape=tape or Tape(), _twin_device=torch.device(device))
    follow(twin, module)
    return twin


def follow(twin: nn.Module, module: LightningModule) -> None:
    """Update the twin's attributes from the module."""
    vars(twin).update(vars(module), _trainer=None)


def step_batch(step: str, batch: Any, num_arguments: int = 1, dataloader: int = 0) -> Any:
    """Return a batch of `step_model`: the step's name ("training") and the user's batch.

    `num_arguments` counts the further arguments of the step: `batch_idx`, `dataloader_idx`.
    """
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)  # such as transformers' BatchEncoding
    return {"batch": batch, "step": step, "num_arguments": num_arguments, "dataloader": dataloader}


def training_arguments(module: LightningModule) -> int:
    """Return the number of arguments of `training_step` besides the batch, as Lightning does."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise CaptureError(
            f"{type(module).__name__}.training_step takes dataloader_iter",
            hint="def training_step(self, batch, batch_idx)",
        )
    return int(is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2))


def require_supported(module: LightningModule) -> None:
    """Refuse features that a compiled step would silently ignore."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise OptimizerError(
            f"{name} has automatic_optimization=False, but a compiled step has its own backward",
            hint="return the loss from training_step, and one optimizer from configure_optimizers",
        )
    if is_overridden("backward", module):
        raise OptimizerError(
            f"{name}.backward would not be called: a compiled step has its own",
            hint="return the loss to differentiate from training_step",
        )


class BatchIndex(int):
    """A placeholder for `batch_idx` in a captured step, which must not use it."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise CaptureError(
            f"the step uses batch_idx, which {_CHANGES}",
            hint="use it in on_train_batch_end(self, outputs, batch, batch_idx), or put values "
            "that depend on it into the batch",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __index__ = _refuse
    __int__ = __float__ = __str__ = __repr__ = __format__ = __and__ = __or__ = _refuse
    __hash__ = int.__hash__


class _TrainerPlaceholder:
    """A placeholder for `self.trainer` in a captured step."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_trainer(f"self.trainer.{name}")


def _refuse_trainer(attribute: str) -> NoReturn:
    raise CaptureError(
        f"the step uses {attribute}, which {_CHANGES}",
        hint="use it in a hook such as on_train_batch_end, or make it a buffer or part of the "
        "batch (on_before_batch_transfer)",
    )


def _is_metric(module: nn.Module) -> bool:
    return any(c.__name__ in ("Metric", "MetricCollection") for c in type(module).__mro__)


def _twin_class(base: type[Any]) -> type[Any]:
    """Return a subclass of the user's class whose `forward` is a step."""
    members = {n: v for n, v in vars(_Twin).items() if n not in ("__dict__", "__weakref__")}
    members |= {"forward": _Twin.run_step, "_base": base, "__module__": base.__module__}
    return type(base.__name__, (base,), members)


class _Twin:
    """The members of a twin's class; `self` is a LightningModule."""

    carries_growth = True  # the recording includes lists that grow in a step
    carries_state_of = staticmethod(_is_metric)  # it also includes calls of metrics
    captured_for_every_size = True  # a tape may contain sizes: self.log(…, batch_size=len(x))
    _base: type[Any]
    _tape: Tape
    _twin_device: torch.device

    def run_step(  # not named `forward`: nodes are attributed to the user's innermost forward
        self: Any, batch: Any, step: str, num_arguments: int = 1, dataloader: int = 0
    ) -> dict[str, Any]:
        tape: Tape = self._tape
        tape.begin(self)
        before = snapshot(self)
        method = getattr(self, f"{step}_step")
        arguments = (BatchIndex(), dataloader)[:num_arguments]
        with _recording_calls(self):
            returned = method(batch, *arguments)
        for path, items in growth(before, self):
            tape.add(path, "extend", "", items)
        tape.end(returned)
        result: dict[str, Any] = {"tensors": tuple(tape.tensors)}
        if step == "training":
            result["loss"] = returned["loss"] if isinstance(returned, Mapping) else returned
        return result

    def _record(self: Any, method: str, /, *args: Any, **kwargs: Any) -> None:
        self._tape.add(("",), method, "", *args, **kwargs)

    log = partialmethod(_record, "log")
    log_dict = partialmethod(_record, "log_dict")
    print = partialmethod(_record, "print")
    device = property(attrgetter("_twin_device"))
    trainer = property(lambda self: _TrainerPlaceholder())
    global_step = property(lambda self: _refuse_trainer("self.global_step"))
    current_epoch = property(lambda self: _refuse_trainer("self.current_epoch"))
    logger = property(lambda self: _refuse_trainer("self.logger"))
    loggers = property(lambda self: _refuse_trainer("self.loggers"))


@contextlib.contextmanager
def _recording_calls(twin: Any) -> Iterator[None]:
    """Make `self(x)` the user's own forward, and record the calls of metrics."""
    vars(twin)["forward"] = types.MethodType(twin._base.forward, twin)
    for path, metric in twin.named_modules():
        if _is_metric(metric):
            for name in _METRIC_CALLS:
                source = f"self.{path}" if name in ("forward", "compute") else ""
                vars(metric)[name] = partial(twin._tape.add, (path,), name, source)
    try:
        yield
    finally:
        del vars(twin)["forward"]


def unsynced_metrics(module: nn.Module, until: ExitStack) -> None:
    """Keep torchmetrics from combining ranks, as all see the full batch, until a stack closes."""
    for child in module.modules():
        metric: Any = child
        if hasattr(metric, "sync_on_compute") and hasattr(metric, "_to_sync"):
            until.callback(_set_sync, metric, metric.sync_on_compute, metric.dist_sync_on_step)
            _set_sync(metric, False, False)


def _set_sync(metric: Any, on_compute: bool, on_step: bool) -> None:
    metric.sync_on_compute = metric._to_sync = on_compute
    metric.dist_sync_on_step = on_step
