"""Runtime operators in other dtypes than float64, and cases beyond the rules' property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import runtime as rt
from shardwise.errors import ProgramError
from shardwise.runtime.mesh import Axis, ProcessMesh
from shardwise.runtime.transport.threads import run_threads


def on_ranks(num: int, fn: Callable[[Axis], Any]) -> list[Any]:
    return run_threads(num, lambda rank, t: fn(ProcessMesh({"tp": num}, rank, t).axis("tp")))


def part(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    n = x.shape[dim]
    return x.narrow(dim, axis.start(n), axis.length(n))


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_statistics_are_as_precise_as_in_torch(
    ranks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 64) * 5 + 20).to(dtype)
    w, b = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    pairs = {
        "layer_norm": (
            lambda a: rt.layer_norm(part(x, a), a, 1, part(w, a), part(b, a), eps=1e-5, count=64),
            F.layer_norm(x, (64,), w, b),
        ),
        "rms_norm": (
            lambda a: rt.rms_norm(part(x, a), a, 1, part(w, a), eps=None, count=64),
            F.rms_norm(x, (64,), w),
        ),
        "softmax": (lambda a: rt.softmax(part(x, a), a, 1), x.double().softmax(1).to(dtype)),
        "log_softmax": (
            lambda a: rt.log_softmax(part(x, a), a, 1),
            x.double().log_softmax(1).to(dtype),
        ),
    }
    for name, (fn, expected) in pairs.items():
        result = torch.cat(on_ranks(ranks, fn), -1)
        torch.testing.assert_close(result, expected, msg=name)
    replicated = {
        "var": (lambda a: rt.var(part(x, a), a, (1,), False, 1.0, 64), x.var(1)),
        "logsumexp": (lambda a: rt.logsumexp(part(x, a), a, (1,)), x.logsumexp(1)),
        "norm": (lambda a: rt.vector_norm(part(x, a), a, (1,), False), x.norm(dim=1)),
    }
    for name, (fn, expected) in replicated.items():
        for result in on_ranks(ranks, fn):
            torch.testing.assert_close(result, expected, msg=name)


def test_softmax_with_masked_scores_on_one_rank_and_on_all() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    x[0, :3] = -torch.inf
    x[1] = -torch.inf
    result = torch.cat(on_ranks(2, lambda a: rt.softmax(part(x, a), a, 1)), 1)
    torch.testing.assert_close(result, x.softmax(1), equal_nan=True)
    for total in on_ranks(2, lambda a: rt.logsumexp(part(x, a), a, (1,))):
        torch.testing.assert_close(total, x.logsumexp(1))


def test_cross_entropy_does_not_communicate_scores() -> None:
    scores = torch.randn(8, 1000, dtype=torch.float64)
    labels = torch.randint(0, 1000, (8,))

    def work(rank: int, transport: Any) -> tuple[int, Tensor]:
        sent = []

        class Counting:
            def __getattr__(self, name: str) -> Any:
                def call(flat: Tensor, *args: Any, **kwargs: Any) -> Any:
                    sent.append(flat.numel())
                    return getattr(transport, name)(flat, *args, **kwargs)

                return call if name.startswith(("all_", "reduce")) else getattr(transport, name)

        axis = ProcessMesh({"tp": 2}, rank, Counting()).axis("tp")  # type: ignore[arg-type]
        own = part(scores, axis).clone().requires_grad_()
        loss = rt.cross_entropy(own, labels, reduction="mean", class_axis=axis, classes=1000)
        loss.backward()
        return max(sent), loss.detach()

    for largest, loss in run_threads(2, work):
        assert largest <= 8
        torch.testing.assert_close(loss, F.cross_entropy(scores, labels))


def test_operators_on_positions_need_a_single_range() -> None:
    table, ids = torch.randn(6, 2), torch.tensor([1])
    with pytest.raises(ProgramError, match="2 ranges"):
        on_ranks(2, lambda a: rt.embedding_rows(table[:4], ids, a, ((2, 3, 1),)))


def test_embedding_rows_split_at_an_outer_factor() -> None:
    table, ids = torch.randn(6, 2, dtype=torch.float64), torch.tensor([0, 3, 5, 2])
    bounds = [(0, 4), (4, 6)]  # three blocks of two rows over two ranks

    def work(axis: Axis) -> Tensor:
        start, stop = bounds[axis.index]
        return rt.embedding_rows(table[start:stop], ids, axis, ((1, 3, 2),))

    torch.testing.assert_close(sum(on_ranks(2, work)), table[ids])


def test_gradients_reach_all_operands_of_an_empty_result() -> None:
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(0, 3, requires_grad=True)
    values, indices = rt.empty_results(((2, 0), (2, 0)), (torch.float32, torch.int64), x, w)
    values.sum().backward()
    assert not indices.requires_grad
    assert x.grad is not None
    assert not x.grad.any()
    assert w.grad is not None
    assert w.grad.shape == (0, 3)
