"""The loss and the user's metrics over the evaluation data, exactly.

Each batch counts by its own denominator (`counting.py`); where ranks read some
rows each, what the denominator depends on, the labels, is put together first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.batch import read_batch
from shardwise.errors import (
    ConfigError,
    LossError,
    ShardwiseError,
    TrainingError,
    did_you_mean,
    failed,
)
from shardwise.frontend import flatten_batch
from shardwise.ir import Graph, Node, Ref, TensorType
from shardwise.ir.interpret import interpret
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.plans import Plan
from shardwise.program.microbatches import restrict, separate_means
from shardwise.runtime.consistency import signature
from shardwise.runtime.mesh import Axis
from shardwise.runtime.module import ParallelModule
from shardwise.simulation.workload import batch_rows
from shardwise.training.config import CheckpointConfig, EarlyStopConfig, TrainConfig
from shardwise.training.data import BatchParts, Fetched, MapLoader, StreamLoader, whole_like
from shardwise.training.planning import DEBUG, load_function, make
from shardwise.training.sampling import Position

__all__ = [
    "EVALUATION_LOSS",
    "FIGURES",
    "Evaluator",
    "LossWeight",
    "Metric",
    "agreed",
    "check_metrics",
    "count_flops",
    "count_tokens",
    "make_metrics",
]


# Metrics of the user's own over the evaluation data, exactly.
#
# A metric is a function `metric(output, batch)`. It returns one value for each sample of the batch
# (or for each token of each sample), or a pair `(sum, count)`; the metric is the mean over all
# values of the evaluation data, whatever its batches are. It may also be an object with
# `update(output, batch)`, `compute()` and `reset()`, for what is no mean: F1, AUC, perplexity.
#
# Every rank sees the whole batch and the whole output, so that a metric computes the same as on one
# device. All ranks then go by the values of rank 0.


EVALUATION_LOSS = "evaluation_loss"
STEP_FIGURES = ("loss", "learning_rate", "gradient_norm")
OTHER_FIGURES = (
    "epoch",
    "memory_bytes",
    "mfu",
    "samples_per_s",
    "skipped",
    "step",
    "step_s",
    "tokens_per_s",
)
FIGURES = (EVALUATION_LOSS, *STEP_FIGURES, *OTHER_FIGURES)  # names that metrics cannot have
_HINT = "return a tensor with a value for each sample, or a pair (sum, count)"


class Metric(Protocol):
    """Takes the batches of one evaluation."""

    def reset(self) -> None:
        """Begin a new evaluation."""
        ...

    def update(self, output: Any, batch: Any, rows: int) -> None:
        """Take the model's output for a batch of so many rows."""
        ...

    def compute(self) -> float:
        """Return the metric over all batches since `reset`."""
        ...


class _Mean:
    """The mean of what a function returns."""

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
                total, count = (float(each) for each in value)
        elif isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            total, count = float(value.detach().double().sum()), float(value.numel())
        else:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise TrainingError(
                f"metric {self.name!r} returned a {type(value).__name__}{shape} for {rows} "
                "samples, which gives no exact mean over all batches",
                where=f"metrics.{self.name}",
                hint=_HINT,
            )
        self.total, self.count = self.total + total, self.count + count

    def compute(self) -> float:
        if not self.count:
            raise TrainingError(
                f"metric {self.name!r} counted nothing in the evaluation data",
                where=f"metrics.{self.name}",
                hint="a count above 0 for some batch",
            )
        return self.total / self.count


class _Stateful:
    """An object that keeps what it needs of all batches."""

    def __init__(self, name: str, found: Any) -> None:
        self.name, self.found = name, found

    def reset(self) -> None:
        with _explained(self.name):
            self.found.reset()

    def update(self, output: Any, batch: Any, rows: int) -> None:
        with _explained(self.name):
            self.found.update(output, batch)

    def compute(self) -> float:
        with _explained(self.name):
            return float(self.found.compute())


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn an exception of the user's metric into an error with its name and line."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise failed(TrainingError, f"metrics.{name}", error, DEBUG) from error


def make_metrics(config: TrainConfig, base: Path | None) -> dict[str, Metric]:
    """Return the metrics that a config names, ready for the first evaluation."""
    found: dict[str, Metric] = {}
    for name, part in config.metrics.items():
        key = f"metrics.{name}"
        made = load_function(part, key, base)
        if isinstance(made, type):
            made = make(made, {}, key)
        if all(hasattr(made, each) for each in ("update", "compute", "reset")):
            found[name] = _Stateful(name, made)
        elif callable(made):
            found[name] = _Mean(name, made)
        else:
            raise ConfigError(
                f"a {type(made).__name__} is not a metric",
                where=key,
                hint="a function (output, batch), or an object with update, compute and reset",
            )
    return found


