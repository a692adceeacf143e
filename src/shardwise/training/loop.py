"""Run the steps of a training, and what happens between them.

A step loads a batch, computes gradients, clips them, and updates parameters, average and learning
rate. Logs, callbacks, evaluations and checkpoints follow when they are due; then all ranks agree on
whether to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwise.dtypes import dtype_name
from shardwise.errors import TrainingError
from shardwise.runtime import clip_grad_norm_
from shardwise.runtime.failures import naming_failures
from shardwise.training.config import CheckpointConfig, EvaluationConfig
from shardwise.training.data import LoadedBatch
from shardwise.training.evaluation import EVALUATION_LOSS, count_flops, count_tokens
from shardwise.training.logs import Log, Terminal, summary
from shardwise.training.planning import Planned
from shardwise.training.processes import Stop, StopRequests
from shardwise.training.run_files import StepRecorder, peak_memory_bytes
from shardwise.training.session import Session

if TYPE_CHECKING:
    from shardwise.training.elastic import Elastic
    from shardwise.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the steps of a run."""

    losses: tuple[float, ...]
    metrics: Mapping[str, float]
    stop: Stop


@dataclass(eq=False)
class Loop:
    """Run a session until its config, a callback or a signal ends it."""

    trainer: Trainer
    session: Session
    stops: StopRequests
    logs: list[Log]
    terminal: Terminal
    recorder: StepRecorder
    elastic: Elastic | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    evaluated_step: int | None = None

    def __post_init__(self) -> None:
        self.config = self.session.config
        self._meter = _Meter(self.session) if self.session.world.is_main else None
        feedback = self.session.module.store.reducer.state.feedback
        feedback.measures = self.session.world.is_main

    def run(self) -> Outcome:
        """Run all remaining steps; if a rank fails, the others name it."""
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
        if stop is Stop.RANKS:
            return Outcome(losses=tuple(self.losses), metrics=dict(self.metrics), stop=stop)
        not_evaluated = bool(self.losses) and self.evaluated_step != session.step
        if stop is not Stop.SIGNAL and not_evaluated and session.evaluator is not None:
            self._evaluate()
        if session.checkpoints is not None and session.saved_step != session.step:
            self._save(wait=True)
        return Outcome(losses=tuple(self.losses), metrics=dict(self.metrics), stop=stop)

    def _steps(self, batches: Iterator[LoadedBatch]) -> Stop:
        session = self.session
        while True:
            begin = time.perf_counter()
            loaded = next(batches)
            self.recorder.begin(session.step + 1)
            self._step(loaded)
            seconds = time.perf_counter() - begin
            if self.recorder.end(session.step, seconds) and session.world.is_main:
                self.terminal.say(f"step {session.step}  trace {self.recorder.trace}")
            self._report(loaded, seconds)
            if session.checkpoints is not None:
                session.checkpoints.tidy()
            self._after_step(loaded)
            # All ranks agree on whether to stop and whether to sample the next step.
            module, wants_sample = session.module, self.recorder.wants_sample(session.step)
            mesh, device = module.mesh, module.store.device
            stop, sample = self.stops.agreed(mesh.everyone, device, wants_sample)
            self.recorder.sample_next = sample
            is_complete = session.complete()
            if self.elastic is not None and not is_complete:
                self.elastic.after_step(session, is_last=stop is Stop.RANKS)
            if stop or is_complete:
                self.recorder.finish()
                return stop if stop is not Stop.RANKS or not is_complete else Stop.NO

    # --- one step ------------------------------------------------------------------------

    def _step(self, loaded: LoadedBatch) -> None:
        session = self.session
        batch, local = session.slicer.slice(loaded)
        loss = session.module.train_step(batch, local=local)
        session.settle()
        self.metrics = {"loss": float(loss)}
        if self.config.clip_norm is not None:
            norm = clip_grad_norm_(session.module, self.config.clip_norm)
            self.metrics["gradient_norm"] = float(norm)
        if self._has_finite_gradients():
            session.optimizer.step()
            if session.ema is not None:
                session.ema.update()
        session.optimizer.zero_grad()
        self.metrics["learning_rate"] = session.lr_schedule.learning_rate
        session.step += 1
        session.position, session.data_state = loaded.after, loaded.state
        session.lr_schedule.advance("step", self.metrics["loss"])
        self.losses.append(self.metrics["loss"])

    def _has_finite_gradients(self) -> bool:
        """Return whether to use the gradients; loss and norm are the same on all ranks."""
        session = self.session
        # A loss scaler itself skips steps whose gradients overflow.
        names = ["loss", "gradient_norm"] if session.module.store.scaler is None else ["loss"]
        nonfinite = [n for n in names if not math.isfinite(self.metrics.get(n, 0.0))]
        if not nonfinite:
            return True
        if self.config.nonfinite == "skip":
            self.metrics["skipped"] = 1.0
            return False
        checkpoint = "no checkpoint was saved"
        if session.saved_step is not None:
            checkpoint = f"the checkpoint of step {session.saved_step} is intact"
        name = nonfinite[0]
        raise TrainingError(
            f"{name.replace('_', ' ')} is {self.metrics[name]} at step {session.step + 1} "
            f"(epoch {session.position.epoch}, sample {session.position.sample}); {checkpoint}",
            hint="a lower learning rate, clip_norm: 1.0, or nonfinite: skip",
        )

    def _report(self, loaded: LoadedBatch, seconds: float) -> None:
        """Log and show the figures of a step, among them speed and memory."""
        if self._meter is None:
            return
        self.metrics |= self._meter.read(loaded, seconds)
        self.metrics |= self.session.module.store.reducer.state.figures()
        if self.session.step % self.config.logs.every_steps == 0:
            self._log({"epoch": float(loaded.epoch), **self.metrics})
        self.terminal.step(self.session.step, self.metrics)

    def _log(self, figures: Mapping[str, float]) -> None:
        for log in self.logs:
            log.write(self.session.step, figures)

    # --- between steps -------------------------------------------------------------------

    def _after_step(self, loaded: LoadedBatch) -> None:
        session, step = self.session, self.session.step
        epochs = loaded.epoch + 1 if loaded.ends_epoch else 0
        session.callbacks.call("on_step", self.trainer, dict(self.metrics))
        if epochs:
            session.lr_schedule.advance("epoch", self.metrics["loss"])
            session.callbacks.call("on_epoch", self.trainer, loaded.epoch)
        if _is_due(self.config.evaluation, step, epochs):
            self._evaluate()
        if session.checkpoints is not None and _is_due(self.config.checkpoints, step, epochs):
            self._save(wait=False)

    def _evaluate(self) -> None:
        session = self.session
        metrics = session.evaluate()
        self.evaluated_step = session.step
        self.metrics |= metrics
        session.lr_schedule.advance("evaluation", metrics[EVALUATION_LOSS])
        if session.world.is_main:
            self._log(metrics)
            self.terminal.say(f"step {session.step}  {summary(metrics)}")
        session.callbacks.call("on_evaluation", self.trainer, dict(metrics))

    def _save(self, *, wait: bool) -> None:
        if self.session.saving is not None:
            self.session.saving.wait(self.config.timeout_s)
        path = self.session.save(None, self.metrics, wait=wait)
        if path is not None:
            self.session.callbacks.call("on_checkpoint", self.trainer, path)


