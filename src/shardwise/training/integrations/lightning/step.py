"""A LightningModule's step as a model that can be captured.

`step_model(module)` is a twin of the module with the same parameters under the same names, whose
`forward` is one of its steps. Inside it, logging and metrics are recorded on a tape, and what
changes from step to step without being a tensor of the batch (the index of the batch, the trainer)
is refused, because a captured step would keep its first value.

Enters: a LightningModule. Leaves: an `nn.Module`, and the batches that it takes.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.errors import CaptureError, OptimizerError
from shardwise.training.integrations.lightning.attributes import growth, snapshot
from shardwise.training.integrations.lightning.library import (
    LightningModule,
    is_overridden,
    is_param_in_hook_signature,
)
from shardwise.training.integrations.lightning.tape import Deferred, Tape

__all__ = ["follow", "require_supported", "step_batch", "step_model", "training_arguments"]

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
