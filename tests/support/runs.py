"""Folders of runs as a trainer writes them, with arbitrary figures."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["add_rows", "make_run", "ranks_line", "row"]


def row(step: int, **changes: Any) -> dict[str, Any]:
    """Return the figures of a step."""
    return {
        "step": step,
        "epoch": 0.0,
        "loss": 3.0 * math.exp(-step / 400) + 0.1 * math.sin(step),
        "gradient_norm": 1.0 + 0.1 * math.cos(step),
        "learning_rate": 1e-3,
        "step_s": 0.1 + 0.01 * math.sin(step * 7),
        "samples_per_s": 320.0,
        "tokens_per_s": 32000.0 + step,
        "memory_bytes": 2.0 * 2**30,
        **changes,
    }


def add_rows(folder: Path, steps: range, **changes: Any) -> None:
    """Append steps to the metrics of a run."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row(step, **changes)) + "\n" for step in steps)


def ranks_line(step: int, own: list[float], load: float = 0.0) -> dict[str, Any]:
    """Return the times of all ranks as the trainer writes them."""
    from shardwise.training.run_files import ranks_row

    rows = [
        [seconds, 0.01, max(own) * 1.1, (2 + rank / 10) * 2**30, load]
        for rank, seconds in enumerate(own)
    ]
    return ranks_row(step, rows, [tuple(range(len(own)))])


def make_run(folder: Path, steps: int = 10, **about: Any) -> Path:
    """Write a run of this process that has done some steps."""
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "format": "shardwise-run",
        "version": 1,
        "model": "GPT",
        "plan": "ddp",
        "ranks": 8,
        "total_steps": 1000,
        "predicted_step_s": 0.08,
        "known_machines": True,
        "host": platform.node(),
        "pid": os.getpid(),
        "state": "running",
        **about,
    }
    (folder / "run.json").write_text(json.dumps(description))
    (folder / "metrics.jsonl").touch()
    add_rows(folder, range(1, steps + 1))
    return folder
