"""The project's English: words and phrases that must not occur, and how they are recognized."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import language


def test_no_word_occurs_more_often_than_the_baseline_allows() -> None:
    problems = language.excess(language.count())
    assert not problems, "\n".join([*problems, "python -m tests.support.language PATH lists them"])


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ("found = 1\n", ["found"]),
        ("class FoundPlan: ...\n", ["found"]),
        ("profound = founded = NotFound = not_found = 1\n", []),
        ("kept = kept_names(x.kept)\n", ["kept"]),
        ('"""Enters: a graph. Leaves: a plan."""\n', ["Enters/Leaves", "Enters/Leaves"]),
        ('raise ValueError(f"port {port} is none")\n', ["is none"]),
        ("if x is None and there is no_way: ...\n", []),
        ('"there is no schedule, and it is no longer needed"\n', []),
        ('"that is no plan"\n', ["is no X"]),
        ("# each microbatch, as `microbatches=2` has it\n", ["microbatch"]),
        ("text = 'a file was not found'  # as they were told\n", ["told"]),
    ],
)
def test_occurrences_are_recognized(
    source: str, rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [occurrence.rule for occurrence in language.occurrences(file)] == rules
