"""What the pages print is what their code prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import run_page, without_errors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "limit"),
    [
        ("README.md", 1),
        ("docs/tour.md", None),
        ("docs/guides/clusters.md", None),
        ("docs/guides/checkpoints.md", None),
        ("docs/guides/trainer.md", None),
        pytest.param("docs/guides/pipelines.md", None, marks=pytest.mark.slow),
        pytest.param("docs/guides/planning.md", None, marks=pytest.mark.slow),
    ],
)
def test_printed_output_is_real(
    page: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / page).read_text()
    assert without_errors(run_page(text, limit)) == without_errors(text), (
        f"python -m tests.support.pages {page} writes what is printed now"
    )


def test_the_tour_shows_every_stage() -> None:
    text = (ROOT / "docs/tour.md").read_text()
    assert "```text\n```" not in text
    for stage in ("capture", "strategies", "explain", "compile", "verify", "parallelize"):
        assert stage in text


def test_the_guide_to_pipelines_shows_what_is_refused() -> None:
    text = (ROOT / "docs/guides/pipelines.md").read_text()
    assert "```text\n```" not in text
    for words in ("ScheduleError", "couples the samples", "RankError", "no such node or module"):
        assert words in text
