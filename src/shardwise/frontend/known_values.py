"""Answer Python's questions about the values of traced tensors.

A traced tensor has no data, so `bool(tensor)` and `tensor.item()` cannot be answered in general. A
tensor that `forward` computes from sizes and constants alone, such as a causal mask, has the same
value in every step: its nodes are run with data, outside of the trace, and Python goes on with the
answer. A tensor that also depends on the batch, or on buffers that `forward` does not change, is
evaluated on the example batch, and the answer becomes a guard: other batches are checked before
their step. Values that depend on parameters or random numbers stay unknown.
"""

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.frontend.errors import running_frame
from shardwise.frontend.fake import has_data
from shardwise.frontend.tracing import patched
from shardwise.ir.guards import QUESTIONS

_MAX_NODES = 50  # that are run to evaluate a tensor while tracing
_MAX_GUARDED_NODES = 500  # the same, of a tensor that depends on the batch
_MAX_ELEMENTS = 2**26  # of each tensor among them: a mask over 8192 positions
_MAX_CONTENTS = 4096  # elements of a tensor whose contents are guarded
_ASKED = {  # methods of tensors, and the question that a guard asks in their place
    **dict.fromkeys(("__bool__", "is_nonzero"), "bool"),
    **dict.fromkeys(("__int__", "__index__"), "int"),
    **dict.fromkeys(("__float__", "__complex__", "item", "tolist", "numpy"), "contents"),
}


class UnknownValue(Exception):
    """A traced tensor depends on an input or a random number, or on too many nodes."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that Python asked about a value of the batch, and its answer."""

    tensor: torch.Tensor  # traced, as it was when Python asked
    question: str  # a key of `QUESTIONS`
    answer: Any
    source: str  # the user's line


