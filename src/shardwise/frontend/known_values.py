"""Answer Python's questions about traced tensors whose values do not depend on the batch.

A traced tensor has no data, so `bool(tensor)` and `tensor.item()` cannot be answered in general. A
tensor that `forward` computes from sizes and constants alone, such as a causal mask, has the same
value in every step: its nodes are run with data, outside of the trace, and Python goes on with the
answer. Values of parameters, buffers and the batch may change between steps and stay unknown.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.frontend.tracing import patched

_MAX_NODES = 50  # that are run to evaluate a tensor while tracing
_MAX_ELEMENTS = 2**26  # of each tensor among them: a mask over 8192 positions
_QUESTIONS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")


class UnknownValue(Exception):
    """A traced tensor depends on an input or a random number, or on too many nodes."""


def ask(question: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Ask a question of a traced tensor's data; raise `UnknownValue` if that is not known."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    slot: Any = get_proxy_slot(tensor, tracer, None) if tracer is not None else None
    if slot is None:
        raise UnknownValue
    with _disable_current_modes():
        try:
            value = _run(slot.proxy.node, tracer.root)
        except (RuntimeError, TypeError) as error:
            raise UnknownValue from error
        return question(value)


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """Answer `bool(t)`, `t.item()` and the like with the known value of a traced tensor."""

    def answering(question: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def answer(tensor: torch.Tensor) -> Any:
            with contextlib.suppress(UnknownValue):
                return ask(question, tensor)
            return question(tensor)

        return answer

    asked = [(FakeTensor, name, answering(getattr(FakeTensor, name))) for name in _QUESTIONS]
    with patched(*asked), _transformers_of_torch(), _transformers_of_hugging_face():
        yield


def _run(node: fx.Node, root: torch.nn.Module) -> Any:
    """Run a node with all that its value depends on, in the order of the trace."""
    needed = _dependencies(node)
    values: dict[fx.Node, Any] = {}
    for current in node.graph.nodes:
        if current in needed:
            args = fx.node.map_arg(current.args, values.__getitem__)
            kwargs = fx.node.map_arg(current.kwargs, values.__getitem__)
            target: Any = current.target
            if current.op == "get_attr":
                values[current] = _literal(getattr(root, target))
            else:
                values[current] = target(*_on_cpu(args), **_on_cpu(kwargs))
    return values[node]


def _literal(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if data is None:
        raise UnknownValue
    return data


def _dependencies(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that a value depends on, including writes to the memory that it reads."""
    writes = [n for n in node.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    writes = [n for n in writes if n.target._schema.is_mutable]
    needed: set[fx.Node] = set()
    memory: set[int] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in needed:
            continue
        needed.add(current)
        _check_known(current, len(needed))
        memory |= _memory(current)
        pending += current.all_input_nodes
        pending += [n for n in writes if n not in needed and _memory(n) & memory]
    return needed


def _check_known(node: fx.Node, count: int) -> None:
    """Raise if a node is an input, draws random numbers, or makes the evaluation too expensive."""
    target: Any = node.target
    if count > _MAX_NODES:
        raise UnknownValue
    if node.op == "get_attr":
        # A literal, as in torch.tensor([1, 2]); other tensors outside the trace may change.
        if any(user.target is not torch.ops.aten.lift_fresh_copy.default for user in node.users):
            raise UnknownValue
    elif not isinstance(target, torch._ops.OpOverload):
        if target is not operator.getitem:
            raise UnknownValue
    elif torch.Tag.nondeterministic_seeded in target.tags:
        raise UnknownValue
    if any(tensor.numel() > _MAX_ELEMENTS for tensor in _tensors(node)):
        raise UnknownValue


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _memory(node: fx.Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(node)}


def _on_cpu(arguments: Any) -> Any:
    cpu = torch.device("cpu")
    if isinstance(arguments, dict):
        return {k: cpu if isinstance(v, torch.device) else v for k, v in arguments.items()}
    return [cpu if isinstance(value, torch.device) else value for value in arguments]


# ---------------------------------------------------------------- attention masks


@contextlib.contextmanager
def _transformers_of_torch() -> Iterator[None]:
    """Trace `nn.Transformer*` with masks of any origin.

    It compares each mask with a causal one to choose a faster kernel. That is a hint: without it
    the mask itself is applied, so "no" is right for a mask in the batch or in a buffer. The fused
    inference path of frozen layers looks at the padding and has no derivative; the ordinary path
    computes the same for all positions that are not padding.
    """
    detect = transformer._detect_is_causal_mask

    def detect_if_known(
        mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
    ) -> bool:
        if not isinstance(mask, FakeTensor) or is_causal is not None:
            return detect(mask, is_causal, size)
        try:
            return bool(ask(lambda known: detect(known, None, size), mask))
        except UnknownValue:
            return False

    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with patched((transformer, "_detect_is_causal_mask", detect_if_known)):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _transformers_of_hugging_face() -> contextlib.AbstractContextManager[None]:
    """Make `transformers`, if it is loaded, choose attention masks as in eager mode.

    When traced, it does not use `is_causal=True` but builds a full mask, since shapes may differ
    from the traced ones and sequences may be packed. Our graphs are for one shape, and positions
    that count up from 0 are known while tracing: then it can decide as in eager mode.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(module, "find_packed_sequence_indices", None)
    if find is None or not hasattr(module, "is_torchdynamo_exporting"):
        return contextlib.nullcontext()

    def find_packed(position_ids: torch.Tensor) -> Any:
        with contextlib.suppress(UnknownValue):
            if ask(lambda known: bool(torch.all(torch.diff(known, dim=-1) == 1)), position_ids):
                return None
        return find(position_ids)

    return patched(
        (module, "is_torchdynamo_exporting", lambda: False),
        (module, "find_packed_sequence_indices", find_packed),
    )
