"""What a reader of the README meets first: a block that runs anywhere, and every signature."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_block_runs_without_the_repository(tmp_path: Path) -> None:
    block = (ROOT / "README.md").read_text("utf-8").split("```python\n")[1].split("```")[0]
    assert "examples" not in block
    (tmp_path / "first.py").write_text(block)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "equals Classifier" in done.stdout
    assert (tmp_path / "out" / "rank_0.py").is_file()


def test_signatures_are_current() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "signatures.py"))
    written = module["PAGE"].read_text("utf-8")
    assert written == module["write"](), "python docs/signatures.py writes it anew"
