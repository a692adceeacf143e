"""`run.json`: what a run is, that it goes on, and how it ended; for those who watch it.

Enters: a session as it starts, and how it ended. Leaves: a small file in the run's folder, always
whole. Its figures come from `metrics.jsonl` and `ranks.jsonl` beside it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import TrainingError
from shardwise.files import write_text
from shardwise.plans import Plan
from shardwise.training.session import Session

__all__ = ["FORMAT", "NAME", "VERSION", "RunFile", "predicted_step_s"]

FORMAT, VERSION, NAME = "shardwise-run", 1, "run.json"
ROOM_BYTES = 4096  # so that a full disk has room for how the run ended


class RunFile:
    """The file of one run; without a folder there is none."""

    def __init__(self, folder: Path | None, session: Session) -> None:
        self._path = None if folder is None else folder / NAME
        plan = session.planned.plan
        predicted = predicted_step_s(plan)
        self._data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": plan.model,
            "plan": plan.name,
            "ranks": session.world.size,
            "device": session.world.device.type,
            "batch_size": session.source.batch_size,
            "first_step": session.step,
            "total_steps": session.totals()["total_steps"],
            "predicted_step_s": predicted,
            "known_machines": session.planned.known_machines,
            "host": platform.node(),
            "pid": os.getpid(),
            "started_at": time.time(),
            "state": "running",
        }
        self._write()

    def end(self, state: str, error: str | None = None) -> None:
        """The run has ended: "finished", "callback", "signal" or "failed"."""
        more = {} if error is None else {"error": error}
        self._data |= {"state": state, "ended_at": time.time(), **more}
        self._write()

    def _write(self) -> None:
        """Write the file; on a full disk into the place that the old one has."""
        if self._path is None:
            return
        text = (json.dumps(self._data, indent=2) + "\n").ljust(ROOM_BYTES)
        try:
            write_text(self._path, text, TrainingError)
        except TrainingError:
            with suppress(OSError), self._path.open("r+b") as file:
                file.write(text.encode())
                return
            raise


def predicted_step_s(plan: Plan) -> float | None:
    """Return the step time that the search predicted; None for a plan without figures."""
    return None if plan.search is None or plan.is_edited else plan.search.best.step_time_s
