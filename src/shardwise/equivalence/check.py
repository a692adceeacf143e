"""Run an emitted program, a thread per rank, and compare it with the model.

There are two trials: one with the weights and batch as given, and one with both changed
so that no zero hides a path (`trial.py`). Each compares everything that a training step produces.
The second also compares every intermediate value and its gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.batch import flatten_batch
from shardwise.equivalence.certificate import (
    TOLERANCE,
    Certificate,
    Comparison,
    compare,
    rounding_elements,
    vagueness,
)
from shardwise.equivalence.edits import Edit, differing_statements, locate_edit
from shardwise.equivalence.locate import compare_gradients, compare_values, locate
from shardwise.equivalence.ranks import TIMEOUT_S, Outcome, Probed, Subject, run_probed, subject_of
from shardwise.equivalence.reference import Reference, Truth
from shardwise.equivalence.trial import Tensors, Trial, make_trial, perturbed
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.program import Pipeline, Program
from shardwise.sharding.candidates import candidates
from shardwise.sharding.factors import analyze
from shardwise.sharding.registry import is_registered

AS_GIVEN = "weights and batch as given"
Rerun = Callable[[Tensors, Tensors], Reference]  # the model's step with a state and inputs


def not_exercised(graph: Graph, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Describe what no trial could confirm.

    A program may treat a parameter without gradient, a value that is always zero or an unused input
    in any manner and still agree with the model.
    """
    lines = []
    for parameter in graph.parameters:
        gradients = [trial.reference.gradients.get(parameter.name) for trial in trials]
        if parameter.requires_grad and all(map(_is_zero, gradients)):
            lines.append(f"parameter {parameter.name}: its gradient is zero")
    same = {n for n, t in trials[0].inputs.items() if torch.equal(t, trials[-1].inputs[n])}
    used = {name for node in graph.nodes for name in node.inputs}
    for source in graph.inputs:
        if source.value not in used:
            lines.append(f"input {source.name}: nothing reads it")
        elif source.name in same and len(same) < len(graph.inputs) and len(trials) > 1:
            lines.append(f"input {source.name}: the same in all trials")
    for guard in graph.guards.checks if graph.guards else ():
        lines.append(
            f"batches in which Python sees another value than {guard.answer}: {guard.source}"
        )
    hidden = set.intersection(*(set(_hidden_uses(graph, trial.truth)) for trial in trials))
    for node in graph.nodes:
        for name in node.outputs:
            if name not in trials[0].truth.gradients:
                continue
            if all(_is_zero(trial.truth.values[name]) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its value is zero")
            elif all(_is_zero(trial.truth.gradients.get(name)) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its gradient is zero")
        lines += [
            f"the use of %{name} in %{node.name} ({node.op}) at {node.origin}: its gradient is tiny"
            for name in dict.fromkeys(node.inputs)
            if (node.name, name) in hidden
        ]
    if len(trials) == 1:
        lines.append("other weights and batches: the model does not run on changed ones")
    return tuple(lines)


def _hidden_uses(graph: Graph, truth: Truth) -> Iterator[tuple[str, str]]:
    """Yield nodes and operands whose part of a gradient is too small to show an error.

    Behind a saturated function, a node adds next to nothing to the gradient of an operand with
    other uses, or an operand hardly changes a node, so that all rows get equal gradients.
    """
    sizes = {n: float((truth.values[n] * g).abs().sum()) for n, g in truth.gradients.items()}
    uses = Counter(name for node in graph.nodes for name in set(node.inputs))
    sources = {parameter.value for parameter in graph.parameters}
    for node in graph.nodes:
        effect = sum(sizes.get(name, 0.0) for name in node.outputs)
        for name in sizes.keys() & set(node.inputs):
            small, large = (effect, sizes[name]) if uses[name] > 1 else (sizes[name], effect)
            if 0 < small <= TOLERANCE * large and (uses[name] > 1 or name not in sources):
                yield node.name, name


def unused_choices(subject: Subject) -> tuple[str, ...]:
    """Describe the choices of users' rules that no node takes, so that no trial confirms them."""
    taken: dict[str, dict[str, bool]] = {}  # operator -> choice -> whether a node takes it
    for program in (view.program for view in subject.views):
        nodes = [node for node in program.graph.nodes if is_registered(node.op)]
        if not nodes:
            continue
        facts, rank = analyze(program.graph), program.rank_programs[0]
        steps = {step.node: step for step in rank.steps if not step.is_move}
        for node in nodes:
            choices, step = taken.setdefault(node.op, {}), steps[node.name]
            layouts = (step.needs, [rank.values[name].layout for name in node.outputs])
            placed = [
                tuple(tuple(layout[axis] for layout in side) for side in layouts)
                for axis, _ in program.mesh.axes
            ]
            for option in candidates(facts.rules[node.name], facts.structures[node.name])[1:]:
                text = str(option.choice).partition(":")[0]
                is_taken = (option.operands, option.results) in placed
                choices[text] = choices.get(text, False) or is_taken
    unused = {op: [text for text in choices if not choices[text]] for op, choices in taken.items()}
    return tuple(f"rule of {op}: no node takes {', '.join(c)}" for op, c in unused.items() if c)


def _is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not bool(tensor.any())


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
    """Run the program and compare everything that a training step produces.

    `rerun` runs a step of the model with other weights and another batch; by default the captured
    graph does. `trials` are the result of `make_trials`, for checking several programs of one plan.
    `sources` replaces the emitted text of each rank program, for code that was edited by hand;
    `emitted` is the text before the edit, by default the program's own. `scaled` describes what was
    made smaller and is copied to the certificate.
    """
    subject = subject_of(program)
    trials = trials or make_trials(program, reference, batch, rerun)
    texts = list(emitted or subject.sources())
    edit = Edit(texts, list(sources or texts))
    comparisons: list[Comparison] = []
    difference: str | None = None
    for trial in trials:
        compared, raised = _compare_results(subject, edit, trial, timeout_s)
        probed: Probed | None = None
        if trial is trials[-1] and all(c.ok for c in compared):
            if edit.edited != edit.emitted:
                compared += differing_statements(subject, edit, trial, timeout_s)
            else:
                values, probed = _compare_values(subject, trial, timeout_s)
                compared += values
        comparisons += compared
        if not all(c.ok for c in compared):
            if edit.edited != edit.emitted:
                difference = locate_edit(subject, edit, trial, timeout_s, raised)
            if difference is None:
                probed = probed or run_probed(subject, trial, timeout_s)
                difference = locate(subject, trial, comparisons, probed)
            break
    return Certificate(
        plan=subject.plan.name,
        model=subject.graph.name,
        mesh=subject.mesh,
        comparisons=_worst(comparisons),
        first_difference=difference,
        scaled=scaled,
        trials=tuple(trial.about for trial in trials),
        not_exercised=(*unused_choices(subject), *not_exercised(subject.computed, trials)),
    )


def make_trials(
    program: Program | Pipeline, reference: Reference, batch: Any, rerun: Rerun | None = None
) -> list[Trial]:
    """Return a trial of the given weights and batch, and one of changed ones if the model runs on
    them.
    """
    subject = subject_of(program)
    inputs, _ = flatten_batch(batch)
    original = make_trial(subject.computed, subject.plan, reference, inputs, AS_GIVEN)
    changed = perturbed(subject.computed, subject.plan, original, rerun)
    return [original] if changed is None else [original, changed]


def _compare_results(
    subject: Subject, edit: Edit, trial: Trial, timeout_s: float
) -> tuple[list[Comparison], Exception | None]:
    """Compare what a training step produces; return the exception that ended it, if any."""
    try:
        outcomes = subject.run(
            edit.edited, trial.reference.state, trial.inputs, timeout_s=timeout_s
        )
    except Exception as error:
        is_own = isinstance(error, ShardwiseError)
        text = str(error) if is_own else f"{type(error).__name__}: {error}"
        return [Comparison("the run", float("inf"), text, trial.about)], error
    return [*compare_outcome(outcomes[0], trial), *_agreement(outcomes, trial)], None


def _compare_values(
    subject: Subject, trial: Trial, timeout_s: float
) -> tuple[list[Comparison], Probed]:
    """Compare every value of the program and its gradient."""
    probed = run_probed(subject, trial, timeout_s)
    if probed.raised is not None:
        text = f"{type(probed.raised).__name__}: {probed.raised}"
        return [Comparison("the run with probes", float("inf"), text, trial.about)], probed
    comparisons = [
        compared.comparison
        for view in subject.views
        for compare_all in (compare_values, compare_gradients)
        for compared in compare_all(view, probed.records, trial)
    ]
    return comparisons, probed


def _worst(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return one comparison for each tensor, with its largest error.

    A tensor whose noise could hide an error in every trial counts as different.
    """
    worst: dict[str, Comparison] = {}
    noise: dict[str, float] = {}
    for comparison in comparisons:
        name = comparison.what
        pair = (worst.get(name, comparison), comparison)
        worst[name] = max(pair, key=lambda c: (not c.ok, c.relative_error))
        noise[name] = min(noise.get(name, float("inf")), comparison.vague)
    return tuple(
        replace(c, problem=f"rounding alone moves it by {noise[name]:.0e} of its size")
        if noise[name] and c.ok
        else c
        for name, c in worst.items()
    )


def compare_outcome(actual: Outcome, trial: Trial) -> list[Comparison]:
    """Compare the loss, outputs, gradients, and parameters and buffers after the step."""
    expected, noise, about = trial.reference, trial.noise, trial.about
    loss = expected.loss.reshape(())
    comparisons = [compare("loss", actual.loss.reshape(()), loss, noise=noise.loss, trial=about)]
    if len(actual.outputs) != len(expected.outputs):
        counts = f"{len(actual.outputs)} leaves, expected {len(expected.outputs)}"
        return [Comparison("outputs", float("inf"), counts, about)]
    for index, (a, b) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        moved = noise.outputs[index] if index < len(noise.outputs) else None
        if isinstance(b, torch.Tensor):
            comparisons.append(compare(f"output of leaf {index}", a, b, noise=moved, trial=about))
        elif a != b:
            text = f"{a!r} != {b!r}"
            comparisons.append(Comparison(f"output of leaf {index}", float("inf"), text, about))
    for name, gradient in expected.gradients.items():
        computed, moved = actual.gradients.get(name), noise.gradients.get(name)
        comparisons.append(
            compare(f"gradient of {name}", computed, gradient, noise=moved, trial=about)
        )
    for name in sorted(set(actual.gradients) - set(expected.gradients)):
        what = f"gradient of {name}"
        comparisons.append(Comparison(what, float("inf"), "no such parameter", about))
    for name, tensor in expected.state_after.items():
        kind = "parameter" if name in expected.gradients else "buffer"
        updated, moved = actual.state_after.get(name), noise.state_after.get(name)
        what = f"{kind} of {name} after a step"
        compared = compare(what, updated, tensor, noise=moved, trial=about)
        gradient = expected.gradients.get(name)
        if compared.vague and moved is not None and gradient is not None:
            # AdamW divides by the gradient's magnitude, which turns rounding into a full step: the
            # gradient of the key part of an attention bias, for example, is zero up to rounding.
            zeros = rounding_elements(gradient, noise.gradients.get(name))
            remaining = torch.as_tensor(moved).expand(tensor.shape).masked_fill(zeros, 0.0)
            compared = replace(compared, vague=vagueness(tensor, remaining))
        comparisons.append(compared)
    return comparisons


def _agreement(outcomes: Sequence[Outcome], trial: Trial) -> list[Comparison]:
    """Require that all ranks report the same loss and gather the same gradients and state."""
    first, noise, about = outcomes[0], trial.noise, trial.about
    comparisons: list[Comparison] = []
    for rank, outcome in enumerate(outcomes):
        for name, copy in outcome.replicas.items():
            what = f"copy of {name} on rank {rank} after a step"
            expected, moved = trial.reference.state_after[name], noise.state_after.get(name)
            comparisons.append(compare(what, copy, expected, noise=moved, trial=about))
        if rank == 0:
            continue
        loss, first_loss = outcome.loss.reshape(()), first.loss.reshape(())
        comparisons.append(
            compare(f"loss of rank {rank}", loss, first_loss, noise=noise.loss, trial=about)
        )
        for kind, tensors, expected_tensors, noises in (
            ("gradient", outcome.gradients, first.gradients, noise.gradients),
            ("state", outcome.state_after, first.state_after, noise.state_after),
        ):
            what = f"agreement of rank {rank} on {kind}"
            compared = [
                compare(f"{what} {n}", t, expected_tensors.get(n), noise=noises.get(n), trial=about)
                for n, t in tensors.items()
            ]
            comparisons += [c for c in compared if c.relative_error > 0]
    return comparisons
