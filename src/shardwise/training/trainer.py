"""`sw.Trainer`: training from one config, in one process or in many.

Enters: the fields of `TrainConfig`, as keyword arguments or as a file. Leaves: a trained model's
checkpoints, and `FitResult`. Every process of a group does the same; rank 0 alone talks and writes
logs.

    result = sw.Trainer(
        model=make_model, data={"train": dataset, "batch_size": 32}, steps=1000, folder="runs/first"
    ).fit()
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.runtime import ParallelModule, ShardedOptimizer
from shardwise.runtime.failures import naming_failures
from shardwise.simulation import Estimate, simulate
from shardwise.training.config import TrainConfig
from shardwise.training.loop import Loop
from shardwise.training.planning import make_planned
from shardwise.training.processes import (
    Stop,
    StopRequests,
    choose_device,
    print_errors_once,
    process_group,
)
from shardwise.training.reading import config_from, load_config
from shardwise.training.run_files import Records, RunOutputs
from shardwise.training.session import Ingredients, Session, check, gather

__all__ = ["DryRun", "FitResult", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """How a training ended.

    `losses` are those of the steps of this call; `steps` counts earlier ones, too. `stopped` is
    "finished", "callback" (early stop is one) or "signal". `trace` is the file of recorded steps.
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
    """What would run: the plan, and its predicted step and memory."""

    plan: Plan
    estimate: Estimate

    def __str__(self) -> str:
        return f"{self.plan}\n{self.estimate}"


class Trainer:
    """Trains what its config says; see `TrainConfig` for the fields."""

    def __init__(self, **fields: Any) -> None:
        print_errors_once()
        self.config: TrainConfig = config_from(fields)
        self._base: Path | None = None
        self._session: Session | None = None
        self._stack = contextlib.ExitStack()
        self._stops = StopRequests()
        self._resumed_from: Path | None = None

    @classmethod
    def from_config(
        cls, path: str | Path, overrides: Sequence[str] = (), **changes: Any
    ) -> Trainer:
        """The trainer of a config file; files that it names are looked for beside it first."""
        trainer = cls(**_fields(load_config(path, overrides, **changes)))
        trainer._base = Path(path).resolve().parent
        return trainer

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if this trainer joined it."""
        self._session = None
        self._stack.close()

    def check(self) -> None:
        """Say what is wrong with the config, as far as that is known without building anything."""
        check(self.config, self._base)

    # --- what a trainer does ---------------------------------------------------------------

    def fit(self) -> FitResult:
        """Train until the end, from the newest checkpoint if there is one."""
        session = self._started()
        with RunOutputs(session) as outputs:
            if self._resumed_from is not None:
                then = ": all steps are done, nothing is trained" if session.complete() else ""
                outputs.terminal.say(
                    f"resumed at step {session.step} from {self._resumed_from}{then}"
                )
            session.callbacks.tell("on_start", self)
            records = Records(self.config, session.module, outputs.ranks)
            loop = Loop(self, session, self._stops, outputs.logs, outputs.terminal, records)
            with self._stops.listening(self._answer(session)):
                outcome = loop.run()
                session.finish_saving()
            if missed := records.missed():
                outputs.terminal.say(missed)
            names = {Stop.NO: "finished", Stop.CALLBACK: "callback", Stop.SIGNAL: "signal"}
            outputs.ended(names[outcome.stop])
        self._stops.asked = Stop.NO
        result = FitResult(
            steps=session.step,
            epoch=session.position.epoch,
            losses=outcome.losses,
            metrics=outcome.metrics,
            checkpoint=session.checkpoints.latest() if session.checkpoints is not None else None,
            stopped=names[outcome.stop],
            resumed_from=self._resumed_from,
            trace=records.trace,
        )
        session.callbacks.tell("on_end", self, result)
        return result

    def evaluate(self) -> dict[str, float]:
        """The loss over the evaluation data; all ranks call it."""
        return self._started().evaluate()

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint, in the run's folder or at a path; all ranks call it."""
        session = self._started()
        if path is None and session.checkpoints is None:
            raise ConfigError("where to?", where="folder", hint="trainer.save('checkpoint')")
        found = session.save(Path(path) if path is not None else None, {}, wait=True)
        assert found is not None
        return found

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The whole model's state dict, or that of its moving average; all ranks call it."""
        session = self._started()
        if not ema:
            return session.module.gather_state_dict()
        if session.ema is None:
            raise ConfigError("no moving average was asked for", where="ema", hint="ema: 0.999")
        session.settle()
        with session.ema.applied():
            return session.module.gather_state_dict()

    def stop(self) -> None:
        """End the training after the step under way; one rank's call is enough."""
        self._stops.ask()

    def dry_run(self, ranks: int | None = None) -> DryRun:
        """The plan and its predicted step, for machines that need not be here."""
        parts = gather(self.config, self._base)
        device = "cpu" if self.config.cluster is not None else choose_device(self.config.device)
        planned = make_planned(
            self.config,
            parts.model,
            parts.batch,
            parts.loss_fn,
            ranks=ranks,
            device=device,
            base=self._base,
        )
        estimate = simulate(planned.graph, planned.plan, planned.cluster)
        return DryRun(plan=planned.plan, estimate=estimate)

    # --- what callbacks may look at ----------------------------------------------------------

    @property
    def module(self) -> ParallelModule:
        """This rank's part of the model."""
        return self._started().module

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The optimizer of this rank's part."""
        return self._started().optimizer

    @property
    def plan(self) -> Plan:
        """The plan that is used."""
        return self._started().planned.plan

    @property
    def step(self) -> int:
        """The steps done, over all runs."""
        return self._started().step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._started().position.epoch

    @property
    def rank(self) -> int:
        """This process among all."""
        return self._started().world.rank

    def _started(self) -> Session:
        if self._session is None:
            self.check()
            device, timeout_s = choose_device(self.config.device), self.config.timeout_s
            world = self._stack.enter_context(process_group(device, timeout_s))
            with naming_failures(timeout_s):  # of one rank alone, such as a file that it lacks
                session = Session(Ingredients(self.config, self._base), world)
                self._resumed_from = session.resume()
            self._session = session
        return self._session

    def _answer(self, session: Session) -> str:
        """What a signal is answered with at once, on the rank that talks."""
        if not session.world.talks:
            return ""
        saving = " and saving" if session.checkpoints is not None else "; no folder, nothing saved"
        return f"stopping after this step{saving}. Press Ctrl-C again to end at once."


def _fields(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}
