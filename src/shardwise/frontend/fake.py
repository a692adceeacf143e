"""Copy a model's structure without its weights, on meta or with fake tensors.

Copies keep tying, `requires_grad`, train flags and hooks. The user's model is only read.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import BlockMask

from shardwise.frontend.hooks import copy_hooks

StandIn = Callable[[torch.Tensor], torch.Tensor]


def skeleton(model: nn.Module) -> nn.Module:
    """Return a structural copy of `model` on meta, from which later captures start.

    >>> skeleton(nn.Linear(2, 3)).weight.device
    device(type='meta')
    """
    return _copy_structure(model, lambda t: _empty_like(t, torch.device("meta")))


def fake_copy(model: nn.Module, device: torch.device, mode: FakeTensorMode) -> nn.Module:
    """Return a structural copy with fake tensors on the logical `device`."""
    with mode:
        return _copy_structure(model, lambda t: _empty_like(t, device))


def fake_tensor(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    """Return a new fake tensor for one tensor of the batch, even if the batch has it twice."""
    with mode:
        return _empty_like(tensor, device).requires_grad_(tensor.requires_grad)


def new_fake_mode() -> FakeTensorMode:
    """Return a mode in which numbers read from tensors are symbols, as `torch.export` needs it."""
    return FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True
    )


def has_data(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is real: neither fake nor on meta."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def logical_device(model: nn.Module, batch: list[torch.Tensor]) -> torch.device:
    """Return the device of the model's first tensor with data, then the batch's; else the CPU."""
    for tensor in (*model.parameters(), *model.buffers(), *batch):
        if tensor.device.type != "meta":
            return torch.device(tensor.device.type)
    return torch.device("cpu")


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _copy_structure(model: nn.Module, stand_in: StandIn) -> nn.Module:
    try:
        return copy.deepcopy(model, _memo(model, stand_in))
    except Exception:  # some attribute cannot be copied: share it
        return _share_what_cannot_be_copied(model, _memo(model, stand_in))


def _memo(model: nn.Module, stand_in: StandIn) -> dict[int, Any]:
    """Return a memo for `deepcopy` with a stand-in for every tensor, so that none is copied."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _parameter_like(parameter, stand_in)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = stand_in(buffer).requires_grad_(buffer.requires_grad)
    for module in model.modules():
        for tensor in plain_tensors(module):
            if id(tensor) not in memo:
                keep = has_data(tensor) and tensor.is_leaf
                memo[id(tensor)] = tensor if keep else stand_in(tensor)
    return memo


def _parameter_like(parameter: nn.Parameter, stand_in: StandIn) -> nn.Parameter:
    copied = nn.Parameter(stand_in(parameter.detach()), requires_grad=parameter.requires_grad)
    copied.__dict__.update({k: v for k, v in vars(parameter).items() if not k.startswith("_")})
    copy_hooks(parameter, copied)
    return copied


def plain_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors that are plain attributes, or in lists, dicts and block masks that are."""
    registered = ("_parameters", "_buffers", "_modules")
    values: list[Any] = [value for key, value in vars(module).items() if key not in registered]
    for _ in range(3):  # levels of nesting
        yield from (value for value in values if isinstance(value, torch.Tensor))
        values = [vars(v) if isinstance(v, BlockMask) else v for v in values]
        containers = [v for v in values if isinstance(v, dict | list | tuple)]
        values = [i for c in containers for i in (c.values() if isinstance(c, dict) else c)]


def _share_what_cannot_be_copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy as `deepcopy` does, but share attributes that cannot be copied."""
    if id(module) in memo:
        done: nn.Module = memo[id(module)]
        return done
    clone = module.__class__.__new__(module.__class__)
    memo[id(module)] = clone
    for key, value in vars(module).items():
        if key == "_modules":
            copied: Any = {
                name: None if child is None else _share_what_cannot_be_copied(child, memo)
                for name, child in value.items()
            }
        else:
            try:
                copied = copy.deepcopy(value, memo)
            except Exception:
                copied = value
        clone.__dict__[key] = copied
    return clone
