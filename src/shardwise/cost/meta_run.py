"""Run a local call on meta tensors to record the kernels it launches and the memory it saves.

Every ATen call of forward, and of the backward that autograd derives from it, is recorded; saved
tensors are recognized by their storages. Attention counts as the fused kernel (`cost.fused`);
operators of the runtime run unchanged, on a mesh that only counts collectives. A call that cannot
run (its shapes depend on data, or an operator has no meta kernel) is guessed from its bytes, with a
note.
"""

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import runtime as rt
from shardwise.cost.fused import attention_cost, is_fused_attention, is_fused_norm, norm_cost
from shardwise.cost.kernels import (
    CallCost,
    CollectiveCall,
    Kernel,
    Saved,
    contiguous,
    kernels_of,
    op_info,
    touched_bytes,
)
from shardwise.cost.signature import Signature, call_on_meta, under_autocast
from shardwise.dtypes import dtype_name
from shardwise.ir import TensorType, map_refs
from shardwise.ir.operators import batch_norm, operator, tensors
from shardwise.runtime.mesh import Axis
from shardwise.runtime.rng import Rng, Splits
from shardwise.runtime.splits import Of, full_length
from shardwise.runtime.transport import Group, Pending, Transport
from shardwise.runtime.transport.fake import FakeTransport
from shardwise.sharding.rule import MeshAxis
from shardwise.shares import Shares


@dataclass(slots=True, eq=False)
class Storage:
    """One live storage; `kind` is its purpose, once that is known."""

    number: int  # addresses are reused, numbers are not
    size: int = 0
    kind: str | None = None
    watch: Any = field(default=None, repr=False)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track the storages of tensors, and the sum of their sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0  # bytes
        self.storages: dict[int, Storage] = {}  # by address
        self._counter = itertools.count()

    def track(self, tensor: Tensor) -> Storage:
        """Return the record of a tensor's storage, with its current size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self.storages.get(key)
        if record is None:
            record = self.storages[key] = Storage(next(self._counter))
            free = lambda _: self.resize(self.storages.pop(key), 0)  # noqa: E731
            record.watch = weakref.ref(storage, free)
        self.resize(record, storage.nbytes())
        return record

    def resize(self, storage: Storage, size: int) -> None:
        """Set the size of a storage."""
        self.live += size - storage.size
        self.peak = max(self.peak, self.live)
        storage.size = size


# ------------------------------------------------------------ kernels
@dataclass(slots=True)
class _Launch:
    """One kernel, with the storages that it reads and writes, by number."""

    kernel: Kernel
    reads: frozenset[int]
    writes: frozenset[int]


class Recorder(StorageTracker):  # type: ignore[no-untyped-call]
    """Record the kernels of every ATen call, and track the storages that calls allocate."""

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()
        self._launches: list[_Launch] = []
        self._inputs: list[Tensor] = []  # referenced so that their addresses are not reused
        self._input_keys: set[int] = set()
        self._in_backward = False
        self.add_inputs(operands)

    def add_inputs(self, inputs: list[Tensor]) -> None:
        """Do not track the storages of these tensors: operands, or gradients of results."""
        self._inputs += inputs
        self._input_keys |= {t.untyped_storage()._cdata for t in inputs}

    def is_input(self, tensor: Tensor) -> bool:
        """Return whether the tensor shares the memory of an input."""
        return tensor.untyped_storage()._cdata in self._input_keys

    def begin_backward(self) -> None:
        """Start a new peak."""
        self.peak, self._in_backward = self.live, True

    def take(self) -> list[Kernel]:
        """Return the kernels since the last call."""
        launches, self._launches = self._launches, []
        return [launch.kernel for launch in launches]

    def unneeded(self, gradients: list[Tensor]) -> tuple[Kernel, ...]:
        """Return the kernels since the last `take` that these gradients do not need."""
        needed = self._numbers(gradients)
        kernels = []
        for launch in reversed(self._launches):
            if needed.isdisjoint(launch.writes):
                kernels.append(launch.kernel)
            else:
                needed |= launch.reads
        return tuple(reversed(kernels))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        result = call_on_meta(func, args, options)
        if func.is_view:
            return result
        results = list(tensors(result))
        for tensor in results:
            if not self.is_input(tensor):
                self.track(tensor)
        if op_info(func).launches:
            kernels = kernels_of(func, args, options, result, backward=self._in_backward)
            reads = frozenset(self._numbers(tensors((args, tuple(options.values())))))
            parts = [results for _ in kernels]
            if len(kernels) == 2:  # the first result, and the others: see `kernels_of`
                parts = [list(tensors(result[:1])), list(tensors(result[1:]))]
            for kernel, part in zip(kernels, parts, strict=True):
                self._launches.append(_Launch(kernel, reads, frozenset(self._numbers(part))))
        return result

    def _numbers(self, operands: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the tracked storages among those of `operands`."""
        storages = (self.storages.get(t.untyped_storage()._cdata) for t in operands)
        return {storage.number for storage in storages if storage is not None}


