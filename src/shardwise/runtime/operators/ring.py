"""Attention over a sharded sequence: blocks of keys and values travel around a ring of ranks.

Every rank keeps its query rows. In each of n steps it adds the attention to the block that it
holds, while the next one arrives; the log of the sum of exponentials merges the terms. In backward
the blocks travel again, and their gradients travel with them, back to their owners.

Under a causal mask, rank i of contiguous shards would compute i + 1 of n blocks. So that all work
equally, ranks i and n-1-i exchange the second halves of their shards inside the operator: rank i
then holds the halves 2i and 2n-1-2i of 2n, and every step costs every rank two of four pairs of
halves. Outside of the operator shards stay contiguous, so that positions, labels and masks do.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.operators import untraced, widened
from shardwise.runtime.splits import offsets
from shardwise.runtime.transport import Group, LocalTransport, Pending
from shardwise.shares import part

MAX_SCORES = 1 << 26  # elements of the scores that exist at a time
Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients
Saved = tuple[Tensor, Tensor | None, Tensor, Tensor]  # query, mask, result, logs


@untraced
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axis,
    mask: Tensor | None = None,
    *,
    rows: int,
    columns: int,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of `rows` query positions to `columns` key positions, sharded over `axis`.

    `mask` has this rank's rows and all columns.
    """
    ring = _Ring(
        axis=axis,
        rows=rows,
        columns=columns,
        is_causal=is_causal,
        folded=is_causal and mask is None and rows == columns,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        groups=query.shape[-3] // key.shape[-3] if enable_gqa else 1,
        flash=mask is None and (not is_causal or rows == columns) and _has_flash(query, value),
    )
    result = _RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


