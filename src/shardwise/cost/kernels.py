"""The kernels of one ATen call, with their flops and bytes, and the time they take on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.cluster import Device
from shardwise.dtypes import dtype_name
from shardwise.ir import TensorType

# ------------------------------------------------------------ products
#
# Operators that are unknown here but have a formula in `torch.utils.flop_counter` (which users may
# extend with `register_flop_formula`) use that.


@dataclass(frozen=True, slots=True)
class Product:
    """One product: `kind`, flops (2 per multiply-add), its size, and the tensors it touches.

    `causal`: an attention of which half a mask is seen.
    """

    kind: str
    flops: float
    shape: tuple[int, ...]
    operands: tuple[Tensor, ...]
    dtype: torch.dtype
    causal: bool = False


def products(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Product, ...] | None:
    """Return the products that an ATen call computes, or None."""
    packet = func.overloadpacket
    sized = _SIZES.get(packet.__name__) if func.namespace == "aten" else None
    if sized is not None:
        shape = sized(*args)
        given = tuple(a for a in args if isinstance(a, Tensor))
        bias = kwargs.get("bias")
        more = (bias,) if isinstance(bias, Tensor) else ()
        return (_matmul(shape, (*given, *more, *_results(result))),)
    if func.namespace == "aten" and packet.__name__ in _CONVOLUTIONS:
        return tuple(_CONVOLUTIONS[packet.__name__](args, result))
    if packet not in flop_registry:
        return None
    return (_registered(func, args, kwargs, result),)


def _results(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return tuple(t for t in result if isinstance(t, Tensor))


def _matmul(shape: tuple[int, int, int, int], touched: tuple[Tensor, ...]) -> Product:
    floats = [t.dtype for t in touched]
    return Product("matmul", 2.0 * prod(shape), shape, touched, min(floats, key=_width))


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize


# ---------------------------------------------------------------- sizes (batch, m, n, k)

Size = tuple[int, int, int, int]


def _mm(a: Tensor, b: Tensor, *_: Any) -> Size:
    return 1, a.shape[0], b.shape[1], a.shape[1]


def _bmm(a: Tensor, b: Tensor, *_: Any) -> Size:
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2]


def _mv(a: Tensor, v: Tensor, *_: Any) -> Size:
    return 1, a.shape[0], 1, a.shape[1]


def _linear(x: Tensor, weight: Tensor, *_: Any) -> Size:
    return 1, prod(x.shape[:-1]), weight.shape[0], x.shape[-1]


def _grouped(a: Tensor, b: Tensor, *_: Any) -> Size:
    """Rows in groups times a matrix each, rows times rows by group, or batches."""
    if a.dim() == 2 and b.dim() == 3:
        return 1, a.shape[0], b.shape[2], a.shape[1]
    if a.dim() == 2:
        return 1, a.shape[0], b.shape[1], a.shape[1]
    return (1, a.shape[1], b.shape[1], a.shape[2]) if b.dim() == 2 else _bmm(a, b)


def _with_sum(size: Callable[..., Size]) -> Callable[..., Size]:
    def sized(bias: Tensor, *args: Any) -> Size:
        return size(*args)

    return sized


_SIZES: dict[str, Callable[..., Size]] = {
    "mm": _mm,
    "_scaled_mm": _mm,
    "_int_mm": _mm,
    "addmm": _with_sum(_mm),
    "_addmm_activation": _with_sum(_mm),
    "bmm": _bmm,
    "baddbmm": _with_sum(_bmm),
    "addbmm": _with_sum(_bmm),
    "mv": _mv,
    "addmv": _with_sum(_mv),
    "linear": _linear,
    "_grouped_mm": _grouped,
}


# ---------------------------------------------------------------- convolutions


def _convolution(args: tuple[Any, ...], result: Any) -> Iterator[Product]:
    x, weight, bias = args[:3]
    size = _window(x, weight, result, transposed=bool(args[6]), groups=args[8])
    touched = tuple(t for t in (x, weight, bias, result) if isinstance(t, Tensor))
    yield Product("convolution", 2.0 * prod(size), size, touched, weight.dtype)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> Iterator[Product]:
    """One product for the input's gradient, one for the weight's (and a sum for the bias')."""
    grad, x, weight = args[:3]
    transposed, groups, mask = bool(args[7]), args[9], args[10]
    groups_, m, n, k = _window(x, weight, grad, transposed=transposed, groups=groups)
    flops = 2.0 * groups_ * m * n * k
    if mask[0]:
        size = groups_, m, k, n
        yield Product("convolution", flops, size, (grad, weight, result[0]), weight.dtype)
    if mask[1] or mask[2]:
        touched = tuple(t for t in (grad, x, result[1], result[2]) if isinstance(t, Tensor))
        size = groups_, n, k, m
        yield Product("convolution", flops if mask[1] else 0.0, size, touched, weight.dtype)


def _window(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool, groups: int) -> Size:
    """Return a convolution as a product of its windows with the filters, per group."""
    space = x if transposed else out
    rows = x.shape[0] * prod(space.shape[2:]) if x.dim() == weight.dim() else prod(space.shape[1:])
    filters, inner, taps = (
        weight.shape[0] // max(groups, 1),
        weight.shape[1],
        prod(weight.shape[2:]),
    )
    if transposed:
        return groups, rows, inner * taps, filters
    return groups, rows, filters, inner * taps


_CONVOLUTIONS: dict[str, Callable[[tuple[Any, ...], Any], Iterator[Product]]] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
}


# ---------------------------------------------------------------- registered formulas


