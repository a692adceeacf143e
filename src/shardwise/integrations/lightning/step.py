"""A LightningModule's step as a model that can be captured.

`step_model(module)` is a twin of the module with the same parameters under the same names, whose
`forward` is one of its steps. Inside it, logging and metrics are recorded on a tape, and what
changes from step to step without being a tensor of the batch (the index of the batch, the trainer)
is refused, because a captured step would keep its first value.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, OptimizerError
from shardwise.integrations.lightning.library import (
    LightningModule,
    is_overridden,
    is_param_in_hook_signature,
)

__all__ = [
    "Deferred",
    "Effect",
    "Recording",
    "Tape",
    "follow",
    "growth",
    "own_values",
    "replay",
    "require_supported",
    "snapshot",
    "step_batch",
    "step_model",
    "training_arguments",
]


# Plain attributes that a captured step changes: lists that grow, and what is refused.
#
# `self.outputs.append(loss)` is done again after every run. Any other change of Python state would
# happen once, when the step is captured, and never again; so it is an error.


_OWN = ("_parameters", "_buffers", "_modules", "forward", "training")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Path = tuple[Any, ...]


def snapshot(module: nn.Module) -> dict[Path, Any]:
    """What can be seen to change: containers and plain values, by their path."""
    found: dict[Path, Any] = {}
    for name, value in vars(module).items():
        if name not in _OWN and not isinstance(value, torch.Tensor | nn.Module):
            found.update(_walk((name,), value))
    return found


def growth(before: Mapping[Path, Any], module: nn.Module) -> Iterator[tuple[Path, list[Any]]]:
    """Paths of lists and the items that were appended to them."""
    after = snapshot(module)
    for path, new in after.items():
        old = before.get(path)
        if isinstance(new, _List) and isinstance(old, _List):
            same = all(a is b for a, b in zip(old.items, new.items, strict=False))
            if not same or len(new.items) < len(old.items):
                raise _changed(path)
            if len(new.items) > len(old.items):
                yield path, list(new.items[len(old.items) :])
        elif path not in before or not _same(old, new):
            raise _changed(path)
    for path in before:
        if path not in after:
            raise _changed(path)


class _List:
    def __init__(self, items: list[Any]) -> None:
        self.items = tuple(items)


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, list):
        yield path, _List(value)
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


def _changed(path: Path) -> CaptureError:
    place = f"self.{path[0]}" + "".join(f"[{key!r}]" for key in path[1:])
    return CaptureError(
        f"the step changes {place}; it is captured once, and would not change it again",
        hint="change it in on_train_batch_end, append to a list, or use register_buffer",
    )


# What a step does besides computing: `self.log`, metrics, lists that grow.
#
# A step is captured once and then runs as a compiled program, so calls that leave it are recorded
# while it is captured, with the tensors they were given as further outputs of the program, and done
# again after every run with that run's values.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One of the tensors that the program returns."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRef:
    """A submodule, such as a metric."""

    path: str


class Deferred:
    """What a recorded call will return: it can be given to `self.log` and to other such calls."""

    def __init__(self, slot: int, what: str) -> None:
        self.slot, self.what = slot, what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(
            f"the step uses the value of {self.what}, which is known after the step alone",
            hint="give it to self.log or self.log_dict, or compute it from tensors in the step",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A call of a method of the module at `path`, or the growth of a list that is there."""

    path: tuple[Any, ...]
    method: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The effects of one captured step in order, and what it returned."""

    effects: tuple[Effect, ...]
    returned: Any
    num_tensors: int

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the step returned, with the tensors of one run."""
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
        """Forget what was recorded: a step of this module begins."""
        self.recording = None
        self.tensors, self._effects, self._slots = [], [], 0
        self._paths = {id(found): path for path, found in module.named_modules()}

    def add(
        self, path: tuple[Any, ...], method: str, args: Any, kwargs: Any, what: str = ""
    ) -> Deferred | None:
        """Record a call; `what` names its value, if it has one."""
        slot = None
        if what:
            slot, self._slots = self._slots, self._slots + 1
        self._effects.append(
            Effect(
                path=path,
                method=method,
                args=tuple(self._frozen(list(args))),
                kwargs=tuple(self._frozen(dict(kwargs)).items()),
                slot=slot,
            )
        )
        return None if slot is None else Deferred(slot, what)

    def end(self, returned: Any) -> None:
        """The step is over and has returned this."""
        frozen = self._frozen(returned)
        self.recording = Recording(
            effects=tuple(self._effects), returned=frozen, num_tensors=len(self.tensors)
        )

    def _frozen(self, tree: Any) -> Any:
        return pytree.tree_map(self._reference, tree)

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            for index, known in enumerate(self.tensors):
                if known is leaf:
                    return TensorRef(index=index)
            self.tensors.append(leaf)
            return TensorRef(index=len(self.tensors) - 1)
        if isinstance(leaf, nn.Module):
            path = self._paths.get(id(leaf))
            if path is None:
                kind = type(leaf).__name__
                raise CaptureError(
                    f"the step uses a {kind} that is no attribute of the module",
                    hint=f"self.{kind.lower()} = {kind}(…) in __init__",
                )
            return ModuleRef(path=path)
        return leaf


