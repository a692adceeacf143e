"""Models with torch.func, parametrizations, pruning, complex numbers, or repeated modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.errors import CaptureError

BATCH = {"x": torch.linspace(-1, 1, 42).view(7, 6).sin(), "y": torch.arange(7) % 5}


class Model(nn.Module):
    """One linear layer, and the ways to compute with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, nn.Linear(6, 5)
        if kind == "pruned":
            prune.l1_unstructured(self.net, "weight", 0.3)
        elif kind == "normalized":
            parametrizations.weight_norm(self.net)
        elif kind == "spectral":
            parametrizations.spectral_norm(self.net)
        elif kind == "orthogonal":
            parametrizations.orthogonal(self.net)
        self.square, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.mixing = nn.Parameter(torch.eye(4, 6) * (1 + 0.5j))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(getattr(self, f"_{self.kind}", self.net)(x), y)

    def _called(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * p for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, doubled, (x,))

    def _mapped(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.net(row).tanh())(x)

    def _ensemble(self, x: Tensor) -> Tensor:
        weights = torch.stack([self.net.weight, self.net.weight.tanh()])
        return torch.func.vmap(lambda weight: F.linear(x, weight))(weights).sum(0)

    def _complex(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(x) @ self.mixing
        return self.net(z.abs() + torch.view_as_real(z).sum(-1))

    def _repeated(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(self.square(x)).relu()
        return self.net(x)

    def _derived(self, x: Tensor) -> Tensor:
        return self.net(torch.func.grad(lambda rows: rows.square().sum())(x))

    def _nested(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        return self.net(rows).to_padded_tensor(0.0).flatten(0, 1)[:7]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.parametrize(
    "kind",
    [
        *("called", "mapped", "ensemble", "complex", "repeated"),
        *("pruned", "normalized", "spectral", "orthogonal"),
    ],
)
def test_plans_equal_the_model(kind: str, strategy: str) -> None:
    torch.manual_seed(0)
    model = Model(kind)
    plan = getattr(sw.strategies, strategy)(sw.capture(model, BATCH), sw.Cluster.local(3))
    certificate = sw.verify(model, BATCH, plan)
    assert certificate.ok, certificate


@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        ("derived", "torch.func.grad", "takes derivatives itself"),
        ("nested", "torch.nested.as_nested_tensor", "rows of unequal sizes"),
    ],
)
def test_refusals_name_the_line(kind: str, line: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        sw.capture(Model(kind), BATCH)
    assert line in str(caught.value.where)
