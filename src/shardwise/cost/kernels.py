"""The kernels of one ATen call, with their flops and bytes, and the time they take on a device."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.cluster import Device
from shardwise.dtypes import dtype_name
from shardwise.ir import TensorType
from shardwise.ir.operators import tensors

MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch; `flops` are 2 per multiply-add, `bytes` are read and written, each once."""

    op: str  # ATen's name: "mm", "_softmax_backward_data"; "mylib.op" of another library
    kind: str = MEMORY  # or "matmul", "attention", "convolution"
    flops: float = 0.0
    bytes: float
    dtype: str  # of the arithmetic
    shape: tuple[int, ...]  # (batch, m, n, k) of a product; (batch, heads, q, kv, d); of the result
    causal: bool = False  # attention whose flops are those of the visible part of the mask

    def __str__(self) -> str:
        flops = f"{self.flops:.3g} flops, " if self.flops else ""
        return f"{self.op} {self.dtype}{list(self.shape)}: {flops}{self.bytes:.3g} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Memory that backward needs from forward: an operand, a result, or an allocation."""

    operand: int | None = None
    result: int | None = None
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A collective inside a local call, on some mesh axes, with the input bytes of each rank."""

    op: str
    num_bytes: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """The kernels and the memory of one local call.

    `weight` is the part of `backward` that only parameters' gradients need. Temporary bytes are the
    peak inside a call beyond operands, results, gradients and saved memory. `aliases` names the
    operand whose memory a result shares; `gradients` the new memory of every operand's gradient, 0
    if it shares the memory of a result's gradient.
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
    note: str = ""  # the reason if the cost is a guess from bytes

    @property
    def temporary_bytes(self) -> int:
        """The larger one of forward and backward."""
        return max(self.forward_temporary_bytes, self.backward_temporary_bytes)


# ------------------------------------------------------------ products
#
# Operators that are unknown here but have a formula in `torch.utils.flop_counter` (which users may
# extend with `register_flop_formula`) use that.

Size = tuple[int, int, int, int]  # batch, m, n, k


def products(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[Kernel, ...] | None:
    """Return the kernels of an ATen call that computes products, or None."""
    name = func.overloadpacket.__name__
    operands = [a for a in args if isinstance(a, Tensor)]
    results = list(tensors(result))
    if func.namespace in ("aten", "shardwise") and name in _SIZES:
        touched = [*operands, *tensors(kwargs.get("bias")), *results]
        size = _SIZES[name](*args)
        dtype = min((t.dtype for t in touched), key=lambda dtype: dtype.itemsize)
        return (_product(name, "matmul", 2.0 * prod(size), size, touched, dtype),)
    if func.namespace == "aten" and name in _CONVOLUTIONS:
        return tuple(_CONVOLUTIONS[name](name, args, result))
    if func.overloadpacket not in flop_registry:
        return None
    flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
    touched = [*operands, *results]
    full_name = op_info(func).name
    if "attention" in name and operands[-1].dim() >= 3:
        first = 1 if "backward" in name else 0
        query, key = operands[first : first + 2]
        names = [argument.name for argument in func._schema.arguments]
        causal = bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))
        fraction = causal_fraction(query.shape[-2], key.shape[-2]) if causal else 1.0
        shape = (*query.shape[:-1], key.shape[-2], query.shape[-1])[-5:]
        kernel = _product(full_name, "attention", flops * fraction, shape, touched, query.dtype)
        return (replace(kernel, causal=causal),)
    side = max(round((flops / 2) ** (1 / 3)), 1)  # of the cube that has these flops
    cube = (1, side, side, side)
    return (_product(full_name, "matmul", flops, cube, touched, operands[0].dtype),)


def _product(
    op: str,
    kind: str,
    flops: float,
    shape: tuple[int, ...],
    touched: Iterable[Tensor],
    dtype: torch.dtype,
) -> Kernel:
    num_bytes = float(sum(touched_bytes(t) for t in touched))
    return Kernel(
        op=op, kind=kind, flops=flops, bytes=num_bytes, dtype=dtype_name(dtype), shape=shape
    )


