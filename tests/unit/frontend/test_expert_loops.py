"""Loops over experts become tokens routed to experts, or are refused with the line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, one_hot

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.ir.operators import interpret

EXPERTS = 3


class Loop(nn.Module):
    """A router, and experts in one parameter for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(8, EXPERTS), nn.LayerNorm(16)
        self.up, self.bias = (nn.Parameter(torch.randn(EXPERTS, 16, *n)) for n in ((8,), ()))
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, 8))

    def expert(self, x: Tensor, e: int) -> Tensor:
        return self.norm(gelu(linear(x, self.up[e], self.bias[e]))) @ self.down[e]

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = 2 * x
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out = out.index_add(0, token, self.expert(x[token], e) * weights[token, choice, None])
        return out.square().mean()


class Separate(Loop):
    """Experts that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 5), nn.SiLU(), nn.Linear(5, 8)) for _ in range(EXPERTS)
        )

    def expert(self, x: Tensor, e: int) -> Tensor:
        return self.experts[e](x)


class Masks(Loop):
    """Rows of a one-hot mask, of which the choice is the first dim."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        mask, out = one_hot(ids, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
        for e in range(EXPERTS):
            choice, token = torch.where(mask[e])
            out.index_add_(0, token, self.expert(x[token], e) * weights[token, choice, None])
        return out.square().mean()


class Single(Loop):
    """One expert for every token, selected by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            mask = ids == e
            out[mask] = self.expert(x[mask], e) * weights[mask].unsqueeze(-1)
        return out.square().mean()


class Added(Loop):
    """Results are added to the rows that were read."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).topk(2)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            out[token] += weights[token, choice, None] * self.expert(x[token], e)
        return out.square().mean()


class Indices(Loop):
    """Indices are asked of `nonzero`."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = 2 * x
        for e in range(EXPERTS):
            token, choice = (ids == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.expert(x[token], e) * weights[token, choice, None])
        return out.square().mean()


class Sorted(Loop):
    """Each expert takes a number of rows that are sorted by expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        order = ids.flatten().argsort(stable=True)
        sizes = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        rows = torch.cat([self.expert(r, e) for e, r in enumerate(x[order // 2].split(sizes))])
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        return x.index_add(0, order // 2, rows).square().mean()


class Inverted(Separate):
    """Rows return in the order of the pairs; counts are sums of a matrix of zeros and ones."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        order = ids.flatten().sort(0).indices
        sizes = torch.zeros(len(x), EXPERTS).scatter(1, ids, 1).long().sum(0).tolist()
        rows = x[order.div(2, rounding_mode="trunc")].split(sizes)
        rows = torch.cat([self.expert(r, e) for e, r in enumerate(rows)])
        pairs = rows[order.argsort()].view(*ids.shape, -1)
        return (pairs * weights.unsqueeze(-1)).sum(1).square().mean()


@pytest.mark.parametrize("model", [Loop, Separate, Masks, Single, Added, Indices, Sorted, Inverted])
def test_a_loop_over_experts_is_captured_as_routing(model: type[Loop]) -> None:
    torch.manual_seed(0)
    loop, x = model().double(), torch.randn(7, 8, dtype=torch.float64)
    graph = sw.capture(loop, {"x": x})
    assert [n.op for n in graph.nodes].count("shardwise.grouped_linear.default") == 2
    expected = loop(x)
    expected.backward()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in loop.named_parameters()}
    values = interpret(graph, parameters, {}, {"x": x})
    assert graph.loss is not None
    values[graph.loss].backward()
    torch.testing.assert_close(values[graph.loss], expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in loop.named_parameters():
        torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)


class Unequal(Loop):
    """The first expert computes something else."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        out = super().expert(x, e)
        return out.relu() if e == 0 else out


class Skipping(Loop):
    """The second expert is not called."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x, 2 * e // 2)

    def forward(self, x: Tensor) -> Tensor:
        ids = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for e in (0, 2):
            (token,) = torch.where(ids == e)
            out = out.index_add(0, token, self.expert(x[token], e))
        return out.square().mean()


class Mixing(Loop):
    """Rows of an expert depend on each other."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x.softmax(0), e)


class MixingSorted(Sorted):
    """Rows of an expert depend on each other."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x.cumsum(0), e)


class Descending(Sorted):
    """The rows of the last expert come first, but the counts of the first."""

    def forward(self, x: Tensor) -> Tensor:
        ids = self.router(x).argmax(-1)
        order = ids.argsort(descending=True)
        parts = x[order].split(torch.bincount(ids, minlength=EXPERTS).tolist())
        rows = torch.cat([self.expert(part, e) for e, part in enumerate(parts)])
        return x.index_add(0, order, rows).square().mean()


class OtherCounts(Sorted):
    """Counts of other ids than those by which rows are sorted."""

    def forward(self, x: Tensor) -> Tensor:
        ids = self.router(x).argmax(-1)
        order = ids.argsort()
        parts = x[order].split(torch.bincount(2 - ids, minlength=EXPERTS).tolist())
        rows = torch.cat([self.expert(part, e) for e, part in enumerate(parts)])
        return x.index_add(0, order, rows).square().mean()


@pytest.mark.parametrize(
    "model", [Unequal, Skipping, Mixing, MixingSorted, Descending, OtherCounts]
)
def test_other_loops_are_refused_with_the_rewrite(model: type[Loop]) -> None:
    with pytest.raises(CaptureError) as caught:
        sw.capture(model(), {"x": torch.randn(7, 8)})
    line = caught.value.where or ""
    assert ".tolist()" in line if issubclass(model, Sorted) else "torch.where(ids == e)" in line
    assert "shardwise.routing" in (caught.value.hint or "")
