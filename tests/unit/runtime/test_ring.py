"""Ring attention on threads equals the fused operator, and shares causal work equally."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import runtime as rt
from shardwise.runtime.operators import ring
from shardwise.runtime.transport.threads import run_threads
from shardwise.shares import part


def local(x: Tensor, ranks: int, rank: int) -> Tensor:
    start, length = part(x.shape[-2], ranks, rank)
    return x.narrow(-2, start, length).detach().clone().requires_grad_(x.requires_grad)


def on_threads(
    operands: list[Tensor], mask: Tensor | None, grad: Tensor, ranks: int, **options: Any
) -> list[Tensor]:
    """Return the result and the gradients of all operands, gathered."""
    rows, columns = operands[0].shape[-2], operands[1].shape[-2]

    def work(rank: int, transport: Any) -> list[Tensor]:
        axis = rt.ProcessMesh({"cp": ranks}, rank, transport).axis("cp")
        own = [local(x, ranks, rank) for x in operands]
        own_mask = None if mask is None else local(mask, ranks, rank)
        out = rt.ring_attention(*own, axis, own_mask, rows=rows, columns=columns, **options)
        out.backward(local(grad, ranks, rank))
        grads = [x.grad for x in own] + ([own_mask.grad] if own_mask is not None else [])
        return [out.detach(), *(g for g in grads if g is not None)]

    parts = run_threads(ranks, work)
    return [torch.cat(pieces, -2) for pieces in zip(*parts, strict=True)]


CASES = {
    "causal": ((2, 4, 13, 8), (2, 4, 13, 8), None, {"is_causal": True}),
    "grouped": ((2, 6, 7, 8), (2, 2, 7, 8), None, {"is_causal": True, "enable_gqa": True}),
    "full": ((1, 3, 7, 8), (1, 3, 7, 8), None, {"scale": 0.3}),
    "cross": ((2, 2, 5, 8), (2, 2, 9, 8), None, {}),
    "window": ((2, 4, 9, 8), (2, 4, 9, 8), torch.bool, {}),
    "bias": ((2, 4, 9, 8), (2, 2, 9, 8), torch.float64, {"enable_gqa": True}),
    "three dims": ((3, 7, 8), (3, 7, 8), None, {"is_causal": True}),
    "fewer positions than ranks": ((1, 2, 3, 8), (1, 2, 3, 8), None, {"is_causal": True}),
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_ring_equals_attention(case: str, ranks: int) -> None:
    query, key, kind, options = CASES[case]
    torch.manual_seed(0)
    operands = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (query, key, key)
    ]
    mask = None
    if kind is torch.bool:
        distance = torch.arange(query[-2])[:, None] - torch.arange(key[-2])
        mask = (distance >= 0) & (distance < 4)
    elif kind is not None:
        mask = torch.randn((1, query[-3], query[-2], key[-2]), dtype=kind, requires_grad=True)
    expected = F.scaled_dot_product_attention(*operands, mask, **options)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    wanted = [expected.detach(), *(x.grad for x in operands)]
    wanted += [mask.grad] if mask is not None and mask.requires_grad else []
    actual = on_threads(operands, mask, grad, ranks, **options)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("first", "rows"), [(0, 4), (3, 5), (9, 4), (13, 0), (11, 6)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_causal_rows_equal_those_of_a_mask(first: int, rows: int, key_heads: int) -> None:
    torch.manual_seed(0)
    operands = [
        torch.randn(2, heads, length, 6, dtype=torch.float64, requires_grad=True)
        for heads, length in ((4, rows), (key_heads, 13), (key_heads, 13))
    ]
    mask = torch.arange(first, first + rows)[:, None] >= torch.arange(13)
    expected = F.scaled_dot_product_attention(*operands, mask, scale=0.3, enable_gqa=True)
    grad = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, operands, grad)]
    result = ring.causal_rows(*operands, first, 0.3)
    actual = [result, *torch.autograd.grad(result, operands, grad)]
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_causal_work_is_shared_equally_in_every_step(ranks: int) -> None:
    length, work = 4096, []
    for rank in range(ranks):

        def count(rank: int = rank) -> list[int]:
            axis = rt.ProcessMesh({"cp": ranks}, rank, _Silent(ranks)).axis("cp")
            shape = ring._Ring(
                axis=axis, rows=length, columns=length, is_causal=True, folded=True, scale=1.0,
                groups=1, flash=True,
            )  # fmt: skip
            return [sum(_pairs(p) for p in shape.pieces(step, 1)) for step in range(ranks)]

        work.append(count())
    mean = length * (length + 1) / 2 / ranks
    for steps in work:
        assert abs(sum(steps) - mean) <= 0.05 * mean
        assert max(steps) <= 1.05 * mean / ranks + length


def _pairs(piece: Any) -> int:
    """Return the number of pairs of a row and a column that it sees."""
    rows, columns = (s.stop - s.start for s in (piece.rows, piece.columns))
    if piece.diagonal is None:
        return int(rows * columns)
    return sum(min(columns, max(0, i + piece.diagonal + 1)) for i in range(rows))


class _Silent:
    """A transport of ranks that send nothing."""

    rank = 0

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks
