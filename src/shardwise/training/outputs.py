"""All that a run writes besides checkpoints: its settings, logs, `run.json`, and the terminal.

Enters: a session that is about to run, and how it ended. Leaves: files in the run's folder. On
ranks other than the first nothing is written and nothing said.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from types import TracebackType

from shardwise.errors import CheckpointError, ShardwiseError, TrainingError
from shardwise.files import write_text
from shardwise.planner.figures import with_figures
from shardwise.plans import Plan
from shardwise.runtime.rendezvous import open_rendezvous
from shardwise.training.config import config_to_json
from shardwise.training.folder_lock import locked_folder
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
        self.logs: list[Log] = []
        self.ranks: JsonlLog | None = None
        self._run: RunFile | None = None
        self._lock = contextlib.ExitStack()
        try:
            # A folder that cannot be used is an error of all ranks, not of the first alone.
            rendezvous = open_rendezvous("open the run", CheckpointError)
            rendezvous.run(lambda: self._open(session), session.config.timeout_s)
        except BaseException:
            self._close()
            raise

    def _open(self, session: Session) -> None:
        config, writer = session.config, session.world.talks
        folder = Path(config.folder) if config.folder is not None and writer else None
        if session.complete():
            folder = None
        if folder is not None:
            self._lock.enter_context(locked_folder(folder))
            _write_settings(session, folder)
            self._run = RunFile(folder, session)
        if writer and not session.complete():
            self.logs = make_logs(config.logs, folder, config_to_json(config), session.step)
        if folder is not None and config.logs.jsonl:
            self.ranks = JsonlLog(folder / "ranks.jsonl", session.step)
        kind = config.logs.console if writer else "off"
        self.terminal = make_console(kind, session.totals()["total_steps"], session.step)

    def __enter__(self) -> RunOutputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminal.close()
        try:
            if error is not None:
                self.ended("failed", f"{type(error).__name__}: {error}"[:2000])
        finally:
            self._close()

    def _close(self) -> None:
        for log in (*self.logs, *([self.ranks] if self.ranks is not None else [])):
            log.close()
        self._lock.close()

    def ended(self, how: str, error: str | None = None) -> None:
        """Note how the run ended: "finished", "callback", "signal" or "failed"."""
        if self._run is None:
            return
        try:
            self._run.end(how, error)
        except TrainingError as problem:  # the run has ended all the same
            warnings.warn(f"{problem.message} ({problem.hint})", RuntimeWarning, stacklevel=2)


def _write_settings(session: Session, folder: Path) -> None:
    """The config and the plan of the run, for people."""
    text = json.dumps(config_to_json(session.config), indent=2) + "\n"
    write_text(folder / "config.json", text, TrainingError)
    plan = session.planned.plan
    if session.config.trace is not None and predicted_step_s(plan) is None:
        plan = _with_figures(session.planned)
    plan.save(folder / "plan.json")


def _with_figures(planned: Planned) -> Plan:
    """The plan with a prediction that its trace can be laid over, where one can be made."""
    try:
        return with_figures(planned.graph, planned.plan, planned.cluster)
    except ShardwiseError:
        return planned.plan
