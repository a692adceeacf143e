"""Train with inexact synchronization on ranks, and by its reference in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.equivalence.reference_sync import SimulatedRanks
from shardwise.inexact import COMPRESSIONS, Compression, OuterOptimizer
from shardwise.plans import Sync

STEPS = 7
LEARNING_RATE = 0.03
SHORT = {"ratio": 0.2, "rank": 2, "warmup": 1}  # so that a small model is compressed

FORMS: dict[str, Sync] = {
    "local_sgd": Sync(every=3),
    "diloco": Sync(every=2, outer=OuterOptimizer()),
    "heavy_ball": Sync(every=2, outer=OuterOptimizer(lr=0.9, momentum=0.5, nesterov=False)),
    "fragments": Sync(every=4, outer=OuterOptimizer(), fragments=3),
    "overlap": Sync(every=3, outer=OuterOptimizer(), fragments=2, overlap=2),
    "overlapped_mean": Sync(every=2, overlap=1),
    "stale_1": Sync(stale=1),
    "stale_3": Sync(stale=3),
    "stale_owner": Sync(kind="owner", owner=1, stale=2),
    "stale_partitioned": Sync(kind="partitioned", stale=1),
    "stale_rows": Sync(kind="partitioned", dim=0, stale=2),
    "stale_columns": Sync(kind="partitioned", dim=1, stale=1),
    "stale_int8": Sync(stale=1, compression=Compression(kind="int8", **SHORT)),
    "diloco_int8": Sync(
        every=2, outer=OuterOptimizer(), compression=Compression(kind="int8", warmup=1)
    ),
    "diloco_powersgd": Sync(every=2, fragments=2, compression=Compression(kind="powersgd", rank=1)),
    "int8_without_feedback": Sync(compression=Compression(kind="int8", error_feedback=False)),
    **{kind: Sync(compression=Compression(kind=kind, **SHORT)) for kind in COMPRESSIONS},
}


class Words(nn.Module):
    """A model without gradients that are zero up to rounding, whose signs would be arbitrary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        logits = self.head(x + self.down(torch.tanh(self.up(x))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(rows: int = 7) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a model and the batches of some steps, with ragged labels."""
    torch.manual_seed(0)
    model, batches = Words().double(), []
    for _ in range(2 * STEPS):
        ids, labels = torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))
        labels[torch.arange(rows), torch.arange(rows) % 4] = -100
        labels[0, :3] = -100
        batches.append({"ids": ids, "labels": labels})
    return model, batches


def optimizer_class(name: str) -> Any:
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]


def plan_of(
    model: nn.Module, batch: Any, syncs: Mapping[str, Sync], ranks: int, **options: Any
) -> sw.Plan:
    graph = sw.capture(model, batch)
    cluster, zero = sw.Cluster.local(ranks), options.pop("zero", 0)
    strategy = sw.strategies.zero1 if zero else sw.strategies.ddp
    return strategy(graph, cluster, constraints=dict(syncs), **options)


def contributions(
    model: nn.Module, replicas: list[dict[str, Tensor]], batch: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return the gradient of the full batch's loss for each rank's replica: that of its rows."""
    ranks, total = len(replicas), (batch["labels"] != -100).sum()
    result = []
    for rank, replica in enumerate(replicas):
        rows = {name: t.tensor_split(ranks)[rank] for name, t in batch.items()}
        count = (rows["labels"] != -100).sum()
        weights = {n: p.detach().clone().requires_grad_() for n, p in replica.items()}
        if count:
            loss = torch.func.functional_call(model, weights, (), rows) * count / total
            loss.backward()
        zeros = {n: torch.zeros_like(p) for n, p in weights.items()}
        result.append({n: zeros[n] if p.grad is None else p.grad for n, p in weights.items()})
    return result


def reference(
    syncs: Mapping[str, Sync],
    ranks: int,
    *,
    optimizer: str = "adamw",
    steps: int = STEPS,
    max_norm: float | None = None,
    rows: int = 7,
) -> list[list[dict[str, Tensor]]]:
    """Return every rank's parameters after every step, by the reference."""
    model, batches = make(rows)
    parameters = dict(model.named_parameters())
    empty = Sync().inexact
    inexact = dict.fromkeys(parameters, empty)
    for glob, sync in syncs.items():
        inexact |= {n: sync.inexact for n in parameters if glob == "*" or n.startswith(glob[:-1])}
    simulated = SimulatedRanks(
        parameters, inexact, ranks, lambda ps: optimizer_class(optimizer)(ps, lr=LEARNING_RATE)
    )
    history = []
    for batch in batches[:steps]:
        simulated.step(contributions(model, simulated.replicas, batch), max_norm)
        history.append([{n: p.detach().clone() for n, p in r.items()} for r in simulated.replicas])
    return history


def start(
    syncs: Mapping[str, Sync], ranks: int, optimizer: str = "adamw", rows: int = 7, **options: Any
) -> Any:
    """Return a parallel module of this rank, its optimizer and the batches."""
    model, batches = make(rows)
    plan = plan_of(model, batches[0], syncs, ranks, **options)
    pm = sw.parallelize(model, batches[0], plan=plan)
    return pm, sw.optimizer(pm, optimizer_class(optimizer), lr=LEARNING_RATE), batches


def train(
    pm: Any, opt: Any, batches: Any, max_norm: float | None = None
) -> list[dict[str, Tensor]]:
    """Return this rank's parameters after every step."""
    history = []
    for batch in batches:
        opt.zero_grad()
        pm.train_step(batch)
        if max_norm is not None:
            sw.clip_grad_norm_(pm, max_norm)
        opt.step()
        history.append({e.spec.name: e.leaf.detach().clone() for e in pm.store.entries})
    return history


def run(
    syncs: Mapping[str, Sync], ranks: int, optimizer: str = "adamw", max_norm: float | None = None
) -> Any:
    """Train on this rank."""
    pm, opt, batches = start(syncs, ranks, optimizer)
    return train(pm, opt, batches[:STEPS], max_norm)
