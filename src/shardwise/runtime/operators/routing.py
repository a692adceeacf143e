"""Tokens routed to experts that are divided over the ranks of an axis.

Rows of a rank's own tokens, sorted by expert, travel to the ranks that hold their experts
(`to_experts`) and return in the same order (`to_tokens`). Ranks first gather the counts of all,
from which the sizes of all messages and the order of received rows follow.
"""

from typing import Any, cast

import torch
from torch import Tensor

from shardwise.routing import collect as local_collect
from shardwise.routing import dispatch as local_dispatch
from shardwise.routing import grouped_linear as local_grouped_linear
from shardwise.routing import route as local_route
from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators import untraced
from shardwise.runtime.splits import Of, runs

dispatch = untraced(local_dispatch)
collect = untraced(local_collect)


@untraced
def route(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return this rank's pairs of token and choice sorted by expert, and their counts."""
    if _is_predicted(ids):
        sizes = (ids.numel(), num_experts)
        return tuple(ids.new_empty(size, dtype=torch.int64) for size in sizes)  # type: ignore[return-value]
    return cast(tuple[Tensor, Tensor], local_route(ids, num_experts))


@untraced
def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Multiply each expert's rows by its matrix, in the dtype of an autocast region."""
    kind = rows.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return cast(Tensor, local_grouped_linear(rows, weight, counts, bias, transposed))


def _is_predicted(tensor: Tensor) -> bool:
    """Return whether costs or memory are predicted: a tensor without data."""
    return tensor.is_meta or type(tensor) is not Tensor


class _Exchange(torch.autograd.Function):
    """Exchange rows; gradients take the opposite way with the same counts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, counts: list[Tensor], forth: bool) -> Tensor:
        ctx.axis, ctx.counts, ctx.forth = axis, counts, forth
        return _exchange(rows, axis, counts, forth)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.axis, ctx.counts, not ctx.forth), None, None, None


@untraced
def to_experts(x: Tensor, axis: Axis, counts: Tensor, experts: Of) -> Tensor:
    """S -> S': send rows to the ranks of their experts; they arrive sorted by expert."""
    if axis.size == 1:
        return x
    table = _gather_counts(x, counts, axis, experts, forth=True)
    return cast(Tensor, _Exchange.apply(x, axis, table, True))  # type: ignore[no-untyped-call]


@untraced
def to_tokens(x: Tensor, axis: Axis, counts: Tensor, experts: Of) -> Tensor:
    """S -> S': return rows from the ranks of their experts, in the order in which they were."""
    if axis.size == 1:
        return x
    table = _gather_counts(x, counts, axis, experts, forth=False)
    return cast(Tensor, _Exchange.apply(x, axis, table, False))  # type: ignore[no-untyped-call]


def _gather_counts(
    rows: Tensor, counts: Tensor, axis: Axis, experts: Of, *, forth: bool
) -> list[Tensor]:
    """Return for each rank that holds experts the rows it gets, by source rank and expert.

    Predictions assume equal counts. The way back uses the table that was gathered on the way forth.
    """
    gathered: dict[str, list[Tensor]] = counts.__dict__.setdefault("gathered", {})
    key = f"{axis!r} {experts}"
    if key in gathered:
        return gathered[key]
    sizes = [counts.numel()] * axis.size
    parts = [runs(experts, axis.shares, index) for index in range(axis.size)]
    ranges = [part[0] if part else (0, 0) for part in parts]
    table = axis.all_gather(counts.contiguous(), sizes).wait().view(axis.size, -1)
    if _is_predicted(table):
        cells = counts.numel() if forth else axis.size * ranges[axis.index][1]
        table = torch.full(table.shape, rows.shape[0] // max(cells, 1))
    table = table.cpu()
    gathered[key] = [table[:, start : start + length] for start, length in ranges]
    return gathered[key]


def _exchange(rows: Tensor, axis: Axis, counts: list[Tensor], forth: bool) -> Tensor:
    """Send rows to experts (`forth`) or back; `counts` are those of `_gather_counts`."""
    width = rows.shape[1:].numel()
    outgoing = [int(table[axis.index].sum()) * width for table in counts]
    own = counts[axis.index]
    incoming = [int(count) * width for count in own.sum(1)]
    order = _expert_order(own).to(rows.device)
    if forth:
        axis = axis.about("collectives", expert_load=_load(counts))
    else:
        outgoing, incoming = incoming, outgoing
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
    flat = axis.all_to_all(rows.reshape(-1), outgoing, incoming).wait()
    received = flat.view(-1, *rows.shape[1:]) if width else flat.view(*rows.shape)
    return received.index_select(0, order) if forth else received


def _load(counts: list[Tensor]) -> float:
    """Return the rows of the most loaded rank, relative to those if experts got equally many."""
    rows, experts = [int(t.sum()) for t in counts], [t.shape[1] for t in counts]
    return max(rows) * sum(experts) / max(sum(rows) * max(experts), 1)


def _expert_order(counts: Tensor) -> Tensor:
    """Return the order by expert of rows that arrive by source rank, then expert."""
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return torch.argsort(torch.repeat_interleave(experts, counts.reshape(-1)), stable=True)
