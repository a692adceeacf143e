"""The wheel of `make dist` is complete, and runs the quick start in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path, PurePath

import pytest
import torch

from tests.support.pages import ROOT

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGE = ROOT / "src" / "shardwise"


def data_files() -> set[str]:
    """The files of the package that are not Python, relative to it."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    names = {str(path.relative_to(PACKAGE)) for path in files if path.suffix not in (".py", ".pyc")}
    assert "cluster/presets.yaml" in names
    return names


def test_every_data_file_is_named_in_the_build_settings() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["shardwise"]
    patterns += [pattern.removeprefix("**/") for pattern in patterns]
    missing = [n for n in data_files() if not any(PurePath(n).match(p) for p in patterns)]
    assert not missing


def run(*words: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_runs_the_quick_start_in_a_clean_environment(tmp_path: Path) -> None:
    dist, folder, prefix = (tmp_path / name for name in ("dist", "outside", "env"))
    run("make", "-o", "setup", "dist", f"PY={sys.executable}", f"DIST={dist}", cwd=ROOT)
    (wheel,) = dist.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    python = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert {f"shardwise/{name}" for name in data_files() | python} <= packed

    venv.create(prefix, with_pip=True)
    here = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    here |= {"PATH": f"{prefix}/bin:{here['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    pip = (prefix / "bin" / "python", "-m", "pip", "install", "-q")
    version = torch.__version__.partition("+")[0]
    run(*pip, "--extra-index-url", TORCH_CPU_INDEX, f"torch=={version}", cwd=tmp_path, env=here)
    run(*pip, wheel, cwd=tmp_path, env=here)

    folder.mkdir()
    shutil.copy(ROOT / "tests" / "support" / "pages.py", folder)
    shutil.copy(ROOT / "docs" / "quickstart.md", folder)
    check = (
        "import pages, pathlib, shardwise; assert 'site-packages' in shardwise.__file__;"
        "text = pathlib.Path('quickstart.md').read_text();"
        "printed = pages.run_page(text);"
        "assert pages.without_errors(printed) == pages.without_errors(text), printed;"
        "import shardwise as sw; from model import make; model, batch = make();"
        "graph = sw.capture(model, batch);"
        "plan = sw.plan(graph, sw.Cluster.preset('h100', devices_per_node=2), progress=False);"
        "sw.report(plan).save('report.html'); plan.save('plan.json')"
    )
    run(prefix / "bin" / "python", "-c", check, cwd=folder, env=here)
    assert "<html" in (folder / "report.html").read_text()
    run("torchrun", "--nproc-per-node", "2", "train.py", cwd=folder, env=here)
    assert (folder / "checkpoint").is_dir()
    for words in (("explain", "plan.json"), ("doctor",), ("--help",)):
        run("shardwise", *words, cwd=folder, env=here)
