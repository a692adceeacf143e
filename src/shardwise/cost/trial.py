"""What a local call launches and keeps, found by running it once on tensors without data.

Enters: the function and arguments of a `Step`, local types, and which operands need gradients.
Leaves: `CallCost`, cached by exactly these.

Every ATen call of forward, and of the backward that autograd makes of it, is recorded; what
autograd saves is told by whose memory it is. Attention counts as the fused kernel (`attention`),
functions of the runtime as the computation that they are locally (`local`). A call that cannot
be tried (its shapes depend on data, an operator has no rule for shapes) is guessed from its
bytes, with a note.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.cost import attention, local, shapes
from shardwise.cost.autocast import cast
from shardwise.cost.guess import guessed
from shardwise.cost.kernels import (
    CallCost,
    Kernel,
    Saved,
    kernels_of,
    op_info,
    tensors,
    touched_bytes,
)
from shardwise.cost.signature import Signature, call_signature
from shardwise.ir import TensorType, map_refs
from shardwise.ir.interpret import batch_norm
from shardwise.ir.schema import operator

CACHED_CALLS = 1 << 16  # signatures kept; a search over one model makes a few thousand


def call_cost(
    op: str,
    args: tuple[Any, ...],
    kwargs: Sequence[tuple[str, Any]] = (),
    types: Sequence[TensorType] = (),
    grads: frozenset[int] = frozenset(),
    parameters: frozenset[int] = frozenset(),
    **more: Any,
) -> CallCost:
    """The kernels of a local call and of its backward, and what is kept between them.

    Arguments are those of `call_signature`.
    """
    return cost_of(call_signature(op, args, kwargs, types, grads, parameters, **more))


@lru_cache(maxsize=CACHED_CALLS)
def cost_of(signature: Signature) -> CallCost:
    """The cost of a call, once per signature."""
    try:
        if attention.is_fused(signature):
            return attention.cost(signature)
        return _Trial(signature).run()
    except Exception as error:  # an operator may refuse meta tensors in any way
        reason = str(error).strip().split("\n")[0]
        return guessed(signature, f"{signature.op}: {type(error).__name__}: {reason}")


@dataclass(slots=True)
class _Backward:
    """One backward pass."""

    kernels: list[Kernel]
    gradients: tuple[Tensor | None, ...]
    peak: int


class _Trial:
    """One call on meta tensors."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.operands = _operands(signature)
        distinct = {id(t): t for t in self.operands}
        self.recorder = Recorder(list(distinct.values()))
        self.saved: list[Tensor] = []

    def run(self) -> CallCost:
        signature, recorder = self.signature, self.recorder
        function = signature.function or function_of(signature)
        function = cast(signature.op, function, signature.autocast)
        supply = iter(self.operands)
        args, kwargs = map_refs((signature.args, signature.kwargs), lambda _: next(supply))
        talks = local.Talks()
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, _same)
        with talks, recorder, torch.set_grad_enabled(bool(signature.grads)), saving:
            found = function(*args, **dict(kwargs))
        results = list(tensors(found))
        forward, kept = recorder.take(), recorder.live
        forward_peak = recorder.peak
        saved = self._saved(results)
        self.saved = []
        talks.turn()
        whole, weight = self._backward(results, talks)
        return CallCost(
            forward=tuple(forward),
            backward=tuple(whole.kernels),
            weight=weight,
            saved=saved,
            talks=talks.forward,
            talks_backward=talks.backward,
            forward_temporary_bytes=forward_peak - kept,
            backward_temporary_bytes=whole.peak,
            results=tuple(TensorType(tuple(t.shape), t.dtype) for t in results),
            strides=tuple(t.stride() for t in results),
            aliases=tuple(self._owner(t) for t in results),
            gradients=self._gradients(whole.gradients),
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor)
        return tensor

    def _owner(self, tensor: Tensor) -> int | None:
        key = tensor.untyped_storage()._cdata
        for position, operand in enumerate(self.operands):
            if operand.untyped_storage()._cdata == key:
                return position
        return None

    def _saved(self, results: list[Tensor]) -> tuple[Saved, ...]:
        """What autograd keeps, each storage once."""
        of_results = {t.untyped_storage()._cdata: i for i, t in reversed([*enumerate(results)])}
        found: dict[int, Saved] = {}
        for tensor in self.saved:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in found or not size:
                continue
            owner = self._owner(tensor)
            if owner is not None:
                found[key] = Saved(operand=owner, num_bytes=size)
            else:
                found[key] = Saved(result=of_results.get(key), num_bytes=size)
        return tuple(found.values())

    def _backward(
        self, results: list[Tensor], talks: local.Talks
    ) -> tuple[_Backward, tuple[Kernel, ...]]:
        """All of backward, and what of it only parameters need."""
        signature = self.signature
        wanted = {
            id(t): i
            for i, t in reversed([*enumerate(self.operands)])
            if i in signature.grads and t.requires_grad
        }
        ends = [t for t in results if t.requires_grad]
        if not wanted or not ends:
            return _Backward([], (), 0), ()
        seeds = [torch.empty_like(t, requires_grad=False) for t in ends]
        self.recorder.known(seeds)
        leaves = [self.operands[i] for i in sorted(wanted.values())]
        others = [t for i, t in enumerate(self.operands) if id(t) in wanted and wanted[id(t)] == i]
        others = [t for t in others if not self._is_parameter(t)]
        split = 0 < len(others) < len(leaves)
        with talks:
            whole = self._pass(ends, leaves, seeds)
        if split:
            rest = self._pass(ends, others, seeds)
            return whole, _difference(whole.kernels, rest.kernels)
        return whole, () if others else tuple(whole.kernels)

    def _is_parameter(self, tensor: Tensor) -> bool:
        places = [i for i, t in enumerate(self.operands) if t is tensor]
        return all(i in self.signature.parameters for i in places)

    def _pass(self, ends: list[Tensor], leaves: list[Tensor], seeds: list[Tensor]) -> _Backward:
        """The graph is retained, so that what is alive at the end was so before, or is new."""
        recorder = self.recorder
        recorder.begin_backward()
        with recorder:
            found = torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True)
        return _Backward(recorder.take(), found, max(recorder.peak - recorder.live, 0))

    def _gradients(self, found: tuple[Tensor | None, ...]) -> tuple[tuple[int, int], ...]:
        """New memory of the gradients, in the order of the operands that get one."""
        places: dict[int, int] = {}
        for i, t in enumerate(self.operands):
            if i in self.signature.grads and t.requires_grad:
                places.setdefault(id(t), i)
        pairs = zip(sorted(places.values()), found, strict=False)
        return tuple(
            (i, 0 if t is None or self.recorder.is_known(t) else touched_bytes(t)) for i, t in pairs
        )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _difference(whole: list[Kernel], rest: list[Kernel]) -> tuple[Kernel, ...]:
    """Kernels of `whole` that `rest` does without."""
    left = Counter(rest)
    found = []
    for kernel in whole:
        if left[kernel]:
            left[kernel] -= 1
        else:
            found.append(kernel)
    return tuple(found)


