"""Operators that reorder dims, and those that work along some dims and keep them whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.ir import map_refs
from shardwise.ir.schema import operator
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.axes import axes_of, normalize, passes


def permutation(call: Call) -> tuple[int, ...]:
    """For every dim of the result, the operand's dim: read off a call with distinct sizes."""
    probe = torch.empty(tuple(range(2, 2 + len(call.operands[0]))), device="meta")
    args, kwargs = map_refs((call.node.args, tuple(call.node.kwargs)), lambda _: probe)
    result = operator(call.node.op)(*args, **dict(kwargs))
    return tuple(size - 2 for size in result.shape)


@rule("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T", "aten.matrix_H", "aten.mT")
@rule("aten.mH", "aten.adjoint", "aten.movedim", "aten.moveaxis", "aten.swapaxes", "aten.swapdims")
def permute(call: Call) -> NodeRule:
    """Dims change places."""
    axes, dims = axes_of(call.operands[0])
    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=(tuple(dims[d] for d in permutation(call)),),
        linear=passes(call, 0),
    )


def along(call: Call, dims: set[int], *, linear: bool = False) -> NodeRule:
    """A call that works along `dims` of its first operand and leaves the order of the others.

    Other operands and all results must have the same rank; dims of another size than the first
    operand's have a frozen axis of their own.
    """
    source = call.operands[0]
    axes, own = axes_of(source, frozen=dims)

    def match(prefix: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        found: list[tuple[str, ...]] = []
        for d, size in enumerate(shape):
            if size == source[d]:
                found.append((f"d{d}",))
            else:
                axes[f"{prefix}{d}"] = Axis(f"{prefix}{d}", size, frozen=True)
                axes[f"d{d}"] = Axis(f"d{d}", source[d], frozen=True)
                found.append((f"{prefix}{d}",))
        return tuple(found)

    if any(len(shape) != len(source) for shape in (*call.operands, *call.results)):
        return whole_rule(call, "operands and results have different numbers of dims")
    operands = tuple(match(f"o{i}_", shape) for i, shape in enumerate(call.operands[1:]))
    results = tuple(match(f"r{i}_", shape) for i, shape in enumerate(call.results))
    return NodeRule(
        axes=axes,
        operands=(own, *operands),
        results=results,
        linear=passes(call, *range(len(call.operands))) if linear else (),
    )


def dims_argument(call: Call, name: str = "dim") -> set[int]:
    """The dims that an argument names; all of them when it is missing or empty."""
    rank = len(call.operands[0])
    given = call.get(name)
    if given is None or given == () or given == []:
        return set(range(rank))
    return {normalize(d, rank) for d in ([given] if isinstance(given, int) else given)}


@rule("aten.roll", "aten.flip")
def roll(call: Call) -> NodeRule:
    """The rolled or flipped dims stay whole: elements would change ranks."""
    return along(call, dims_argument(call, "dims"), linear=True)


@rule("aten.fliplr", "aten.flipud", "aten.rot90")
def flip_fixed(call: Call) -> NodeRule:
    """Flips of the first two dims."""
    return along(call, {0, 1}, linear=True)


FOURIER = "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn"


@rule(*(f"aten.fft_{name}" for name in FOURIER.split()), "aten.fft_fftshift", "aten.fft_ifftshift")
def fourier(call: Call) -> NodeRule:
    """Fourier transforms: the transformed dims stay whole."""
    rank = len(call.operands[0])
    dims = dims_argument(call)
    if call.get("dim") is None and call.get("s"):
        dims = set(range(rank - len(call.get("s")), rank))
    return replace(along(call, dims, linear=True), localize=_unless_empty)


def _unless_empty(call: Call, local: Local) -> LocalCall:
    if 0 not in local.results[0]:
        return call.replace()
    dtype = call.types[call.node.outputs[0]].dtype
    return LocalCall("rt.nothing", (call.get("self"), local.results[0], dtype))


@rule("aten.diagonal", "aten.linalg_diagonal")
def diagonal(call: Call) -> NodeRule:
    """Two dims become one at the end; they stay whole."""
    rank = len(call.operands[0])
    pair = {normalize(call.get("dim1", 0), rank), normalize(call.get("dim2", 1), rank)}
    axes, dims = axes_of(call.operands[0], frozen=pair)
    axes["diagonal"] = Axis("diagonal", call.results[0][-1], frozen=True)
    rest = tuple(dims[d] for d in range(rank) if d not in pair)
    return NodeRule(
        axes=axes,
        operands=(dims,),
        results=((*rest, ("diagonal",)),),
        linear=passes(call, 0),
    )


@rule("aten.diag_embed")
def diag_embed(call: Call) -> NodeRule:
    """The last dim becomes two; they stay whole."""
    rank = len(call.results[0])
    pair = {normalize(call.get("dim1", -2), rank), normalize(call.get("dim2", -1), rank)}
    axes, dims = axes_of(call.results[0], frozen=pair)
    axes["diagonal"] = Axis("diagonal", call.operands[0][-1], frozen=True)
    rest = tuple(dims[d] for d in range(rank) if d not in pair)
    return NodeRule(
        axes=axes,
        operands=((*rest, ("diagonal",)),),
        results=(dims,),
        linear=passes(call, 0),
    )


@rule("aten.glu")
def glu(call: Call) -> NodeRule:
    """`a * sigmoid(b)` of the two halves of a dim: a shard takes its part of both."""
    source = call.operands[0]
    dim = normalize(call.get("dim", -1), len(source))
    axes, dims = axes_of(call.results[0])
    axes["halves"] = Axis("halves", 2, frozen=True)
    operand = (*dims[:dim], ("halves", f"d{dim}"), *dims[dim + 1 :])
    return NodeRule(axes=axes, operands=(operand,), results=(dims,))


keep_whole("a diagonal matrix of a vector has no dim to cut", "aten.diag", "aten.trace")