def replay(recording: Recording, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Do on `module` what the captured step did, with the tensors of one run."""
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
            _item(module, effect.path).extend(*args)
            continue
        target = module.get_submodule(effect.path[0])
        found = getattr(target, effect.method)(*args, **kwargs)
        if effect.slot is not None:
            slots[effect.slot] = found


def _item(module: nn.Module, path: tuple[Any, ...]) -> Any:
    found = getattr(module, path[0])
    for key in path[1:]:
        found = found[key]
    return found


_METRIC_CALLS = ("forward", "update", "compute", "reset")
_MOMENT = (
    "is known to the trainer alone and changes from step to step; a captured step would keep its "
    "first value"
)


def step_model(
    module: LightningModule, tape: Tape | None = None, device: torch.device | str = "cpu"
) -> nn.Module:
    """The module with a step as its `forward`; takes what `step_batch` gives.

    Parameters and submodules are those of `module`, not copies.
    """
    base = type(module)
    twin: nn.Module = object.__new__(_twin_class(base))
    vars(twin).update(_tape=tape or Tape(), _place=torch.device(device))
    follow(twin, module)
    return twin


def follow(twin: nn.Module, module: LightningModule) -> None:
    """Give the twin the module's present attributes."""
    vars(twin).update(vars(module), _trainer=None)


def step_batch(step: str, batch: Any, num_arguments: int = 1, dataloader: int = 0) -> Any:
    """A batch of `step_model`: the step's name ("training"), and the user's batch.

    `num_arguments` is how many of `batch_idx` and `dataloader_idx` the step takes, too.
    """
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)  # transformers' BatchEncoding, for one
    return {"batch": batch, "step": step, "num_arguments": num_arguments, "dataloader": dataloader}


def training_arguments(module: LightningModule) -> int:
    """How many arguments `training_step` takes besides the batch, as Lightning counts them."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise CaptureError(
            f"{type(module).__name__}.training_step takes dataloader_iter",
            hint="def training_step(self, batch, batch_idx)",
        )
    return int(is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2))


def require_supported(module: LightningModule) -> None:
    """Refuse what a compiled step would silently leave out."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise OptimizerError(
            f"{name} has automatic_optimization=False; a compiled step has its own backward",
            hint="return the loss from training_step, and one optimizer from configure_optimizers",
        )
    if is_overridden("backward", module):
        raise OptimizerError(
            f"{name}.backward would not be called: a compiled step has its own",
            hint="return from training_step the loss whose gradients are wanted",
        )


class BatchIndex(int):
    """Stands for `batch_idx` while a step is captured: it may be ignored, not used."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise CaptureError(
            f"the step uses batch_idx, which {_MOMENT}",
            hint="use it in on_train_batch_end(self, outputs, batch, batch_idx), or put what "
            "depends on it into the batch",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __index__ = _refuse
    __int__ = __float__ = __str__ = __repr__ = __format__ = __and__ = __or__ = _refuse
    __hash__ = int.__hash__


class _TrainerInside:
    """Stands for `self.trainer` while a step is captured."""

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_trainer(f"self.trainer.{name}")


def _refuse_trainer(what: str) -> NoReturn:
    raise CaptureError(
        f"the step uses {what}, which {_MOMENT}",
        hint="use it in a hook such as on_train_batch_end, or make it a buffer or part of the "
        "batch (on_before_batch_transfer)",
    )


def _is_metric(module: nn.Module) -> bool:
    return any(c.__name__ in ("Metric", "MetricCollection") for c in type(module).__mro__)


def _twin_class(base: type[Any]) -> type[Any]:
    """A subclass of the user's class whose `forward` is a step."""
    own = {
        name: value
        for name, value in vars(_Twin).items()
        if name not in ("__dict__", "__weakref__")
    }
    return type(
        base.__name__,
        (base,),
        {**own, "forward": _Twin.run_step, "_base": base, "__module__": base.__module__},
    )


