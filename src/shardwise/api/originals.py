"""Guard the user's model after `parallelize`, which trains a copy of it.

While the parallel module lives, another `parallelize` of the same parameters is refused, the model
warns once when it is called for training, and training stops if its tensors were changed, because
that has no effect on the copy. All references are weak: nothing here outlives the parallel module.
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
from shardwise.runtime.user_model import sample_values

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
        if (claimed := _claimed_name(parameter)) is not None:
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


def _refuse_to_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer would update originals, which have no gradients, and do nothing."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]] if _CLAIMS else []
    claimed = {name: p for p in parameters if (name := _claimed_name(p)) is not None}
    if claimed and all(parameter.grad is None for parameter in claimed.values()):
        name = next(iter(claimed))
        raise ProgramError(
            f"torch.optim.{type(optimizer).__name__} steps {name} of a model that was given to "
            "sw.parallelize, which trains a copy of it: none of its parameters has a gradient",
            where=name,
            hint=f"sw.optimizer(pm, torch.optim.{type(optimizer).__name__}, …)",
        )


register_optimizer_step_pre_hook(_refuse_to_step)

_Tensors = dict[str, tuple[Callable[[], Any], int, torch.Tensor]]


class ChangeDetector:
    """Raise if a tensor of the original was changed or replaced after `parallelize`.

    The versions of all tensors are compared at every call. Writes through `.data` leave them as
    they were and show only in the values, of which a sample is compared at calls 1, 2, 4, 8, …
    1024, 2048, 3072, …, as are the identities of the tensors. Values that `pm` itself has copied,
    gathered or loaded are accepted.
    """

    def __init__(self, model: nn.Module, pm: ParallelModule) -> None:
        self._modules = [(path, weakref.ref(m)) for path, m in model.named_modules()]
        self._class_name, self._pm = type(model).__name__, weakref.ref(pm)
        self._calls = 0
        self._note(self._tensors())

    def _note(self, tensors: _Tensors) -> None:
        """Compare with these tensors from now on."""
        self._before = tensors
        self._refs = [ref for ref, _, _ in tensors.values()]
        self._versions = [version for _, version, _ in tensors.values()]

    def __call__(self) -> None:
        self._calls += 1
        is_due = self._calls % 1024 == 0 or not self._calls & (self._calls - 1)
        try:
            is_changed = [ref()._version for ref in self._refs] != self._versions
        except AttributeError:  # some tensors no longer exist
            is_changed = True
        if is_due or is_changed:
            self._compare(self._pm())

    def _compare(self, pm: ParallelModule | None) -> None:
        tensors = self._tensors()
        for name, (tensor, version, values) in tensors.items():
            if name not in self._before and not isinstance(tensor(), nn.Parameter):
                continue  # a buffer that the model's own forward has added
            original, known, before = self._before.get(name, (_nothing, version, values))
            same = original() is tensor() and version == known and _equal(before, values)
            if not same and pm is not None and not _equal(pm.exchanged.get(name), values):
                self._versions = []  # compare again at the next call, whatever was written
                raise ProgramError(
                    f"{name} of the {self._class_name} that was given to sw.parallelize was "
                    "changed, which has no effect on the copy that is being trained",
                    where=name,
                    hint="change pm.named_parameters() or pm.named_buffers(); or take all values "
                    "from the model: pm.load_state_dict(model.state_dict()); or use "
                    "copy.deepcopy(model) for other weights",
                )
        self._note(tensors)

    def _tensors(self) -> _Tensors:
        """Return every tensor with its version and some of its values, tied ones once."""
        tensors: _Tensors = {}
        names: dict[int, str] = {}
        for path, ref in self._modules:
            if (module := ref()) is None:
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and not tensor.is_meta and not tensor.is_inference():
                    key = names.setdefault(id(tensor), f"{path}.{name}" if path else name)
                    tensors[key] = (weakref.ref(tensor), tensor._version, sample_values(tensor))
        return tensors


def _equal(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    if a is None or (a.dtype, a.device) != (b.dtype, b.device):
        return False
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
