"""One trial of a check: weights, a batch, the model's step on them, and the noise of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.equivalence.randomness import Truth, run_graph
from shardwise.equivalence.reference import Reference
from shardwise.equivalence.rounding import Jitter, distance, farthest
from shardwise.errors import VerifyError
from shardwise.ir import Graph
from shardwise.plans import Plan

JITTERED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far rounding moves the results of a step, and the graph's values and their gradients."""

    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor]
    state_after: Mapping[str, torch.Tensor]
    values: Mapping[str, torch.Tensor]
    value_gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the program must compute: `reference` for its results, `truth` for single values."""

    about: str
    inputs: Mapping[str, torch.Tensor]  # of the whole batch
    reference: Reference
    truth: Truth
    noise: Noise


def make_trial(
    graph: Graph,
    plan: Plan,
    reference: Reference,
    inputs: Mapping[str, torch.Tensor],
    about: str,
) -> Trial:
    """Measure the noise around a reference; raise where the reference is not finite."""
    require_finite(reference, about)
    state, batches = reference.state, reference.batches
    plain, truth = run_graph(graph, plan, state, batches)
    noise: dict[tuple[str, Any], Any] = {}
    for seed in range(JITTERED_RUNS):
        moved = run_graph(graph, plan, state, batches, Jitter(seed + 1))
        for (key, before), (_, after) in zip(_numbers(plain, truth), _numbers(*moved), strict=True):
            noise[key] = farthest(noise.get(key), distance(after, before))

    def of(kind: str) -> dict[Any, Any]:
        return {name: moved for (k, name), moved in noise.items() if k == kind}

    return Trial(
        about=about,
        inputs=inputs,
        reference=reference,
        truth=truth,
        noise=Noise(
            loss=noise["loss", ""],
            outputs=tuple(of("output").values()),
            gradients=of("gradient"),
            state_after=of("state"),
            values=of("value"),
            value_gradients=of("value gradient"),
        ),
    )


def _numbers(reference: Reference, truth: Truth) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Every tensor of a step, with a key."""
    yield ("loss", ""), reference.loss
    for kind, tensors in (
        ("output", dict(enumerate(reference.outputs))),
        ("gradient", reference.gradients),
        ("state", reference.state_after),
        ("value", truth.values),
        ("value gradient", truth.gradients),
    ):
        for name, tensor in tensors.items():
            yield (kind, name), tensor


def require_finite(reference: Reference, about: str) -> None:
    """Raise where a comparison would show nothing: beside a NaN every program looks right.

    Infinities are allowed where masks hold them (the batch, buffers, outputs) as long as the loss,
    gradients and parameters are finite; they are compared like other values.
    """
    inputs = {f"input {n}": t for batch in reference.batches for n, t in batch.items()}
    before = {f"{_kind(n, reference)} {n}": t for n, t in reference.state.items()}
    for name, tensor in (*inputs.items(), *before.items()):
        _require(name, tensor, about, finite=name.startswith("parameter"))
    _require("the loss", reference.loss, about, finite=True)
    for index, output in enumerate(reference.outputs):
        _require(f"output {index}", output, about, finite=False)
    for name, gradient in reference.gradients.items():
        _require(f"the gradient of {name}", gradient, about, finite=True)
    for name, tensor in reference.state_after.items():
        what = f"{_kind(name, reference)} {name} after a step"
        _require(what, tensor, about, finite=name in reference.gradients)


def _kind(name: str, reference: Reference) -> str:
    return "parameter" if name in reference.gradients else "buffer"


def _require(what: str, tensor: Any, about: str, *, finite: bool) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    wrong = ~tensor.isfinite() if finite else tensor.isnan()
    if not bool(wrong.any()):
        return
    place = tuple(wrong.nonzero()[0].tolist())
    number = tensor[place].item()
    at = f" at {list(place)}" if place else ""
    raise VerifyError(
        f"{what} is {number}{at} ({int(wrong.sum())} of {tensor.numel()} elements) in the model "
        f"itself ({about}): a comparison with it would show nothing",
        hint="verify with weights and a batch whose loss and gradients are finite",
    )
