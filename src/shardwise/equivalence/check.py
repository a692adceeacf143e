"""Runs an emitted program, a thread per rank, and compares it with the model.

Enters: a `Program` and a `Reference`. Leaves: a `Certificate`. What runs is the emitted code with
the runtime's own reducer and optimizer; only the transport is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.equivalence.certificate import Certificate, Comparison, compare, relative_error
from shardwise.equivalence.edits import locate_edit
from shardwise.equivalence.locate import locate
from shardwise.equivalence.ranks import TIMEOUT_S, Outcome
from shardwise.equivalence.reference import LEARNING_RATE, Reference
from shardwise.equivalence.subject import subject_of
from shardwise.errors import ShardwiseError
from shardwise.frontend.batch import flatten_batch
from shardwise.program import Pipeline, Program

NEGLIGIBLE = 1e-4  # of the largest gradient: smaller ones are measured against this


def check(
    program: Program | Pipeline,
    reference: Reference,
    batch: Any,
    *,
    sources: Sequence[str] | None = None,
    timeout: float = TIMEOUT_S,
    scaled: tuple[str, ...] = (),
) -> Certificate:
    """Run the program and compare everything a training step leaves behind.

    `sources` replaces the emitted text of each rank program, for code that was edited by hand.
    `scaled` says what was made smaller before; it is only passed on.
    """
    subject = subject_of(program)
    emitted = subject.sources()
    texts = list(sources or emitted)
    inputs, _ = flatten_batch(batch)
    comparisons: list[Comparison] = []
    failure: Exception | None = None
    try:
        outcomes = subject.run(texts, reference.state, inputs, timeout=timeout)
    except Exception as error:
        failure = error
        known = isinstance(error, ShardwiseError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        comparisons.append(Comparison("the run", float("inf"), text))
    else:
        comparisons += compare_outcome(outcomes[0], reference)
        comparisons += _agreement(outcomes)
        for rank, outcome in enumerate(outcomes):
            for name, copy in outcome.borrowed.items():
                what = f"copy of {name} on rank {rank} after a step"
                expected = reference.state_after[name]
                comparisons.append(compare(what, copy, expected, floor=LEARNING_RATE))
    difference = None
    if not all(c.ok for c in comparisons):
        if texts != emitted:
            difference = locate_edit(subject, emitted, texts, reference, inputs, timeout, failure)
        if difference is None:
            difference = locate(subject, reference, inputs, comparisons, timeout, failure)
    return Certificate(
        plan=subject.plan.name,
        model=subject.graph.name,
        mesh=subject.mesh,
        comparisons=tuple(comparisons),
        first_difference=difference,
        scaled=scaled,
    )


def compare_outcome(found: Outcome, expected: Reference) -> list[Comparison]:
    """Loss, outputs, every gradient, parameters and buffers after the step."""
    result = [compare("loss", found.loss.reshape(()), expected.loss.reshape(()))]
    for index, (a, b) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        if isinstance(b, torch.Tensor):
            result.append(compare(f"output of leaf {index}", a, b))
        elif a != b:
            result.append(Comparison(f"output of leaf {index}", float("inf"), f"{a!r} != {b!r}"))
    given = [g for g in expected.gradients.values() if g is not None and g.numel()]
    floor = NEGLIGIBLE * max((g.abs().max().item() for g in given), default=0.0)
    for name, gradient in expected.gradients.items():
        mine = found.gradients.get(name)
        result.append(compare(f"gradient of {name}", mine, gradient, floor=floor))
    for name in sorted(set(found.gradients) - set(expected.gradients)):
        result.append(Comparison(f"gradient of {name}", float("inf"), "no such parameter"))
    buffers = [
        t.abs().max().item()
        for name, t in expected.state_after.items()
        if name not in expected.gradients and t.is_floating_point() and t.numel()
    ]
    smallest = NEGLIGIBLE * max(buffers, default=0.0)
    for name, tensor in expected.state_after.items():
        trained = name in expected.gradients
        what = f"{'parameter' if trained else 'buffer'} of {name} after a step"
        floor = LEARNING_RATE if trained else smallest  # how far a step can move a parameter
        result.append(compare(what, found.state_after[name], tensor, floor=floor))
    return result


def _agreement(outcomes: Sequence[Outcome]) -> list[Comparison]:
    """All ranks must report the same loss, and gather the same gradients and state."""
    first = outcomes[0]
    found: list[Comparison] = []
    for rank, outcome in enumerate(outcomes[1:], start=1):
        found.append(compare(f"loss of rank {rank}", outcome.loss, first.loss))
        for kind, mine, theirs in (
            ("gradient", outcome.gradients, first.gradients),
            ("state", outcome.state_after, first.state_after),
        ):
            worst, name = _worst(mine, theirs)
            if worst > 0:
                found.append(Comparison(f"agreement of rank {rank} on {kind} {name}", worst))
    return found


def _worst(
    mine: Mapping[str, torch.Tensor | None], theirs: Mapping[str, torch.Tensor | None]
) -> tuple[float, str]:
    """The largest difference between two ranks' tensors, and whose."""
    worst, where = 0.0, ""
    for name, tensor in mine.items():
        other = theirs.get(name)
        if tensor is None or other is None:
            error = 0.0 if tensor is other else float("inf")
        else:
            error = 0.0 if torch.equal(tensor, other) else relative_error(tensor, other, 1e-6)
        if error > worst:
            worst, where = error, name
    return worst, where
