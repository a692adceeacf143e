"""Tokens routed to experts: the operators of a mixture-of-experts layer.

    order, counts = route(ids, num_experts)       which rows each expert gets, and how many
    rows = dispatch(x, order, top_k)              the token of every row, sorted by expert
    rows = grouped_linear(rows, weight, counts)   each expert's rows times its matrix
    y = collect(rows, order, ids)                 the rows of every token: [t, top_k, m]

Rows form a *ragged* dim. Logically it is the product `experts x tokens x top_k`, of which the pairs
that the router chose exist: one in `experts`. Captured graphs give it the size of the product, so
that rules, layouts and moves treat it like any other dim: sharding its tokens leaves each rank the
rows of its own tokens, sharding its experts the rows of its own experts. At run time a tensor holds
only the rows that exist, and `counts` gives the number for each expert.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ProgramError

ROUTE, DISPATCH = "shardwise.route.default", "shardwise.dispatch.default"
GROUPED_LINEAR, COLLECT = "shardwise.grouped_linear.default", "shardwise.collect.default"


@torch.library.custom_op("shardwise::route", mutates_args=())
def route(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs `token * top_k + choice` sorted by expert, and the number for each expert.

    Pairs with an id of `num_experts` or above are dropped, as by an expert that is full.
    """
    flat = ids.reshape(-1)
    counts = torch.bincount(flat.clamp(max=num_experts), minlength=num_experts + 1)
    order = torch.argsort(flat, stable=True)
    return order[: flat.numel() - int(counts[num_experts])], counts[:num_experts].clone()


@route.register_fake
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    order = ids.new_empty(num_experts * ids.numel(), dtype=torch.int64)
    return order, ids.new_empty(num_experts, dtype=torch.int64)


@torch.library.custom_op("shardwise::dispatch", mutates_args=())
def dispatch(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return the token of every row."""
    return x.index_select(0, order.div(top_k, rounding_mode="floor"))


dispatch.register_fake(lambda x, order, top_k: x.new_empty(order.shape[0], *x.shape[1:]))


@torch.library.custom_op("shardwise::collect", mutates_args=())
def collect(rows: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    """Return the row of every token and choice; zeros for pairs that were dropped."""
    pairs = rows.new_zeros(ids.numel(), *rows.shape[1:])
    return pairs.index_copy_(0, order, rows).view(*ids.shape, *rows.shape[1:])


collect.register_fake(lambda rows, order, ids: rows.new_empty(*ids.shape, *rows.shape[1:]))


@torch.library.custom_op("shardwise::grouped_linear", mutates_args=())
def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Multiply each expert's rows by its matrix `[out, in]`, or `[in, out]` if `transposed`."""
    matrices = weight if transposed else weight.transpose(1, 2)
    if bias is None and _has_grouped_kernel(rows, weight):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=_ends(counts))
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for i, (start, stop) in _ranges(counts, rows):
        if bias is None:
            torch.mm(rows[start:stop], matrices[i], out=out[start:stop])
        else:
            torch.addmm(bias[i], rows[start:stop], matrices[i], out=out[start:stop])
    return out


grouped_linear.register_fake(
    lambda rows, weight, counts, bias=None, transposed=False: rows.new_empty(
        rows.shape[0], weight.shape[2 if transposed else 1]
    )
)


@torch.library.custom_op("shardwise::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Return `left.T @ right` over each expert's rows: the gradient of its matrix."""
    if _has_grouped_kernel(left, right):
        return torch.nn.functional.grouped_mm(left.T, right, offs=_ends(counts))
    out = left.new_zeros(counts.numel(), left.shape[1], right.shape[1])
    for i, (start, stop) in _ranges(counts, left):
        torch.mm(left[start:stop].T, right[start:stop], out=out[i])
    return out


grouped_outer.register_fake(
    lambda left, right, counts: left.new_empty(counts.shape[0], left.shape[1], right.shape[1])
)


@torch.library.custom_op("shardwise::grouped_sum", mutates_args=())
def grouped_sum(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each expert's rows: the gradient of its bias."""
    out = rows.new_zeros(counts.numel(), rows.shape[1])
    for i, (start, stop) in _ranges(counts, rows):
        out[i] = rows[start:stop].sum(0)
    return out


grouped_sum.register_fake(lambda rows, counts: rows.new_empty(counts.shape[0], rows.shape[1]))


def _ranges(counts: Tensor, rows: Tensor) -> list[tuple[int, tuple[int, int]]]:
    """Return each expert that has rows, with the range of its rows."""
    ends = list(accumulate(counts.tolist(), initial=0))
    if ends[-1] != rows.shape[0]:
        raise ProgramError(
            f"{rows.shape[0]} rows for counts of {ends[-1]} rows by {counts.numel()} experts",
            hint="pass the counts of the route that sorted the rows",
        )
    return [(i, (start, stop)) for i, (start, stop) in enumerate(pairwise(ends)) if start < stop]


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _has_grouped_kernel(a: Tensor, b: Tensor) -> bool:
    """Return whether one kernel multiplies all groups: it needs rows of multiples of 16 bytes."""
    sizes = (a.shape[-1], b.shape[-1], b.shape[-2])
    return a.is_cuda and a.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


# ---------------------------------------------------------------- derivatives
def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, ctx.top_k = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(order)


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    # A sum over the choices of each token, not `index_add`, which is not deterministic on GPUs.
    pairs = collect(grad, order, order.new_empty(ctx.num_tokens, ctx.top_k))
    return pairs.sum(1), None, None


def _save_collect(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _collect_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    return dispatch(grad.flatten(0, 1), order, 1), None, None


def _save_grouped_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, counts, _, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, counts)


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight, counts = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad = grad.contiguous()
    of_rows = grouped_linear(grad, weight, counts, None, not ctx.transposed) if needs[0] else None
    pair = (rows, grad) if ctx.transposed else (grad, rows)
    of_weight = grouped_outer(*pair, counts) if needs[1] else None
    of_bias = grouped_sum(grad, counts) if any(needs[3:4]) else None
    # torch omits arguments with their default value.
    return (of_rows, of_weight, None, of_bias, None)[: len(needs)]


dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
collect.register_autograd(_collect_backward, setup_context=_save_collect)
grouped_linear.register_autograd(_grouped_linear_backward, setup_context=_save_grouped_linear)
