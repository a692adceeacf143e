"""`sw.Trainer`: train a model from one config, in one process or in many.

Every process of a group runs the same code; only rank 0 prints and writes logs.

    result = sw.Trainer(
        model=make_model, data={"train": dataset, "batch_size": 32}, steps=1000, folder="runs/first"
    ).fit()
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.runtime import ParallelModule, ShardedOptimizer
from shardwise.runtime.failures import naming_failures
from shardwise.simulation import Estimate, simulate
from shardwise.training.config import TrainConfig, config_from, load_config
from shardwise.training.elastic import Elastic
from shardwise.training.loop import Loop
from shardwise.training.membership import is_member
from shardwise.training.planning import make_planned
from shardwise.training.processes import (
    Stop,
    StopRequests,
    choose_device,
    print_errors_once,
    process_group,
)
from shardwise.training.run_files import RunOutputs, StepRecorder
from shardwise.training.session import Ingredients, Session, check

STOPPED = {
    Stop.NO: "finished",
    Stop.RANKS: "left",
    Stop.CALLBACK: "callback",
    Stop.SIGNAL: "signal",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The result of a training run.

    `losses` are those of this call; `steps` counts all steps, also those before a resume. `stopped`
    is "finished", "callback" (also an early stop), "signal", or "left" if an elastic training
    continues without this rank. `trace` is the file of recorded steps.
    """

    steps: int
    epoch: int
    losses: tuple[float, ...]
    metrics: Mapping[str, float]
    checkpoint: Path | None
    stopped: str
    resumed_from: Path | None
    trace: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The plan that would run, and its predicted step time and memory."""

    plan: Plan
    estimate: Estimate

    def __str__(self) -> str:
        return f"{self.plan}\n{self.estimate}"


class Trainer:
    """Trains a model; the fields are those of `TrainConfig`."""

    def __init__(self, **fields: Any) -> None:
        print_errors_once()
        self.config: TrainConfig = config_from(fields)
        self._base: Path | None = None
        self._session: Session | None = None
        self._stack = contextlib.ExitStack()
        weakref.finalize(self, self._stack.close)  # also when the interpreter exits
        self._stops = StopRequests()
        self._resumed_from: Path | None = None

    @classmethod
    def from_config(
        cls, path: str | Path, overrides: Sequence[str] = (), **changes: Any
    ) -> Trainer:
        """Create a trainer from a config file; paths in it are relative to its folder first."""
        config = load_config(path, overrides, **changes)
        trainer = cls(**{name: getattr(config, name) for name in config.__dataclass_fields__})
        trainer._base = Path(path).resolve().parent
        return trainer

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if this trainer joined it."""
        self._session = None
        self._stack.close()

    def check(self) -> None:
        """Raise an error for mistakes in the config that show without building anything."""
        check(self.config, self._base)

    # ------------------------------------------------------------ actions
    def fit(self) -> FitResult:
        """Train until the end, starting from the newest checkpoint if there is one."""
        if self.config.elastic is not None and is_member():
            self.check()
            return Elastic(self, self._base).fit()
        session = self._started()
        return self.fit_session(session, self._resumed_from)

    def fit_session(
        self, session: Session, resumed_from: Path | None, elastic: Elastic | None = None
    ) -> FitResult:
        """Train until the end, or until other ranks continue an elastic training."""
        self._session, self._resumed_from = session, resumed_from
        if elastic is not None:
            self._stops.ranks_change = lambda: elastic.member.is_change_planned
        with RunOutputs(session) as outputs:
            if elastic is not None:
                elastic.report(session, outputs.terminal.say)
            if self._resumed_from is not None:
                done = ": all steps are done" if session.complete() else ""
                outputs.terminal.say(
                    f"resumed at step {session.step} from {self._resumed_from}{done}"
                )
            session.callbacks.call("on_start", self)
            recorder = StepRecorder(self.config, session.module, outputs.ranks)
            logs, terminal = outputs.logs, outputs.terminal
            loop = Loop(self, session, self._stops, logs, terminal, recorder, elastic)
            with self._stops.listening(_signal_reply(session)):
                outcome = loop.run()
                session.finish_saving()
            if missed := recorder.missed_steps():
                outputs.terminal.say(missed)
            if outcome.stop is not Stop.RANKS:
                outputs.record_end(STOPPED[outcome.stop])
        self._stops.request = Stop.NO
        result = FitResult(
            steps=session.step,
            epoch=session.position.epoch,
            losses=outcome.losses,
            metrics=outcome.metrics,
            checkpoint=session.checkpoints.latest() if session.checkpoints is not None else None,
            stopped=STOPPED[outcome.stop],
            resumed_from=self._resumed_from,
            trace=recorder.trace,
        )
        if outcome.stop is not Stop.RANKS:
            session.callbacks.call("on_end", self, result)
        return result

    def evaluate(self) -> dict[str, float]:
        """Return the loss and metrics over the evaluation data; all ranks call it."""
        return self._started().evaluate()

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint, in the run's folder or at a path; all ranks call it."""
        session = self._started()
        if path is None and session.checkpoints is None:
            raise ConfigError(
                "no path and no folder to save to",
                where="folder",
                hint="trainer.save('checkpoint')",
            )
        saved = session.save(Path(path) if path is not None else None, {}, wait=True)
        assert saved is not None
        return saved

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """Return the full state dict of the model or of its average; all ranks call it."""
        session = self._started()
        if not ema:
            return session.module.gather_state_dict()
        if session.ema is None:
            raise ConfigError("the config has no moving average", where="ema", hint="ema: 0.999")
        session.settle()
        with session.ema.applied():
            return session.module.gather_state_dict()

    def stop(self) -> None:
        """End the training after the current step; a call on one rank is enough."""
        self._stops.stop()

    def dry_run(self, ranks: int | None = None) -> DryRun:
        """Return the plan and its predicted step, for a cluster that need not be available."""
        self.check()
        ingredients = Ingredients(self.config, self._base)
        device = "cpu" if self.config.cluster is not None else choose_device(self.config.device)
        planned = make_planned(
            self.config,
            ingredients.model,
            ingredients.batch,
            ingredients.loss_fn,
            ranks=ranks,
            device=device,
            base=self._base,
        )
        estimate = simulate(planned.graph, planned.plan, planned.cluster)
        return DryRun(plan=planned.plan, estimate=estimate)

    # ------------------------------------------------------------ state, for callbacks
    @property
    def module(self) -> ParallelModule:
        """Return this rank's part of the model."""
        return self._started().module

    @property
    def optimizer(self) -> ShardedOptimizer:
        """Return the optimizer of this rank's part."""
        return self._started().optimizer

    @property
    def plan(self) -> Plan:
        """Return the plan of the run."""
        return self._started().planned.plan

    @property
    def step(self) -> int:
        """Return the number of completed steps, over all runs."""
        return self._started().step

    @property
    def epoch(self) -> int:
        """Return the epoch of the next batch, counted from 0."""
        return self._started().position.epoch

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self._started().world.rank

    def _started(self) -> Session:
        if self._session is None:
            self.check()
            device, timeout_s = choose_device(self.config.device), self.config.timeout_s
            world = self._stack.enter_context(process_group(device, timeout_s))
            with naming_failures(timeout_s):  # an error on one rank only, such as a missing file
                session = Session(Ingredients(self.config, self._base), world)
                self._resumed_from = session.resume()
            self._session = session
        return self._session


def _signal_reply(session: Session) -> str:
    """Return the message that answers a signal at once; only rank 0 has one."""
    if not session.world.is_main:
        return ""
    saving = " and saving" if session.checkpoints is not None else "; no folder, nothing is saved"
    return f"stopping after this step{saving}. Press Ctrl-C again to end at once."
