"""A model's structure without its weights.

Enters: an `nn.Module` with real, fake or meta tensors. Leaves: a copy whose parameters and buffers
are stand-ins (meta or fake) and which shares nothing with the original but small constants.
Tying, `requires_grad`, train flags and hooks are kept. The user's model is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardwise.frontend.hooks import copy_hooks

StandIn = Callable[[torch.Tensor], torch.Tensor]


def skeleton(model: nn.Module) -> nn.Module:
    """Return a structural copy of `model` on meta: what later captures start from.

    >>> skeleton(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    return _copy_structure(model, _on_meta)


def fake_copy(model: nn.Module, device: torch.device, mode: FakeTensorMode) -> nn.Module:
    """Return a structural copy whose tensors are fake ones of the logical `device`."""
    with mode:
        return _copy_structure(model, lambda t: _empty_like(t, device))


def fake_tensor(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake stand-in for one tensor of the batch: never shared, even if the tensor is."""
    with mode:
        return _empty_like(tensor, device).requires_grad_(tensor.requires_grad)


def new_fake_mode() -> FakeTensorMode:
    """Return a mode in which numbers read from tensors are symbols, as `torch.export` wants it."""
    return FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True
    )


def has_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor is real: neither fake nor on meta."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def logical_device(model: nn.Module, batch: list[torch.Tensor]) -> torch.device:
    """Return the device of the model's first tensor with data, then the batch's; else the CPU."""
    for tensor in (*model.parameters(), *model.buffers(), *batch):
        if tensor.device.type != "meta":
            return torch.device(tensor.device.type)
    return torch.device("cpu")


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return _empty_like(tensor, torch.device("meta"))


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _copy_structure(model: nn.Module, stand_in: StandIn) -> nn.Module:
    try:
        return copy.deepcopy(model, _memo(model, stand_in))
    except Exception:  # an attribute that cannot be copied: share what cannot be
        return _share_what_cannot_be_copied(model, _memo(model, stand_in))


def _memo(model: nn.Module, stand_in: StandIn) -> dict[int, Any]:
    """`deepcopy`'s memo with a stand-in for every tensor, so that none is really copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _parameter_like(parameter, stand_in)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = stand_in(buffer).requires_grad_(buffer.requires_grad)
    for module in model.modules():
        for tensor in _plain_tensors(module):
            if id(tensor) not in memo:
                keep = has_data(tensor) and tensor.is_leaf
                memo[id(tensor)] = tensor if keep else stand_in(tensor)
    return memo


def _parameter_like(parameter: nn.Parameter, stand_in: StandIn) -> nn.Parameter:
    like = nn.Parameter(stand_in(parameter.detach()), requires_grad=parameter.requires_grad)
    like.__dict__.update({k: v for k, v in vars(parameter).items() if not k.startswith("_")})
    copy_hooks(parameter, like)
    return like


def _plain_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that are plain attributes, or in lists and dicts that are."""
    registered = ("_parameters", "_buffers", "_modules")
    stack = [value for key, value in vars(module).items() if key not in registered]
    depth = 0
    while stack and depth < 3:
        depth += 1
        deeper: list[Any] = []
        for value in stack:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, dict):
                deeper.extend(value.values())
            elif isinstance(value, list | tuple):
                deeper.extend(value)
        stack = deeper


def _share_what_cannot_be_copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Like `deepcopy`, but attributes that refuse to be copied are shared with the original."""
    if id(module) in memo:
        done: nn.Module = memo[id(module)]
        return done
    clone = module.__class__.__new__(module.__class__)
    memo[id(module)] = clone
    for key, value in vars(module).items():
        if key == "_modules":
            fresh: Any = {
                name: None if child is None else _share_what_cannot_be_copied(child, memo)
                for name, child in value.items()
            }
        else:
            try:
                fresh = copy.deepcopy(value, memo)
            except Exception:
                fresh = value
        clone.__dict__[key] = fresh
    return clone
