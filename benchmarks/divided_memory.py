"""Report how the bytes of a rank fall as experts, the sequence or tensors are divided.

    python -m benchmarks.divided_memory [--length 8192] [--out FILE]

Programs run without data, so the figures are exact and the same on every machine. `experts` are the
bytes of experts' parameters, `context` those of activations saved for backward, both relative to an
n-th of one device's: 1.0 is ideal. `sequence_parallel` are activations relative to those of tensor
parallelism without it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import shardwise as sw
from benchmarks import context, experts

LIMITS = {"experts": 1.05, "context": 1.1}


def activations(graph: sw.Graph, plan: sw.Plan) -> float:
    """Return the bytes that the fullest rank saves for backward, at their peak."""
    compiled = sw.compile(graph, plan)
    ranks = range(plan.num_ranks)
    return max(compiled.memory(rank=rank).activations_peak_bytes for rank in (ranks[0], ranks[-1]))


def of_experts(sizes: tuple[int, ...]) -> dict[str, float]:
    """Return the ratio for each size of `ep`."""
    graph = sw.capture(*experts.make())
    stacked = {p.name for p in graph.parameters if p.name.endswith((".up", ".down"))}
    ratios = {}
    for ep in sizes:
        plan = sw.strategies.expert(graph, sw.Cluster.local(ep))
        program = sw.compile(graph, plan).lowered.rank_programs[0]
        shapes = [p for p in program.parameters if p.name in stacked]
        local = sum(torch.Size(p.local_shape).numel() for p in shapes)
        full = sum(torch.Size(p.shape).numel() for p in shapes)
        ratios[f"ep={ep}"] = round(local / full * ep, 3)
    return ratios


def of_context(graph: sw.Graph, sizes: tuple[int, ...]) -> dict[str, float]:
    """Return the ratio for each size of `cp` and way of attention."""
    full = activations(graph, sw.strategies.ddp(graph, sw.Cluster.local(1)))
    ratios = {}
    for cp in sizes:
        for attention in ("ring", "heads", "gather"):
            plan = sw.strategies.context(graph, sw.Cluster.local(cp), attention=attention)
            ratios[f"cp={cp}, {attention}"] = round(activations(graph, plan) / full * cp, 3)
    return ratios


def of_sequence_parallelism(graph: sw.Graph, sizes: tuple[int, ...]) -> dict[str, float]:
    """Return the ratio for each size of `tp`."""
    ratios = {}
    for tp in sizes:
        plain, divided = (
            activations(
                graph, sw.strategies.tensor(graph, sw.Cluster.local(tp), sequence_parallel=sequence)
            )
            for sequence in (False, True)
        )
        ratios[f"tp={tp}"] = round(divided / plain, 3)
    return ratios


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, batch = context.make(options.length, torch.device("meta"))
    graph = sw.capture(model, batch)
    figures = {
        "limits": LIMITS,
        "length": options.length,
        "experts": of_experts((2, 4, 8, 16)),
        "context": of_context(graph, (2, 4, 8)),
        "sequence_parallel": of_sequence_parallelism(graph, (2, 4, 8)),
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