@dataclass(slots=True)
class Inquiry:
    """The data with which questions are answered during one trace, and the questions asked.

    Without `guarding`, only values that no input changes are known.
    """

    inputs: Sequence[torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    guarding: bool = False
    asked: list[Question] = field(default_factory=list)
    num_unanswered: int = 0
    _data: dict[fx.Node, torch.Tensor] = field(default_factory=dict)

    def begin(self, tensors: Sequence[torch.Tensor], model: nn.Module) -> None:
        """Find the traced inputs and buffers for which there are data."""
        self._data.clear()
        self.asked.clear()
        tracer: Any = getattr(get_proxy_mode(), "tracer", None)
        pairs = list(zip(tensors, self.inputs, strict=True))
        pairs += [(b, self.buffers[n]) for n, b in model.named_buffers() if n in self.buffers]
        for traced, data in pairs if self.guarding and tracer is not None else ():
            slot: Any = get_proxy_slot(traced, tracer, None)
            if slot is not None and has_data(data):
                self._data[slot.proxy.node] = data

    def answer(self, method: str, question: Callable[[torch.Tensor], Any], tensor: Any) -> Any:
        """Answer a question about a traced tensor, or raise `UnknownValue`."""
        value, depends = evaluate(tensor, self._data)
        with _disable_current_modes():
            if not depends:
                return question(value)
            if value.numel() > _MAX_CONTENTS and _ASKED[method] == "contents":
                raise UnknownValue
            try:
                answer, guarded = question(value), QUESTIONS[_ASKED[method]](value)
            except (RuntimeError, TypeError, ValueError) as error:
                raise UnknownValue from error
        frame = running_frame()
        copy = tensor.detach().clone()
        self.asked.append(Question(copy, _ASKED[method], guarded, str(frame or "forward")))
        return answer


def evaluate(
    tensor: torch.Tensor, data: Mapping[fx.Node, torch.Tensor] | None = None
) -> tuple[torch.Tensor, bool]:
    """Return the value of a traced tensor, and whether it depends on `data` of placeholders."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    slot: Any = get_proxy_slot(tensor, tracer, None) if tracer is not None else None
    if slot is None:
        raise UnknownValue
    with _disable_current_modes():
        try:
            return _run(slot.proxy.node, tracer.root, data or {})
        except (RuntimeError, TypeError) as error:
            raise UnknownValue from error


@contextlib.contextmanager
def known_values(inquiry: Inquiry) -> Iterator[None]:
    """Answer `bool(t)`, `t.item()` and the like with the known value of a traced tensor."""

    def answering(method: str, question: Callable[..., Any]) -> Callable[..., Any]:
        def answer(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(UnknownValue):
                return inquiry.answer(method, lambda t: question(t, *args, **kwargs), tensor)
            inquiry.num_unanswered += 1
            return question(tensor, *args, **kwargs)

        return answer

    asked = [(FakeTensor, name, answering(name, getattr(FakeTensor, name))) for name in _ASKED]
    patches = patched(*asked, *_comparisons())
    with patches, _transformers_of_torch(), _transformers_of_hugging_face():
        yield


def _comparisons() -> list[tuple[Any, str, Any]]:
    """Return patches of functions that compare traced tensors and return a bool."""

    def equal(a: Any, b: Any) -> bool:
        return bool(a.shape == b.shape and (a == b).all())

    def allclose(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(torch.isclose(a, b, *args, **kwargs).all())

    def if_traced(ours: Callable[..., bool], original: Callable[..., bool]) -> Callable[..., bool]:
        def compare(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
            traced = isinstance(a, FakeTensor) or isinstance(b, FakeTensor)
            return (ours if traced else original)(a, b, *args, **kwargs)

        return compare

    return [
        (owner, ours.__name__, if_traced(ours, getattr(owner, ours.__name__)))
        for owner in (torch, torch.Tensor)
        for ours in (equal, allclose)
    ]


def _run(node: fx.Node, root: nn.Module, data: Mapping[fx.Node, torch.Tensor]) -> tuple[Any, bool]:
    """Run a node with all that its value depends on, in the order of the trace.

    Return its value, and whether it depends on `data`. Nodes may write to their inputs.
    """
    needed = _dependencies(node, data)
    used = {n: tensor for n, tensor in data.items() if n in needed}
    depends = bool(used) or any(n.op == "get_attr" and not _is_literal(n) for n in needed)
    if len(needed) > (_MAX_GUARDED_NODES if depends else _MAX_NODES):
        raise UnknownValue
    values: dict[fx.Node, Any] = {
        n: tensor.detach().to("cpu", n.meta["val"].dtype, copy=True) for n, tensor in used.items()
    }

    def on_cpu(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return values[argument] if isinstance(argument, fx.Node) else argument

    for current in node.graph.nodes:
        if current in needed and current not in values:
            args, kwargs = fx.node.map_aggregate((current.args, current.kwargs), on_cpu)
            target: Any = current.target
            if current.op == "get_attr":
                values[current] = _literal(getattr(root, target))
            else:
                values[current] = target(*args, **kwargs)
    return values[node], depends


def _is_literal(node: fx.Node) -> bool:
    """Return whether a tensor is one of the code, as in `torch.tensor([1, 2])`."""
    return all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)


def _literal(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if data is None:
        raise UnknownValue
    return data


def _dependencies(node: fx.Node, data: Mapping[fx.Node, torch.Tensor]) -> set[fx.Node]:
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
        if current not in data:
            _check_known(current, len(needed), guarding=bool(data))
        memory |= _memory(current)
        pending += current.all_input_nodes
        pending += [n for n in writes if n not in needed and _memory(n) & memory]
    return needed


def _check_known(node: fx.Node, count: int, *, guarding: bool) -> None:
    """Raise if a node is an input, draws random numbers, or makes the evaluation too expensive."""
    if node.op == "get_attr":  # tensors outside the trace that are not literals may change
        is_known = guarding or _is_literal(node)
    elif isinstance(node.target, torch._ops.OpOverload):
        is_known = torch.Tag.nondeterministic_seeded not in node.target.tags
    else:
        is_known = node.target is operator.getitem
    is_large = any(tensor.numel() > _MAX_ELEMENTS for tensor in _tensors(node))
    if not is_known or is_large or count > _MAX_GUARDED_NODES:
        raise UnknownValue


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _memory(node: fx.Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(node)}


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
            value, _ = evaluate(mask)
            with _disable_current_modes():
                return detect(value, None, size)
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
            value, _ = evaluate(position_ids)
            with _disable_current_modes():
                if bool(torch.all(torch.diff(value, dim=-1) == 1)):
                    return None
        return find(position_ids)

    return patched(
        (module, "is_torchdynamo_exporting", lambda: False),
        (module, "find_packed_sequence_indices", find_packed),
    )
