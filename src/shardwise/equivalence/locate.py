"""Where a program that differs from the model differs first.

Enters: a `Program` whose check failed and the `Reference`. Leaves: text that names the node, where
the user wrote it, and the plan's entry. The program is written again with a probe after every
statement; each probed value is assembled from all ranks by its layout and compared with the
captured graph's value, forward in the order of statements and then gradients in reverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise import runtime as rt
from shardwise.equivalence.assembly import Unassembled, gradient_layout, whole_value
from shardwise.equivalence.blame import Blame
from shardwise.equivalence.certificate import Comparison, relative_error
from shardwise.equivalence.failures import failed_statement
from shardwise.equivalence.randomness import keyed_random
from shardwise.equivalence.reference import Reference
from shardwise.equivalence.subject import Subject, View
from shardwise.ir import Graph
from shardwise.ir.interpret import interpret
from shardwise.plans import Plan
from shardwise.program import Program, Step

LOOSE = 1e-8  # of single values: they may cancel more than results do
NOISE = 1e-5  # of the terms a value is made of: what is smaller is taken for rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The graph's own values and the gradients of the loss with respect to them."""

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


def locate(
    subject: Subject,
    reference: Reference,
    inputs: Mapping[str, torch.Tensor],
    comparisons: Sequence[Comparison],
    timeout: float,
    failure: Exception | None = None,
) -> str:
    """The first difference, in words."""
    records = [rt.Records() for _ in range(subject.num_ranks)]
    raised: Exception | None = None
    try:
        sources = subject.sources(probe=True)
        subject.run(sources, reference.state, inputs, timeout=timeout, records=records)
    except Exception as error:
        raised = error
    views = [(view, Blame(view.program)) for view in subject.views]
    text: str | None = None
    if subject.plan.per_microbatch:
        text = "micro-batches that are batches of their own have no values to compare one by one"
    else:
        truth = find_truth(subject.computed, subject.plan, reference.state, inputs)
        text = _first(_first_value(view, records, truth, blame) for view, blame in views)
        if text is None and raised is not None:
            text = _first(failed_statement(view.program, raised, blame) for view, blame in views)
        text = text or _first(
            _first_gradient(view, records, truth, blame) for view, blame in reversed(views)
        )
    text = text or _first_result(subject, comparisons)
    structure = _first(blame.structure() for _, blame in views)
    return f"{text}; the program itself is inconsistent: {structure}" if structure else text


def _first(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text is not None), None)


def find_truth(
    graph: Graph, plan: Plan, state: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> Truth:
    """Every value of the captured graph on one device, with its gradient."""
    parameters = {
        p.name: state[p.name].detach().clone().requires_grad_(p.requires_grad)
        for p in graph.parameters
    }
    buffers = {b.name: state[b.name].detach().clone() for b in graph.buffers}
    random = keyed_random(graph, rt.Rng(plan.seed, plan.rng))
    values = interpret(graph, parameters, buffers, inputs, random=random)
    gradients: dict[str, torch.Tensor] = {}
    if graph.loss is not None and values[graph.loss].requires_grad:
        named = {n: v for n, v in values.items() if v.requires_grad}
        found = torch.autograd.grad(values[graph.loss], list(named.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(named, found, strict=True) if g is not None}
    return Truth(values={n: v.detach() for n, v in values.items()}, gradients=gradients)


def _first_value(
    view: View, records: Sequence[rt.Records], truth: Truth, blame: Blame
) -> str | None:
    program = view.program
    for step, name in _probed(program):
        parts = view.values(records, name)
        held = program.rank_programs[0].values[name]
        if parts is None or held.value not in truth.values:
            continue
        expected = truth.values[held.value]
        try:
            found = whole_value(parts, held.layout, tuple(expected.shape), program.mesh)
        except Unassembled as error:
            problem: str | None = str(error)
        else:
            problem = _difference(found, expected, [*parts, *_operands(program, step, truth)])
        if problem:
            entries = f"; plan: {blame.entries(blame.nodes[step.node])}" if step.node else ""
            return (
                f"{blame.step_text(step)}: %{held.value}, held as {held.layout}, {problem}{entries}"
            )
    return None


def _probed(program: Program) -> Iterator[tuple[Step, str]]:
    for step in program.rank_programs[0].steps:
        for name in step.outputs:
            yield step, name


def _operands(program: Program, step: Step, truth: Truth) -> list[torch.Tensor]:
    held = program.rank_programs[0].values
    values = [held[name].value for name in step.inputs if name in held]
    return [truth.values[value] for value in values if value in truth.values]


def _difference(
    found: torch.Tensor, expected: torch.Tensor, terms: Sequence[torch.Tensor]
) -> str | None:
    """How far two values are apart, if more than the rounding of the terms they are made of."""
    sizes = [
        t.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        for t in terms
        if t.numel() and t.is_floating_point()
    ]
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if torch.equal(found, expected) else "has other integers"
    error = relative_error(found, expected, NOISE * max(sizes, default=0.0))
    return f"differs by {error:.1e}" if error > LOOSE else None


def _first_gradient(
    view: View, records: Sequence[rt.Records], truth: Truth, blame: Blame
) -> str | None:
    """The value closest to the loss whose gradient differs: one of its uses is at fault."""
    program = view.program
    stored = program.rank_programs[0].values
    given = [g for g in truth.gradients.values() if g.numel()]
    largest = max((g.abs().max().item() for g in given), default=0.0)
    for step, name in reversed(list(_probed(program))):
        held, expected = stored[name], truth.gradients.get(stored[name].value)
        if name != held.value or expected is None:
            continue  # a moved copy sees only part of its value's gradient
        layout = gradient_layout(held.layout)
        parts = view.gradients(records, name)
        if parts is None:
            continue
        try:
            found = whole_value(parts, layout, tuple(expected.shape), program.mesh)
        except Unassembled as error:
            problem: str | None = str(error)
        else:
            floor = torch.tensor(largest, dtype=torch.float64)
            problem = _difference(found, expected, [*parts, floor])
        if problem:
            users = [n for n in blame.graph.nodes if held.value in n.inputs]
            plans = "; ".join(dict.fromkeys(blame.entries(n) for n in users[:3]))
            sources = [blame.describe(n) for n in users[:3]]
            if held.value in view.sent:
                stages = ", ".join(map(str, view.sent[held.value]))
                sources.insert(0, f"transfer %{held.value} back from stage {stages}")
            return (
                f"all values agree forward; backward, the gradient of %{held.value} "
                f"({blame.step_text(step)}, held as {held.layout}) {problem}, as it comes from "
                f"{' and '.join(sources) or 'its use'}" + (f"; plan: {plans}" if plans else "")
            )
    return None


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
