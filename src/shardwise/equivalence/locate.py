"""Where a program that differs from the model differs first.

Enters: a check that failed. Leaves: text that names the node, where the user wrote it, and the
plan's entry: the first value that differs, forward in the order of statements; then the gradient
nearest to the loss; then a parameter, buffer or result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.equivalence.blame import Blame
from shardwise.equivalence.certificate import Comparison
from shardwise.equivalence.failures import failed_statement
from shardwise.equivalence.probed import Probed
from shardwise.equivalence.subject import Subject, View
from shardwise.equivalence.trial import Trial
from shardwise.equivalence.values import Compared, compare_gradients, compare_values


def locate(
    subject: Subject,
    trial: Trial,
    comparisons: Sequence[Comparison],
    probed: Probed,
) -> str:
    """Return the first difference, in words."""
    records = probed.records
    views = [(view, Blame(view.program)) for view in subject.views]
    text = _first(
        _value_text(blame, compared)
        for view, blame in views
        for compared in compare_values(view, records, trial)
        if not compared.comparison.ok
    )
    if text is None and probed.raised is not None:
        raised = probed.raised
        text = _first(failed_statement(view.program, raised, blame) for view, blame in views)
    text = text or _first(
        _gradient_text(view, blame, compared)
        for view, blame in reversed(views)
        for compared in compare_gradients(view, records, trial)
        if not compared.comparison.ok
    )
    text = text or _first_result(subject, comparisons)
    structure = _first(blame.structure() for _, blame in views)
    return f"{text}; the program itself is inconsistent: {structure}" if structure else text


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def _value_text(blame: Blame, compared: Compared) -> str:
    step, held = compared.step, compared.held
    entries = f"; plan: {blame.entries(blame.nodes[step.node])}" if step.node else ""
    problem = _problem(compared.comparison)
    return f"{blame.step_text(step)}: %{held.value}, held as {held.layout}, {problem}{entries}"


def _gradient_text(view: View, blame: Blame, compared: Compared) -> str:
    """Name the uses of the value: one of them is at fault."""
    held = compared.held
    users = [n for n in blame.graph.nodes if held.value in n.inputs]
    plans = "; ".join(dict.fromkeys(blame.entries(n) for n in users[:3]))
    sources = [blame.describe(n) for n in users[:3]]
    if held.value in view.sent:
        stages = ", ".join(map(str, view.sent[held.value]))
        sources.insert(0, f"transfer %{held.value} back from stage {stages}")
    return (
        f"all values agree forward; backward, the gradient of %{held.value} "
        f"({blame.step_text(compared.step)}, held as {held.layout}) "
        f"{_problem(compared.comparison)}, as it comes from "
        f"{' and '.join(sources) or 'its use'}" + (f"; plan: {plans}" if plans else "")
    )


def _problem(comparison: Comparison) -> str:
    return comparison.problem or f"differs by {comparison.relative_error:.1e}"


def _first_result(subject: Subject, comparisons: Sequence[Comparison]) -> str:
    """Values and their gradients agree: what is left is parameters, buffers, outputs, the step."""
    failed = [c.what for c in comparisons if not c.ok]
    for view in subject.views:
        text = _result_of(view, failed, Blame(view.program))
        if text is not None:
            return text
    return f"values and gradients agree; {failed[0] if failed else 'a result'} differs"


def _result_of(view: View, failed: list[str], blame: Blame) -> str | None:
    """Which parameter, buffer or result of one program is at fault, if one is."""
    program = view.program
    ranks = program.rank_programs[0]
    if failed and failed[0] == "loss" and ranks.loss:
        made = program.graph.producers[ranks.values[ranks.loss].value]
        held = ranks.values[ranks.loss].layout
        return (
            f"the loss of {blame.describe(made)} is returned as {held}, not as a whole value; "
            f"plan: {blame.entries(made)}"
        )
    named = {n: p for p in program.graph.parameters for n in (p.name, *p.aliases)}
    storages = {s.name: s for s in program.rank_programs[0].parameters}
    names = [w.split(" of ", 1)[1] for w in failed if w.startswith("gradient of ")]
    wrong = [named[name] for name in names if name in named]
    order = {n.name: i for i, n in enumerate(program.graph.nodes)}
    users = {p.value: [n for n in program.graph.nodes if p.value in n.inputs] for p in wrong}
    wrong.sort(key=lambda p: -max((order[n.name] for n in users[p.value]), default=-1))
    if wrong:
        first, storage = wrong[0], storages[wrong[0].name]
        tied = f", tied as {', '.join(first.aliases)}" if first.aliases else ""
        where = " and ".join(n.origin for n in users[first.value][:3])
        synced = f"summed over {'.'.join(storage.sync)}" if storage.sync else "not synchronized"
        if first.name in view.tied:
            home, *others = view.tied[first.name]
            synced += (
                f", its home is stage {home}, to be summed with stage {', '.join(map(str, others))}"
            )
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return (
            f"values and their gradients agree; the gradient of parameter {first.name}{tied}{more} "
            f"differs: {synced}, used by {where}; plan: {'; '.join(blame.parameter_entries(first))}"
        )
    buffers = {b.name: b for b in program.graph.buffers}
    for what in failed:
        name = what.split(" of ", 1)[-1].removesuffix(" after a step")
        if name in buffers:
            writer = program.graph.producers.get(buffers[name].mutation or "")
            by = f" by {blame.describe(writer)}" if writer else ""
            return f"values agree; buffer {name} is not left as the model leaves it{by}"
    return None
