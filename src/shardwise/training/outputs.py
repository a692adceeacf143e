"""All that a run writes besides checkpoints: its settings, logs, `run.json`, and the terminal.

Enters: a session that is about to run, and how it ended. Leaves: files in the run's folder. On
ranks other than the first nothing is written and nothing said.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from shardwise.errors import ShardwiseError
from shardwise.planner.search.details import figures
from shardwise.plans import Plan
from shardwise.training.config import config_to_json
from shardwise.training.logs import Log, make_console, make_logs
from shardwise.training.logs.files import JsonlLog
from shardwise.training.planning import Planned
from shardwise.training.run_file import RunFile, predicted_step_s
from shardwise.training.session import Session

__all__ = ["RunOutputs"]


class RunOutputs:
    """Opened when a run starts; closed when it ends, also by an error, which `run.json` tells.

    A run that has nothing left to do leaves all files as they are.
    """

    def __init__(self, session: Session) -> None:
        config, writer = session.config, session.world.talks
        folder = Path(config.folder) if config.folder is not None and writer else None
        if session.complete():
            folder = None
        self.logs: list[Log] = []
        self.ranks: JsonlLog | None = None
        if writer and not session.complete():
            self.logs = make_logs(config.logs, folder, config_to_json(config), session.step)
        if folder is not None:
            _write_settings(session, folder)
            if config.logs.jsonl:
                self.ranks = JsonlLog(folder / "ranks.jsonl", session.step)
        kind = config.logs.console if writer else "off"
        self.terminal = make_console(kind, session.totals()["total_steps"], session.step)
        self._run = RunFile(folder, session) if folder is not None else None

    def __enter__(self) -> RunOutputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminal.close()
        for log in (*self.logs, *([self.ranks] if self.ranks is not None else [])):
            log.close()
        if error is not None and self._run is not None:
            self._run.end("failed", f"{type(error).__name__}: {error}"[:2000])

    def ended(self, how: str) -> None:
        """How the run ended: "finished", "callback" or "signal"."""
        if self._run is not None:
            self._run.end(how)


def _write_settings(session: Session, folder: Path) -> None:
    """The config and the plan of the run, for people."""
    (folder / "config.json").write_text(
        json.dumps(config_to_json(session.config), indent=2) + "\n", "utf-8"
    )
    plan = session.planned.plan
    if session.config.trace is not None and predicted_step_s(plan) is None:
        plan = _with_figures(session.planned)
    plan.save(folder / "plan.json")


def _with_figures(planned: Planned) -> Plan:
    """The plan with a prediction that its trace can be laid over, where one can be made."""
    try:
        return figures(planned.graph, planned.plan, planned.cluster)
    except ShardwiseError:
        return planned.plan
