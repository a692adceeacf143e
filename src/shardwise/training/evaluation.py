"""The loss and the user's metrics over the evaluation data, exactly.

Enters: a parallel module and a source of batches. Leaves: the mean over all that the batches'
losses are means of. Each batch counts by its own denominator (`counting.py`); where ranks read some
rows each, what the denominator depends on, the labels, is put together first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.batch import read_batch
from shardwise.errors import LossError, TrainingError
from shardwise.frontend import flatten_batch
from shardwise.plans import Plan
from shardwise.runtime.consistency import signature
from shardwise.runtime.module import ParallelModule
from shardwise.training.counting import LossWeight
from shardwise.training.loading import Fetched, MapLoader, StreamLoader
from shardwise.training.metrics import EVALUATION_LOSS, Metric, agreed
from shardwise.training.parts import BatchParts, whole_like
from shardwise.training.positions import Position

__all__ = ["Evaluator"]


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
