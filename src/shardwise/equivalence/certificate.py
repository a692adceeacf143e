"""Compare tensors, and record the result of a check as a `Certificate`.

Every element is compared relative to its own magnitude, so that an error is detected no matter how
large neighbouring elements, other gradients or other terms of the loss are.
"""

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

TOLERANCE = 1e-9  # relative, in float64
MAX_NOISE = 1e-6  # relative to the tensor; more rounding noise could hide an error
ZERO_LEVEL = 1e-2  # relative to the noise; a smaller tensor is zero up to rounding
MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """A compared tensor and its error."""

    what: str  # "loss", "gradient of tok.weight", …
    relative_error: float
    problem: str = ""  # why the tensors cannot be compared, if they cannot
    trial: str = ""  # the weights and batch; empty if there was only one trial
    vague: float = 0.0  # rounding noise relative to the tensor, if it could hide an error

    @property
    def ok(self) -> bool:
        return not self.problem and self.relative_error <= TOLERANCE

    @property
    def reason(self) -> str:
        """Explain why the comparison failed."""
        text = self.problem or f"relative error {self.relative_error:.2e}"
        return f"{text} ({self.trial})" if self.trial else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of a check by execution: whether every compared tensor agrees.

    A certificate covers the trials that were run, each with its own weights and batch, not all
    possible inputs. `not_exercised` lists what no trial could confirm, and `scaled` lists what was
    made smaller for the check. `first_difference` names the first node whose value differs, and
    the plan entry responsible. `inexact` lists how a plan differs from synchronous training: it
    then equals the reference of its synchronization (`reference_sync.py`).
    """

    plan: str
    model: str
    mesh: str
    comparisons: tuple[Comparison, ...]
    first_difference: str | None = None
    scaled: tuple[str, ...] = field(default=())
    trials: tuple[str, ...] = field(default=())
    not_exercised: tuple[str, ...] = field(default=())
    inexact: tuple[str, ...] = field(default=())

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
        kinds = Counter(comparison.what.split(" of ")[0] for comparison in self.comparisons)
        counted = ", ".join(f"{n} {_plural(kind, n)}" for kind, n in kinds.items())
        verdict = "equals" if self.ok else "DIFFERS FROM"
        if self.inexact:
            verdict += " the reference of its synchronization of"
        lines = [
            f"plan {self.plan} on {self.mesh} {verdict} {self.model}: "
            f"max relative error {self.max_relative_error:.1e} (limit {TOLERANCE:.0e})",
            f"  compared in float64: {counted}",
        ]
        if self.inexact:
            lines.append(f"  differs from synchronous training: {'; '.join(self.inexact)}")
        lines += [f"  trial: {trial}" for trial in self.trials]
        lines += [f"  scaled: {change}" for change in self.scaled]
        lines += _listed("not exercised", self.not_exercised)
        lines += _listed("differs", [f"{f.what}: {f.reason}" for f in self.failures])
        if self.first_difference:
            lines.append(f"  first difference: {self.first_difference}")
        return "\n".join(lines)


def compare(
    what: str,
    actual: torch.Tensor | None,
    expected: torch.Tensor | None,
    *,
    noise: torch.Tensor | float | None = None,
    trial: str = "",
) -> Comparison:
    """Compare two tensors element by element; integers and booleans must be equal.

    An element may differ by `TOLERANCE` relative to itself, or by its `noise`: the change that
    rounding alone causes, which matters where large terms cancel (see `Jitter`).
    """
    if (actual is None) != (expected is None):
        missing = "is missing" if actual is None else "should be None"
        return Comparison(what, float("inf"), missing, trial)
    if actual is None or expected is None:
        return Comparison(what, 0.0, "", trial)
    if actual.shape != expected.shape:
        shapes = f"has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return Comparison(what, float("inf"), shapes, trial)
    return Comparison(
        what, relative_error(actual, expected, noise), "", trial, vagueness(expected, noise)
    )


def relative_error(
    actual: torch.Tensor, expected: torch.Tensor, noise: torch.Tensor | float | None = None
) -> float:
    """Return the largest elementwise error relative to the expected element.

    Where `noise` exceeds the tolerance of an element, the error is relative to the noise instead,
    scaled so that `TOLERANCE` is the limit in both cases. The error is infinite where one side is
    NaN or infinite and the other is not.
    """
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = actual.to(wide), expected.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())  # infinities may agree, too
    if bool(same.all()):
        return 0.0
    scale = b.abs()
    if noise is not None:
        scale = scale.maximum(torch.as_tensor(noise, dtype=torch.float64).cpu() / TOLERANCE)
    errors = ((a - b).abs() / scale).nan_to_num(float("inf"), posinf=float("inf"))
    return float(torch.where(same, 0.0, errors).max().item())


def vagueness(expected: torch.Tensor, noise: torch.Tensor | float | None) -> float:
    """Return the rounding noise relative to a tensor, if it is large enough to hide an error.

    It is zero if the comparison is precise, and if the tensor is zero up to rounding: its noise is
    then tiny compared with the terms that cancel.
    """
    if noise is None or not expected.is_floating_point() or not expected.numel():
        return 0.0
    size = float(expected.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    moved = float(torch.as_tensor(noise).max().item())
    is_precise, is_zero = moved <= MAX_NOISE * size, size <= ZERO_LEVEL * moved
    return 0.0 if is_precise or is_zero else moved / size


def rounding_elements(expected: torch.Tensor, noise: torch.Tensor | float | None) -> torch.Tensor:
    """Return a mask of the elements that are zero up to rounding."""
    size = expected.detach().abs().cpu()
    if noise is None:
        return torch.zeros_like(size, dtype=torch.bool)
    return size <= ZERO_LEVEL * torch.as_tensor(noise).cpu()


def _listed(label: str, items: Sequence[str]) -> list[str]:
    lines = [f"  {label}: {item}" for item in items[:MAX_LISTED]]
    return lines + [f"  {label}: {len(items) - MAX_LISTED} more"] * (len(items) > MAX_LISTED)


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    if word.endswith("y"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith("s") else f"{word}s"


# ------------------------------------------------------------ rounding noise
#
# Ranks add in a different order than one device does, so their results differ by rounding. Where
# large terms cancel, that difference is large relative to the result: the gradient of a bias before
# a batch norm is zero up to rounding. The tolerance of every element is therefore measured (Monte
# Carlo arithmetic): the captured graph runs a few more times, with the result of every operation of
# its forward and backward pass changed by about 1e-12 relative. The largest change of an element
# over these runs is its noise.
#
# The runs complement each other. The first decomposes attention, so that its steps are perturbed,
# too. The others run its fused kernel as the ranks do, because its backward cancels differently: it
# subtracts sums over the keys and over the outputs, which are equal where a query sees one key. In
# these two runs, equal values change by equal amounts, so that ties (in a top-k or a maximum)
# remain ties; but where equal values cancel, no noise is measured. The last run therefore changes
# values by their positions. It counts unless it takes other decisions, that is, unless an integer
# or boolean result differs.
#
# A tensor of integers stays as it is: it was computed without rounding. Attention masks of zeros
# and ones are multiplied by the smallest number there is, which would magnify any change.


EPSILON = 2.0**-40  # about 8,000 times the rounding error of one float64 operation
LARGEST = 1e300  # larger values could overflow
_ODD = -7046029254386353131  # multiplication by this constant mixes the bits of a number


class Jitter(TorchDispatchMode):
    """While active, perturb the float64 result of every operation by up to `EPSILON`.

    `decisions` are checksums of the integer and boolean results. `fused` keeps attention one
    operation.
    """

    def __init__(self, seed: int, *, fused: bool = False, by_position: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.fused, self.by_position = seed * 0x5DEECE66D + 11, fused, by_position
        self.decisions: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Decomposed attention has other strides than the fused kernel, which some views rely on.
        run = torch.reshape if func is torch.ops.aten.view.default else func
        result = run(*args, **(kwargs or {}))
        if func._schema.is_mutable or func.is_view:
            return result
        if isinstance(result, torch.Tensor):
            return self.change(result)
        if isinstance(result, tuple | list):
            return type(result)(self.change(r) for r in result)
        return result

    def change(self, value: Any) -> Any:
        """Return the tensor with each element changed by an amount derived from its bits."""
        if not isinstance(value, torch.Tensor) or value.is_sparse:
            return value
        if value.dtype == torch.complex128:
            real = self.change(torch.view_as_real(value.resolve_conj()))
            return torch.view_as_complex(real)
        if value.dtype != torch.float64:
            if not value.is_floating_point() and not value.is_complex():
                self.decisions.append(zlib.crc32(value.cpu().contiguous().numpy().tobytes()))
            return value
        if bool((value == value.round()).all()):
            return value
        bits = (value.contiguous().view(torch.int64) ^ self.seed) * _ODD
        if self.by_position:
            bits += torch.arange(value.numel(), device=value.device).view(value.shape)
        bits = (bits ^ (bits >> 29)) * _ODD
        factor = (bits >> 11).to(torch.float64) * 2.0**-52  # -1 to 1
        return torch.where(value.abs() < LARGEST, value * (1 + EPSILON * factor), value)


@contextlib.contextmanager
def jittered(jitter: Jitter | None) -> Iterator[None]:
    """Run operations under `jitter`, if there is one."""
    with contextlib.ExitStack() as stack:
        if jitter is not None and not jitter.fused:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if jitter is not None:
            stack.enter_context(jitter)
        yield


def distance(a: Any, b: Any) -> Any:
    """Return the absolute elementwise difference of two tensors, or None for other values."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None
    if a.shape != b.shape or not (b.is_floating_point() or b.is_complex()):
        return None
    return (a.detach() - b.detach()).abs().nan_to_num(0.0, 0.0, 0.0)


def farthest(a: Any, b: Any) -> Any:
    """Return the elementwise maximum of two distances, either of which may be None."""
    return torch.maximum(a, b) if a is not None and b is not None else b if a is None else a
