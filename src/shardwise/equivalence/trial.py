"""Build the trials of a check: weights, a batch, the model's step on them, and rounding noise.

A layer initialized with zeros, a batch of zeros or numbers that are 1e14 times larger hide the
paths behind them. The second trial of a check therefore changes both weights and batch. Parameters
move by a fraction of their magnitude, and are redrawn if they are zero, tiny or huge.
Floating-point inputs are mixed and lose their extremes, indices are drawn from the range that they
index, and masks without a hole get one. Shapes stay the same. If the model does not run on such
data, or its loss is not finite, less is changed.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwise.equivalence.certificate import Jitter, distance, farthest
from shardwise.equivalence.reference import Reference, Truth, run_graph
from shardwise.errors import VerifyError
from shardwise.ir import Graph
from shardwise.plans import Plan

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The change that rounding causes in the results, values and gradients of a step."""

    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor]
    state_after: Mapping[str, torch.Tensor]
    values: Mapping[str, torch.Tensor]
    value_gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the program must compute: its results (`reference`) and its values (`truth`)."""

    about: str
    inputs: Mapping[str, torch.Tensor]  # of the full batch
    reference: Reference
    truth: Truth
    noise: Noise


def make_trial(
    graph: Graph, plan: Plan, reference: Reference, inputs: Mapping[str, torch.Tensor], about: str
) -> Trial:
    """Measure the noise of a reference; raise an error if the reference is not finite."""
    require_finite(reference, about)
    state, batches = reference.state, reference.batches
    plain, truth = run_graph(graph, plan, state, batches)
    noise: dict[tuple[str, Any], Any] = {}
    jitters = (Jitter(1), Jitter(2, fused=True), Jitter(3, fused=True, by_position=True))
    for jitter in jitters:
        moved = run_graph(graph, plan, state, batches, jitter)
        if jitter.by_position and jitter.decisions != jitters[1].decisions:
            continue
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
    """Yield every tensor of a step with a key."""
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
    """Raise an error if NaNs or infinities would make a comparison meaningless.

    Masks may have infinities (the batch, buffers, outputs) as long as the loss, gradients and
    parameters are finite; they are compared like other values.
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
    is_tensor = isinstance(tensor, torch.Tensor)
    if not is_tensor or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    wrong = ~tensor.isfinite() if finite else tensor.isnan()
    if not bool(wrong.any()):
        return
    place = tuple(wrong.nonzero()[0].tolist())
    number = tensor[place].item()
    at = f" at {list(place)}" if place else ""
    raise VerifyError(
        f"{what} is {number}{at} ({int(wrong.sum())} of {tensor.numel()} elements) in the model "
        f"itself ({about}): a comparison with it would be meaningless",
        hint="verify with weights and a batch whose loss and gradients are finite",
    )


# ------------------------------------------------------------ changed weights and batches
SMALLEST, LARGEST = 1e-3, 1e2  # magnitudes of parameters that are moved instead of drawn
MOVED = 0.25  # of a parameter's magnitude
EXTREME = 1e6  # larger inputs are masks, or hide others
WIDEST = 10.0  # times the median magnitude of an input
IGNORED = -100  # the default ignore_index of cross entropy


class _Change(NamedTuple):
    """What a trial changes besides the parameters."""

    about: str
    buffers: bool
    floats: bool
    integers: bool


LADDER = (
    _Change("weights, buffers and batch changed", True, True, True),
    _Change("weights and batch changed", False, True, True),
    _Change("weights and floating-point inputs changed", False, True, False),
    _Change("weights changed, batch as given", False, False, False),
)


def perturbed(
    graph: Graph,
    plan: Plan,
    original: Trial,
    rerun: Callable[[Tensors, Tensors], Reference] | None = None,
) -> Trial | None:
    """Return a trial with changed weights and batch, or None if the model runs on none of them."""
    batches = original.reference.batches
    for change in LADDER:
        if rerun is None and len(batches) > 1 and (change.floats or change.integers):
            continue  # only the caller can split a new batch into micro-batches
        # Other values of what Python looks at may belong to other graphs.
        guarded = graph.guards.sources if graph.guards else frozenset()
        state = perturb_state(
            original.reference.state, original.reference.gradients, change.buffers
        )
        inputs = perturb_inputs(graph, original.inputs, change.floats, change.integers)
        state |= {n: t for n, t in original.reference.state.items() if n in guarded}
        inputs |= {n: t for n, t in original.inputs.items() if n in guarded}
        try:
            if rerun is not None:
                reference = rerun(state, inputs)
            else:
                changed = [inputs] if len(batches) == 1 else batches
                reference = run_graph(graph, plan, state, changed)[0]
            return make_trial(graph, plan, reference, inputs, change.about)
        except Exception:  # any error: the model was not made for such data
            continue
    return None


