"""JAX's gather, scatter and dynamic slices, as indexing with one index tensor per dim."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.integrations.jax.primitives import Equation, Value, primitive


def _mode(eqn: Equation) -> str:
    mode = eqn["mode"]
    return str(getattr(mode, "name", mode))


def _line(n: int, dim: int, rank: int, device: torch.device) -> Tensor:
    """Return 0 … n-1 along one dim of a tensor with `rank` dims."""
    return torch.arange(n, device=device).reshape([-1 if d == dim else 1 for d in range(rank)])


def _indices(
    eqn: Equation,
    starts: Tensor,
    sizes: Sequence[int],
    slice_sizes: Sequence[int],
    windows: Sequence[int],
    fixed: Sequence[int],
    index_map: Sequence[int],
    batch_dims: tuple[Sequence[int], Sequence[int]],
    rank: int,
) -> tuple[list[Tensor], Tensor | None]:
    """Return an index tensor for each dim of the operand, and where they are inside of it.

    `windows` are the dims of the result that run over slices, the others run over `starts`.
    """
    outer = [d for d in range(rank) if d not in windows]
    where = dict(zip([d for d in range(len(sizes)) if d not in fixed], windows, strict=True))

    def spread(value: Tensor) -> Tensor:  # dims of the starts to their dims of the result
        shape = [1] * rank
        for dim, n in zip(outer, value.shape, strict=True):
            shape[dim] = n
        return value.reshape(shape)

    indices, inside = [], None
    for dim, n in enumerate(sizes):
        index = torch.zeros((), dtype=torch.int64, device=starts.device)
        if dim in index_map:
            start = starts.select(-1, list(index_map).index(dim)).long()
            last = n - slice_sizes[dim]
            if _mode(eqn) == "FILL_OR_DROP":
                valid = spread((start >= 0) & (start <= last))
                inside = valid if inside is None else inside & valid
            if _mode(eqn) != "PROMISE_IN_BOUNDS":
                start = start.clamp(0, last)
            index = spread(start)
        elif dim in batch_dims[0]:
            place = outer[batch_dims[1][list(batch_dims[0]).index(dim)]]
            index = _line(n, place, rank, starts.device)
        if dim in where:
            index = index + _line(slice_sizes[dim], where[dim], rank, starts.device)
        indices.append(index)
    return indices, inside


@primitive("gather")
def gather(eqn: Equation, x: Tensor, starts: Tensor) -> Value:
    numbers, slices = eqn["dimension_numbers"], eqn["slice_sizes"]
    is_table = (
        x.dim() == 2
        and tuple(slices) == (1, x.shape[1])
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.offset_dims) == (starts.dim() - 1,)
    )
    if is_table and _mode(eqn) != "CLIP":
        return F.embedding(starts.squeeze(-1), x)  # an index out of range is an error
    others = tuple(d for d in range(x.dim()) if d not in numbers.start_index_map)
    if (
        len(others) == x.dim() - 1
        and others == tuple(numbers.operand_batching_dims)
        and others == tuple(numbers.start_indices_batching_dims)
        and starts.dim() == x.dim() + 1
        and _mode(eqn) != "CLIP"
    ):  # jnp.take_along_axis
        return torch.gather(x, numbers.start_index_map[0], starts.squeeze(-1).long())
    fixed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    batch = (numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    indices, inside = _indices(
        eqn, starts, x.shape, slices, numbers.offset_dims, sorted(fixed), numbers.start_index_map,
        batch, len(eqn.shape),
    )  # fmt: skip
    # An index without dims would be read as a Python number, so it gets one.
    chosen = x[tuple(index.reshape(1) if index.dim() == 0 else index for index in indices)]
    result = chosen.expand(eqn.shape) if eqn.shape else chosen.reshape(())
    if inside is None:
        return result
    fill = eqn["fill_value"]
    if fill is None:
        fill = math.nan if result.is_floating_point() else np.iinfo(eqn.results[0].dtype).min
    return torch.where(inside, result, fill)


@primitive("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-sub",
           "scatter_min", "scatter-min", "scatter_max", "scatter-max")  # fmt: skip
def scatter(eqn: Equation, x: Tensor, starts: Tensor, updates: Tensor) -> Value:
    numbers, kind = eqn["dimension_numbers"], eqn.name.replace("-", "_").removeprefix("scatter")
    fixed = sorted((*numbers.inserted_window_dims, *numbers.operand_batching_dims))
    slices = [1] * x.dim()
    free = [d for d in range(x.dim()) if d not in fixed]
    for dim, place in zip(free, numbers.update_window_dims, strict=True):
        slices[dim] = updates.shape[place]
    batch = (numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    indices, inside = _indices(
        eqn, starts, x.shape, slices, numbers.update_window_dims, fixed,
        numbers.scatter_dims_to_operand_dims, batch, updates.dim(),
    )  # fmt: skip
    shape = tuple(updates.shape) or (1,)  # an index without dims would be read as a number
    updates, inside = updates.reshape(shape), inside if inside is None else inside.expand(shape)
    places = tuple(index.expand(shape) for index in indices)
    if kind in ("_add", "_sub"):
        updates = updates if inside is None else torch.where(inside, updates, 0)
        updates = -updates if kind == "_sub" else updates
        return torch.index_put(x, places, updates, accumulate=True)
    flat = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, n in zip(places, x.shape, strict=True):
        flat = flat * n + index
    if kind == "":
        if inside is not None:  # a dropped update leaves what is there
            updates = torch.where(inside, updates, x[places])
        return torch.index_put(x, places, updates)
    neutral = {"_mul": 1.0, "_min": math.inf, "_max": -math.inf}[kind]
    updates = updates if inside is None else torch.where(inside, updates, neutral)
    how = {"_mul": "prod", "_min": "amin", "_max": "amax"}[kind]
    result = x.reshape(-1).scatter_reduce(0, flat.reshape(-1), updates.reshape(-1), how)
    return result.reshape(x.shape)


def _starts(eqn: Equation, x: Tensor, sizes: Sequence[int], starts: Sequence[Value]) -> list[Any]:
    """Return the starts of a slice, moved so that it lies inside: numbers, or tensors."""
    moved: list[Any] = []
    for start, n, size in zip(starts, x.shape, sizes, strict=True):
        if isinstance(start, Tensor):
            moved.append(start.long().clamp(0, n - size) if n > size else 0)
        else:
            moved.append(min(max(int(start), 0), n - size))
    return moved


@primitive("dynamic_slice")
def dynamic_slice(eqn: Equation, x: Tensor, *starts: Value) -> Value:
    sizes = eqn["slice_sizes"]
    for dim, (start, size) in enumerate(zip(_starts(eqn, x, sizes, starts), sizes, strict=True)):
        if isinstance(start, Tensor):
            x = x.index_select(dim, start + torch.arange(size, device=x.device))
        elif size != x.shape[dim]:
            x = x.narrow(dim, start, size)
    return x


@primitive("dynamic_update_slice")
def dynamic_update_slice(eqn: Equation, x: Tensor, update: Tensor, *starts: Value) -> Value:
    indices = [
        start + _line(size, dim, x.dim(), x.device)
        for dim, (start, size) in enumerate(
            zip(_starts(eqn, x, update.shape, starts), update.shape, strict=True)
        )
    ]
    return torch.index_put(x, tuple(index.expand(update.shape) for index in indices), update)