def causal_fraction(rows: int, columns: int, tile: int = 1) -> float:
    """Return the computed fraction of a causal mask: row i uses columns up to i, in full tiles.

    >>> causal_fraction(4, 4)
    0.625
    >>> causal_fraction(4, 4, tile=2)
    0.75
    """
    if not rows or not columns:
        return 1.0
    full = max(rows - columns, 0)  # these rows use all columns
    tiles, remainder = divmod(rows - full, tile)
    used = tile * tile * tiles * (tiles + 1) / 2 + remainder * min((tiles + 1) * tile, columns)
    return (used + full * columns) / (rows * columns)


def _by_dims(*operands: str) -> Callable[..., Size]:
    """Return the function of a product whose operands have these dims; "" is an added term."""

    def size(*args: Any) -> Size:
        sizes = {"b": 1, "n": 1}
        for dims, operand in zip(operands, args, strict=False):
            sizes |= zip(dims, operand.shape, strict=True) if dims else ()
        return sizes["b"], sizes["m"], sizes["n"], sizes["k"]

    return size


def _grouped(a: Tensor, b: Tensor, *_: Any) -> Size:
    """Return the size of rows times a matrix per group, rows times rows per group, or batches."""
    if a.dim() == 2 and b.dim() == 3:
        return 1, a.shape[0], b.shape[2], a.shape[1]
    if a.dim() == 2:
        return 1, a.shape[0], b.shape[1], a.shape[1]
    if b.dim() == 2:
        return 1, a.shape[1], b.shape[1], a.shape[2]
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2]