def _operands(signature: Signature) -> list[Tensor]:
    """A meta tensor for every operand; the same one for repeats."""
    made: dict[int, Tensor] = {}
    found = []
    for position, first in enumerate(signature.firsts):
        if first not in made:
            kind, stride = signature.types[first], signature.strides[first]
            if stride is None:
                made[first] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
            else:
                made[first] = torch.empty_strided(
                    kind.shape, stride, dtype=kind.dtype, device="meta"
                )
        if position in signature.grads and _differentiable(made[first].dtype):
            made[first].requires_grad_()
        found.append(made[first])
    return found


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def function_of(signature: Signature, device: str = "meta") -> Callable[..., Any]:
    """What a call runs; factories make their tensors on `device`."""
    if signature.op.startswith("rt."):
        return local.function(signature)
    if signature.op == "shardwise.batch_norm.default":
        return batch_norm
    found = operator(signature.op)
    if found is None:
        raise LookupError(f"operator {signature.op} is not registered in this process")
    if any(a.name == "device" for a in found._schema.arguments) and not signature.firsts:
        return lambda *args, **kwargs: found(*args, **{**kwargs, "device": device})
    return found  # type: ignore[no-any-return]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the kernels of every ATen call, and the bytes of storages while they live."""

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._kernels: list[Kernel] = []
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, Any] = {}
        self._known: set[int] = set()
        self._held: list[Tensor] = []
        self._in_backward = False
        self.known(operands)

    def known(self, given: list[Tensor]) -> None:
        """Storages that are there anyway: operands, and gradients that come in."""
        self._held += given
        self._known |= {t.untyped_storage()._cdata for t in given}

    def is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def begin_backward(self) -> None:
        self.peak, self._in_backward = self.live, True

    def take(self) -> list[Kernel]:
        """The kernels since the last time."""
        found, self._kernels = self._kernels, []
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        found = shapes.call(func, args, options)
        if func.is_view:
            return found
        if op_info(func).launches:
            self._kernels += kernels_of(func, args, options, found, backward=self._in_backward)
        for tensor in tensors(found):
            self._watch(tensor)
        return found

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        size = storage.nbytes()
        self._sizes[key] = size
        self._watches[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._watches.pop(key, None)
