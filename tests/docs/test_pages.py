"""The code of README and documentation runs, and prints what the pages say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.sharding import registry
from tests.support.pages import NOT_RUN, PYTHON, TORCHRUN, read_blocks, run_page, without_errors

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}
# Pages that take more than some seconds as a whole; others may have single blocks that do.
SLOW = {
    "docs/guides/huggingface.md",
    "docs/guides/lightning.md",
    "docs/guides/pipelines.md",
    "docs/guides/planning.md",
}
RUN = [page for page, text in PAGES.items() if any(b.is_run for b in read_blocks(text))]
PARTLY_SLOW = {page for page in RUN if any(b.is_slow for b in read_blocks(PAGES[page]))}
PROGRAMS = [
    (page, block.code)
    for page, text in PAGES.items()
    for block in read_blocks(text)
    if block.language in PYTHON and block.first_line.startswith(TORCHRUN)
]


def check_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    (folder / "examples").symlink_to(ROOT / "examples")
    for table in ("RULES", "REPLICATED", "REGISTERED"):  # a page's own rules end with it
        monkeypatch.setattr(registry, table, getattr(registry, table).copy())
    text = PAGES[page]
    known = set(sys.modules)
    try:
        printed = run_page(text, slow=slow)
    finally:
        for name in set(sys.modules) - known:
            if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]  # a file that the page wrote
    assert without_errors(printed) == without_errors(text), (
        f"python -m tests.support.pages {page} writes what is printed now"
    )


@pytest.mark.parametrize("page", sorted(set(RUN) - SLOW))
def test_printed_output_is_real(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_page(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted(SLOW | PARTLY_SLOW))
def test_printed_output_of_long_pages_is_real(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_page(page, tmp_path, monkeypatch, slow=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "code"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_programs_of_pages_run_on_processes(
    page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    *options, file = code.partition("\n")[0].removeprefix(TORCHRUN).split()
    (tmp_path / file).write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, file]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_code_that_is_not_run_says_why() -> None:
    for page, text in PAGES.items():
        for block in read_blocks(text):
            if block.language in PYTHON and block.first_line.startswith(NOT_RUN.strip()):
                assert len(block.first_line) > len(NOT_RUN) + 10, page
        assert "```text\n```" not in text, f"{page} prints nothing where it should"


def test_every_page_is_reached_from_the_index() -> None:
    reached = {"docs/index.md"}
    for page, text in PAGES.items():
        folder = Path(page).parent
        for block in read_blocks(text):
            if block.language == "{toctree}":
                names = re.findall(r"^(?:.*<)?([\w/-]+)>?$", block.code, re.M)
                reached |= {str(folder / f"{name}.md") for name in names}
    assert {page for page in PAGES if page.startswith("docs/")} == reached


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/reference/"))
    documented = set(re.findall(r"shardwise\.(\w+)$", text, re.M))
    assert set(sw.__all__) - {"__version__"} <= documented


def test_every_error_has_its_cause_and_cure() -> None:
    text = PAGES["docs/errors.md"]
    for name, kind in vars(sw.errors).items():
        if isinstance(kind, type) and issubclass(kind, sw.errors.ShardwiseError):
            assert f"`{name}`" in text, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="`make docs` installs what the documentation needs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, "docs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pictures_are_what_their_script_draws() -> None:
    draw = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))
    for name, content in draw["pictures"]():
        assert (ROOT / "docs/pictures" / name).read_text() == content, (
            "python docs/pictures/draw.py writes them"
        )


def test_links_of_the_readme_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", PAGES["README.md"]):
        assert (ROOT / link).exists(), link


def test_the_performance_page_names_commands_and_results_that_exist() -> None:
    text = PAGES["docs/performance.md"]
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for file in re.findall(r"benchmarks/results/\w+\.json", text):
        assert (ROOT / file).is_file(), file
    results = {f"benchmarks/results/{p.name}" for p in (ROOT / "benchmarks/results").glob("*.json")}
    assert results <= set(re.findall(r"benchmarks/results/\w+\.json", text))


def test_the_guide_to_pipelines_shows_what_is_refused() -> None:
    text = PAGES["docs/guides/pipelines.md"]
    for words in ("ScheduleError", "couples the samples", "RankError", "no such node or module"):
        assert words in text


def test_files_of_the_architecture_page_exist() -> None:
    for name in re.findall(r"`([a-z_]+/[a-z_/.]*)`", PAGES["docs/architecture.md"]):
        assert (ROOT / "src/shardwise" / name).exists(), name
