"""Run an emitted program, a thread per rank, and compare it with the model.

What runs is the emitted code with
the runtime's own reducer and optimizer; only the transport is in memory.

There are two trials: one with the weights and batch as they are, one with both changed so that no
path is hidden by a zero (`perturb.py`). Each compares everything a training step leaves behind. In
the second, every single value and its gradient is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.batch import flatten_batch
from shardwise.equivalence.certificate import (
    Certificate,
    Comparison,
    compare,
    rounding_elements,
    vagueness,
)
from shardwise.equivalence.edits import Edit, differing_statements, locate_edit
from shardwise.equivalence.locate import compare_gradients, compare_values, locate
from shardwise.equivalence.ranks import TIMEOUT_S, Outcome, Probed, Subject, run_probed, subject_of
from shardwise.equivalence.reference import Reference
from shardwise.equivalence.trial import Trial, make_trial, perturbed
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.program import Pipeline, Program

# What no trial of a check could show to be right.
#
# A parameter whose gradient is zero, a value that is always zero or an input that nothing reads:
# the program may treat it in any way and still agree with the model. A certificate names them.


def not_exercised(graph: Graph, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Describe what stayed zero, or had no gradient, in every trial."""
    lines = []
    for parameter in graph.parameters:
        gradients = [trial.reference.gradients.get(parameter.name) for trial in trials]
        if parameter.requires_grad and all(map(_is_zero, gradients)):
            lines.append(f"parameter {parameter.name}: its gradient is zero")
    used = {name for node in graph.nodes for name in node.inputs}
    for source in graph.inputs:
        if source.value not in used:
            lines.append(f"input {source.name}: nothing reads it")
    for node in graph.nodes:
        for name in node.outputs:
            if name not in trials[0].truth.gradients:
                continue
            if all(_is_zero(trial.truth.values[name]) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its value is zero")
            elif all(_is_zero(trial.truth.gradients.get(name)) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its gradient is zero")
    if len(trials) == 1:
        lines.append("other weights and batches: the model does not run on changed ones")
    return tuple(lines)


def _is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not bool(tensor.any())


AS_GIVEN = "weights and batch as given"
Tensors = Mapping[str, torch.Tensor]
Rerun = Callable[[Tensors, Tensors], Reference]  # the model's step with a state and inputs


def check(
    program: Program | Pipeline,
    reference: Reference,
    batch: Any,
    *,
    rerun: Rerun | None = None,
    trials: Sequence[Trial] | None = None,
    sources: Sequence[str] | None = None,
    emitted: Sequence[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    scaled: tuple[str, ...] = (),
) -> Certificate:
    """Run the program and compare everything a training step leaves behind.

    `rerun` takes the model through a step with other weights and another batch; without it the
    captured graph does. `trials` are those of `make_trials`, where several programs of one plan are
    checked. `sources` replaces the emitted text of each rank program, for code that was edited by
    hand; `emitted` is that text before it was edited, if that is not the program's own. `scaled`
    says what was made smaller before; it is only passed on.
    """
    subject = subject_of(program)
    trials = trials or make_trials(program, reference, batch, rerun)
    texts = list(emitted or subject.sources())
    run = _Check(subject, Edit(texts, list(sources or texts)), trials, timeout_s)
    difference = run.first_difference()
    return Certificate(
        plan=subject.plan.name,
        model=subject.graph.name,
        mesh=subject.mesh,
        comparisons=run.comparisons(),
        first_difference=difference,
        scaled=scaled,
        trials=tuple(trial.about for trial in trials),
        not_exercised=not_exercised(subject.computed, trials),
    )


def make_trials(
    program: Program | Pipeline, reference: Reference, batch: Any, rerun: Rerun | None = None
) -> list[Trial]:
    """Return the trials of a check: as given, and with weights and batch changed if the model runs
    so.
    """
    subject = subject_of(program)
    inputs, _ = flatten_batch(batch)
    given = make_trial(subject.computed, subject.plan, reference, inputs, AS_GIVEN)
    other = perturbed(subject.computed, subject.plan, given, rerun)
    return [given] if other is None else [given, other]


class _Check:
    """The comparisons of all trials, up to the first trial that shows a difference."""

    def __init__(
        self, subject: Subject, edit: Edit, trials: Sequence[Trial], timeout_s: float
    ) -> None:
        self.subject, self.edit, self.timeout_s = subject, edit, timeout_s
        self.edited = edit.edited != edit.emitted
        self.found: list[Comparison] = []
        self.failed: _Failed | None = None
        for trial in trials:
            compared, failure = self._results(trial)
            probed: Probed | None = None
            if trial is trials[-1] and all(c.ok for c in compared):
                more, probed = self._edited(trial) if self.edited else self._values(trial)
                compared += more
            self.found += compared
            if not all(c.ok for c in compared):
                self.failed = _Failed(trial, failure, probed)
                return

    def _results(self, trial: Trial) -> tuple[list[Comparison], Exception | None]:
        """What a training step of the texts leaves behind."""
        reference = trial.reference
        try:
            outcomes = self.subject.run(
                self.edit.edited, reference.state, trial.inputs, timeout_s=self.timeout_s
            )
        except Exception as error:
            known = isinstance(error, ShardwiseError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            return [Comparison("the run", float("inf"), text, trial.about)], error
        return [*compare_outcome(outcomes[0], trial), *_agreement(outcomes, trial)], None

    def _values(self, trial: Trial) -> tuple[list[Comparison], Probed]:
        """Every value of the program and its gradient."""
        probed = run_probed(self.subject, trial, self.timeout_s)
        if probed.raised is not None:
            text = f"{type(probed.raised).__name__}: {probed.raised}"
            return [Comparison("the run with probes", float("inf"), text, trial.about)], probed
        compared = [
            compared.comparison
            for view in self.subject.views
            for compare_all in (compare_values, compare_gradients)
            for compared in compare_all(view, probed.records, trial)
        ]
        return compared, probed

    def _edited(self, trial: Trial) -> tuple[list[Comparison], None]:
        """Statements of edited code whose effect the results are too coarse to show."""
        return differing_statements(self.subject, self.edit, trial, self.timeout_s), None

    def comparisons(self) -> tuple[Comparison, ...]:
        """Each thing that was compared once, with its largest error.

        A comparison that is vague in every trial is none: rounding could hide an error.
        """
        worst: dict[str, Comparison] = {}
        vague: dict[str, float] = {}
        for comparison in self.found:
            known = worst.get(comparison.what)
            if known is None or _badness(comparison) > _badness(known):
                worst[comparison.what] = comparison
            least = vague.get(comparison.what, float("inf"))
            vague[comparison.what] = min(least, comparison.vague)
        return tuple(
            replace(c, problem=f"rounding alone moves it by {vague[what]:.0e} of its size")
            if vague[what] and c.ok
            else c
            for what, c in worst.items()
        )

    def first_difference(self) -> str | None:
        if self.failed is None:
            return None
        trial, failure, probed = self.failed.trial, self.failed.raised, self.failed.probed
        if self.edited:
            text = locate_edit(self.subject, self.edit, trial, self.timeout_s, failure)
            if text is not None:
                return text
        probed = probed or run_probed(self.subject, trial, self.timeout_s)
        return locate(self.subject, trial, self.found, probed)


@dataclass(frozen=True, slots=True)
class _Failed:
    trial: Trial
    raised: Exception | None
    probed: Probed | None


def _badness(comparison: Comparison) -> tuple[bool, float]:
    return not comparison.ok, comparison.relative_error


def compare_outcome(found: Outcome, trial: Trial) -> list[Comparison]:
    """Loss, outputs, every gradient, parameters and buffers after the step."""
    expected, noise, about = trial.reference, trial.noise, trial.about
    loss = expected.loss.reshape(())
    result = [compare("loss", found.loss.reshape(()), loss, noise=noise.loss, trial=about)]
    if len(found.outputs) != len(expected.outputs):
        counts = f"{len(found.outputs)} leaves, expected {len(expected.outputs)}"
        return [Comparison("outputs", float("inf"), counts, about)]
    for index, (a, b) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        moved = noise.outputs[index] if index < len(noise.outputs) else None
        if isinstance(b, torch.Tensor):
            result.append(compare(f"output of leaf {index}", a, b, noise=moved, trial=about))
        elif a != b:
            text = f"{a!r} != {b!r}"
            result.append(Comparison(f"output of leaf {index}", float("inf"), text, about))
    for name, gradient in expected.gradients.items():
        mine, moved = found.gradients.get(name), noise.gradients.get(name)
        result.append(compare(f"gradient of {name}", mine, gradient, noise=moved, trial=about))
    for name in sorted(set(found.gradients) - set(expected.gradients)):
        what = f"gradient of {name}"
        result.append(Comparison(what, float("inf"), "no such parameter", about))
    for name, tensor in expected.state_after.items():
        kind = "parameter" if name in expected.gradients else "buffer"
        mine, moved = found.state_after.get(name), noise.state_after.get(name)
        what = f"{kind} of {name} after a step"
        compared = compare(what, mine, tensor, noise=moved, trial=about)
        gradient = expected.gradients.get(name)
        if compared.vague and moved is not None and gradient is not None:
            # AdamW divides by the gradient's own size: what is rounding there is a step here, as
            # for the keys' part of a bias in attention, whose gradient is zero.
            zeros = rounding_elements(gradient, noise.gradients.get(name))
            sharp = torch.as_tensor(moved).expand(tensor.shape).masked_fill(zeros, 0.0)
            compared = replace(compared, vague=vagueness(tensor, sharp))
        result.append(compared)
    return result


def _agreement(outcomes: Sequence[Outcome], trial: Trial) -> list[Comparison]:
    """All ranks must report the same loss, and gather the same gradients and state."""
    first, noise, about = outcomes[0], trial.noise, trial.about
    found: list[Comparison] = []
    for rank, outcome in enumerate(outcomes):
        for name, copy in outcome.borrowed.items():
            what = f"copy of {name} on rank {rank} after a step"
            expected, moved = trial.reference.state_after[name], noise.state_after.get(name)
            found.append(compare(what, copy, expected, noise=moved, trial=about))
        if rank == 0:
            continue
        mine, theirs = outcome.loss.reshape(()), first.loss.reshape(())
        found.append(compare(f"loss of rank {rank}", mine, theirs, noise=noise.loss, trial=about))
        for kind, tensors, others, moved_by in (
            ("gradient", outcome.gradients, first.gradients, noise.gradients),
            ("state", outcome.state_after, first.state_after, noise.state_after),
        ):
            what = f"agreement of rank {rank} on {kind}"
            compared = [
                compare(f"{what} {n}", t, others.get(n), noise=moved_by.get(n), trial=about)
                for n, t in tensors.items()
            ]
            found += [c for c in compared if c.relative_error > 0]
    return found
