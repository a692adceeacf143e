"""Locate the first value at which a program differs from the model.

The program is emitted with a probe after each statement. The recorded local parts are assembled by
their layout and compared with the graph's value. An error is thus located at the node that causes
it, even if a factor of zero, a larger term of the loss or a maximum hides it later.
"""

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
    full_values,
    gradient_layout,
)
from shardwise.equivalence.trial import Trial
from shardwise.errors import ProgramError, ShardwiseError
from shardwise.ir import Node, Parameter
from shardwise.plans import Resolved, resolve
from shardwise.program import Program, Step
from shardwise.program.program import LocalValue
from shardwise.sharding.placements import REPLICATED, Layout, Partial


@dataclass(frozen=True, slots=True)
class Compared:
    """A compared value or gradient of a program."""

    step: Step
    value: LocalValue
    comparison: Comparison


def compare_values(view: View, records: Sequence[rt.Records], trial: Trial) -> Iterator[Compared]:
    """Compare the values in the order of the program's statements."""
    local_values = view.program.rank_programs[0].values
    used = _used(view.program)
    for step, name in _probed(view.program):
        value = local_values[name]
        expected = trial.truth.values.get(value.value)
        parts = view.values(records, name)
        if parts is None or expected is None or name not in used:
            continue
        what, noise = f"value of %{value.value}", trial.noise.values.get(value.value)
        yield Compared(
            step, value, _compare(what, view, parts, value.layout, expected, noise, trial.about)
        )


def compare_gradients(
    view: View, records: Sequence[rt.Records], trial: Trial
) -> Iterator[Compared]:
    """Compare the gradients of values, from the loss backward."""
    local_values = view.program.rank_programs[0].values
    for step, name in reversed(list(_probed(view.program))):
        value = local_values[name]
        expected = trial.truth.gradients.get(value.value)
        if name != value.value or expected is None:
            continue  # a redistributed copy receives only a part of its value's gradient
        parts = view.gradients(records, name)
        if parts is None:
            continue
        what = f"arriving gradient of %{value.value}"
        layout, noise = gradient_layout(value.layout), trial.noise.value_gradients.get(value.value)
        yield Compared(
            step, value, _compare(what, view, parts, layout, expected, noise, trial.about)
        )


def _probed(program: Program) -> Iterator[tuple[Step, str]]:
    """Yield the values to compare; rows of experts are compared when they return to tokens."""
    first, types = program.rank_programs[0], program.graph.values
    for step in first.steps:
        for name in step.outputs:
            if types[first.values[name].value].ragged == 1:
                yield step, name


def _used(program: Program) -> set[str]:
    """Return the values that are read; an operator may leave anything in the others."""
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
        replicas = full_values(parts, layout, shape, mesh)
        if noise is not None and any(isinstance(p, Partial) for _, p in layout.axes):
            sizes = [part.abs().to(noise.dtype) for part in parts]
            noise = noise + EPSILON * full_values(sizes, layout, shape, mesh)[0][1]
    except Unassembled as error:
        return Comparison(what, float("inf"), str(error), about)
    comparisons = [
        compare(what, value, expected, noise=noise, trial=about) for _, value in replicas
    ]
    worst = max(range(len(replicas)), key=lambda i: comparisons[i].relative_error)
    if worst == 0 or comparisons[worst].ok:
        return comparisons[worst]
    problem = f"{replicas[worst][0]} should be equal"
    return Comparison(what, comparisons[worst].relative_error, problem, about)


class NodeInfo:
    """Describe the nodes of a program and the plan entries that decided them.

    The plan is resolved again when it is first needed.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph, self.plan = program.graph, program.plan
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.parameters = {p.value: p for p in self.graph.parameters}
        self._resolved: Resolved | None = None

    def describe(self, node: Node) -> str:
        """Return `node linear_3 (aten.linear.default) at blocks.0.fc (model.py:41)`."""
        text = f" `{node.source_text}`" if node.source_text else ""
        return f"node {node.name} ({node.op}) at {node.origin}{text}"

    def entries(self, node: Node) -> str:
        """Return the plan entries that decide this node, as written in the plan file."""
        choices = self.plan.choices(self.graph).get(node.name, {})
        entries = [f'nodes["{node.name}"]: {axis} "{choice}"' for axis, choice in choices.items()]
        for value in dict.fromkeys(node.inputs):
            if value in self.parameters:
                entries += self.parameter_entries(self.parameters[value])
        return "; ".join([*entries, *self._choices(node)]) or "no plan entry"

    def parameter_entries(self, parameter: Parameter) -> list[str]:
        """Return the plan's globs that match a parameter, with their shardings."""
        entries = []
        for glob, entry in self.plan.parameters.items():
            if not any(fnmatchcase(n, glob) for n in (parameter.name, *parameter.aliases)):
                continue
            shardings = [f"{axis} {sharding}" for axis, sharding in entry.layout.items()]
            shardings += [f"zero {entry.zero}"] if entry.zero else []
            entries.append(f'parameters["{glob}"]: {", ".join(shardings) or REPLICATED}')
        return entries

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
        """Return the problem that the program's own structural check reports, if any."""
        try:
            self.program.verify()
        except ProgramError as error:
            return str(error).splitlines()[0]
        return None

    def step_text(self, step: Step) -> str:
        """Return `rt.reduce over tp for node …`, or the description of the node itself."""
        if not step.node:
            return f"{step.fn} over {'.'.join(step.axes)}"
        described = self.describe(self.nodes[step.node])
        if not step.is_move:
            return described
        return f"{step.fn} over {'.'.join(step.axes)} for {described}"


