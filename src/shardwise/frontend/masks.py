"""Attention masks of Hugging Face models as eager mode makes them.

When `transformers` sees that it is traced, it gives up `is_causal=True` and builds a full mask:
it fears other shapes than the traced ones and packed sequences that it cannot look for. Our graphs
are for one shape, and positions that are counted up from 0 are known while tracing. So the patches
here let it decide as in eager mode wherever that does not depend on the batch's data.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

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
