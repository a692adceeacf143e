"""Time grouped products of 64 experts on one GPU, next to a loop and to a dense product.

    python -m benchmarks.experts_gpu [--pairs 40] [--out FILE]

Forward and backward of `grouped_linear` in bfloat16, for even and skewed loads. The loop multiplies
each expert's rows in a product of its own, and reads the counts on the host first. The dense
product has one matrix and as many rows, and so the same work. Systems alternate; ratios of medians
have a 90% interval from resampled pairs. Before, results and gradients are compared with the loop.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu import alternate
from benchmarks.run import Step, ratio
from shardwise.routing import grouped_linear

LIMITS = {"loop": 0.5, "dense": 1.1}
EXPERTS, ROWS, WIDTH, INNER = 64, 64 * 1024, 2048, 1408


def loads(skewed: bool) -> Tensor:
    """Return the rows of each expert; if skewed, they fall from many to none."""
    if not skewed:
        return torch.full((EXPERTS,), ROWS // EXPERTS, device="cuda")
    weights = torch.linspace(2, 0, EXPERTS, device="cuda")
    counts = (weights / weights.sum() * ROWS).long()
    counts[0] += ROWS - counts.sum()
    return counts


def looped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix, one after the other."""
    parts = rows.split(counts.tolist())
    return torch.cat([linear(part, matrix) for part, matrix in zip(parts, weight, strict=True)])


def steps(counts: Tensor) -> dict[str, Step]:
    """Return a forward and backward pass of each system."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(ROWS, WIDTH, **options).requires_grad_()
    weight = (torch.randn(EXPERTS, INNER, WIDTH, **options) / WIDTH**0.5).requires_grad_()
    matrix = weight.detach()[0].clone().requires_grad_()
    grad = torch.randn(ROWS, INNER, **options)
    functions = {
        "grouped": (lambda: grouped_linear(rows, weight, counts), weight),
        "loop": (lambda: looped(rows, weight, counts), weight),
        "dense": (lambda: linear(rows, matrix), matrix),
    }

    def step(name: str) -> list[Tensor]:
        forward, parameter = functions[name]
        out = forward()
        return [out, *torch.autograd.grad(out, (rows, parameter), grad)]

    for grouped, loop in zip(step("grouped"), step("loop"), strict=True):
        error = (grouped - loop).abs().max() / loop.abs().max()
        assert error < 0.02, f"grouped products differ from a loop by {error.item():.3f}"
    return {name: lambda name=name: step(name) for name in functions}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for load in ("even", "skewed"):
        systems = steps(loads(load == "skewed"))
        for rival, limit in LIMITS.items():
            times = alternate(systems["grouped"], systems[rival], options.pairs)
            rows.append({"load": load, "rival": rival, "limit": limit, **ratio(*times)})
            print(json.dumps(rows[-1]), flush=True)
    figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
