"""Programs for the mutation tests, each lowered once, with its reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.equivalence import Certificate, check, double, run_reference
from shardwise.equivalence.check import make_trials
from shardwise.equivalence.reference import Reference, widen_graph
from shardwise.equivalence.trial import Trial
from shardwise.plans import resolve
from shardwise.program import Program, lower
from shardwise.routing import collect, dispatch, grouped_linear, route
from tests.support import zoo


class BiasedMLP(nn.Module):
    """Two linear layers with biases; its 7 rows do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y)


class Routed(nn.Module):
    """Three experts with biases, of which each of 7 tokens uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 5, 8))
        self.bias = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        order, counts = route(ids, 3)
        rows = torch.tanh(grouped_linear(dispatch(x, order, 2), self.up, counts))
        rows = grouped_linear(rows, self.down, counts, self.bias)
        return nn.functional.mse_loss((collect(rows, order, ids) * weights[..., None]).sum(1), y)


@dataclass(frozen=True)
class Case:
    program: Program
    reference: Reference
    batch: Any
    trials: list[Trial]

    def check(self, program: Program | None = None, **options: Any) -> Certificate:
        options = {"trials": self.trials, "timeout_s": 20, **options}
        return check(program or self.program, self.reference, self.batch, **options)


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build a model whose parameters are all nonzero, and its batch."""
    if name in ("biased_mlp", "routed"):
        torch.manual_seed(0)
        model: nn.Module = (BiasedMLP() if name == "biased_mlp" else Routed()).double()
        generator = torch.Generator().manual_seed(1)
        batch = {
            "x": torch.randn(7, 6, generator=generator, dtype=torch.float64),
            "y": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        }
    else:
        model, batch = zoo.build(name)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
    return model, batch


@cache
def case(name: str, strategy: str, **options: Any) -> Case:
    model, batch = build(name)
    twin, wide = double(model, batch)
    graph = widen_graph(sw.capture(twin, wide))
    ranks = options.get("dp", 1) * options.get("tp", 1) if strategy == "hybrid" else 2
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)
    program = lower(resolve(graph, plan))
    reference = run_reference(twin, wide)
    return Case(program, reference, wide, make_trials(program, reference, wide))