@untraced
def causal_rows(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> Tensor:
    """Compute causal attention of the rows from `first` on, given all keys: a ring of one rank.

    No mask is stored, and keys that no row sees are skipped.
    """
    rows, columns = query.shape[-2], key.shape[-2]
    flash = first + rows <= columns and _has_flash(query, value)
    solo, groups = Axis("self", Group((0,), 0), LocalTransport()), query.shape[-3] // key.shape[-3]
    ring = _Ring(
        axis=solo, rows=rows, columns=columns, is_causal=True, folded=False, scale=scale,
        groups=groups, flash=flash, first=first,
    )  # fmt: skip
    return cast(Tensor, _RingAttention.apply(query, key, value, None, ring))  # type: ignore[no-untyped-call]


class _Piece(NamedTuple):
    """Local rows and columns; under a causal mask row i sees columns up to `i + diagonal`."""

    rows: slice
    columns: slice
    diagonal: int | None
    start: int  # the position of the first column in the full sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The positions that each rank holds, and messages to other ranks."""

    axis: Axis
    rows: int
    columns: int
    is_causal: bool
    folded: bool
    scale: float
    groups: int
    flash: bool  # whether torch's flash kernels compute the pieces
    first: int | None = None  # the first row of a rank that has all columns

    def ranges(self, size: int, rank: int) -> list[tuple[int, int]]:
        """Return start and length of the positions that a rank holds, in order."""
        start, length = part(size, self.axis.shares, rank)
        if not self.folded:
            return [(start, length)]
        other, other_length = part(size, self.axis.shares, self.axis.size - 1 - rank)
        half = (other_length + 1) // 2
        return [(start, (length + 1) // 2), (other + half, other_length - half)]

    def fold(self, x: Tensor, size: int, *, back: bool = False) -> Tensor:
        """Exchange the second half of the rows of dim -2 with the rank at the other end."""
        if not self.folded:
            return x
        partner = self.axis.size - 1 - self.axis.index
        (_, first), _ = self.ranges(size, self.axis.index)
        _, (_, length) = self.ranges(size, partner if back else self.axis.index)
        shape = (*x.shape[:-2], length, x.shape[-1])
        received = self._send(x[..., first:, :], partner, partner, math.prod(shape)).wait()
        return torch.cat([x[..., :first, :], received.view(shape)], -2)

    def shift(self, pair: Pair, step: int) -> Callable[[], Pair]:
        """Send two tensors to the next rank; return a function that waits for the previous one's.

        They have a row for each column of the block of this step.
        """
        n, index = self.axis.size, self.axis.index
        length = sum(length for _, length in self.ranges(self.columns, (index - step - 1) % n))
        shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in pair]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.cat([x.reshape(-1) for x in pair])
        pending = self._send(flat, (index + 1) % n, (index - 1) % n, sum(sizes))

        def arrive() -> Pair:
            first, second = torch.split(pending.wait(), sizes)
            return first.view(shapes[0]), second.view(shapes[1])

        return arrive

    def _send(self, x: Tensor, target: int, source: int, size: int) -> Pending:
        sent, received = [0] * self.axis.size, [0] * self.axis.size
        sent[target], received[source] = x.numel(), size
        return self.axis.all_to_all(x.reshape(-1), sent, received)

    def positions(self, step: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the ranges of this rank's rows, and of the columns that it has in this step."""
        n, index, first = self.axis.size, self.axis.index, self.first
        if first is None:
            return self.ranges(self.rows, index), self.ranges(self.columns, (index - step) % n)
        ends = [0, first, first + self.rows, self.columns]  # columns before, at and after the rows
        columns = [(a, max(0, min(b, self.columns) - a)) for a, b in pairwise(ends)]
        return [(first, self.rows)], columns

    def pieces(self, step: int, num_heads: int) -> Iterator[_Piece]:
        """Iterate over pairs of ranges of this rank's rows and of the block's columns.

        Without flash kernels, scores of one piece have at most `MAX_SCORES` elements.
        """
        rows_here, block = self.positions(step)
        for row, first_row, num_rows in offsets(rows_here):
            for column, first_column, num_columns in offsets(block):
                columns = slice(first_column, first_column + num_columns)
                limit = num_rows if self.flash else MAX_SCORES // max(1, num_heads * num_columns)
                for start in range(0, num_rows if num_columns else 0, max(1, limit)):
                    stop = min(start + max(1, limit), num_rows)
                    diagonal = row + start - column
                    if self.is_causal and diagonal + stop - start <= 0:
                        continue  # all of these keys come after all of these queries
                    masked = self.is_causal and diagonal < num_columns - 1
                    rows = slice(first_row + start, first_row + stop)
                    yield _Piece(rows, columns, diagonal if masked else None, column)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: _Ring
    ) -> Tensor:
        q = _grouped(ring.fold(query, ring.rows), ring.groups)
        k, v = ring.fold(key, ring.columns), ring.fold(value, ring.columns)
        wide, attend = widened(q.dtype), _flash if ring.flash else _attend
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        logs = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        block: Pair = (k, v)
        for step in range(ring.axis.size):
            arrive = ring.shift(block, step) if step + 1 < ring.axis.size else None
            for piece in ring.pieces(step, math.prod(q.shape[:-2])):
                term, new = attend(piece, q, block, mask, ring)
                before, rows = logs[..., piece.rows], out[..., piece.rows, :]
                total = torch.logaddexp(before, new)
                at = _finite(total)
                rows.mul_((before - at).exp().unsqueeze(-1))
                rows.add_(term * (new - at).exp().unsqueeze(-1))
                logs[..., piece.rows] = total
            block = arrive() if arrive is not None else block
        result = out.to(value.dtype)
        ctx.save_for_backward(q, k, v, mask, result, logs)
        ctx.ring = ring
        return ring.fold(result.flatten(-4, -3), ring.rows, back=True).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, logs = ctx.saved_tensors
        ring: _Ring = ctx.ring
        differentiate = _flash_backward if ring.flash else _differentiate
        grad = _grouped(ring.fold(grads[0], ring.rows), ring.groups)
        to_q = torch.zeros_like(q, dtype=logs.dtype)
        to_mask = torch.zeros_like(mask, dtype=logs.dtype) if ctx.needs_input_grad[3] else None
        block: Pair = (k, v)
        arrive_sum: Callable[[], Pair] | None = None
        for step in range(ring.axis.size):
            arrive = ring.shift(block, step) if step + 1 < ring.axis.size else None
            own = tuple(torch.zeros_like(x, dtype=logs.dtype) for x in block)
            for piece in ring.pieces(step, math.prod(q.shape[:-2])):
                terms = differentiate(piece, block, (q, mask, out, logs), grad, to_mask, ring)
                to_q[..., piece.rows, :] += terms[0]
                for target, term in zip(own, terms[1:], strict=True):
                    target[..., piece.columns, :] += term
            if arrive_sum is not None:  # the sum of the ranks before, for the same block
                own = tuple(a.add_(b) for a, b in zip(own, arrive_sum(), strict=True))
            arrive_sum = ring.shift((own[0], own[1]), step)
            block = arrive() if arrive is not None else block
        assert arrive_sum is not None
        to_k, to_v = (ring.fold(x.to(k.dtype), ring.columns, back=True) for x in arrive_sum())
        to_q = ring.fold(to_q.flatten(-4, -3).to(q.dtype), ring.rows, back=True)
        return to_q, to_k, to_v, None if to_mask is None else to_mask.to(mask.dtype), None


# ---------------------------------------------------------------- one piece
def _scores(piece: _Piece, q: Tensor, k: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
    """Return the masked scores, of shape (…, heads, groups, rows, columns)."""
    q, k = q[..., piece.rows, :], k[..., piece.columns, :].unsqueeze(-3)
    scores = (q @ k.transpose(-2, -1)).mul_(ring.scale)
    scores = scores.to(widened(scores.dtype))
    if piece.diagonal is not None:
        place = torch.arange(scores.shape[-2], device=scores.device) + piece.diagonal
        hidden = torch.arange(scores.shape[-1], device=scores.device) > place.unsqueeze(-1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        own = _of_mask(piece, mask, ring)
        boolean = own.dtype == torch.bool
        scores = scores.masked_fill_(~own, -torch.inf) if boolean else scores.add_(own)
    return scores


def _of_mask(piece: _Piece, mask: Tensor, ring: _Ring) -> Tensor:
    """Return a view of a piece's part of a mask, with the dims of its scores."""
    length = piece.columns.stop - piece.columns.start
    own = mask[..., piece.rows, piece.start : piece.start + length]
    if own.dim() < 3:
        return own
    return _grouped(own, ring.groups) if own.shape[-3] > 1 else own.unsqueeze(-3)


def _attend(piece: _Piece, q: Tensor, block: Pair, mask: Tensor | None, ring: _Ring) -> Pair:
    """Return the attention of a piece, and the logs of its sums of exponentials."""
    scores = _scores(piece, q, block[0], mask, ring)
    logs = scores.logsumexp(-1)
    weights = scores.sub_(_finite(logs).unsqueeze(-1)).exp_().to(q.dtype)
    return weights @ block[1][..., piece.columns, :].unsqueeze(-3), logs


def _differentiate(
    piece: _Piece, block: Pair, saved: Saved, grad: Tensor, to_mask: Tensor | None, ring: _Ring
) -> tuple[Tensor, ...]:
    """Return the gradients of a piece's rows, keys and values; add that of its mask."""
    (q, mask, out, logs), (k, v) = saved, block
    scores = _scores(piece, q, k, mask, ring)
    q, grad, out = (x[..., piece.rows, :] for x in (q, grad, out))
    k, v = k[..., piece.columns, :], v[..., piece.columns, :]
    weights = scores.sub_(_finite(logs[..., piece.rows]).unsqueeze(-1)).exp_()
    to_v = (weights.to(q.dtype).transpose(-2, -1) @ grad).sum(-3)
    to_scores = (grad @ v.unsqueeze(-3).transpose(-2, -1)).to(weights.dtype)
    to_scores = to_scores.sub_((grad.to(weights.dtype) * out).sum(-1, keepdim=True)).mul_(weights)
    if to_mask is not None:
        own = _of_mask(piece, to_mask, ring)
        own += to_scores.sum_to_size(own.shape)
    low = to_scores.mul_(ring.scale).to(q.dtype)
    return low @ k.unsqueeze(-3), (low.transpose(-2, -1) @ q).sum(-3), to_v


# Torch's flash kernels return the logs as well, and differentiate a piece given those of all of
# them. They need pieces that are full or square, without a mask.


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """Return whether a flash kernel exists for these operands; fake ones stand for GPUs."""
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return False
    half = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in range(8, 257, 8)
    return half or query.device.type == "cpu"


def _repeated(piece: _Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return a piece's rows, keys and values, with a key head for each query head."""
    pair = (x[..., piece.columns, :].repeat_interleave(q.shape[-3], -3) for x in (k, v))
    return (q[..., piece.rows, :].flatten(-4, -3), *pair)


def _flash(piece: _Piece, q: Tensor, block: Pair, mask: Tensor | None, ring: _Ring) -> Pair:
    """Do what `_attend` does."""
    run = torch.ops.aten._scaled_dot_product_flash_attention
    if q.device.type == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    causal = piece.diagonal is not None
    out, logs, *_ = run(*_repeated(piece, q, *block), 0.0, causal, scale=ring.scale)
    return _grouped(out, ring.groups), logs.unflatten(-2, (-1, ring.groups))


def _flash_backward(
    piece: _Piece, block: Pair, saved: Saved, grad: Tensor, to_mask: Tensor | None, ring: _Ring
) -> tuple[Tensor, ...]:
    """Do what `_differentiate` does."""
    q, _, out, logs = saved
    q, k, v = _repeated(piece, q, *block)
    grad, out = (x[..., piece.rows, :].flatten(-4, -3) for x in (grad, out))
    args = (grad, q, k, v, out, logs[..., piece.rows].flatten(-3, -2).contiguous())
    causal = piece.diagonal is not None
    if q.device.type == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        to_q, *pair = run(*args, 0.0, causal, scale=ring.scale)
    else:
        run = torch.ops.aten._scaled_dot_product_flash_attention_backward
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout
        lengths = (None, None, q.shape[-2], k.shape[-2])
        to_q, *pair = run(*args, *lengths, 0.0, causal, unused, unused, scale=ring.scale)
    summed = (_grouped(x, ring.groups).sum(-3, dtype=logs.dtype) for x in pair)
    return (_grouped(to_q, ring.groups), *summed)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return (…, heads x groups, rows, size) as (…, heads, groups, rows, size)."""
    return torch.unflatten(x, -3, (x.shape[-3] // groups, groups))


def _finite(logs: Tensor) -> Tensor:
    """Return the logs, with zeros for rows that see nothing."""
    return logs.masked_fill(logs == -torch.inf, 0)
