"""Where a program that differs from the model differs first."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from shardwise import runtime as rt
from shardwise.equivalence.certificate import EPSILON, Comparison, compare
from shardwise.equivalence.ranks import (
    Probed,
    Subject,
    Unassembled,
    View,
    gradient_layout,
    whole_values,
)
from shardwise.equivalence.trial import Trial
from shardwise.errors import ProgramError, ShardwiseError
from shardwise.ir import Node, Parameter
from shardwise.plans import Resolved, resolve
from shardwise.program import Program, Step
from shardwise.program.program import LocalValue
from shardwise.sharding.placements import Layout, Partial

# Compare every value of a program with the graph's, and every gradient on its way back.
#
# The program is written with a probe after each statement. What the ranks recorded is assembled by
# its layout and compared by its own size. A wrong value is thus seen at the node that makes it,
# whatever hides it later: a factor of zero, a larger term of the loss, a maximum.


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


# Which decision of a plan a node follows from.


class Blame:
    """Answers for one program; the plan is resolved again on the first question."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph, self.plan = program.graph, program.plan
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.parameters = {p.value: p for p in self.graph.parameters}
        self._resolved: Resolved | None = None

    def describe(self, node: Node) -> str:
        """`node linear_3 (aten.linear.default) at blocks.0.fc (model.py:41)`."""
        text = f" `{node.source_text}`" if node.source_text else ""
        return f"node {node.name} ({node.op}) at {node.origin}{text}"

    def entries(self, node: Node) -> str:
        """Return the plan's entries that decide this node, as they stand in the plan file."""
        found = []
        for axis, choice in self.plan.choices(self.graph).get(node.name, {}).items():
            found.append(f'nodes["{node.name}"]: {axis} "{choice}"')
        for value in dict.fromkeys(node.inputs):
            if value in self.parameters:
                found += self.parameter_entries(self.parameters[value])
        return "; ".join([*found, *self._choices(node)]) or "no entry of the plan"

    def parameter_entries(self, parameter: Parameter) -> list[str]:
        """Return the globs that match a parameter, with what they say."""
        found = []
        for glob, entry in self.plan.parameters.items():
            if not any(fnmatchcase(n, glob) for n in (parameter.name, *parameter.aliases)):
                continue
            said = [f"{axis} {cut}" for axis, cut in entry.layout.items()]
            said += [f"zero {entry.zero}"] if entry.zero else []
            found.append(f'parameters["{glob}"]: {", ".join(said) or "whole"}')
        return found

    def _choices(self, node: Node) -> list[str]:
        try:
            self._resolved = self._resolved or resolve(self.graph, self.plan)
        except ShardwiseError:
            return [f"{axis}: {role}" for axis, role in self.plan.roles.items()]
        return [
            f"{a.axis} ({self.plan.roles[a.axis]}): {a.nodes[node.name].choice}"
            for a in self._resolved.assignments
            if node.name in a.nodes
        ]

    def structure(self) -> str | None:
        """What the program's own check finds wrong, if anything."""
        try:
            self.program.verify()
        except ProgramError as error:
            return str(error).splitlines()[0]
        return None

    def uses(self, value: str) -> list[str]:
        """Return the nodes that use a graph value, described."""
        return [self.describe(n) for n in self.graph.nodes if value in n.inputs]

    def step_text(self, step: Step) -> str:
        """`rt.reduce over tp for node …`, or the node itself."""
        if not step.node:
            return f"{step.fn} over {'.'.join(step.axes)}"
        described = self.describe(self.nodes[step.node])
        if not step.is_move:
            return described
        return f"{step.fn} over {'.'.join(step.axes)} for {described}"


# Which statement of emitted code raised.


PROBE = re.compile(r"rt\.probe\('([^']+)'")


def failed_statement(program: Program, error: BaseException, blame: Blame) -> str:
    """Return the statement in emitted code where an exception came from, and the node it belongs
    to.
    """
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith("<shardwise program") and f.lineno is not None
    ]
    if not frames:
        return f"the program stopped outside its own statements: {type(error).__name__}: {message}"
    line = frames[-1].lineno or 0
    statement = linecache.getline(frames[-1].filename, line).strip()
    value = _probed_after(frames[-1].filename, line)
    step = next((s for s in program.rank_programs[0].steps if value in s.outputs), None)
    where = f" of {blame.step_text(step)}" if step else ""
    entries = f"; plan: {blame.entries(blame.nodes[step.node])}" if step and step.node else ""
    return f"`{statement}`{where} raised {type(error).__name__}: {message}{entries}"


def _probed_after(filename: str, line: int) -> str | None:
    """Return the value that the statement at a line makes: the next one probed."""
    for number in range(line, line + 40):
        found = PROBE.search(linecache.getline(filename, number))
        if found:
            return found.group(1)
    return None


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
