"""Loops over steps, such as scans of state-space models, as one operator.

`Scan.apply` runs a function for every step, and autograd records what it does, as in the user's
own loop. Captured graphs have a `ScanBody`, from which generated code writes the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepIndex:
    """An integer that changes with the step: `start + stride * t`."""

    start: int
    stride: int

    def at(self, step: int) -> int:
        """Return its value in a step."""
        return self.start + self.stride * step

    def __str__(self) -> str:
        return f"{self.start} + {self.stride} * t"


@dataclass(frozen=True, slots=True)
class ScanBody:
    """The nodes of one step; `arguments` and `results` are names of values."""

    nodes: tuple[Any, ...]
    arguments: tuple[str, ...]  # carried values, elements, fixed values
    results: tuple[str, ...]  # new carried values, last values, collected values


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """`step(t, *carried, *elements, *fixed)` for each of `trips` steps.

    It returns the new carried values, values of which the last step's are results, and values that
    are collected over all steps. Operands are the first carried values, the tensors that elements
    are taken from, and fixed values.
    """

    step: Callable[..., tuple[Tensor, ...]] = field(compare=False)
    trips: int
    carried: int = 0
    elements: tuple[tuple[int, StepIndex], ...] = ()  # the dim, and the position in it
    last: int = 0
    collected: tuple[tuple[str, int], ...] = ()  # "stack" or "cat", and the dim
    body: ScanBody | None = field(default=None, compare=False)

    def apply(self, *operands: Tensor) -> Any:
        """Run all steps; return a tensor, or a tuple of several."""
        carried = operands[: self.carried]
        rest = operands[self.carried :]
        sources, fixed = rest[: len(self.elements)], rest[len(self.elements) :]
        slices = [x.unbind(dim) for x, (dim, _) in zip(sources, self.elements, strict=True)]
        ends, histories = self.carried + self.last, [[] for _ in self.collected]  # type: ignore[var-annotated]
        values: tuple[Tensor, ...] = ()
        for t in range(self.trips):
            now = [x[i.at(t)] for x, (_, i) in zip(slices, self.elements, strict=True)]
            values = self.step(t, *carried, *now, *fixed)
            carried = values[: self.carried]
            for history, value in zip(histories, values[ends:], strict=True):
                history.append(value)
        joined = [
            getattr(torch, how)(history, dim)
            for (how, dim), history in zip(self.collected, histories, strict=True)
        ]
        results = (*values[self.carried : ends], *joined)
        return results[0] if len(results) == 1 else results

    @property
    def sample(self) -> Scan:
        """The loop with enough steps that every carried value has reached every result."""
        return replace(self, trips=min(self.trips, self.carried + 2))
