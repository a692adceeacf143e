"""Train zoo models on gloo processes, and compare them with the same steps on one process.

Everything is float64: narrowing casts in a model are widened on both sides.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

import shardwise as sw
from shardwise.equivalence.certificate import TOLERANCE, Comparison
from shardwise.equivalence.certificate import compare as compare_tensors
from shardwise.equivalence.reference import KeepDouble, TraceDouble
from shardwise.frontend import capture
from tests.support import zoo

STEPS, LEARNING_RATE = 2, 1e-3
NEGLIGIBLE = 1e-4  # of the largest gradient; errors of smaller ones are relative to this


@dataclass(frozen=True)
class Training:
    """The losses of some steps, the first gradients, and the final state."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]


def captured(name: str, dropout: float = 0.0) -> sw.Graph:
    """Capture a model in float64, for plans."""
    return capture(*zoo.build(name, dropout=dropout), around=TraceDouble)


def reference(name: str) -> Training:
    """Train the model on one process."""
    model, batch = zoo.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], {}
    with KeepDouble():
        for step in range(STEPS):
            loss = zoo.loss_of(model(**batch))
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                gradients = {
                    n: None if p.grad is None else p.grad.clone()
                    for n, p in model.named_parameters()
                }
            optimizer.step()
            optimizer.zero_grad()
    return Training(losses, gradients, {k: v.clone() for k, v in model.state_dict().items()})


def train(name: str, plan: dict[str, Any], dropout: float = 0.0) -> Training:
    """Train on one rank; the gathered results are equal on all ranks."""
    warnings.simplefilter("ignore")
    model, batch = zoo.build(name, dropout=dropout)
    with KeepDouble():
        part = sw.parallelize(model, batch, plan=sw.Plan.from_json(plan))
        del model
        optimizer = sw.optimizer(part, torch.optim.AdamW, lr=LEARNING_RATE)
        losses, gradients = [], {}
        for step in range(STEPS):
            losses.append(part.train_step(batch).item())
            if step == 0:
                gradients = part.gather_gradients()
            optimizer.step()
            optimizer.zero_grad()
        return Training(losses, gradients, part.gather_state_dict())


def compare(ranks: list[Training], expected: Training) -> tuple[float, str]:
    """Return the largest relative error of all ranks, and the first difference."""
    sizes = [
        g.abs().max().item() for g in expected.gradients.values() if g is not None and g.numel()
    ]
    floor = NEGLIGIBLE * max(sizes, default=0.0)
    comparisons: list[Comparison] = []
    for rank, training in enumerate(ranks):
        for step, (a, b) in enumerate(zip(training.losses, expected.losses, strict=True)):
            what = f"loss of step {step} on rank {rank}"
            comparisons.append(
                compare_tensors(what, torch.tensor(a).double(), torch.tensor(b).double())
            )
        for name, gradient in expected.gradients.items():
            actual = training.gradients.get(name)
            what = f"gradient of {name} on rank {rank}"
            comparisons.append(
                compare_tensors(what, actual, gradient, noise=_noise(gradient, floor))
            )
        if training.state.keys() != expected.state.keys():
            different = sorted(training.state.keys() ^ expected.state.keys())
            comparisons.append(
                Comparison("state dict", float("inf"), f"keys differ: {different[:3]}")
            )
            continue
        for name, tensor in expected.state.items():
            floor_of = LEARNING_RATE if name in expected.gradients else 0.0
            what = f"{name} after {STEPS} steps on rank {rank}"
            noise = _noise(tensor, floor_of)
            comparisons.append(compare_tensors(what, training.state[name], tensor, noise=noise))
    failures = [c for c in comparisons if not c.ok]
    worst = max(c.relative_error for c in comparisons)
    if not failures:
        return worst, ""
    first = failures[0]
    detail = first.problem or f"relative error {first.relative_error:.1e}"
    return worst, f"{first.what}: {detail} ({len(failures)} of {len(comparisons)} differ)"


def _noise(expected: torch.Tensor | None, floor: float) -> float:
    """Return the difference that counts as rounding, relative to the largest element or `floor`."""
    size = 0.0 if expected is None or not expected.numel() else expected.abs().max().item()
    return TOLERANCE * max(float(size), floor)