class _Twin:
    """The members of a twin's class; `self` is a LightningModule."""

    carries_growth = True  # lists that grow in a step are in its recording
    carries_state_of = staticmethod(_is_metric)  # calls of metrics are in it, too
    captured_for_every_size = True  # a tape may hold sizes: self.log(…, batch_size=len(x))
    _base: type[Any]
    _tape: Tape
    _place: torch.device

    def run_step(  # not named `forward`: the place of a node is the user's innermost forward
        self: Any, batch: Any, step: str, num_arguments: int = 1, dataloader: int = 0
    ) -> dict[str, Any]:
        tape: Tape = self._tape
        tape.begin(self)
        before = snapshot(self)
        method = getattr(self, f"{step}_step")
        arguments = (BatchIndex(), dataloader)[:num_arguments]
        with _inside(self):
            returned = method(batch, *arguments)
        for path, items in growth(before, self):
            tape.add(path, "extend", [items], {})
        tape.end(returned)
        found: dict[str, Any] = {"tensors": tuple(tape.tensors)}
        if step == "training":
            found["loss"] = returned["loss"] if isinstance(returned, Mapping) else returned
        return found

    def log(self: Any, *args: Any, **kwargs: Any) -> None:
        self._tape.add(("",), "log", args, kwargs)

    def log_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        self._tape.add(("",), "log_dict", args, kwargs)

    def print(self: Any, *args: Any, **kwargs: Any) -> None:
        self._tape.add(("",), "print", args, kwargs)

    @property
    def device(self: Any) -> torch.device:
        place: torch.device = self._place
        return place

    @property
    def trainer(self: Any) -> Any:
        return _TrainerInside()

    @property
    def global_step(self: Any) -> int:
        _refuse_trainer("self.global_step")

    @property
    def current_epoch(self: Any) -> int:
        _refuse_trainer("self.current_epoch")

    @property
    def logger(self: Any) -> Any:
        _refuse_trainer("self.logger")

    @property
    def loggers(self: Any) -> Any:
        _refuse_trainer("self.loggers")


@contextlib.contextmanager
def _inside(twin: Any) -> Iterator[None]:
    """`self(x)` is the user's own forward, and calls of metrics are recorded."""
    vars(twin)["forward"] = types.MethodType(twin._base.forward, twin)
    metrics = [(path, found) for path, found in twin.named_modules() if _is_metric(found)]
    for path, metric in metrics:
        for name in _METRIC_CALLS:
            vars(metric)[name] = _Recorded(twin._tape, path, name)
    try:
        yield
    finally:
        del vars(twin)["forward"]


class _Recorded:
    """A metric's method that is called after the step instead."""

    def __init__(self, tape: Tape, path: str, name: str) -> None:
        self.tape, self.path, self.name = tape, path, name

    def __call__(self, *args: Any, **kwargs: Any) -> Deferred | None:
        what = f"self.{self.path}" if self.name in ("forward", "compute") else ""
        return self.tape.add((self.path,), self.name, args, kwargs, what)


# torchmetrics of a module: each rank has the whole batch's values, so none are joined.


def own_values(module: nn.Module, until: ExitStack) -> None:
    """Count every sample once: a metric's state is the same on all ranks."""
    for found in module.modules():
        metric: Any = found
        if hasattr(metric, "sync_on_compute") and hasattr(metric, "_to_sync"):
            until.callback(_set, metric, metric.sync_on_compute, metric.dist_sync_on_step)
            _set(metric, False, False)


def _set(metric: Any, on_compute: bool, on_step: bool) -> None:
    metric.sync_on_compute = metric._to_sync = on_compute
    metric.dist_sync_on_step = on_step