def _is_due(config: EvaluationConfig | CheckpointConfig, step: int, epochs: int) -> bool:
    """Return whether something is due after a step, which completed `epochs` epochs, or 0."""
    every_steps, every_epochs = config.every_steps, config.every_epochs
    by_step = every_steps is not None and step % every_steps == 0
    return by_step or (every_epochs is not None and epochs > 0 and epochs % every_epochs == 0)


class _Meter:
    """Measures the speed, utilization and memory of this rank."""

    def __init__(self, session: Session) -> None:
        graph, plan = session.planned.graph, session.planned.plan
        # With `per_microbatch`, the graph is that of one micro-batch.
        repeats = plan.num_microbatches if plan.per_microbatch else 1
        self.rows = session.source.batch_size
        tokens = count_tokens(graph)
        self.tokens = None if tokens is None else tokens * repeats
        self.peak = peak_flops_per_s(session.planned)
        flops = count_flops(graph) if self.peak else None
        self.flops = None if flops is None else flops * repeats
        self.device = session.world.device

    def read(self, loaded: LoadedBatch, seconds: float) -> dict[str, float]:
        """Return the figures of a step."""
        fraction = loaded.count / self.rows
        figures = {"step_s": seconds, "samples_per_s": loaded.count / seconds}
        if self.tokens is not None:
            figures["tokens_per_s"] = fraction * self.tokens / seconds
        if self.flops is not None and self.peak:
            figures["mfu"] = fraction * self.flops / seconds / self.peak
        figures["memory_bytes"] = float(peak_memory_bytes(self.device))
        return figures


def peak_flops_per_s(planned: Planned) -> float | None:
    """Return the peak rate of all devices together, or None if it is unknown."""
    if not planned.known_machines:
        return None
    precision, graph = planned.plan.precision, planned.graph
    dtypes: list[Any] = [graph.values[p.value].dtype for p in graph.parameters]
    dtype = precision.compute or dtype_name(dtypes[0] if dtypes else torch.float32)
    total = 0.0
    for node in planned.cluster.nodes:
        for device in node.devices:
            rates = dict(device.matmul_flops_per_s)
            if dtype not in rates:
                return None
            total += rates[dtype].best * device.speed * node.copies
    return total
