"""What a device launches: the kernels of one ATen call, with their flops and bytes.

Enters: an operator with its operands and results, tensors with or without data. Leaves: `Kernel`s,
and `CallCost`, which gathers what a whole local call launches, keeps and says to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.cost.flops import Product, products
from shardwise.dtypes import dtype_name
from shardwise.ir import TensorType

MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch: `flops` are 2 per multiply-add, `bytes` what is read and written, once each."""

    op: str  # ATen's name: "mm", "_softmax_backward_data"; "mylib.op" of another library
    kind: str  # "matmul", "attention", "convolution" or "memory"
    flops: float
    bytes: float
    dtype: str  # of the arithmetic
    shape: tuple[int, ...]  # (batch, m, n, k) of a product; (batch, heads, q, kv, d); of the result
    causal: bool = False  # an attention: flops are of the part of the mask that is seen

    def __str__(self) -> str:
        work = f"{self.flops:.3g} flops, " if self.flops else ""
        return f"{self.op} {self.dtype}{list(self.shape)}: {work}{self.bytes:.3g} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Kept from forward for backward: an operand, a result, or memory of its own."""

    operand: int | None = None
    result: int | None = None
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective inside a local call, with the bytes that each rank gives, on these mesh axes."""

    op: str
    num_bytes: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """What one local call costs, and how it uses memory.

    `weight` is the part of `backward` that only parameters' gradients need. Temporary bytes are the
    most alive inside a call beyond operands, results, gradients and what is saved.
    `aliases` names the operand whose memory a result is; `gradients` the new memory of every
    operand's gradient, 0 where it is the memory of a result's gradient.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    weight: tuple[Kernel, ...] = ()
    saved: tuple[Saved, ...] = ()
    collectives: tuple[CollectiveCall, ...] = ()
    backward_collectives: tuple[CollectiveCall, ...] = ()
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0
    results: tuple[TensorType, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()  # of the results
    aliases: tuple[int | None, ...] = ()  # of the results
    gradients: tuple[tuple[int, int], ...] = ()  # (operand, new bytes)
    note: str = ""  # why this is a guess from bytes, where it is

    @property
    def temporary_bytes(self) -> int:
        """The most of forward and backward."""
        return max(self.forward_temporary_bytes, self.backward_temporary_bytes)


# ---------------------------------------------------------------- one operator

# Operators that launch nothing although their schema does not say that they are views.
_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "is_same_size",
    "_local_scalar_dense",
    "resize_",
    "set_",
    "sym_size",
    "sym_numel",
}
# Operand that is a table of which only the rows found are read.
_LOOKUPS = {"embedding", "index", "_unsafe_index", "index_select", "gather", "take"}
# First operand receives rows: read and written where the others say, not everywhere.
_SCATTERS = {
    "index_put",
    "_unsafe_index_put",
    "_index_put_impl",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "index_copy",
    "index_reduce",
    "masked_scatter",
}
# Operands that are there for their shape only, by position.
_UNREAD = {
    "zeros_like": 0,
    "ones_like": 0,
    "full_like": 0,
    "rand_like": 0,
    "randn_like": 0,
    "randint_like": 0,
    "new_zeros": 0,
    "new_ones": 0,
    "new_full": 0,
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
    "max_pool2d_with_indices_backward": 1,
    "max_pool3d_with_indices_backward": 1,
}
_OVERWRITES = {"fill_", "zero_", "copy_"}
_SPLIT_BACKWARD = {"native_layer_norm_backward", "native_group_norm_backward"}


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of an operator before its operands."""

    name: str
    launches: bool
    mutated: tuple[int, ...]  # positions of arguments that are written
    overwrites: bool  # without reading them


@cache
def op_info(func: Any) -> OpInfo:
    """The facts of an `OpOverload`."""
    schema = func._schema
    name = func.overloadpacket.__name__
    mutated = tuple(
        i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    random = torch.Tag.nondeterministic_seeded in func.tags
    launches = name not in _NOTHING and not func.is_view
    full = name if func.namespace == "aten" else f"{func.namespace}.{name}"
    return OpInfo(full, launches, mutated, random or name in _OVERWRITES)


def tensors(arg: Any) -> Iterator[Tensor]:
    """All tensors in a nested argument."""
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from tensors(item)


def touched_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor really covers: expanded dims count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            count *= size
    return min(count, tensor.untyped_storage().nbytes()) if count else 0


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that lies row by row."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any, *, backward: bool = False
) -> tuple[Kernel, ...]:
    """The kernels that one ATen call launches, given its results.

    Where there are two, the first makes the first result and the second the others.
    """
    info = op_info(func)
    if not info.launches:
        return ()
    results = list(tensors(found))
    if not results:
        return ()
    work = products(func, args, kwargs, found)
    if work is not None:
        return tuple(_product_kernel(info.name, p) for p in work)
    if info.name in _SPLIT_BACKWARD:
        return tuple(_norm_backward(info.name, args, found))
    moved = _bytes_moved(info, args, kwargs, results, backward)
    main = max(results, key=Tensor.numel)
    return (
        Kernel(
            op=info.name,
            kind=MEMORY,
            flops=0.0,
            bytes=float(moved),
            dtype=dtype_name(main.dtype),
            shape=tuple(main.shape),
        ),
    )


def _product_kernel(name: str, product: Product) -> Kernel:
    return Kernel(
        op=name,
        kind=product.kind,
        flops=product.flops,
        bytes=float(sum(touched_bytes(t) for t in product.operands)),
        dtype=dtype_name(product.dtype),
        shape=product.shape,
        causal=product.causal,
    )


def _norm_backward(name: str, args: tuple[Any, ...], found: Any) -> Iterator[Kernel]:
    """A normalization's gradients: one kernel for the input, one for weight and bias.

    Both read gradient, input and statistics; the first one also the weight.
    """
    sizes = [touched_bytes(t) for t in tensors(args)]
    for part, read in ((found[:1], sum(sizes[:5])), (found[1:], sum(sizes[:4]))):
        results = [t for t in tensors(part) if t.numel()]
        if results:
            yield Kernel(
                op=name,
                kind=MEMORY,
                flops=0.0,
                bytes=float(read + sum(touched_bytes(t) for t in results)),
                dtype=dtype_name(results[0].dtype),
                shape=tuple(results[0].shape),
            )


def _bytes_moved(
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[Tensor],
    backward: bool,
) -> int:
    given: dict[int, Tensor] = {}
    written = [id(t) for i in info.mutated if i < len(args) for t in tensors(args[i])]
    unread = [id(t) for t in tensors(args[_UNREAD[info.name]])] if info.name in _UNREAD else []
    for tensor in tensors((args, tuple(v for k, v in kwargs.items() if k != "out"))):
        given[id(tensor)] = tensor
    base = info.name.removesuffix("_")
    if base in _LOOKUPS and args:
        return _lookup_bytes(args, given, results)
    if base in _SCATTERS and args:
        clones = not info.mutated and not backward
        return _scatter_bytes(args, given, clones)
    if info.name in ("nll_loss_forward", "nll_loss2d_forward"):
        picked: int = args[1].numel() * args[0].element_size()
        return picked + sum(touched_bytes(t) for t in (args[1], *results))
    total = 0
    for key, tensor in given.items():
        if key in written:
            total += touched_bytes(tensor) * (1 if info.overwrites else 2)
        elif key not in unread:
            total += touched_bytes(tensor)
    total += sum(touched_bytes(t) for t in results if id(t) not in given)
    if info.name == "embedding_dense_backward":  # rows are added into zeros
        total += 2 * touched_bytes(args[0])
    return total


def _lookup_bytes(args: tuple[Any, ...], given: dict[int, Tensor], results: list[Tensor]) -> int:
    table = args[0]
    rows = sum(touched_bytes(t) for t in results)
    return 2 * rows + sum(touched_bytes(t) for k, t in given.items() if k != id(table))


def _scatter_bytes(args: tuple[Any, ...], given: dict[int, Tensor], clones: bool) -> int:
    table: Tensor = args[0]
    others = [t for k, t in given.items() if k != id(table)]
    rows = [t.numel() * table.element_size() for t in others if t.dtype == table.dtype]
    if not rows:  # one number for all places
        rows = [max((t.numel() for t in others), default=0) * table.element_size()]
    moved = sum(touched_bytes(t) for t in others) + 2 * max(rows)
    return moved + (2 * touched_bytes(table) if clones else 0)