def guess(signature: Signature, reason: str) -> CallCost:
    """Return a cost guessed from bytes; operands and results are saved for backward."""
    operands = {first: signature.types[first] for first in signature.firsts}
    results = signature.results or tuple(operands.values())[:1]
    operand_bytes = sum(t.num_bytes for t in operands.values())
    result_bytes = sum(t.num_bytes for t in results)
    main = max(results, key=lambda t: t.num_bytes, default=None)

    def kernel(suffix: str, num_bytes: int) -> tuple[Kernel, ...]:
        return (
            Kernel(
                op=signature.op.removeprefix("aten.").split(".")[0] + suffix,
                bytes=float(num_bytes),
                dtype=dtype_name(main.dtype) if main else "float32",
                shape=main.shape if main else (),
            ),
        )

    differentiated = {signature.firsts[i] for i in signature.grads}
    differentiated = {i for i in differentiated if operands[i].dtype.is_floating_point}
    forward = kernel("", operand_bytes + result_bytes)
    if not differentiated:
        return CallCost(forward=forward, results=signature.results, note=reason)
    gradient_bytes = sum(operands[i].num_bytes for i in differentiated)
    backward = kernel("_backward", operand_bytes + 2 * result_bytes + gradient_bytes)
    saved = [Saved(operand=i, num_bytes=t.num_bytes) for i, t in operands.items()]
    saved += [Saved(result=i, num_bytes=t.num_bytes) for i, t in enumerate(signature.results)]
    return CallCost(
        forward=forward,
        backward=backward,
        weight=backward if differentiated <= signature.parameters else (),
        saved=tuple(saved),
        results=signature.results,
        aliases=tuple(None for _ in signature.results),
        gradients=tuple((i, operands[i].num_bytes) for i in sorted(differentiated)),
        note=reason,
    )


CACHED_CALLS = 1 << 16  # signatures; a search over one model has a few thousand


@lru_cache(maxsize=CACHED_CALLS)
def cost_of(signature: Signature) -> CallCost:
    """Return the kernels of a local call and of its backward, and the memory saved between them."""
    try:
        if is_fused_attention(signature):
            return attention_cost(signature)
        if is_fused_norm(signature):
            return norm_cost(signature)
        return _MetaRun(signature).run()
    except Exception as error:  # operators without a meta kernel raise errors of many types
        reason = str(error).strip().split("\n")[0]
        return guess(signature, f"{signature.op}: {type(error).__name__}: {reason}")