def _grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, bias: Any = None, transposed: bool = False
) -> Size:
    experts, m, k = weight.shape
    return experts, -(-rows.shape[0] // max(experts, 1)), *((k, m) if transposed else (m, k))


def _grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Size:
    experts = counts.shape[0]
    return experts, left.shape[1], right.shape[1], -(-left.shape[0] // max(experts, 1))


_SIZES: dict[str, Callable[..., Size]] = {
    **dict.fromkeys(("mm", "_scaled_mm", "_int_mm"), _by_dims("mk", "kn")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _by_dims("", "mk", "kn")),
    "bmm": _by_dims("bmk", "bkn"),
    **dict.fromkeys(("baddbmm", "addbmm"), _by_dims("", "bmk", "bkn")),
    "mv": _by_dims("mk", "k"),
    "addmv": _by_dims("", "mk", "k"),
    "linear": lambda x, weight, *_: (1, prod(x.shape[:-1]), weight.shape[0], x.shape[-1]),
    "_grouped_mm": _grouped,
    "grouped_linear": _grouped_linear,
    "grouped_outer": _grouped_outer,
}


def _convolution(op: str, args: tuple[Any, ...], result: Any) -> Iterator[Kernel]:
    x, weight, bias = args[:3]
    size = _window(x, weight, result, transposed=bool(args[6]), groups=args[8])
    touched = tensors((x, weight, bias, result))
    yield _product(op, "convolution", 2.0 * prod(size), size, touched, weight.dtype)


def _convolution_backward(op: str, args: tuple[Any, ...], result: Any) -> Iterator[Kernel]:
    """Yield a product for the input's gradient, and one for the weight's with the bias' sum."""
    grad, x, weight = args[:3]
    transposed, mask = bool(args[7]), args[10]
    groups, m, n, k = _window(x, weight, grad, transposed=transposed, groups=args[9])
    flops = 2.0 * groups * m * n * k
    if mask[0]:
        size, touched = (groups, m, k, n), tensors((grad, weight, result[0]))
        yield _product(op, "convolution", flops, size, touched, weight.dtype)
    if mask[1] or mask[2]:
        size, touched = (groups, n, k, m), tensors((grad, x, result[1], result[2]))
        flops = flops if mask[1] else 0.0
        yield _product(op, "convolution", flops, size, touched, weight.dtype)


def _window(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool, groups: int) -> Size:
    """Return a convolution as a product of its windows with the filters, per group."""
    space = x if transposed else out
    rows = x.shape[0] * prod(space.shape[2:]) if x.dim() == weight.dim() else prod(space.shape[1:])
    filters, inner = weight.shape[0] // max(groups, 1), prod(weight.shape[1:])
    return (groups, rows, inner, filters) if transposed else (groups, rows, filters, inner)


_CONVOLUTIONS: dict[str, Callable[[str, tuple[Any, ...], Any], Iterator[Kernel]]] = {
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
}


# ------------------------------------------------------------ any operator
# Operators that launch nothing although their schema does not say that they are views.
_NOTHING = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "lift_fresh", "is_same_size", "_local_scalar_dense", "resize_", "set_", "sym_size",
    "sym_numel",
}  # fmt: skip
# The first operand is a table, of which only the selected rows are read.
_LOOKUPS = {"embedding", "index", "_unsafe_index", "index_select", "gather", "take"}
# The first operand receives rows: only the places that the others select are read and written.
_SCATTERS = {
    "index_put", "_unsafe_index_put", "_index_put_impl", "scatter", "scatter_add",
    "scatter_reduce", "index_add", "index_copy", "index_reduce", "masked_scatter",
}  # fmt: skip
# Operands of which only the shape is used, by position.
_UNREAD = {
    "zeros_like": 0, "ones_like": 0, "full_like": 0, "rand_like": 0, "randn_like": 0,
    "randint_like": 0, "new_zeros": 0, "new_ones": 0, "new_full": 0, "nll_loss_backward": 1,
    "nll_loss2d_backward": 1, "max_pool2d_with_indices_backward": 1,
    "max_pool3d_with_indices_backward": 1,
}  # fmt: skip
_OVERWRITES = {"fill_", "zero_", "copy_"}
_SPLIT_BACKWARD = {"native_layer_norm_backward", "native_group_norm_backward"}


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Properties of an operator that do not depend on its operands."""

    name: str
    launches: bool
    mutated: tuple[int, ...]  # positions of arguments that are written
    overwrites: bool  # whether it writes them without reading them


@cache
def op_info(func: Any) -> OpInfo:
    """Return the properties of an `OpOverload`, from its schema."""
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


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor covers: expanded dims count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            count *= size
    return min(count, tensor.untyped_storage().nbytes()) if count else 0


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, backward: bool = False
) -> tuple[Kernel, ...]:
    """Return the kernels that one ATen call launches, given its results.

    If there are two, the first one computes the first result and the second one the others.
    """
    info, results = op_info(func), list(tensors(result))
    if not info.launches or not results:
        return ()
    kernels = products(func, args, kwargs, result)
    if kernels is not None:
        return kernels
    if info.name in _SPLIT_BACKWARD:
        return tuple(_norm_backward(info.name, args, result))
    num_bytes = _bytes_moved(info, args, kwargs, results, backward)
    main = max(results, key=Tensor.numel)
    return (memory_kernel(info.name, num_bytes, main.dtype, main.shape),)


def memory_kernel(op: str, num_bytes: int, dtype: torch.dtype, shape: Iterable[int]) -> Kernel:
    """Return a kernel without flops."""
    return Kernel(op=op, bytes=float(num_bytes), dtype=dtype_name(dtype), shape=tuple(shape))


def _norm_backward(name: str, args: tuple[Any, ...], result: Any) -> Iterator[Kernel]:
    """Yield the kernels of a normalization's gradients: one for the input, one for weight and bias.

    Both read the gradient, the input and the statistics; the first one also reads the weight.
    """
    sizes = [touched_bytes(t) for t in tensors(args)]
    for part, read in ((result[:1], sum(sizes[:5])), (result[1:], sum(sizes[:4]))):
        results = [t for t in tensors(part) if t.numel()]
        if results:
            written = sum(touched_bytes(t) for t in results)
            yield memory_kernel(name, read + written, results[0].dtype, results[0].shape)


def _bytes_moved(
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[Tensor],
    backward: bool,
) -> int:
    options = tuple(value for name, value in kwargs.items() if name != "out")
    operands = {id(tensor): tensor for tensor in tensors((args, options))}
    written = [id(t) for i in info.mutated if i < len(args) for t in tensors(args[i])]
    unread = [id(t) for t in tensors(args[_UNREAD[info.name]])] if info.name in _UNREAD else []
    base = info.name.removesuffix("_")
    if base in _LOOKUPS and args:
        rows = sum(touched_bytes(t) for t in results)
        return 2 * rows + sum(touched_bytes(t) for k, t in operands.items() if k != id(args[0]))
    if base in _SCATTERS and args:
        others = [t for k, t in operands.items() if k != id(args[0])]
        return _scatter_bytes(args[0], others, clones=not info.mutated and not backward)
    if info.name in ("nll_loss_forward", "nll_loss2d_forward"):
        selected: int = args[1].numel() * args[0].element_size()
        return selected + sum(touched_bytes(t) for t in (args[1], *results))
    total = 0
    for key, tensor in operands.items():
        if key in written:
            total += touched_bytes(tensor) * (1 if info.overwrites else 2)
        elif key not in unread:
            total += touched_bytes(tensor)
    total += sum(touched_bytes(t) for t in results if id(t) not in operands)
    if info.name == "embedding_dense_backward":  # rows are added into zeros
        total += 2 * touched_bytes(args[0])
    return total


def _scatter_bytes(table: Tensor, others: list[Tensor], *, clones: bool) -> int:
    rows = [t.numel() * table.element_size() for t in others if t.dtype == table.dtype]
    if not rows:  # one number for all places
        rows = [max((t.numel() for t in others), default=0) * table.element_size()]
    moved = sum(touched_bytes(t) for t in others) + 2 * max(rows)
    return moved + (2 * touched_bytes(table) if clones else 0)


# ------------------------------------------------------------ times
#
# A kernel takes the longer of its arithmetic and its memory traffic. A CPU adds the overhead of the
# call. A GPU runs kernels while the host launches the next ones: the overhead shows only if kernels
# are shorter than their launches.


# From the end of a kernel to the start of the next one on a stream, when both are launched ahead:
# "Getting Started with CUDA Graphs" (NVIDIA, 2019) measures a 2.9 us kernel every 3.8 us then.
GAP_S = 0.9e-6
# Columns that the CPU's flash kernel computes at once (kvSplitSize in FlashAttentionKernel.cpp).
# On one thread of an x86 server, head size 64, causal attention takes 0.95, 1.1, 0.99 and 0.75 of
# the time of full attention at 128, 256, 512 and 1024 positions.
CPU_TILE = 512


def execution_seconds(kernel: Kernel, device: Device) -> float:
    """Return the time of the kernel itself: arithmetic or memory traffic, whichever is longer."""
    memory_s = kernel.bytes / device.memory_rate(kernel.bytes) if kernel.bytes else 0.0
    if kernel.kind == MEMORY or not kernel.flops:
        return memory_s
    dtype = kernel.dtype
    if dtype not in device.dtypes and "float" not in dtype:
        # Integers and complex numbers: assume the slowest known rate.
        dtype = min(device.dtypes, key=lambda name: device.matmul_rate(name, 1024, 1024, 1024))
    if kernel.kind == "attention":
        rate = device.attention_rate(dtype, kernel.shape[-2])
        if kernel.causal and device.kind == "cpu":
            # Rates of GPUs are those of causal attention, relative to the visible part of the mask;
            # a CPU computes more of it than that.
            rows, columns = kernel.shape[-3:-1]
            rate /= causal_fraction(rows, columns, CPU_TILE) / causal_fraction(rows, columns)
    else:
        batch, m, n, k = kernel.shape
        rate = device.matmul_rate(dtype, m, n, k, batch)
    return max(kernel.flops / rate, memory_s)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Return the time of the kernel among many that run one after the other."""
    seconds = execution_seconds(kernel, device)
    if device.kind == "cpu":
        return device.overhead_s + seconds
    return max(device.overhead_s, seconds + GAP_S)


def kernels_seconds(kernels: Iterable[Kernel], device: Device) -> float:
    """Return the time of the kernels one after the other."""
    return sum(kernel_seconds(kernel, device) for kernel in kernels)
