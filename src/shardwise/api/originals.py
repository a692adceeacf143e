"""The user's own model after `parallelize`: whose copy is trained, and who says so.

Enters: the model and the `ParallelModule` made of it. Leaves: nothing; while that module lives,
another `parallelize` of the same parameters is refused, and the model warns once when it is used
for training. Everything here is held by weak references and goes with the parallel module.
"""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ShardwiseError
from shardwise.runtime import ParallelModule

__all__ = ["claim", "refuse_shared"]

# id of a parameter -> the parameter, its name and the parallel module that trains its copy
_CLAIMS: dict[int, tuple[weakref.ref[Any], str, weakref.ref[ParallelModule]]] = {}
_HINT = (
    "one parallelize for all: sw.parallelize({name: module, …}, batch, plan, steps={name: step, …})"
    "; or let go of the first parallel module (del pm) before the next"
)


def refuse_shared(model: nn.Module) -> None:
    """Raise if a parallel module that is still there trains one of these parameters."""
    if any(_claim(parameter) for parameter in model.parameters()):
        gc.collect()  # one that nobody holds may be waiting for it
    for name, parameter in model.named_parameters():
        found = _claim(parameter)
        if found is not None:
            raise ShardwiseError(
                f"a parallel module already trains a copy of this parameter, there named "
                f"{found!r}: two copies would be trained apart",
                where=name,
                hint=_HINT,
            )


def _claim(parameter: torch.Tensor) -> str | None:
    held = _CLAIMS.get(id(parameter))
    if held is None or held[0]() is not parameter or held[2]() is None:
        return None
    return held[1]


def claim(model: nn.Module, pm: ParallelModule) -> None:
    """Note that `pm` trains a copy of this model's parameters, and let the model say so."""
    owner = weakref.ref(pm)
    pm.store.original_name = _claim
    keys = []
    for name, parameter in model.named_parameters():
        keys.append(id(parameter))
        _CLAIMS[id(parameter)] = (weakref.ref(parameter), name, owner)
    roots = model.values() if isinstance(model, nn.ModuleDict) else [model]
    handles = [root.register_forward_pre_hook(_Notice(root)) for root in roots]
    weakref.finalize(pm, _release, keys, handles)


def _release(keys: list[int], handles: list[Any]) -> None:
    for key in keys:
        _CLAIMS.pop(key, None)
    for handle in handles:
        handle.remove()


_stepped: weakref.WeakSet[ParallelModule] = weakref.WeakSet()


def _warn_of_originals(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Say once that an optimizer steps parameters of a model that is not what is trained."""
    for group in optimizer.param_groups if _CLAIMS else ():
        for parameter in group["params"]:
            name = _claim(parameter)
            pm = _CLAIMS[id(parameter)][2]() if name is not None else None
            if pm is not None and pm not in _stepped:
                _stepped.add(pm)
                warnings.warn(
                    f"torch.optim.{type(optimizer).__name__} steps {name} of a model that was "
                    "given to sw.parallelize, which is not what is being trained: use "
                    "sw.optimizer(pm, cls, …)",
                    stacklevel=_user_level(),
                )


register_optimizer_step_pre_hook(_warn_of_originals)


class _Notice:
    """A hook that warns once when the original is called for training; copies of it are silent."""

    def __init__(self, original: nn.Module) -> None:
        self.original: Callable[[], nn.Module | None] = weakref.ref(original)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is not self.original() or not (module.training and torch.is_grad_enabled()):
            return
        self.original = _nothing
        warnings.warn(
            f"this {type(module).__name__} was given to sw.parallelize and is not what is being "
            "trained: its weights stay as they were. Train with pm.train_step(batch); "
            "pm.copy_to(model) brings the trained weights here",
            stacklevel=_user_level(),
        )

    def __deepcopy__(self, memo: Any) -> _Notice:
        return _silent()

    def __reduce__(self) -> tuple[Any, ...]:
        return _silent, ()


def _user_level() -> int:
    """The `stacklevel` of the first frame that is not torch's, seen from the caller."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    inside = (str(Path(torch.__file__).parent), __file__)
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def _nothing() -> None:
    return None


def _silent() -> _Notice:
    notice = _Notice.__new__(_Notice)
    notice.original = _nothing
    return notice
