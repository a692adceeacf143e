"""What a check found: the certificate that a plan equals the model.

Enters: pairs of tensors. Leaves: `Certificate`, printable, with the first difference if there is
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

TOLERANCE = 1e-9  # relative, in float64


@dataclass(frozen=True, slots=True)
class Comparison:
    """One compared tensor: what it is, and how far apart."""

    what: str  # "loss", "gradient of tok.weight", …
    relative_error: float
    problem: str = ""  # when the two cannot be compared

    @property
    def ok(self) -> bool:
        return not self.problem and self.relative_error <= TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether every compared tensor agrees.

    `first_difference` names the first node whose value differs, and the plan entry responsible.
    `scaled` says what was made smaller for the check; empty when nothing was.
    """

    plan: str
    model: str
    mesh: str
    comparisons: tuple[Comparison, ...]
    first_difference: str | None = None
    scaled: tuple[str, ...] = field(default=())

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
        lines += [f"  scaled: {what}" for what in self.scaled]
        for failure in self.failures[:8]:
            reason = failure.problem or f"relative error {failure.relative_error:.2e}"
            lines.append(f"  differs: {failure.what}: {reason}")
        if len(self.failures) > 8:
            lines.append(f"  and {len(self.failures) - 8} more")
        if self.first_difference:
            lines.append(f"  first difference: {self.first_difference}")
        return "\n".join(lines)


def compare(
    what: str,
    found: torch.Tensor | None,
    expected: torch.Tensor | None,
    *,
    floor: float = 0.0,
) -> Comparison:
    """Relative to the largest element expected, or to `floor` where that is larger.

    Integers and booleans must be equal. A floor is for tensors that are zero but for rounding, such
    as the gradient of a key bias: they are measured against the size of their like.
    """
    if (found is None) != (expected is None):
        missing = "is missing" if found is None else "should be None"
        return Comparison(what, float("inf"), missing)
    if found is None or expected is None:
        return Comparison(what, 0.0)
    if found.shape != expected.shape:
        shapes = f"has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        return Comparison(what, float("inf"), shapes)
    return Comparison(what, relative_error(found, expected, floor))


def relative_error(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest magnitude; infinite where one is NaN and one is not."""
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(wide), expected.to(wide)
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    same = (a == b) | a.isnan()  # equal infinities and NaN are no difference
    difference = torch.where(same, torch.zeros_like(a), a - b).abs().max().item()
    if difference == 0:
        return 0.0
    finite = b[b.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, floor)
    return difference / scale if scale else difference


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    if word.endswith("y"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith("s") else f"{word}s"
