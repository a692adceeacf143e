"""Products inside ATen operators: their size as a matrix product, and their flops.

Enters: an operator with operands and results. Leaves: `Product`s, one per launch, or None for an
operator that only moves memory. Operators that are unknown here but have a formula in
`torch.utils.flop_counter` (which users may extend with `register_flop_formula`) use that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


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
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
) -> tuple[Product, ...] | None:
    """The products that an ATen call computes, or None."""
    packet = func.overloadpacket
    sized = _SIZES.get(packet.__name__) if func.namespace == "aten" else None
    if sized is not None:
        shape = sized(*args)
        given = tuple(a for a in args if isinstance(a, Tensor))
        bias = kwargs.get("bias")
        more = (bias,) if isinstance(bias, Tensor) else ()
        return (_matmul(shape, (*given, *more, *_results(found))),)
    if func.namespace == "aten" and packet.__name__ in _CONVOLUTIONS:
        return tuple(_CONVOLUTIONS[packet.__name__](args, found))
    if packet not in flop_registry:
        return None
    return (_registered(func, args, kwargs, found),)


def _results(found: Any) -> tuple[Tensor, ...]:
    if isinstance(found, Tensor):
        return (found,)
    return tuple(t for t in found if isinstance(t, Tensor))


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


def _convolution(args: tuple[Any, ...], found: Any) -> Iterator[Product]:
    x, weight, bias = args[:3]
    size = _window(x, weight, found, transposed=bool(args[6]), groups=args[8])
    touched = tuple(t for t in (x, weight, bias, found) if isinstance(t, Tensor))
    yield Product("convolution", 2.0 * prod(size), size, touched, weight.dtype)


def _convolution_backward(args: tuple[Any, ...], found: Any) -> Iterator[Product]:
    """One product for the input's gradient, one for the weight's (and a sum for the bias')."""
    grad, x, weight = args[:3]
    transposed, groups, mask = bool(args[7]), args[9], args[10]
    groups_, m, n, k = _window(x, weight, grad, transposed=transposed, groups=groups)
    flops = 2.0 * groups_ * m * n * k
    if mask[0]:
        size = groups_, m, k, n
        yield Product("convolution", flops, size, (grad, weight, found[0]), weight.dtype)
    if mask[1] or mask[2]:
        touched = tuple(t for t in (grad, x, found[1], found[2]) if isinstance(t, Tensor))
        size = groups_, n, k, m
        yield Product("convolution", flops if mask[1] else 0.0, size, touched, weight.dtype)


def _window(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool, groups: int) -> Size:
    """A convolution as a product of its windows with the filters, per group."""
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


def _registered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Product:
    flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=found))
    given = [a for a in args if isinstance(a, Tensor)]
    touched = (*given, *_results(found))
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
    """The part of a causal mask that is computed: row i sees columns up to i, in whole tiles.

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
