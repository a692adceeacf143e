"""Where code that was edited by hand first differs from the code that was emitted.

Enters: the emitted and the edited sources. Leaves: text that names the edited statement. Both run
with a probe after every assignment of a `forward`; the first assignment whose value differs on
some rank is named. None when the emitted code itself is not right: then the program is at fault.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence

import torch

from shardwise import runtime as rt
from shardwise.equivalence.certificate import relative_error
from shardwise.equivalence.reference import Reference
from shardwise.equivalence.subject import Subject

LOOSE = 1e-8


def locate_edit(
    subject: Subject,
    emitted: Sequence[str],
    edited: Sequence[str],
    reference: Reference,
    inputs: Mapping[str, torch.Tensor],
    timeout: float,
    failure: Exception | None,
) -> str | None:
    """The first statement of the edited code that gives another value than the emitted one."""
    right = [rt.Records() for _ in range(subject.num_ranks)]
    wrong = [rt.Records() for _ in range(subject.num_ranks)]
    try:
        texts = [instrument(text) for text in emitted]
        outcomes = subject.run(texts, reference.state, inputs, timeout=timeout, records=right)
    except Exception:
        return None
    if relative_error(outcomes[0].loss, reference.loss) > LOOSE:
        return None
    try:
        texts = [instrument(text) for text in edited]
        subject.run(texts, reference.state, inputs, timeout=timeout, records=wrong)
    except Exception as error:
        failure = error
    changed = _changed_lines(emitted, edited)
    for name in dict.fromkeys(name for mine in wrong for name in mine.values):
        for rank, (mine, theirs) in enumerate(zip(wrong, right, strict=True)):
            value, expected = mine.values.get(name), theirs.values.get(name)
            if value is not None and expected is not None and _differ(value, expected):
                return f"the edited code: {name} has another value on rank {rank}; {changed}"
    if failure is not None:
        return f"the edited code raised {type(failure).__name__}: {failure}; {changed}"
    return f"the edited code: values agree forward, gradients or state do not; {changed}"


def _differ(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return value.shape != expected.shape or relative_error(value, expected) > LOOSE


def _changed_lines(emitted: Sequence[str], edited: Sequence[str]) -> str:
    """The edited lines, the first few of them."""
    found: dict[str, None] = {}
    for before, after in zip(emitted, edited, strict=True):
        rows = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        for row in rows:
            if row[:1] in "+-" and row[:3] not in ("+++", "---") and row[1:].strip():
                found.setdefault(f"{'now' if row[0] == '+' else 'was'} `{row[1:].strip()}`")
    shown = list(found)[:4]
    return f"edited: {', '.join(shown)}" + (", …" if len(found) > 4 else "")


def instrument(source: str) -> str:
    """The source with a probe after every assignment to plain names in a `forward`."""
    tree = ast.parse(source)
    for item in tree.body:
        if isinstance(item, ast.ClassDef):
            for method in item.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    counter: dict[str, int] = {}
                    method.body = _probed(method.body, item.name, counter)
    return ast.unparse(ast.fix_missing_locations(tree))


def _probed(body: list[ast.stmt], owner: str, counter: dict[str, int]) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With | ast.For | ast.If):
            statement.body = _probed(statement.body, owner, counter)
        result.append(statement)
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for name in names:
                    if isinstance(name, ast.Name) and name.id != "_":
                        counter[name.id] = counter.get(name.id, 0) + 1
                        label = f"assignment {counter[name.id]} of {name.id} in {owner}.forward"
                        result += ast.parse(f"rt.probe({label!r}, {name.id})").body
    return result
