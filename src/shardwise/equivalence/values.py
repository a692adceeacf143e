"""Compare every value of a program with the graph's, and every gradient on its way back.

The program is written with a probe after each statement. What the ranks recorded is assembled by
its layout and compared by its own size. A wrong value is thus seen at the node that makes it,
whatever hides it later: a factor of zero, a larger term of the loss, a maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise import runtime as rt
from shardwise.equivalence.assembly import Unassembled, gradient_layout, whole_values
from shardwise.equivalence.certificate import Comparison, compare
from shardwise.equivalence.rounding import EPSILON
from shardwise.equivalence.subject import View
from shardwise.equivalence.trial import Trial
from shardwise.program import Program, Step
from shardwise.program.program import LocalValue
from shardwise.sharding.placements import Layout, Partial


@dataclass(frozen=True, slots=True)
class Compared:
    """A value or gradient of a program that was compared."""

    step: Step
    held: LocalValue
    comparison: Comparison


def compare_values(view: View, records: Sequence[rt.Records], trial: Trial) -> Iterator[Compared]:
    """Values in the order of the program's statements."""
    stored = view.program.rank_programs[0].values
    used = _used(view.program)
    for step, name in _probed(view.program):
        held = stored[name]
        expected = trial.truth.values.get(held.value)
        parts = view.values(records, name)
        if parts is None or expected is None or name not in used:
            continue
        what, noise = f"value of %{held.value}", trial.noise.values.get(held.value)
        yield Compared(
            step, held, _compare(what, view, parts, held.layout, expected, noise, trial.about)
        )


def compare_gradients(
    view: View, records: Sequence[rt.Records], trial: Trial
) -> Iterator[Compared]:
    """Gradients of values, from the loss backward."""
    stored = view.program.rank_programs[0].values
    for step, name in reversed(list(_probed(view.program))):
        held = stored[name]
        expected = trial.truth.gradients.get(held.value)
        if name != held.value or expected is None:
            continue  # a moved copy sees only part of its value's gradient
        parts = view.gradients(records, name)
        if parts is None:
            continue
        what, noise = (
            f"arriving gradient of %{held.value}",
            trial.noise.value_gradients.get(held.value),
        )
        layout = gradient_layout(held.layout)
        yield Compared(
            step, held, _compare(what, view, parts, layout, expected, noise, trial.about)
        )


def _probed(program: Program) -> Iterator[tuple[Step, str]]:
    for step in program.rank_programs[0].steps:
        for name in step.outputs:
            yield step, name


def _used(program: Program) -> set[str]:
    """Values that something reads: an operator may leave others as it likes."""
    first = program.rank_programs[0]
    used = {name for s in (*first.steps, *first.output_steps) for name in s.inputs}
    used |= {first.loss or "", *(name for _, name in first.mutations)}
    return used | set(program.graph.sends)


def _compare(
    what: str,
    view: View,
    parts: Sequence[torch.Tensor],
    layout: Layout,
    expected: torch.Tensor,
    noise: torch.Tensor | None,
    about: str,
) -> Comparison:
    shape, mesh = tuple(expected.shape), view.program.mesh
    try:
        wholes = whole_values(parts, layout, shape, mesh)
        if noise is not None and any(isinstance(p, Partial) for _, p in layout.axes):
            sizes = [part.abs().to(noise.dtype) for part in parts]
            noise = noise + EPSILON * whole_values(sizes, layout, shape, mesh)[0][1]
    except Unassembled as error:
        return Comparison(what, float("inf"), str(error), about)
    found = [compare(what, whole, expected, noise=noise, trial=about) for _, whole in wholes]
    worst = max(range(len(found)), key=lambda i: found[i].relative_error)
    if worst == 0 or found[worst].ok:
        return found[worst]
    which = wholes[worst][0]
    return Comparison(what, found[worst].relative_error, f"{which} should hold the same", about)
