"""The kernels that a local call launches and the memory it saves, from one run on meta tensors.

Every ATen call of forward, and of the backward that autograd makes of it, is recorded; saved
tensors are recognized by their storages. Attention counts as the fused kernel (`attention`);
operators of the runtime run as they are, on a mesh that only counts collectives (`runtime_call`).
A call that cannot be tried (its shapes depend on data, an operator has no rule for shapes) is
guessed from its bytes, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.cost.fused import attention_cost, is_fused_attention, is_fused_norm, norm_cost
from shardwise.cost.kernels import (
    MEMORY,
    CallCost,
    CollectiveCall,
    Kernel,
    Saved,
    kernels_of,
    op_info,
    tensors,
    touched_bytes,
)
from shardwise.cost.runtime_call import runtime_function
from shardwise.cost.signature import Signature, call_on_meta, call_signature, cast
from shardwise.cost.storages import StorageTracker
from shardwise.dtypes import dtype_name
from shardwise.ir import TensorType, map_refs
from shardwise.ir.interpret import batch_norm
from shardwise.ir.schema import operator

# Record the kernels that ATen calls launch, and the memory that they make.
#
# From the kernels of a backward pass it can tell which of them some gradients do not need.


@dataclass(slots=True)
class _Launch:
    """One kernel, with the storages that it reads and makes, by number."""

    kernel: Kernel
    reads: frozenset[int]
    makes: frozenset[int]


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """Record the kernels of every ATen call, and track the storages that calls make."""

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()
        self._launches: list[_Launch] = []
        self._known: set[int] = set()
        self._held: list[Tensor] = []
        self._in_backward = False
        self.known(operands)

    def known(self, given: list[Tensor]) -> None:
        """Leave out storages that exist anyway: operands, and gradients that come in."""
        self._held += given
        self._known |= {t.untyped_storage()._cdata for t in given}

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory exists anyway."""
        return tensor.untyped_storage()._cdata in self._known

    def begin_backward(self) -> None:
        """Start a new peak."""
        self.peak, self._in_backward = self.live, True

    def take(self) -> list[Kernel]:
        """Return the kernels since the last call."""
        found, self._launches = self._launches, []
        return [launch.kernel for launch in found]

    def without(self, gradients: list[Tensor]) -> tuple[Kernel, ...]:
        """Return the kernels since the last `take` that these gradients do not need."""
        needed = self._places(gradients)
        left = []
        for launch in reversed(self._launches):
            if needed.isdisjoint(launch.makes):
                left.append(launch.kernel)
            else:
                needed |= launch.reads
        return tuple(reversed(left))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        found = call_on_meta(func, args, options)
        if func.is_view:
            return found
        results = list(tensors(found))
        for tensor in results:
            if not self.is_known(tensor):
                self.track(tensor)
        if op_info(func).launches:
            kernels = kernels_of(func, args, options, found, backward=self._in_backward)
            self._note(kernels, (args, tuple(options.values())), found, results)
        return found

    def _note(
        self, kernels: tuple[Kernel, ...], given: Any, found: Any, results: list[Tensor]
    ) -> None:
        reads = frozenset(self._places(tensors(given)))
        if len(kernels) == 2:  # the first result, and the others: see `kernels_of`
            parts = [list(tensors(found[:1])), list(tensors(found[1:]))]
        else:
            parts = [results for _ in kernels]
        for kernel, part in zip(kernels, parts, strict=True):
            self._launches.append(_Launch(kernel, reads, frozenset(self._places(part))))

    def _places(self, given: Any) -> set[int]:
        """Return the numbers of storages that were made here."""
        found = (self.storages.get(t.untyped_storage()._cdata) for t in given)
        return {storage.number for storage in found if storage is not None}


# The cost of a call that could not be tried: every operand and result once, with the reason.