def agreed(values: Mapping[str, float], everyone: Axis, device: torch.device) -> dict[str, float]:
    """Return the values of rank 0, by which all ranks go; all ranks call it."""
    if everyone.size == 1 or not values:
        return dict(values)
    mine = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    every = everyone.all_gather(mine, [len(mine)] * everyone.size).wait()
    return dict(zip(values, every[: len(mine)].tolist(), strict=True))


def check_metrics(config: TrainConfig) -> None:
    """Refuse names of metrics that are taken, and settings that go by one that nobody reports."""
    for name in config.metrics:
        if name in FIGURES or not name.isidentifier():
            what = "is reported already" if name in FIGURES else "is no name"
            raise ConfigError(
                f"a metric {name!r}: that {what}", where="metrics", hint="metrics: {accuracy: …}"
            )
    evaluated = [EVALUATION_LOSS, *config.metrics] if config.data.evaluation is not None else []
    if config.early_stop is not None:
        _check_reported(config, config.early_stop, "early_stop", evaluated)
    steps = [each for each in STEP_FIGURES if each != "gradient_norm" or config.clip_norm]
    kept = config.checkpoints
    if kept.keep_best or kept.metric != EVALUATION_LOSS:
        _check_reported(config, kept, "checkpoints", [*evaluated, *steps])


def _check_reported(
    config: TrainConfig,
    wanted: EarlyStopConfig | CheckpointConfig,
    field: str,
    reported: list[str],
) -> None:
    if wanted.metric not in reported:
        missing = wanted.metric == EVALUATION_LOSS or wanted.metric in config.metrics
        raise ConfigError(
            f"nobody reports {wanted.metric!r}{did_you_mean(wanted.metric, reported)}",
            where=f"{field}.metric",
            hint="data: {evaluation: file.py:function}"
            if missing and config.data.evaluation is None
            else f"{', '.join(reported)}; or metrics: {{{wanted.metric}: file.py:function}}",
        )
    if wanted.mode is None and wanted.metric in config.metrics:
        raise ConfigError(
            f"is a higher or a lower {wanted.metric!r} better?",
            where=f"{field}.mode",
            hint=f"{field}: {{metric: {wanted.metric}, mode: max}}, or mode: min",
        )


# What a batch weighs: the number that its mean loss was divided by, its tokens, its flops.
#
# The mean over an evaluation is exact because each batch counts by its own denominator, which the
# graph knows: the labels that are not ignored, the sum of a mask, or the elements of a mean.


CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.clone.default", "aten.alias.default")


