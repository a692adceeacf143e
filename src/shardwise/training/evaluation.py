"""Compute the mean loss and the user's metrics over the evaluation data, exactly.

Each batch counts by its own denominator. If ranks read only their own rows, the inputs that the
denominator depends on (labels, masks) are first gathered from all ranks.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.batch import read_batch
from shardwise.errors import ConfigError, LossError, TrainingError, did_you_mean, explaining, failed
from shardwise.frontend import flatten_batch
from shardwise.ir import Graph, Node, Ref
from shardwise.ir.operators import interpret
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.plans import Plan
from shardwise.program.microbatches import restrict, separate_means
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.step import StepProgram
from shardwise.simulation.workload import batch_rows
from shardwise.training.config import CheckpointConfig, EarlyStopConfig, TrainConfig
from shardwise.training.data import (
    BatchSlicer,
    LoadedBatch,
    MapLoader,
    StreamLoader,
    placeholder_batch,
)
from shardwise.training.planning import DEBUG, load_function, make
from shardwise.training.sampling import Position

# ------------------------------------------------------------ metrics
# A metric is a function `metric(output, batch)` that returns one value for each sample of the batch
# (or for each token of each sample), or a pair `(sum, count)`; the metric is the mean over all
# values of the evaluation data, however it is batched. It may also be an object with
# `update(output, batch)`, `compute()` and `reset()`, for metrics that are not means: F1, AUC,
# perplexity.
#
# Every rank sees the full batch and the full output, so that a metric computes the same value as on
# one device. All ranks then use the values of rank 0.

EVALUATION_LOSS = "evaluation_loss"
STEP_FIGURES = ("loss", "learning_rate", "gradient_norm")
FIGURES = (  # reserved names
    EVALUATION_LOSS, *STEP_FIGURES, "epoch", "memory_bytes", "mfu", "samples_per_s", "skipped",
    "step", "step_s", "tokens_per_s",
)  # fmt: skip
_HINT = "return a tensor with a value for each sample, or a pair (sum, count)"


class MeanMetric:
    """The mean of the values that a function returns for batches since `reset`."""

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0.0

    def update(self, output: Any, batch: Any, rows: int) -> None:
        with _explained(self.name):
            value = self.function(output, batch)
        if isinstance(value, tuple) and len(value) == 2:
            with _explained(self.name):
                total, count = (float(part) for part in value)
        elif isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            total, count = float(value.detach().double().sum()), float(value.numel())
        else:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise TrainingError(
                f"metric {self.name!r} returned a {type(value).__name__}{shape} for {rows} "
                "samples, from which no exact mean over all batches follows",
                where=f"metrics.{self.name}",
                hint=_HINT,
            )
        self.total, self.count = self.total + total, self.count + count

    def compute(self) -> float:
        if not self.count:
            raise TrainingError(
                f"the counts of metric {self.name!r} sum to 0 over the evaluation data",
                where=f"metrics.{self.name}",
                hint="a count above 0 for some batch",
            )
        return self.total / self.count


class StatefulMetric:
    """A metric object of the user."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name, self.metric = name, metric

    def reset(self) -> None:
        with _explained(self.name):
            self.metric.reset()

    def update(self, output: Any, batch: Any, rows: int) -> None:
        with _explained(self.name):
            self.metric.update(output, batch)

    def compute(self) -> float:
        with _explained(self.name):
            return float(self.metric.compute())


Metric = MeanMetric | StatefulMetric