class _MetaRun:
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
        function = under_autocast(signature.op, function, signature.autocast)
        supply = iter(self.operands)
        args, kwargs = map_refs((signature.args, signature.kwargs), lambda _: next(supply))
        saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        with recorder, torch.set_grad_enabled(bool(signature.grads)), saving:
            result = function(*args, **dict(kwargs))
        results = list(tensors(result))
        cost = CallCost(
            forward=tuple(recorder.take()),
            saved=self._saved(results),
            collectives=tuple(collectives),
            forward_temporary_bytes=recorder.peak - recorder.live,
            results=tuple(TensorType(tuple(t.shape), t.dtype) for t in results),
            strides=tuple(t.stride() for t in results),
            aliases=tuple(self._owner(t) for t in results),
        )
        self.saved = []
        cost = self._with_backward(cost, results)
        return replace(cost, backward_collectives=tuple(collectives[len(cost.collectives) :]))

    def _pack(self, tensor: Tensor) -> Tensor:
        """Detach results: one that its own node saves would form a cycle that is never freed."""
        self.saved.append(tensor)
        return tensor if tensor.is_leaf else tensor.detach()

    def _owner(self, tensor: Tensor) -> int | None:
        key = tensor.untyped_storage()._cdata
        keys = [operand.untyped_storage()._cdata for operand in self.operands]
        return keys.index(key) if key in keys else None

    def _saved(self, results: list[Tensor]) -> tuple[Saved, ...]:
        """Return the memory that autograd saves, each storage once."""
        of_results = {t.untyped_storage()._cdata: i for i, t in reversed([*enumerate(results)])}
        saved: dict[int, Saved] = {}
        for tensor in self.saved:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in saved or not size:
                continue
            owner = self._owner(tensor)
            if owner is not None:
                saved[key] = Saved(operand=owner, num_bytes=size)
            else:
                saved[key] = Saved(result=of_results.get(key), num_bytes=size)
        return tuple(saved.values())

    def _with_backward(self, cost: CallCost, results: list[Tensor]) -> CallCost:
        ends = [t for t in results if t.requires_grad]
        positions = self._differentiated()
        if not positions or not ends:
            return cost
        seeds = [torch.empty_like(t, requires_grad=False) for t in ends]
        recorder, leaves = self.recorder, [self.operands[i] for i in positions]
        recorder.add_inputs(seeds)
        recorder.begin_backward()
        with recorder:  # the graph is retained, so that backward frees nothing of forward
            gradients = torch.autograd.grad(
                ends, leaves, seeds, retain_graph=True, allow_unused=True
            )
        others = [g for i, g in zip(positions, gradients, strict=True) if not self._is_parameter(i)]
        weight: tuple[Kernel, ...] = ()
        if len(others) < len(positions):
            weight = recorder.unneeded([g for g in others if g is not None])
        return replace(
            cost,
            backward=tuple(recorder.take()),
            weight=weight,
            backward_temporary_bytes=max(recorder.peak - recorder.live, 0),
            gradients=tuple(
                (i, 0 if t is None or recorder.is_input(t) else touched_bytes(t))
                for i, t in zip(positions, gradients, strict=True)
            ),
        )

    def _differentiated(self) -> list[int]:
        """Return the operands that get a gradient, each tensor once."""
        positions: dict[int, int] = {}
        for i, t in enumerate(self.operands):
            if i in self.signature.grads and t.requires_grad:
                positions.setdefault(id(t), i)
        return list(positions.values())

    def _is_parameter(self, position: int) -> bool:
        same = [i for i, t in enumerate(self.operands) if t is self.operands[position]]
        return all(i in self.signature.parameters for i in same)


def _operands(signature: Signature) -> list[Tensor]:
    """Return a meta tensor for every operand; the same one for repeats."""
    distinct: dict[int, Tensor] = {}
    for first in dict.fromkeys(signature.firsts):
        kind = signature.types[first]
        strides = signature.strides[first] or contiguous(kind.shape)
        distinct[first] = torch.empty_strided(kind.shape, strides, dtype=kind.dtype, device="meta")
    operands = [distinct[first] for first in signature.firsts]
    for tensor in (operands[position] for position in signature.grads):
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    return operands


def function_of(
    signature: Signature, device: str = "meta", collectives: list[CollectiveCall] | None = None
) -> Callable[..., Any]:
    """Return the function that a call runs, which allocates its tensors on `device`.

    Collectives of the runtime's operators are appended to `collectives`.
    """
    if signature.op.startswith("rt."):
        return runtime_function(signature, device, [] if collectives is None else collectives)
    if signature.op == "shardwise.batch_norm.default":
        return batch_norm
    overload = operator(signature.op)
    if overload is None:
        raise LookupError(f"operator {signature.op} is not registered in this process")
    if any(a.name == "device" for a in overload._schema.arguments) and not signature.firsts:
        return lambda *args, **kwargs: overload(*args, **{**kwargs, "device": device})
    return overload  # type: ignore[no-any-return]