def guessed(signature: Signature, reason: str) -> CallCost:
    """Bytes of operands and results; backward reads both and their gradients, and keeps both."""
    operands = {first: signature.types[first] for first in signature.firsts}
    results = signature.results or tuple(operands.values())[:1]
    given = sum(t.num_bytes for t in operands.values())
    made = sum(t.num_bytes for t in results)
    main = max(results, key=lambda t: t.num_bytes, default=None)

    def kernel(suffix: str, size: int) -> tuple[Kernel, ...]:
        return (
            Kernel(
                op=signature.op.removeprefix("aten.").split(".")[0] + suffix,
                kind=MEMORY,
                flops=0.0,
                bytes=float(size),
                dtype=dtype_name(main.dtype) if main else "float32",
                shape=main.shape if main else (),
            ),
        )

    wanted = {signature.firsts[i] for i in signature.grads}
    wanted = {i for i in wanted if operands[i].dtype.is_floating_point}
    forward = kernel("", given + made)
    if not wanted:
        return CallCost(forward=forward, results=signature.results, note=reason)
    gradients = sum(operands[i].num_bytes for i in wanted)
    backward = kernel("_backward", given + 2 * made + gradients)
    saved = [Saved(operand=i, num_bytes=t.num_bytes) for i, t in operands.items()]
    saved += [Saved(result=i, num_bytes=t.num_bytes) for i, t in enumerate(signature.results)]
    return CallCost(
        forward=forward,
        backward=backward,
        weight=backward if wanted <= signature.parameters else (),
        saved=tuple(saved),
        results=signature.results,
        aliases=tuple(None for _ in signature.results),
        gradients=tuple((i, operands[i].num_bytes) for i in sorted(wanted)),
        note=reason,
    )


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
    """Return the cost of a call, computed once per signature."""
    try:
        if is_fused_attention(signature):
            return attention_cost(signature)
        if is_fused_norm(signature):
            return norm_cost(signature)
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
        collectives: list[CollectiveCall] = []
        function = signature.function or function_of(signature, collectives=collectives)
        function = cast(signature.op, function, signature.autocast)
        supply = iter(self.operands)
        args, kwargs = map_refs((signature.args, signature.kwargs), lambda _: next(supply))
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, _same)
        with recorder, torch.set_grad_enabled(bool(signature.grads)), saving:
            found = function(*args, **dict(kwargs))
        results = list(tensors(found))
        forward, kept = recorder.take(), recorder.live
        forward_peak = recorder.peak
        saved = self._saved(results)
        self.saved = []
        in_forward = len(collectives)
        whole, weight = self._backward(results)
        return CallCost(
            forward=tuple(forward),
            backward=tuple(whole.kernels),
            weight=weight,
            saved=saved,
            collectives=tuple(collectives[:in_forward]),
            backward_collectives=tuple(collectives[in_forward:]),
            forward_temporary_bytes=forward_peak - kept,
            backward_temporary_bytes=whole.peak,
            results=tuple(TensorType(tuple(t.shape), t.dtype) for t in results),
            strides=tuple(t.stride() for t in results),
            aliases=tuple(self._owner(t) for t in results),
            gradients=self._gradients(whole.gradients),
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        """Detach results: one that its own node saved would form a cycle that nothing frees."""
        self.saved.append(tensor)
        return tensor if tensor.is_leaf else tensor.detach()

    def _owner(self, tensor: Tensor) -> int | None:
        key = tensor.untyped_storage()._cdata
        for position, operand in enumerate(self.operands):
            if operand.untyped_storage()._cdata == key:
                return position
        return None

    def _saved(self, results: list[Tensor]) -> tuple[Saved, ...]:
        """Return what autograd saves, each storage once."""
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

    def _backward(self, results: list[Tensor]) -> tuple[_Backward, tuple[Kernel, ...]]:
        """Run backward; return all of it, and the kernels that only parameters need."""
        ends = [t for t in results if t.requires_grad]
        places = self._wanted()
        if not places or not ends:
            return _Backward([], (), 0), ()
        seeds = [torch.empty_like(t, requires_grad=False) for t in ends]
        recorder, leaves = self.recorder, [self.operands[i] for i in places]
        recorder.known(seeds)
        recorder.begin_backward()
        with recorder:  # the graph is retained: what is alive at the end was, or is new
            found = torch.autograd.grad(ends, leaves, seeds, retain_graph=True, allow_unused=True)
        others = [g for i, g in zip(places, found, strict=True) if not self._is_parameter(i)]
        weight: tuple[Kernel, ...] = ()
        if len(others) < len(places):
            weight = recorder.without([g for g in others if g is not None])
        return _Backward(recorder.take(), found, max(recorder.peak - recorder.live, 0)), weight

    def _wanted(self) -> list[int]:
        """Return the operands that get a gradient, each tensor once."""
        places: dict[int, int] = {}
        for i, t in enumerate(self.operands):
            if i in self.signature.grads and t.requires_grad:
                places.setdefault(id(t), i)
        return list(places.values())

    def _is_parameter(self, position: int) -> bool:
        same = [i for i, t in enumerate(self.operands) if t is self.operands[position]]
        return all(i in self.signature.parameters for i in same)

    def _gradients(self, found: tuple[Tensor | None, ...]) -> tuple[tuple[int, int], ...]:
        """Return the new memory of the gradients, in the order of the operands that get one."""
        pairs = zip(self._wanted(), found, strict=False)
        return tuple(
            (i, 0 if t is None or self.recorder.is_known(t) else touched_bytes(t)) for i, t in pairs
        )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _operands(signature: Signature) -> list[Tensor]:
    """Return a meta tensor for every operand; the same one for repeats."""
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


def function_of(
    signature: Signature, device: str = "meta", collectives: list[CollectiveCall] | None = None
) -> Callable[..., Any]:
    """Return what a call runs, which makes its tensors on `device`.

    Collectives of the runtime's operators are appended to `collectives`, if given.
    """
    if signature.op.startswith("rt."):
        return runtime_function(signature, device, [] if collectives is None else collectives)
    if signature.op == "shardwise.batch_norm.default":
        return batch_norm
    found = operator(signature.op)
    if found is None:
        raise LookupError(f"operator {signature.op} is not registered in this process")
    if any(a.name == "device" for a in found._schema.arguments) and not signature.firsts:
        return lambda *args, **kwargs: found(*args, **{**kwargs, "device": device})
    return found  # type: ignore[no-any-return]