class LossWeight:
    """What the loss of one kind of batch is divided by: a number, or a function of some inputs."""

    def __init__(self, graph: Graph) -> None:
        parts = separate_means(graph)
        self._found = _denominator(parts)
        self._graph = restrict(parts, (self._found,)) if isinstance(self._found, str) else None
        self.rows = float(batch_rows(graph))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that it depends on."""
        return () if self._graph is None else tuple(i.name for i in self._graph.inputs)

    def of(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> float:
        """The weight of a whole batch; a loss that is no mean counts by its rows."""
        if self._graph is None:
            return float(self._found) if isinstance(self._found, float) else self.rows
        wanted = {b.name for b in self._graph.buffers}
        held = {name: value.cpu() for name, value in buffers.items() if name in wanted}
        if wanted - set(held):  # another pipeline stage has it
            return self.rows
        assert isinstance(self._found, str)
        return float(interpret(self._graph, {}, held, inputs)[self._found])


def _denominator(graph: Graph) -> str | float | None:
    """The value that the loss is divided by, or its constant; None where the loss is no mean."""
    made: dict[str, Node] = {name: node for node in graph.nodes for name in node.outputs}
    known, loss = values_of_inputs(graph), graph.loss
    while loss in made and made[loss].op in CASTS:
        loss = made[loss].inputs[0]
    node = made.get(loss or "")
    if node is None:
        return None
    if node.op in ("aten.mean.default", "aten.mse_loss.default", "aten.l1_loss.default"):
        return float(max(graph.values[name].numel for name in node.inputs))
    if node.op != "aten.div.Tensor":
        return None
    by = node.args[1]
    if isinstance(by, Ref):
        scalar = graph.values[by.name].numel == 1
        return by.name if scalar and by.name in known else None
    return float(by)


def count_tokens(graph: Graph) -> int | None:
    """The elements of the first input that is a matrix of whole numbers."""
    for source in graph.inputs:
        kind = graph.values[source.value]
        whole = not kind.dtype.is_floating_point and not kind.dtype.is_complex
        if whole and kind.dtype.itemsize > 1 and len(kind.shape) == 2:
            return math.prod(kind.shape)
    return None


def count_flops(graph: Graph) -> float | None:
    """The flops of products in a step's forward and backward, without any computed again.

    None where the graph cannot be run without data.
    """
    meta: Callable[[str], Tensor] = lambda name: _empty(graph.values[name])  # noqa: E731
    trained = {p.name: meta(p.value).requires_grad_(p.requires_grad) for p in graph.parameters}
    buffers = {b.name: meta(b.value) for b in graph.buffers}
    inputs = {i.name: meta(i.value) for i in graph.inputs}
    counter: Any = FlopCounterMode(display=False)
    try:
        with counter, torch.device("meta"):
            values = interpret(graph, trained, buffers, inputs)
            if graph.loss is not None and values[graph.loss].requires_grad:
                values[graph.loss].backward()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    return float(counter.get_total_flops()) or None


def _empty(kind: TensorType) -> Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta")


class Evaluator:
    """Goes through the evaluation data."""

    def __init__(
        self,
        module: ParallelModule,
        plan: Plan,
        source: MapLoader | StreamLoader,
        parts: BatchParts,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.module, self.plan, self.source, self.parts = module, plan, source, parts
        self.metrics = dict(metrics or {})
        self._weights: dict[Hashable, LossWeight] = {}
        self._owned: dict[int, Tensor] = {}

    def run(self, batches: int | None = None) -> dict[str, float]:
        """Return the mean loss over the first `batches`, or over all, and the metrics by name.

        All ranks call it.
        """
        for metric in self.metrics.values():
            metric.reset()
        found = {EVALUATION_LOSS: self._mean_loss(batches)}
        own = {name: metric.compute() for name, metric in self.metrics.items()}
        return found | agreed(own, self.module.mesh.everyone, self.module.store.device)

    def _mean_loss(self, batches: int | None) -> float:
        """Return the mean loss; metrics get the outputs on the way."""
        total, weight = 0.0, 0.0
        for fetched in islice(self._epoch(), batches):
            batch, local = self.parts.take(fetched)
            loss = self._loss(fetched, batch, local)
            mine = self._weight(fetched)
            if mine:  # a batch of which all is ignored has no mean
                total += float(loss) * mine
            weight += mine
        if not weight:
            raise TrainingError("nothing in the evaluation data counts in the loss")
        return total / weight

    def _loss(self, fetched: Fetched, batch: Any, local: bool) -> Tensor:
        if not self.metrics:
            return self.module.eval_loss(batch, local=local)
        loss, output = self.module.eval_step(batch, loss=True, local=local)
        if loss is None:
            raise LossError("the model gives no loss in eval mode", hint="labels in the batch")
        device = self.module.store.device
        call = read_batch(fetched.batch)
        here = call.batch_with([tensor.to(device) for _, tensor in call.tensors])
        with torch.no_grad():
            for metric in self.metrics.values():
                metric.update(output, here, fetched.count)
        return cast(Tensor, loss)

    def _epoch(self) -> Any:
        """The batches of one epoch."""
        for fetched in self.source.batches(Position()):
            yield fetched
            if fetched.ends_epoch:
                return

    def _weight(self, fetched: Fetched) -> float:
        if self.plan.per_microbatch and self.plan.num_microbatches > 1:
            return float(fetched.count)  # its loss is a mean of means
        whole = fetched.batch
        if fetched.rows is not None:
            whole = whole_like(fetched.batch, fetched.count)
        key = signature(whole)
        if key not in self._weights:
            program: Any = self.parts.program(whole)
            self._weights[key] = LossWeight(program.graph)
        weight = self._weights[key]
        return weight.of(self._inputs(fetched, weight.inputs), self.module.store.buffers)

    def _inputs(self, fetched: Fetched, names: tuple[str, ...]) -> Mapping[str, Tensor]:
        """Some inputs of the whole batch, on every rank."""
        tensors, _ = flatten_batch(fetched.batch)
        if fetched.rows is None:
            return {name: tensors[name].cpu() for name in names}
        everyone, device = self.module.mesh.everyone, self.module.store.device
        owned = self._ownership(fetched)
        found = {}
        for name in names:
            rows = tensors[name]
            wide = rows.dtype if rows.is_floating_point() else torch.int64
            whole = torch.zeros((fetched.count, *rows.shape[1:]), dtype=wide)
            places = torch.tensor(fetched.rows)
            whole[places[owned]] = rows[owned].to(wide)
            found[name] = everyone.all_reduce(whole.to(device)).wait().cpu().to(rows.dtype)
        return found

    def _ownership(self, fetched: Fetched) -> Tensor:
        """Which of this rank's rows no rank before it reads, too."""
        known = self._owned.get(fetched.count)
        if known is None:
            everyone, device = self.module.mesh.everyone, self.module.store.device
            places = torch.tensor(fetched.rows)
            first = torch.full((fetched.count,), -everyone.size, dtype=torch.int64)
            first[places] = -everyone.index
            owner = everyone.all_reduce(first.to(device), "max").wait().cpu()
            known = self._owned[fetched.count] = owner[places] == -everyone.index
        return known