# ------------------------------------------------------------ operators of the runtime
def runtime_function(
    signature: Signature, device: str, collectives: list[CollectiveCall]
) -> Callable[..., Any]:
    """Return a function of local tensors that runs the `rt.*` operator of `signature`.

    Tensors that do not depend on operands are allocated on `device`. Every collective that the
    operator calls, in forward or backward, is appended to `collectives`.
    """
    name = signature.op.removeprefix("rt.")
    function = getattr(rt, name, None)
    if function is None:
        raise LookupError(f"the runtime has no operator {name!r}")
    parameters = _parameters(function)
    local = next(iter((*signature.results, *signature.types)), None)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind_partial(*args, **kwargs)
        arguments = bound.arguments
        for parameter, value in arguments.items():
            if isinstance(value, MeshAxis):
                of = arguments.get(parameter.replace("axis", "of"))
                length = local.shape[-2 if parameter == "row_axis" else -1] if of and local else 0
                arguments[parameter] = axis = _axis(value.names, of, length, collectives)
                if name == "ring_attention" and local is not None:
                    ranks = round(arguments["rows"] / max(local.shape[-2], 1))
                    group = Group(tuple(range(ranks)), 0)
                    arguments[parameter] = Axis(axis.name, group, axis._transport)
        if "rng" in parameters.parameters:
            arguments |= {"rng": _Rng(_random_shape(name, arguments, local)), "key": ""}
        if "device" in parameters.parameters:
            arguments["device"] = device
        return function(*bound.args, **bound.kwargs)

    return call


_parameters = cache(inspect.signature)


class _CountingTransport:
    """Record the collectives over some mesh axes; results have the right size, but no values."""

    rank, world_size = 0, 2

    def __init__(self, axes: tuple[str, ...], collectives: list[CollectiveCall]) -> None:
        self._axes, self._collectives = axes, collectives

    def __getattr__(self, operation: str) -> Callable[..., Pending]:
        run = getattr(FakeTransport(self.rank, self.world_size), operation)

        def record(flat: Tensor, *args: Any) -> Pending:
            size = flat.numel() * flat.element_size()
            self._collectives.append(CollectiveCall(op=operation, num_bytes=size, axes=self._axes))
            return cast(Pending, run(flat, *args))

        return record


def _axis(
    names: tuple[str, ...], of: Of | None, length: int, collectives: list[CollectiveCall]
) -> Axis:
    """Return an axis of two ranks; the first one has `length` of a dim that is split as `of`."""
    transport = cast(Transport, _CountingTransport(names, collectives))
    full = full_length(of) if of else 0
    shares = Shares(length, full - length) if 0 < full >= length else 2
    return Axis(".".join(names), Group((0, 1), 0), transport, shares)


class _Rng(Rng):
    """Draw the full tensor and take a part of `shape`, as the runtime does in mode "exact"."""

    def __init__(self, shape: Sequence[int] | None) -> None:
        super().__init__(0)
        self._shape = shape

    def generator(
        self, key: str, device: torch.device | str = "cpu", place: Sequence[tuple[str, int]] = ()
    ) -> torch.Generator:
        kind = torch.device(device).type
        return torch.Generator("cpu" if kind == "meta" else kind)

    def part(
        self,
        fill: Callable[[tuple[int, ...], torch.Generator], Tensor],
        key: str,
        shape: Sequence[int],
        splits: Splits,
        device: torch.device | str,
    ) -> Tensor:
        part = fill(tuple(shape), self.generator(key, device))
        for dim, length in enumerate(shape if self._shape is None else self._shape):
            if length != part.shape[dim]:
                part = part.narrow(dim, 0, length)
        return part.contiguous()


def _random_shape(
    name: str, arguments: dict[str, Any], local: TensorType | None
) -> tuple[int, ...] | None:
    """Return the shape of this rank's random numbers, if it is known."""
    if name == "attention":  # dropout of its weights
        return (*arguments["query"].shape[:-1], arguments["key_"].shape[-2])
    return local.shape[: len(arguments.get("shape", ()))] if local else None