def _explained(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn an exception of the user's metric into an error with its name and line."""
    return explaining(lambda error: failed(TrainingError, f"metrics.{name}", error, DEBUG))


def make_metrics(config: TrainConfig, base: Path | None) -> dict[str, Metric]:
    """Return the metrics that a config names, ready for the first evaluation."""
    metrics: dict[str, Metric] = {}
    for name, part in config.metrics.items():
        key = f"metrics.{name}"
        metric = load_function(part, key, base)
        if isinstance(metric, type):
            metric = make(metric, {}, key)
        if all(hasattr(metric, method) for method in ("update", "compute", "reset")):
            metrics[name] = StatefulMetric(name, metric)
        elif callable(metric):
            metrics[name] = MeanMetric(name, metric)
        else:
            raise ConfigError(
                f"a {type(metric).__name__} is not a metric",
                where=key,
                hint="a function (output, batch), or an object with update, compute and reset",
            )
    return metrics


def check_metrics(config: TrainConfig) -> None:
    """Refuse invalid names of metrics, and settings that refer to a figure that is not reported."""
    for name in config.metrics:
        if name in FIGURES or not name.isidentifier():
            problem = "is a reserved name" if name in FIGURES else "is not an identifier"
            raise ConfigError(
                f"metric {name!r} {problem}", where="metrics", hint="metrics: {accuracy: …}"
            )
    evaluated = [EVALUATION_LOSS, *config.metrics] if config.data.evaluation is not None else []
    if config.early_stop is not None:
        _check_reported(config, config.early_stop, "early_stop", evaluated)
    step_figures = [name for name in STEP_FIGURES if name != "gradient_norm" or config.clip_norm]
    checkpoints = config.checkpoints
    if checkpoints.keep_best or checkpoints.metric != EVALUATION_LOSS:
        _check_reported(config, checkpoints, "checkpoints", [*evaluated, *step_figures])


def _check_reported(
    config: TrainConfig,
    criterion: EarlyStopConfig | CheckpointConfig,
    field: str,
    reported: list[str],
) -> None:
    metric = criterion.metric
    if metric not in reported:
        needs_data = metric == EVALUATION_LOSS or metric in config.metrics
        raise ConfigError(
            f"{metric!r} is not reported{did_you_mean(metric, reported)}",
            where=f"{field}.metric",
            hint="data: {evaluation: file.py:function}"
            if needs_data and config.data.evaluation is None
            else f"{', '.join(reported)}; or metrics: {{{metric}: file.py:function}}",
        )
    if criterion.mode is None and metric in config.metrics:
        raise ConfigError(
            f"set whether a higher or a lower {metric!r} is better",
            where=f"{field}.mode",
            hint=f"{field}: {{metric: {metric}, mode: max}}, or mode: min",
        )


# ------------------------------------------------------------ weights, tokens and flops of a batch
# The mean over an evaluation is exact because each batch counts by the denominator of its own mean
# loss, which the graph contains: the labels that are not ignored, the sum of a mask, or the number
# of elements.

CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.clone.default", "aten.alias.default")


class LossWeight:
    """The denominator of the loss for one kind of batch: a number, or a function of some inputs."""

    def __init__(self, graph: Graph) -> None:
        separated = separate_means(graph)
        self._value = _denominator(separated)
        self._graph = restrict(separated, (self._value,)) if isinstance(self._value, str) else None
        self.rows = float(batch_rows(graph))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the inputs that it depends on."""
        return () if self._graph is None else tuple(i.name for i in self._graph.inputs)

    def of(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> float:
        """Return the weight of a full batch; a loss that is not a mean counts by its rows."""
        if self._graph is None:
            return float(self._value) if isinstance(self._value, float) else self.rows
        names = {b.name for b in self._graph.buffers}
        local = {name: value.cpu() for name, value in buffers.items() if name in names}
        if names - set(local):  # another pipeline stage has it
            return self.rows
        assert isinstance(self._value, str)
        return float(interpret(self._graph, {}, local, inputs)[self._value])


def _denominator(graph: Graph) -> str | float | None:
    """Return the name or constant that the loss is divided by; None if it is not a mean."""
    producers: dict[str, Node] = {name: node for node in graph.nodes for name in node.outputs}
    input_values, loss = values_of_inputs(graph), graph.loss
    while loss in producers and producers[loss].op in CASTS:
        loss = producers[loss].inputs[0]
    node = producers.get(loss or "")
    if node is None:
        return None
    if node.op in ("aten.mean.default", "aten.mse_loss.default", "aten.l1_loss.default"):
        return float(max(graph.values[name].numel for name in node.inputs))
    if node.op != "aten.div.Tensor":
        return None
    divisor = node.args[1]
    if isinstance(divisor, Ref):
        is_scalar = graph.values[divisor.name].numel == 1
        return divisor.name if is_scalar and divisor.name in input_values else None
    return float(divisor)


def count_tokens(graph: Graph) -> int | None:
    """Return the number of elements of the first input that is a matrix of integers."""
    for source in graph.inputs:
        kind = graph.values[source.value]
        is_integer = not kind.dtype.is_floating_point and not kind.dtype.is_complex
        if is_integer and kind.dtype.itemsize > 1 and len(kind.shape) == 2:
            return math.prod(kind.shape)
    return None


def count_flops(graph: Graph) -> float | None:
    """Return the flops of the matrix products in forward and backward, without recomputation.

    None if the graph cannot run on meta tensors.
    """

    def meta(name: str) -> Tensor:
        kind = graph.values[name]
        return torch.empty(kind.shape, dtype=kind.dtype, device="meta")

    parameters = {p.name: meta(p.value).requires_grad_(p.requires_grad) for p in graph.parameters}
    buffers = {b.name: meta(b.value) for b in graph.buffers}
    inputs = {i.name: meta(i.value) for i in graph.inputs}
    counter: Any = FlopCounterMode(display=False)
    try:
        with counter, torch.device("meta"):
            values = interpret(graph, parameters, buffers, inputs)
            if graph.loss is not None and values[graph.loss].requires_grad:
                values[graph.loss].backward()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    return float(counter.get_total_flops()) or None


@dataclass(eq=False)
class Evaluator:
    """Evaluates the loss and the metrics on the evaluation data."""

    module: ParallelModule
    plan: Plan
    source: MapLoader | StreamLoader
    slicer: BatchSlicer
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    _weights: WeakKeyDictionary[StepProgram, LossWeight] = field(default_factory=WeakKeyDictionary)
    _owned_rows: dict[int, Tensor] = field(default_factory=dict)

    def run(self, batches: int | None = None) -> dict[str, float]:
        """Return the mean loss over the first `batches`, or over all, and the metrics by name.

        All ranks call it.
        """
        for metric in self.metrics.values():
            metric.reset()
        loss = self._mean_loss(batches)
        metrics = {name: metric.compute() for name, metric in self.metrics.items()}
        everyone, device = self.module.mesh.everyone, self.module.store.device
        return {EVALUATION_LOSS: loss, **everyone.gather_objects(metrics, device)[0]}

    def _mean_loss(self, batches: int | None) -> float:
        """Return the mean loss, and update the metrics with the outputs."""
        total, total_weight = 0.0, 0.0
        for loaded in islice(self.source.batches(Position()), batches):
            batch, local = self.slicer.slice(loaded)
            loss = self._loss(loaded, batch, local)
            weight = self._weight(loaded)
            if weight:  # the mean of a batch whose labels are all ignored is undefined
                total += float(loss) * weight
            total_weight += weight
            if loaded.ends_epoch:
                break
        if not total_weight:
            raise TrainingError("no label of the evaluation data counts in the loss")
        return total / total_weight

    def _loss(self, loaded: LoadedBatch, batch: Any, local: bool) -> Tensor:
        if not self.metrics:
            return self.module.eval_loss(batch, local=local)
        loss, output = self.module.eval_step(batch, loss=True, local=local)
        if loss is None:
            raise LossError("the model returns no loss in eval mode", hint="labels in the batch")
        device = self.module.store.device
        call = read_batch(loaded.batch)
        moved = call.batch_with([tensor.to(device) for _, tensor in call.tensors])
        with torch.no_grad():
            for metric in self.metrics.values():
                metric.update(output, moved, loaded.count)
        return cast(Tensor, loss)

    def _weight(self, loaded: LoadedBatch) -> float:
        if self.plan.per_microbatch and self.plan.num_microbatches > 1:
            return float(loaded.count)  # its loss is a mean of the micro-batches' means
        batch = loaded.batch
        if loaded.rows is not None:
            batch = placeholder_batch(batch, loaded.count)
        program = self.slicer.program(batch)
        if program not in self._weights:
            self._weights[program] = LossWeight(cast(Any, program.graph))
        weight = self._weights[program]
        return weight.of(self._inputs(loaded, weight.inputs), self.module.store.buffers)

    def _inputs(self, loaded: LoadedBatch, names: tuple[str, ...]) -> Mapping[str, Tensor]:
        """Return some inputs of the full batch, on every rank."""
        tensors, _ = flatten_batch(loaded.batch)
        if loaded.rows is None:
            return {name: tensors[name].cpu() for name in names}
        everyone, device = self.module.mesh.everyone, self.module.store.device
        owned, inputs = self._ownership(loaded), {}
        indices = torch.tensor(loaded.rows)[owned]
        for name in names:
            rows = tensors[name]
            # Not every backend sums small integers and booleans.
            dtype = rows.dtype if rows.is_floating_point() else torch.int64
            full = torch.zeros((loaded.count, *rows.shape[1:]), dtype=dtype)
            full[indices] = rows[owned].to(dtype)
            inputs[name] = everyone.all_reduce(full.to(device)).wait().cpu().to(rows.dtype)
        return inputs

    def _ownership(self, loaded: LoadedBatch) -> Tensor:
        """Return which of this rank's rows no rank before it reads."""
        if loaded.count not in self._owned_rows:
            everyone, device = self.module.mesh.everyone, self.module.store.device
            indices = torch.tensor(loaded.rows)
            # Negated rank indices, so that the maximum is the first rank that reads a row.
            owners = torch.full((loaded.count,), -everyone.size, dtype=torch.int64)
            owners[indices] = -everyone.index
            owners = everyone.all_reduce(owners.to(device), "max").wait().cpu()
            self._owned_rows[loaded.count] = owners[indices] == -everyone.index
        return self._owned_rows[loaded.count]
