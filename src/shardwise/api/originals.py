"""The user's model after `parallelize`, which trains a copy of it: claims and warnings.

Enters: the model and the `ParallelModule` made of it. Leaves: nothing; while that module lives,
another `parallelize` of the same parameters is refused, and the model warns once when it is used
for training or when its tensors are changed. Everything here is held by weak references and goes
with the parallel module.
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

from shardwise.errors import ProgramError
from shardwise.runtime import ParallelModule

__all__ = ["Notice", "claim", "refuse_shared", "user_level"]

# id of a parameter -> the parameter, its name and the parallel module that trains its copy
_CLAIMS: dict[int, tuple[weakref.ref[Any], str, weakref.ref[ParallelModule]]] = {}
_HINT = (
    "one parallelize for all: sw.parallelize({name: module, …}, batch, plan, steps={name: step, …})"
    "; or delete the first parallel module (del pm) before you make the next"
)


def refuse_shared(model: nn.Module) -> None:
    """Raise if a parallel module that is still there trains one of these parameters."""
    if any(_claim(parameter) for parameter in model.parameters()):
        gc.collect()  # one that nobody holds may be waiting for it
    for name, parameter in model.named_parameters():
        found = _claim(parameter)
        if found is not None:
            raise ProgramError(
                f"another parallel module already trains a copy of this parameter, under the name "
                f"{found!r}: the two copies would drift apart",
                where=name,
                hint=_HINT,
            )


def _claim(parameter: torch.Tensor) -> str | None:
    held = _CLAIMS.get(id(parameter))
    if held is None or held[0]() is not parameter or held[2]() is None:
        return None
    return held[1]


def claim(model: nn.Module, pm: ParallelModule) -> Notice:
    """Note that `pm` trains a copy of this model's parameters, and let the model say so.

    The result is to be called now and then.
    """
    owner = weakref.ref(pm)
    pm.store.original_name = _claim
    keys = []
    for name, parameter in model.named_parameters():
        keys.append(id(parameter))
        _CLAIMS[id(parameter)] = (weakref.ref(parameter), name, owner)
    roots = model.values() if isinstance(model, nn.ModuleDict) else [model]
    handles = [root.register_forward_pre_hook(_Called(root)) for root in roots]
    weakref.finalize(pm, _release, keys, handles)
    return Notice(model, pm)


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
                    "given to sw.parallelize, which trains a copy of it: use "
                    "sw.optimizer(pm, cls, …)",
                    stacklevel=user_level(),
                )


register_optimizer_step_pre_hook(_warn_of_originals)


class Notice:
    """Warns once when a tensor of the original is changed or replaced after `parallelize`.

    Called at every step, it looks at steps 1, 2, 4, 8, … 64, 128, 192, …: loops repeat themselves.
    A change that leaves no trace in a tensor's version is found by comparing some of its values,
    which takes longer: at steps 1, 2, 4, 8, … 1024, 2048, 3072, ….
    """

    def __init__(self, model: nn.Module, pm: ParallelModule) -> None:
        self._modules = [(path, weakref.ref(m)) for path, m in model.named_modules()]
        self._kind, self._pm = type(model).__name__, weakref.ref(pm)
        self._calls, self._copies = 0, pm.copies
        self._before = self._take()

    def __call__(self) -> None:
        self._calls += 1
        if self._calls % 64 and self._calls & (self._calls - 1):
            return
        samples = self._calls % 1024 == 0 or not self._calls & (self._calls - 1)
        pm = self._pm()
        if pm is None or pm.copies != self._copies:  # what we have changed ourselves
            self._copies, self._before = pm.copies if pm is not None else 0, self._take()
            return
        for name, (tensor, version, sample) in self._take(samples).items():
            original, known, values = self._before.get(name, (_nothing, version, sample))
            same = original() is tensor() and version == known
            if same and (values is None or sample is None or _equal(values, sample)):
                continue
            self._calls, self._modules = 0, []  # once
            warnings.warn(
                f"{name} of the {self._kind} that was given to sw.parallelize was changed, which "
                "has no effect on training: change pm.named_parameters() or pm.named_buffers(), "
                "or take all values from the model: pm.load_state_dict(model.state_dict())",
                stacklevel=user_level(),
            )
            return

    def _take(
        self, samples: bool = True
    ) -> dict[str, tuple[Callable[[], Any], int, torch.Tensor | None]]:
        """Every tensor with its version and, with `samples`, a few of its values."""
        found: dict[str, tuple[Callable[[], Any], int, torch.Tensor | None]] = {}
        for path, ref in self._modules:
            module = ref()
            if module is None:
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.is_meta or tensor.is_inference():
                    continue
                sample = None
                if samples and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else None
                    sample = flat[:: max(1, len(flat) // 64)].clone() if flat is not None else None
                key = f"{path}.{name}" if path else name
                found[key] = (weakref.ref(tensor), tensor._version, sample)
        return found


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and bool(a.isnan().any()))


class _Called:
    """A hook that warns once when the original is called for training; copies of it are silent."""

    def __init__(self, original: nn.Module) -> None:
        self.original: Callable[[], nn.Module | None] = weakref.ref(original)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is not self.original() or not (module.training and torch.is_grad_enabled()):
            return
        self.original = _nothing
        warnings.warn(
            f"this {type(module).__name__} was given to sw.parallelize, which trains a copy of it: "
            "the weights of this one stay as they were. Train with pm.train_step(batch); "
            "pm.copy_to(model) copies the trained weights back",
            stacklevel=user_level(),
        )

    def __deepcopy__(self, memo: Any) -> _Called:
        return _silent()

    def __reduce__(self) -> tuple[Any, ...]:
        return _silent, ()


def user_level() -> int:
    """The `stacklevel` of the first frame that is not torch's or ours, seen from the caller."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def _nothing() -> None:
    return None


def _silent() -> _Called:
    notice = _Called.__new__(_Called)
    notice.original = _nothing
    return notice
