"""Find where code that was edited by hand first differs from the emitted code.

Both versions run with a probe after every assignment in a `forward`. If the emitted code already
differs from the model, the edit is not to blame and no statement is named.
"""

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise import runtime as rt
from shardwise.equivalence.certificate import EPSILON, TOLERANCE, Comparison, relative_error
from shardwise.equivalence.ranks import Subject
from shardwise.equivalence.trial import Trial

MAX_CHANGES = 4


@dataclass(frozen=True, slots=True)
class _Statements:
    """The assigned values of the emitted and the edited code, on every rank."""

    emitted: tuple[rt.Records, ...]
    edited: tuple[rt.Records, ...]
    raised: Exception | None

    def differing(self) -> Iterator[tuple[str, int]]:
        """Yield assignments of both versions whose values differ, in the edited code's order."""
        for name in dict.fromkeys(name for records in self.edited for name in records.values):
            for rank, (edited, emitted) in enumerate(zip(self.edited, self.emitted, strict=True)):
                value, expected = edited.values.get(name), emitted.values.get(name)
                if value is not None and expected is not None and _differ(value, expected):
                    yield name, rank
                    break


@dataclass(frozen=True, slots=True)
class Edit:
    """The texts of all rank programs, as emitted and as edited."""

    emitted: Sequence[str]
    edited: Sequence[str]

    def __str__(self) -> str:
        """Return the first few edited lines."""
        changes: dict[str, None] = {}
        for before, after in zip(self.emitted, self.edited, strict=True):
            rows = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
            for row in rows:
                if row[:1] in "+-" and row[:3] not in ("+++", "---") and row[1:].strip():
                    changes[f"{'now' if row[0] == '+' else 'was'} `{row[1:].strip()}`"] = None
        shown = list(changes)[:MAX_CHANGES]
        return f"edited: {', '.join(shown)}" + (", …" if len(changes) > MAX_CHANGES else "")


def _run_both(subject: Subject, edit: Edit, trial: Trial, timeout_s: float) -> _Statements | None:
    """Run both versions with probes; return None if the emitted code differs from the model."""
    reference, inputs = trial.reference, trial.inputs
    emitted, edited = (tuple(rt.Records() for _ in range(subject.num_ranks)) for _ in range(2))
    try:
        texts = [instrument(text) for text in edit.emitted]
        outcomes = subject.run(texts, reference.state, inputs, timeout_s=timeout_s, records=emitted)
    except Exception:
        return None
    loss = outcomes[0].loss.reshape(())
    if relative_error(loss, reference.loss.reshape(()), trial.noise.loss) > TOLERANCE:
        return None
    raised: Exception | None = None
    try:
        texts = [instrument(text) for text in edit.edited]
        subject.run(texts, reference.state, inputs, timeout_s=timeout_s, records=edited)
    except Exception as error:
        raised = error
    return _Statements(emitted, edited, raised)


def differing_statements(
    subject: Subject, edit: Edit, trial: Trial, timeout_s: float
) -> list[Comparison]:
    """Compare the assignments of edited code whose results agree.

    A statement may correctly have another value, as part of a larger edit; the results then depend
    on it and would show an error. A statement that the results hardly depend on is refused: a
    change of its value by a tenth must change a result.
    """
    statements = _run_both(subject, edit, trial, timeout_s)
    for name, rank in statements.differing() if statements is not None else ():
        if not _matters(subject, edit, name, trial, timeout_s):
            text = (
                f"differs from the emitted code on rank {rank}, and no result depends on it "
                f"enough to show whether that is correct; {edit}"
            )
            return [Comparison(f"statement of {name}", float("inf"), text, trial.about)]
    return []


def _matters(subject: Subject, edit: Edit, name: str, trial: Trial, timeout_s: float) -> bool:
    """Return whether changing one assignment of the emitted code changes a result."""
    from shardwise.equivalence.check import compare_outcome  # it imports this module

    try:
        texts = [instrument(text, change=name) for text in edit.emitted]
        outcomes = subject.run(texts, trial.reference.state, trial.inputs, timeout_s=timeout_s)
    except Exception:
        return True
    return not all(c.ok for c in compare_outcome(outcomes[0], trial))


def locate_edit(
    subject: Subject, edit: Edit, trial: Trial, timeout_s: float, failure: Exception | None
) -> str | None:
    """Describe the first statement of the edited code whose value differs from the emitted code."""
    statements = _run_both(subject, edit, trial, timeout_s)
    if statements is None:
        return None
    changed = str(edit)
    for name, rank in statements.differing():
        return f"the edited code: {name} differs on rank {rank}; {changed}"
    failure = statements.raised or failure
    if failure is not None:
        return f"the edited code raised {type(failure).__name__}: {failure}; {changed}"
    return f"the edited code: forward values agree, gradients or state do not; {changed}"


def _differ(value: torch.Tensor, expected: torch.Tensor) -> bool:
    if value.shape != expected.shape:
        return True
    size = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if expected.numel() else 0.0
    return relative_error(value, expected, EPSILON * float(size)) > TOLERANCE


def instrument(source: str, change: str | None = None) -> str:
    """Return the source with a probe after every assignment to plain names in a `forward`.

    With `change`, the value of that one assignment is made a tenth larger instead.
    """
    tree = ast.parse(source)
    for item in tree.body:
        if isinstance(item, ast.ClassDef):
            for method in item.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    counter: dict[str, int] = {}
                    method.body = _probed(method.body, item.name, counter, change)
    return ast.unparse(ast.fix_missing_locations(tree))


def _probed(
    body: list[ast.stmt], owner: str, counter: dict[str, int], change: str | None
) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With | ast.For | ast.If):
            statement.body = _probed(statement.body, owner, counter, change)
        result.append(statement)
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for name in names:
                    if isinstance(name, ast.Name) and name.id != "_":
                        counter[name.id] = counter.get(name.id, 0) + 1
                        label = f"assignment {counter[name.id]} of {name.id} in {owner}.forward"
                        text = f"rt.probe({label!r}, {name.id})"
                        if change is not None:
                            factor = f"(1.1 if {name.id}.is_floating_point() else 1)"
                            text = f"{name.id} = {name.id} * {factor}" if label == change else ""
                        result += ast.parse(text).body
    return result
