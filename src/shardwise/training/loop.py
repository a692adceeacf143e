"""The steps of a training, and what happens between them.

Enters: a `Session`. Leaves: the session further on, and `Outcome`. One step: a batch, its
gradients, clipping, the optimizer, the average, the schedule; then logs, callbacks, evaluation and
checkpoints when they are due; then all ranks agree on whether to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.dtypes import dtype_name
from shardwise.errors import TrainingError
from shardwise.runtime import clip_grad_norm_
from shardwise.runtime.failures import naming_failures
from shardwise.training.data import Fetched
from shardwise.training.evaluation import count_flops, count_tokens
from shardwise.training.logs import Log
from shardwise.training.logs.console import Terminal, summary
from shardwise.training.planning import Planned
from shardwise.training.processes import Stop, StopRequests
from shardwise.training.run_files import Records, peak_memory_bytes
from shardwise.training.session import Session

if TYPE_CHECKING:
    from shardwise.training.trainer import Trainer

__all__ = ["Loop", "Outcome", "peak_flops_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of steps ended."""

    losses: tuple[float, ...]
    metrics: Mapping[str, float]
    stop: Stop


class Loop:
    """Runs a session until its config, a callback or a signal says so."""

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        stops: StopRequests,
        logs: list[Log],
        terminal: Terminal,
        records: Records,
    ) -> None:
        self.trainer, self.session, self.stops = trainer, session, stops
        self.records = records
        self.logs, self.terminal, self.config = logs, terminal, session.config
        self.metrics: dict[str, float] = {}
        self.losses: list[float] = []
        self.evaluated_step: int | None = None
        self._gauge = _Gauge(session) if session.world.talks else None

    def run(self) -> Outcome:
        """All steps that are left; a rank that fails in or between them is named by the others."""
        with naming_failures(self.config.timeout_s):
            return self._run()

    def _run(self) -> Outcome:
        session = self.session
        stop = Stop.NO
        if not session.complete():
            batches = session.source.batches(session.position, session.data_state)
            try:
                stop = self._steps(batches)
            finally:
                close = getattr(batches, "close", None)
                if close is not None:
                    close()
        fresh = bool(self.losses) and self.evaluated_step != session.step
        if stop is not Stop.SIGNAL and fresh and session.evaluator is not None:
            self._evaluate()
        if session.checkpoints is not None and session.saved_step != session.step:
            self._save(wait=True)
        return Outcome(losses=tuple(self.losses), metrics=dict(self.metrics), stop=stop)

    def _steps(self, batches: Iterator[Fetched]) -> Stop:
        session = self.session
        while True:
            begin = time.perf_counter()
            fetched = next(batches)
            self.records.begin(session.step + 1)
            self._step(fetched)
            seconds = time.perf_counter() - begin
            if self.records.end(session.step, seconds) and session.world.talks:
                self.terminal.say(f"step {session.step}  trace {self.records.trace}")
            self._figures(fetched, seconds)
            if session.checkpoints is not None:
                session.checkpoints.tidy()
            self._between(fetched)
            stop = self._agreed()
            if stop or session.complete():
                self.records.finish()
                return stop

    def _agreed(self) -> Stop:
        """Whether to stop, and whether to record the next step: all ranks do the same."""
        module, records = self.session.module, self.records
        wish = records.wants_sample(self.session.step)
        stop, sample = self.stops.agreed(module.mesh.everyone, module.store.device, wish)
        records.plan(sample)
        return stop

    # --- one step ------------------------------------------------------------------------

    def _step(self, fetched: Fetched) -> None:
        session = self.session
        batch, local = session.parts.take(fetched)
        loss = session.module.train_step(batch, local=local)
        session.settle()
        self.metrics = {"loss": float(loss)}
        if self.config.clip_norm is not None:
            norm = clip_grad_norm_(session.module, self.config.clip_norm)
            self.metrics["gradient_norm"] = float(norm)
        if self._is_usable():
            session.optimizer.step()
            if session.ema is not None:
                session.ema.update()
        session.optimizer.zero_grad()
        self.metrics["learning_rate"] = session.lr_schedule.learning_rate
        session.step += 1
        session.position, session.data_state = fetched.after, fetched.state
        session.lr_schedule.happened("step", self.metrics["loss"])
        self.losses.append(self.metrics["loss"])

    def _is_usable(self) -> bool:
        """Whether the gradients may be used; the loss and the norm are the same on all ranks."""
        session = self.session
        scaled = session.module.store.scaler is not None  # which skips steps that overflow
        wrong = [
            name
            for name in ("loss", "gradient_norm")
            if not math.isfinite(self.metrics.get(name, 0.0)) and not (scaled and name != "loss")
        ]
        if not wrong:
            return True
        if self.config.nonfinite == "skip":
            self.metrics["skipped"] = 1.0
            return False
        kept = "no checkpoint was saved"
        if session.saved_step is not None:
            kept = f"the checkpoint of step {session.saved_step} is as it was"
        raise TrainingError(
            f"{wrong[0].replace('_', ' ')} is {self.metrics[wrong[0]]} at step {session.step + 1} "
            f"(epoch {session.position.epoch}, sample {session.position.sample}); {kept}",
            hint="a lower learning rate, clip_norm: 1.0, or nonfinite: skip",
        )

    def _figures(self, fetched: Fetched, seconds: float) -> None:
        """Speed and memory, for those who look."""
        if self._gauge is None:
            return
        self.metrics |= self._gauge.read(fetched, seconds)
        if self.session.step % self.config.logs.every_steps == 0:
            self._log({"epoch": float(fetched.epoch), **self.metrics})
        self.terminal.step(self.session.step, self.metrics)

    def _log(self, figures: Mapping[str, float]) -> None:
        for log in self.logs:
            log.write(self.session.step, figures)

    # --- between steps -------------------------------------------------------------------

    def _between(self, fetched: Fetched) -> None:
        session, step = self.session, self.session.step
        epochs = fetched.epoch + 1 if fetched.ends_epoch else 0
        session.callbacks.tell("on_step", self.trainer, dict(self.metrics))
        if epochs:
            session.lr_schedule.happened("epoch", self.metrics["loss"])
            session.callbacks.tell("on_epoch", self.trainer, fetched.epoch)
        when = self.config.evaluation
        if _is_due(step, epochs, when.every_steps, when.every_epochs):
            self._evaluate()
        kept = self.config.checkpoints
        due = _is_due(step, epochs, kept.every_steps, kept.every_epochs)
        if due and session.checkpoints is not None:
            self._save(wait=False)

    def _evaluate(self) -> None:
        session = self.session
        found = session.evaluate()
        self.evaluated_step = session.step
        self.metrics |= found
        session.lr_schedule.happened("evaluation", found["evaluation_loss"])
        if session.world.talks:
            self._log(found)
            self.terminal.say(f"step {session.step}  {summary(found)}")
        session.callbacks.tell("on_evaluation", self.trainer, dict(found))

    def _save(self, *, wait: bool) -> Path | None:
        if self.session.saving is not None:
            self.session.saving.wait(self.config.timeout_s)
        path = self.session.save(None, self.metrics, wait=wait)
        if path is not None:
            self.session.callbacks.tell("on_checkpoint", self.trainer, path)
        return path