def _registered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Product:
    flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
    given = [a for a in args if isinstance(a, Tensor)]
    touched = (*given, *_results(result))
    if "attention" in func.overloadpacket.__name__ and given[-1].dim() >= 3:
        first = 1 if "backward" in func.overloadpacket.__name__ else 0
        query, key = given[first : first + 2]
        causal = _causal(func, args, kwargs)
        share = seen_part(query.shape[-2], key.shape[-2]) if causal else 1.0
        shape = (*query.shape[:-1], key.shape[-2], query.shape[-1])[-5:]
        return Product("attention", flops * share, shape, touched, query.dtype, causal)
    side = max(round((flops / 2) ** (1 / 3)), 1)  # the cube with as many flops
    return Product("matmul", flops, (1, side, side, side), touched, given[0].dtype)


def _causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [a.name for a in func._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


def seen_part(rows: int, columns: int, tile: int = 1) -> float:
    """Return the computed fraction of a causal mask: row i sees columns up to i, in full tiles.

    >>> seen_part(4, 4)
    0.625
    >>> seen_part(4, 4, tile=2)
    0.75
    """
    if not rows or not columns:
        return 1.0
    full = max(rows - columns, 0)  # these rows see all columns
    tiles, rest = divmod(rows - full, tile)
    seen = tile * tile * tiles * (tiles + 1) / 2 + rest * min((tiles + 1) * tile, columns)
    return (seen + full * columns) / (rows * columns)


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
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "lift_fresh", "is_same_size", "_local_scalar_dense", "resize_", "set_", "sym_size",
    "sym_numel",
}  # fmt: skip
# Operand that is a table of which only the rows found are read.
_LOOKUPS = {"embedding", "index", "_unsafe_index", "index_select", "gather", "take"}
# First operand receives rows: read and written where the others say, not everywhere.
_SCATTERS = {
    "index_put", "_unsafe_index_put", "_index_put_impl", "scatter", "scatter_add",
    "scatter_reduce", "index_add", "index_copy", "index_reduce", "masked_scatter",
}  # fmt: skip
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
    """Return what the schema of an `OpOverload` tells."""
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
    """Yield all tensors in a nested argument."""
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from tensors(item)


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor really covers: expanded dims count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            count *= size
    return min(count, tensor.untyped_storage().nbytes()) if count else 0


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, backward: bool = False
) -> tuple[Kernel, ...]:
    """Return the kernels that one ATen call launches, given its results.

    Where there are two, the first makes the first result and the second the others.
    """
    info = op_info(func)
    if not info.launches:
        return ()
    results = list(tensors(result))
    if not results:
        return ()
    work = products(func, args, kwargs, result)
    if work is not None:
        return tuple(_product_kernel(info.name, p) for p in work)
    if info.name in _SPLIT_BACKWARD:
        return tuple(_norm_backward(info.name, args, result))
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


def _norm_backward(name: str, args: tuple[Any, ...], result: Any) -> Iterator[Kernel]:
    """Yield the kernels of a normalization's gradients: one for the input, one for weight and bias.

    Both read gradient, input and statistics; the first one also the weight.
    """
    sizes = [touched_bytes(t) for t in tensors(args)]
    for part, read in ((result[:1], sum(sizes[:5])), (result[1:], sum(sizes[:4]))):
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


# ------------------------------------------------------------ times
#
# A kernel takes the longer of its arithmetic and its memory traffic. A CPU adds the overhead of the
# call. A GPU runs kernels while the host launches the next ones: the overhead shows only where
# kernels are shorter than their launches.


# From the end of a kernel to the start of the next of one stream, when both are launched ahead:
# "Getting Started with CUDA Graphs" (NVIDIA, 2019) finds 2.9 us kernels every 3.8 us then.
GAP_S = 0.9e-6
# Columns that the CPU's flash kernel computes at once (kvSplitSize in FlashAttentionKernel.cpp).
# On one thread of an x86 server, head size 64, a causal attention takes 0.95, 1.1, 0.99 and 0.75
# of a whole one at 128, 256, 512 and 1024 positions.
CPU_TILE = 512


def execution_seconds(kernel: Kernel, device: Device) -> float:
    """Return the time of the kernel itself: arithmetic or memory traffic, whichever is longer."""
    moving = kernel.bytes / device.memory_rate(kernel.bytes) if kernel.bytes else 0.0
    if kernel.kind == MEMORY or not kernel.flops:
        return moving
    dtype = _rated(kernel.dtype, device)
    if kernel.kind == "attention":
        rate = device.attention_rate(dtype, kernel.shape[-2]) / _unseen(kernel, device)
    else:
        batch, m, n, k = kernel.shape
        rate = device.matmul_rate(dtype, m, n, k, batch)
    return max(kernel.flops / rate, moving)


def _rated(dtype: str, device: Device) -> str:
    """Return the dtype whose rate applies: the slowest for integers and complex numbers."""
    if dtype in device.dtypes or "float" in dtype:
        return dtype
    return min(device.dtypes, key=lambda name: device.matmul_rate(name, 1024, 1024, 1024))


def _unseen(kernel: Kernel, device: Device) -> float:
    """Return how much more of a causal mask a device computes than rows see."""
    if not kernel.causal or device.kind != "cpu":
        return 1.0  # rates of GPUs are of causal attentions, by the part that is seen
    rows, columns = kernel.shape[-3:-1]
    return seen_part(rows, columns, CPU_TILE) / seen_part(rows, columns)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Return the time of the kernel among many that run one after the other."""
    running = execution_seconds(kernel, device)
    if device.kind == "cpu":
        return device.overhead_s + running
    return max(device.overhead_s, running + GAP_S)


def kernels_seconds(kernels: Iterable[Kernel], device: Device) -> float:
    """Return the time of the kernels one after the other."""
    return sum(kernel_seconds(kernel, device) for kernel in kernels)
