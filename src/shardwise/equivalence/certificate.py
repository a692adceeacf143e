"""The result of a check: a `Certificate`, which prints as text and is true where all agrees.

Tensors are compared element by element, each element by its own size: a wrong number is seen
however large its neighbours, other gradients or other terms of the loss are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

TOLERANCE = 1e-9  # relative, in float64
VAGUE = 1e-6  # of a tensor's size: rounding that moves it further could hide an error
ROUNDING = 1e-2  # of the noise: a tensor smaller than this is a zero with its rounding
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """One compared tensor: what it is, and how far apart."""

    what: str  # "loss", "gradient of tok.weight", …
    relative_error: float
    problem: str = ""  # when the two cannot be compared
    trial: str = ""  # with which weights and batch; empty where there was one trial only
    vague: float = 0.0  # how much of its size rounding alone moves it, if that could hide an error

    @property
    def ok(self) -> bool:
        return not self.problem and self.relative_error <= TOLERANCE

    @property
    def reason(self) -> str:
        """Why it is not ok, in words."""
        text = self.problem or f"relative error {self.relative_error:.2e}"
        return f"{text} ({self.trial})" if self.trial else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of a check by execution: whether every compared tensor agrees.

    A certificate speaks of the trials that were run, each with its own weights and batch, not of
    all possible ones. `not_exercised` names what no trial could show to be right, `scaled` what was
    made smaller for the check. `first_difference` names the first node whose value differs, and
    the plan entry responsible.
    """

    plan: str
    model: str
    mesh: str
    comparisons: tuple[Comparison, ...]
    first_difference: str | None = None
    scaled: tuple[str, ...] = field(default=())
    trials: tuple[str, ...] = field(default=())
    not_exercised: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return bool(self.comparisons) and all(c.ok for c in self.comparisons)

    @property
    def max_relative_error(self) -> float:
        return max((c.relative_error for c in self.comparisons), default=float("nan"))

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.ok)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for comparison in self.comparisons:
            kind = comparison.what.split(" of ")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
        counted = ", ".join(f"{n} {_plural(kind, n)}" for kind, n in kinds.items())
        verdict = "equals" if self.ok else "DIFFERS FROM"
        lines = [
            f"plan {self.plan} on {self.mesh} {verdict} {self.model}: "
            f"max relative error {self.max_relative_error:.1e} (limit {TOLERANCE:.0e})",
            f"  compared in float64: {counted}",
        ]
        lines += [f"  trial: {trial}" for trial in self.trials]
        lines += [f"  scaled: {what}" for what in self.scaled]
        lines += _listed("not exercised", self.not_exercised)
        lines += _listed("differs", [f"{f.what}: {f.reason}" for f in self.failures])
        if self.first_difference:
            lines.append(f"  first difference: {self.first_difference}")
        return "\n".join(lines)


def compare(
    what: str,
    found: torch.Tensor | None,
    expected: torch.Tensor | None,
    *,
    noise: torch.Tensor | float | None = None,
    trial: str = "",
) -> Comparison:
    """Compare two tensors element by element; integers and booleans must be equal.

    An element may differ by `TOLERANCE` of its own size, or by `noise`: how far rounding alone
    moves it, which matters where large terms cancel (`rounding.py`).
    """
    if (found is None) != (expected is None):
        missing = "is missing" if found is None else "should be None"
        return Comparison(what, float("inf"), missing, trial)
    if found is None or expected is None:
        return Comparison(what, 0.0, "", trial)
    if found.shape != expected.shape:
        shapes = f"has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        return Comparison(what, float("inf"), shapes, trial)
    return Comparison(
        what, relative_error(found, expected, noise), "", trial, vagueness(expected, noise)
    )


def relative_error(
    found: torch.Tensor, expected: torch.Tensor, noise: torch.Tensor | float | None = None
) -> float:
    """Return the largest difference of an element, relative to its own size.

    Where `noise` exceeds `TOLERANCE` of the element it takes the element's place, so that an error
    of `TOLERANCE` is the limit in both cases. The error is infinite where one side is NaN or
    infinite and the other is not.
    """
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(wide), expected.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # equal infinities are no difference
    if bool(same.all()):
        return 0.0
    scale = b.abs()
    if noise is not None:
        scale = scale.maximum(torch.as_tensor(noise, dtype=torch.float64).cpu() / TOLERANCE)
    errors = ((a - b).abs() / scale).nan_to_num(float("inf"), posinf=float("inf"))
    return float(torch.where(same, 0.0, errors).max().item())