def _is_due(step: int, epochs: int, every_steps: int | None, every_epochs: int | None) -> bool:
    by_step = every_steps is not None and step % every_steps == 0
    return by_step or (every_epochs is not None and epochs > 0 and epochs % every_epochs == 0)


class _Gauge:
    """Speed, utilization and memory of this rank."""

    def __init__(self, session: Session) -> None:
        graph, plan = session.planned.graph, session.planned.plan
        parts = plan.num_microbatches if plan.per_microbatch else 1  # the graph is of one of them
        self.rows = session.source.batch_size
        tokens = count_tokens(graph)
        self.tokens = None if tokens is None else tokens * parts
        self.peak = peak_flops_per_s(session.planned)
        flops = count_flops(graph) if self.peak else None
        self.flops = None if flops is None else flops * parts
        self.device = session.world.device

    def read(self, fetched: Fetched, seconds: float) -> dict[str, float]:
        """The figures of a step."""
        share = fetched.count / self.rows
        found = {"step_s": seconds, "samples_per_s": fetched.count / seconds}
        if self.tokens is not None:
            found["tokens_per_s"] = share * self.tokens / seconds
        if self.flops is not None and self.peak:
            found["mfu"] = share * self.flops / seconds / self.peak
        found["memory_bytes"] = float(peak_memory_bytes(self.device))
        return found


def peak_flops_per_s(planned: Planned) -> float | None:
    """What all devices could do at best, where these machines' rates are known."""
    if not planned.known_machines:
        return None
    precision, graph = planned.plan.precision, planned.graph
    kinds: list[Any] = [graph.values[p.value].dtype for p in graph.parameters]
    dtype = precision.compute or dtype_name(kinds[0] if kinds else torch.float32)
    total = 0.0
    for node in planned.cluster.nodes:
        for device in node.devices:
            rates = dict(device.matmul_flops_per_s)
            if dtype not in rates:
                return None
            total += rates[dtype].best * device.speed * node.copies
    return total
