"""Guard the user's model after `parallelize`, which trains a copy of it.

While the parallel module lives, another `parallelize` of the same parameters is refused, and the
model warns once when it is used for training or when its tensors are changed. All references are
weak: nothing here outlives the parallel module.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ProgramError
from shardwise.frontend.errors import user_stacklevel
from shardwise.runtime import ParallelModule

__all__ = ["ChangeDetector", "claim", "refuse_claimed"]

# id of a parameter -> the parameter, its name and the parallel module that trains its copy
_CLAIMS: dict[int, tuple[weakref.ref[Any], str, weakref.ref[ParallelModule]]] = {}
_HINT = (
    "one parallelize for all: sw.parallelize({name: module, …}, batch, plan, steps={name: step, …})"
    "; or delete the first parallel module (del pm) before you make the next"
)


def refuse_claimed(model: nn.Module) -> None:
    """Raise if a living parallel module already trains a copy of one of these parameters."""
    if any(_claimed_name(parameter) for parameter in model.parameters()):
        gc.collect()  # an unreachable parallel module may still await collection
    for name, parameter in model.named_parameters():
        claimed = _claimed_name(parameter)
        if claimed is not None:
            raise ProgramError(
                f"another parallel module already trains a copy of this parameter, under the name "
                f"{claimed!r}: the two copies would drift apart",
                where=name,
                hint=_HINT,
            )


def _claimed_name(parameter: torch.Tensor) -> str | None:
    """Return the name under which a living parallel module trains a copy of a parameter."""
    original, name, owner = _CLAIMS.get(id(parameter), (_nothing, "", _nothing))
    return name if original() is parameter and owner() is not None else None


def claim(model: nn.Module, pm: ParallelModule) -> ChangeDetector:
    """Record that `pm` trains a copy of this model's parameters, and make the model warn.

    The returned detector must be called at every step.
    """
    owner = weakref.ref(pm)
    pm.store.original_name = _claimed_name
    named = list(model.named_parameters())
    _CLAIMS.update({id(p): (weakref.ref(p), name, owner) for name, p in named})
    roots = model.values() if isinstance(model, nn.ModuleDict) else [model]
    handles = [root.register_forward_pre_hook(_WarnWhenTrained(root)) for root in roots]
    weakref.finalize(pm, _release, [id(parameter) for _, parameter in named], handles)
    return ChangeDetector(model, pm)


def _release(keys: list[int], handles: list[Any]) -> None:
    for key in keys:
        _CLAIMS.pop(key, None)
    for handle in handles:
        handle.remove()


_warned: weakref.WeakSet[ParallelModule] = weakref.WeakSet()


def _warn_when_stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warn once if an optimizer steps parameters of an original, not of the trained copy."""
    for group in optimizer.param_groups if _CLAIMS else ():
        for parameter in group["params"]:
            name = _claimed_name(parameter)
            pm = _CLAIMS[id(parameter)][2]() if name is not None else None
            if pm is not None and pm not in _warned:
                _warned.add(pm)
                warnings.warn(
                    f"torch.optim.{type(optimizer).__name__} steps {name} of a model that was "
                    "given to sw.parallelize, which trains a copy of it: use "
                    "sw.optimizer(pm, cls, …)",
                    stacklevel=user_stacklevel(),
                )


register_optimizer_step_pre_hook(_warn_when_stepped)


class ChangeDetector:
    """Warn once when a tensor of the original is changed or replaced after `parallelize`.

    Training loops repeat themselves, so of the steps at which it is called it looks at 1, 2, 4, 8,
    … 64, 128, 192, …. A write that leaves the tensor's version as it was shows only in its values;
    comparing a sample of them takes longer: at steps 1, 2, 4, 8, … 1024, 2048, 3072, ….
    """

    def __init__(self, model: nn.Module, pm: ParallelModule) -> None:
        self._modules = [(path, weakref.ref(m)) for path, m in model.named_modules()]
        self._class_name, self._pm = type(model).__name__, weakref.ref(pm)
        self._calls, self._copies = 0, pm.copies
        self._before = self._tensors()

    def __call__(self) -> None:
        self._calls += 1
        is_power_of_two = not self._calls & (self._calls - 1)
        if self._calls % 64 and not is_power_of_two:
            return
        pm = self._pm()
        if pm is None or pm.copies != self._copies:  # the parallel module itself changed it
            self._copies, self._before = pm.copies if pm is not None else 0, self._tensors()
            return
        with_samples = self._calls % 1024 == 0 or is_power_of_two
        for name, (tensor, version, sample) in self._tensors(with_samples).items():
            original, known, values = self._before.get(name, (_nothing, version, sample))
            same = original() is tensor() and version == known
            if same and (values is None or sample is None or _equal(values, sample)):
                continue
            self._calls, self._modules = 0, []  # warn once
            warnings.warn(
                f"{name} of the {self._class_name} that was given to sw.parallelize was changed, "
                "which has no effect on training: change pm.named_parameters() or "
                "pm.named_buffers(), or take all values from the model: "
                "pm.load_state_dict(model.state_dict())",
                stacklevel=user_stacklevel(),
            )
            return

    def _tensors(
        self, with_samples: bool = True
    ) -> dict[str, tuple[Callable[[], Any], int, torch.Tensor | None]]:
        """Return every tensor with its version and, `with_samples`, some of its values."""
        tensors: dict[str, tuple[Callable[[], Any], int, torch.Tensor | None]] = {}
        for path, ref in self._modules:
            module = ref()
            if module is None:
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.is_meta or tensor.is_inference():
                    continue
                sample = None
                plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
                if with_samples and plain and tensor.is_contiguous():
                    flat = tensor.detach().reshape(-1)
                    sample = flat[:: max(1, len(flat) // 64)].clone()
                key = f"{path}.{name}" if path else name
                tensors[key] = (weakref.ref(tensor), tensor._version, sample)
        return tensors


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # NaNs differ from themselves; with equal positions of NaNs, assume that nothing changed.
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and bool(a.isnan().any()))


class _WarnWhenTrained:
    """A hook that warns once when the original is called for training; copies of it are silent."""

    def __init__(self, original: nn.Module | None) -> None:
        self.original: Callable[[], Any] = _nothing if original is None else weakref.ref(original)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module is not self.original() or not (module.training and torch.is_grad_enabled()):
            return
        self.original = _nothing
        warnings.warn(
            f"this {type(module).__name__} was given to sw.parallelize, which trains a copy of it: "
            "the weights of this one stay as they were. Train with pm.train_step(batch); "
            "pm.copy_to(model) copies the trained weights back",
            stacklevel=user_stacklevel(),
        )

    def __reduce__(self) -> tuple[Any, ...]:  # of pickle and of copy.deepcopy
        return _WarnWhenTrained, (None,)


def _nothing() -> None:
    return None