def vagueness(expected: torch.Tensor, noise: torch.Tensor | float | None) -> float:
    """Return how much of its size rounding alone moves a tensor, where that hides errors.

    Zero where the comparison is sharp, and where the tensor is nothing but rounding: it then
    stands for zero, and the noise is tiny beside the terms that cancel.
    """
    if noise is None or not expected.is_floating_point() or not expected.numel():
        return 0.0
    size, moved = _sizes(expected, noise)
    if moved <= VAGUE * size or is_rounding(expected, noise):
        return 0.0
    return moved / size


def rounding_elements(expected: torch.Tensor, noise: torch.Tensor | float | None) -> torch.Tensor:
    """Return which elements of a tensor are zeros with their rounding, and nothing else."""
    size = expected.detach().abs().cpu()
    if noise is None:
        return torch.zeros_like(size, dtype=torch.bool)
    return size <= ROUNDING * torch.as_tensor(noise).cpu()


def is_rounding(expected: torch.Tensor, noise: torch.Tensor | float | None) -> bool:
    """Return whether a tensor is a zero with its rounding, and nothing else."""
    if noise is None or not expected.is_floating_point() or not expected.numel():
        return False
    size, moved = _sizes(expected, noise)
    return size <= ROUNDING * moved


def _sizes(expected: torch.Tensor, noise: torch.Tensor | float) -> tuple[float, float]:
    """Return the largest element of a tensor, and the farthest that rounding moves one."""
    size = expected.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return float(size), float(torch.as_tensor(noise).max().item())


def _listed(label: str, items: Sequence[str]) -> list[str]:
    lines = [f"  {label}: {item}" for item in items[:SHOWN]]
    return lines + [f"  {label}: {len(items) - SHOWN} more"] * (len(items) > SHOWN)


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    if word.endswith("y"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith("s") else f"{word}s"


# How far rounding alone moves each number of a training step.
#
# Ranks add in another order than one device, so that results differ by rounding. Where large terms
# cancel, the difference is large beside the result: the gradient of a bias before a batch norm is
# zero but for rounding. The tolerance of every element is therefore measured, not guessed: the
# captured graph runs a few times more, and every operation of its forward and backward pass has its
# result changed by about 1e-12 of each element. The largest change that this makes in an element is
# its noise (Monte Carlo arithmetic).
#
# Equal values are changed equally, so that ties (of a top-k, of a maximum) stay ties.


EPSILON = 2.0**-40  # about 8,000 times the rounding of one operation in float64
LARGEST = 1e300  # beyond, a change could overflow
_ODD = -7046029254386353131  # multiplying by it mixes the bits of a number


class Jitter(TorchDispatchMode):
    """While active, every operation's float64 result is changed by up to `EPSILON`."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed * 0x5DEECE66D + 11

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or func.is_view:
            return result
        if isinstance(result, torch.Tensor):
            return self.change(result)
        if isinstance(result, tuple | list):
            return type(result)(self.change(r) for r in result)
        return result

    def change(self, value: Any) -> Any:
        """Return the values, each changed by an amount that depends on its bits."""
        if not isinstance(value, torch.Tensor) or value.is_sparse:
            return value
        if value.dtype == torch.complex128:
            real = self.change(torch.view_as_real(value.resolve_conj()))
            return torch.view_as_complex(real)
        if value.dtype != torch.float64:
            return value
        bits = (value.contiguous().view(torch.int64) ^ self.seed) * _ODD
        bits = (bits ^ (bits >> 29)) * _ODD
        part = (bits >> 11).to(torch.float64) * 2.0**-52  # -1 to 1
        return torch.where(value.abs() < LARGEST, value * (1 + EPSILON * part), value)


@contextlib.contextmanager
def jittered(jitter: Jitter | None) -> Iterator[None]:
    """Run operations under `jitter`; attention is then taken apart, so that it is reached too."""
    if jitter is None:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), jitter:
        yield


def distance(a: Any, b: Any) -> Any:
    """Return how far two tensors are apart, element by element; None for anything else."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None
    if a.shape != b.shape or not (b.is_floating_point() or b.is_complex()):
        return None
    return (a.detach() - b.detach()).abs().nan_to_num(0.0, 0.0, 0.0)


def farthest(known: Any, other: Any) -> Any:
    """Return the larger of two distances, element by element."""
    if known is None or other is None:
        return known if other is None else other
    return torch.maximum(known, other)