PROBE = re.compile(r"rt\.probe\('([^']+)'")


def failed_statement(program: Program, error: BaseException, info: NodeInfo) -> str:
    """Describe the statement of emitted code that raised an exception, and its node."""
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
    following = (linecache.getline(frames[-1].filename, n) for n in range(line, line + 40))
    value = next((probe.group(1) for text in following if (probe := PROBE.search(text))), None)
    step = next((s for s in program.rank_programs[0].steps if value in s.outputs), None)
    where = f" of {info.step_text(step)}" if step else ""
    entries = f"; plan: {info.entries(info.nodes[step.node])}" if step and step.node else ""
    return f"`{statement}`{where} raised {type(error).__name__}: {message}{entries}"


def locate(
    subject: Subject, trial: Trial, comparisons: Sequence[Comparison], probed: Probed
) -> str:
    """Describe the first difference."""
    records = probed.records
    views = [(view, NodeInfo(view.program)) for view in subject.views]
    text = _first(
        _value_text(info, compared)
        for view, info in views
        for compared in compare_values(view, records, trial)
        if not compared.comparison.ok
    )
    if text is None and probed.raised is not None:
        raised = probed.raised
        text = _first(failed_statement(view.program, raised, info) for view, info in views)
    text = text or _first(
        _gradient_text(view, info, compared)
        for view, info in reversed(views)
        for compared in compare_gradients(view, records, trial)
        if not compared.comparison.ok
    )
    text = text or _first_result(subject, comparisons)
    structure = _first(info.structure() for _, info in views)
    return f"{text}; the program itself is inconsistent: {structure}" if structure else text


def _first(texts: Iterable[str | None]) -> str | None:
    return next((text for text in texts if text is not None), None)


def _value_text(info: NodeInfo, compared: Compared) -> str:
    step, value = compared.step, compared.value
    entries = f"; plan: {info.entries(info.nodes[step.node])}" if step.node else ""
    problem = _problem(compared.comparison)
    return f"{info.step_text(step)}: %{value.value}, laid out as {value.layout}, {problem}{entries}"


def _gradient_text(view: View, info: NodeInfo, compared: Compared) -> str:
    """Name the uses of the value, one of which causes the difference."""
    value = compared.value
    users = [n for n in info.graph.nodes if value.value in n.inputs]
    plans = "; ".join(dict.fromkeys(info.entries(n) for n in users[:3]))
    sources = [info.describe(n) for n in users[:3]]
    if value.value in view.sent:
        stages = ", ".join(map(str, view.sent[value.value]))
        sources.insert(0, f"transfer %{value.value} back from stage {stages}")
    return (
        f"all forward values agree; in the backward pass, the gradient of %{value.value} "
        f"({info.step_text(compared.step)}, laid out as {value.layout}) "
        f"{_problem(compared.comparison)} as it arrives from "
        f"{' and '.join(sources) or 'its use'}" + (f"; plan: {plans}" if plans else "")
    )


def _problem(comparison: Comparison) -> str:
    return comparison.problem or f"differs by {comparison.relative_error:.1e}"


def _first_result(subject: Subject, comparisons: Sequence[Comparison]) -> str:
    """Describe a difference of parameters, buffers or results, given that all values agree."""
    failed = [c.what for c in comparisons if not c.ok]
    text = _first(_result_of(view, failed, NodeInfo(view.program)) for view in subject.views)
    return text or f"values and gradients agree; {failed[0] if failed else 'a result'} differs"


def _result_of(view: View, failed: list[str], info: NodeInfo) -> str | None:
    """Describe the parameter, buffer or result of one program that differs, if any."""
    program = view.program
    ranks = program.rank_programs[0]
    if failed and failed[0] == "loss" and ranks.loss:
        producer = program.graph.producers[ranks.values[ranks.loss].value]
        layout = ranks.values[ranks.loss].layout
        return (
            f"the loss of {info.describe(producer)} is returned as {layout}, not replicated; "
            f"plan: {info.entries(producer)}"
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
            owner, *others = view.tied[first.name]
            synced += f", owned by stage {owner} and tied to stage {', '.join(map(str, others))}"
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return (
            f"values and their gradients agree; the gradient of parameter {first.name}{tied}{more} "
            f"differs: {synced}, used by {where}; plan: {'; '.join(info.parameter_entries(first))}"
        )
    buffers = {b.name: b for b in program.graph.buffers}
    for what in failed:
        name = what.split(" of ", 1)[-1].removesuffix(" after a step")
        if name in buffers:
            writer = program.graph.producers.get(buffers[name].mutation or "")
            by = f", written by {info.describe(writer)}" if writer else ""
            return f"values agree; buffer {name} differs after the step{by}"
    return None