def perturb_state(
    state: Tensors, parameters: Mapping[str, object], buffers: bool
) -> dict[str, torch.Tensor]:
    """Return the state with changed parameters, and changed floating-point buffers if asked."""
    generator = torch.Generator().manual_seed(20)
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            changed[name] = tensor
        elif name in parameters:
            changed[name] = _other_parameter(tensor, generator)
        else:
            changed[name] = _other_buffer(tensor, generator) if buffers else tensor
    return changed


def _other_parameter(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    size = tensor.abs().square().mean().sqrt().item()
    if SMALLEST <= size <= LARGEST:
        return tensor + MOVED * size * noise
    if tensor.dim() > 1:
        return noise * math.sqrt(tensor.shape[0] / tensor.numel())
    return noise * 0.2 + 0.5  # a scale, a gate or a bias


def _other_buffer(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Change a buffer but keep signs and magnitudes, for variances and masks."""
    if tensor.is_complex() or bool((tensor.abs() > EXTREME).any()):
        return tensor
    factor = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
    if not bool(tensor.any()):
        return 0.2 * (factor - 0.5)
    return tensor * (0.9 + 0.2 * factor)


def perturb_inputs(
    graph: Graph, inputs: Tensors, floats: bool, integers: bool
) -> dict[str, torch.Tensor]:
    """Return inputs of the same shapes and dtypes with other numbers."""
    # `twin` imports `check`, which imports this module.
    from shardwise.equivalence.twin.scale import ignores_some, index_bounds

    generator = torch.Generator().manual_seed(21)
    values = {source.name: source.value for source in graph.inputs}
    changed = dict(inputs)
    for name, tensor in inputs.items():
        if not tensor.numel():
            continue
        if tensor.is_floating_point():
            changed[name] = _other_floats(tensor, generator) if floats else tensor
        elif integers and not tensor.is_complex():
            value = values.get(name)
            bounds = list(index_bounds(graph, value)) if value else []
            if bounds and tensor.dtype != torch.bool:
                ignored = value is not None and ignores_some(graph, value)
                changed[name] = _other_indices(tensor, min(bounds), ignored, generator)
            else:
                changed[name] = _other_integers(tensor, generator)
    return changed


def _other_floats(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mix random pairs of elements, which preserves usual ranges, without extreme elements."""
    usual = tensor[tensor.isfinite() & (tensor.abs() < EXTREME)]
    count = tensor.numel()
    weight = torch.rand(count, generator=generator, dtype=tensor.dtype)
    if not len(usual) or bool((usual == usual[0]).all()):
        size = abs(usual[0].item()) if len(usual) else 0.0
        return (weight * (size if SMALLEST < size < LARGEST else 1.0)).reshape(tensor.shape)
    median = usual[usual != 0].abs().median().item()
    if not SMALLEST <= median <= LARGEST:  # rounding could hide other terms, or be hidden
        usual, median = usual / median, 1.0
    limit = WIDEST * median
    a, b = (
        usual[torch.randint(len(usual), (count,), generator=generator)].clamp(-limit, limit)
        for _ in range(2)
    )
    return (weight * a + (1 - weight) * b).reshape(tensor.shape)


def _other_indices(
    tensor: torch.Tensor, bound: int, ignored: bool, generator: torch.Generator
) -> torch.Tensor:
    """Draw indices from the full range, with as many negative ones as before unless all were."""
    drawn = torch.randint(bound, tensor.shape, generator=generator, dtype=tensor.dtype)
    order = torch.randperm(tensor.numel(), generator=generator)
    before = tensor.reshape(-1)[order].reshape(tensor.shape)
    if bool((before < 0).all()):
        before = torch.zeros_like(tensor)
    if ignored and not bool((before < 0).any()) and tensor.numel() > 2:
        before = before.clone()
        # A mean over the remaining targets then differs from a mean over all.
        before.view(-1)[:: max(3, tensor.numel() // 4)] = IGNORED
    return torch.where(before < 0, before, drawn)


def _other_integers(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the integers in another order; a mask of equal elements gets a hole."""
    first = tensor.reshape(-1)[0]
    is_wide = tensor.dim() > 1 and tensor.shape[-1] > 1
    if (tensor.dtype == torch.bool or (is_wide and first == 1)) and bool((tensor == first).all()):
        holed = tensor.clone()
        rows = holed[::2] if tensor.dim() > 1 else holed
        rows[..., -max(1, tensor.shape[-1] // 4) :] = first == 0
        return holed
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.reshape(-1)[order].reshape(tensor.shape)
