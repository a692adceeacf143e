"""Compare the best plan that divides experts with the best that does not.

    python -m benchmarks.experts [--ranks 8] [--pairs 40] [--out benchmarks/results/experts.json]

The model has 16 experts per layer. Both plans come from `sw.plan` for all ranks of this machine:
the fastest of all sizes of `ep` above 1, and that of `ep=1`. Their steps alternate in the same
processes. The ratio of medians is the plan with `ep` over the one without, with a 90% interval from
resampled pairs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import shardwise as sw
from benchmarks.pipeline import machine
from benchmarks.reality import Job, launch
from benchmarks.reality_models import MODELS
from benchmarks.run import ratio
from shardwise.profiling import profile
from shardwise.routing import collect, dispatch, grouped_linear, route

LIMIT = 0.8
WIDTH, INNER, EXPERTS, TOP_K, VOCAB, LENGTH = 256, 512, 16, 2, 512, 32


class Layer(nn.Module):
    """Two of sixteen experts for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(TOP_K)
        order, counts = route(ids, EXPERTS)
        rows = silu(grouped_linear(dispatch(tokens, order, TOP_K), self.up, counts))
        rows = grouped_linear(rows, self.down, counts)
        return x + (collect(rows, order, ids) * weights.unsqueeze(-1)).sum(1).view_as(x)


class Model(nn.Module):
    """Four layers of experts between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return Model(), {"tokens": torch.randint(VOCAB, (16, LENGTH + 1))}


MODELS["experts"] = make  # here, so that the processes of a job know it too


def main() -> None:
    """Plan, measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cluster = profile(num_ranks=options.ranks)
    graph = sw.capture(*make())
    sizes = [n for n in range(2, options.ranks + 1) if options.ranks % n == 0]
    divided = [sw.plan(graph, cluster, ep=ep) for ep in sizes]
    plans = {
        "auto": min(divided, key=lambda plan: sw.simulate(graph, plan, cluster).step_time_s),
        "without ep": sw.plan(graph, cluster, ep=1, all_devices=True),
    }
    predicted = {n: sw.simulate(graph, p, cluster).step_time_s for n, p in plans.items()}
    systems = tuple((name, json.dumps(plan.to_json())) for name, plan in plans.items())
    times = launch(Job(model="experts", ranks=options.ranks, systems=systems, pairs=options.pairs))
    pairs = list(zip(*([t for t, _ in times[name]] for name in plans), strict=False))
    figures = {
        **ratio([a for a, _ in pairs], [b for _, b in pairs]),
        "limit": LIMIT,
        "meshes": {name: str(plan.mesh) for name, plan in plans.items()},
        "predicted_s": predicted,
        "machine": machine(),
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
