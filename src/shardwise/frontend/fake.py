"""A model's structure without its weights.

Tying, `requires_grad`, train flags and hooks are kept. The user's model is only read.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

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


# Attention masks of Hugging Face models as eager mode makes them.
#
# When `transformers` sees that it is traced, it gives up `is_causal=True` and builds a full mask:
# it fears other shapes than the traced ones and packed sequences that it cannot look for. Our
# graphs are for one shape, and positions that are counted up from 0 are known while tracing. So the
# patches here let it decide as in eager mode wherever that does not depend on the batch's data.


_MAX_NODES = 50


@contextlib.contextmanager
def eager_masks() -> Iterator[None]:
    """Patch `transformers.masking_utils`, if it is loaded; undone on the way out."""
    module: Any = sys.modules.get("transformers.masking_utils")
    names = ("is_torchdynamo_exporting", "find_packed_sequence_indices")
    if module is None or not all(hasattr(module, name) for name in names):
        yield
        return
    originals = {name: getattr(module, name) for name in names}
    find = originals["find_packed_sequence_indices"]

    def find_packed(position_ids: torch.Tensor) -> Any:
        return None if holds(_counts_up, position_ids) else find(position_ids)

    module.is_torchdynamo_exporting = lambda: False
    module.find_packed_sequence_indices = find_packed
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def holds(question: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
    """Whether `question` is surely true of a traced tensor, because no input has a part in it.

    The few nodes before the tensor are run with real data, outside of the trace.
    """
    mode = get_proxy_mode()
    slot: Any = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    if slot is None:
        return False
    try:
        with _disable_current_modes():
            return question(_run(slot.proxy.node, {}, [_MAX_NODES]))
    except (_Unknown, RuntimeError, TypeError):
        return False


def _counts_up(positions: torch.Tensor) -> bool:
    return bool(torch.all(torch.diff(positions, dim=-1) == 1))


class _Unknown(Exception):
    """The value depends on an input, or on too much."""


def _run(node: fx.Node, done: dict[fx.Node, Any], left: list[int]) -> Any:
    if node in done:
        return done[node]
    left[0] -= 1
    target: Any = node.target
    if left[0] < 0 or node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        raise _Unknown
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        raise _Unknown
    args = fx.node.map_arg(node.args, lambda n: _run(n, done, left))
    kwargs = dict(fx.node.map_arg(node.kwargs, lambda n: _run(n, done, left)))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    done[node] = target(*args, **kwargs)
    return done[node]
