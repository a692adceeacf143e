"""A small model with dropout, its samples, and training runs on any number of ranks."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import shardwise as sw
from shardwise.training.trainer import FitResult

VOCAB, WIDTH, LENGTH = 13, 8, 5


class Net(nn.Module):
    """Two blocks with dropout over an embedding; ragged labels."""

    def __init__(self, dropout: float = 0.3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(2 * WIDTH, WIDTH, dtype=dtype),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, dtype=dtype)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Scored(Net):
    """The same model with scores as an output beside the loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def first_right(output: Any, batch: Any) -> Tensor:
    """Return whether the last label of each sample is among the three best guesses."""
    best = output["scores"][:, -1].topk(3).indices
    return (best == batch["labels"][:, -1:]).any(-1)


def num_right(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the number of right tokens of a batch, and of those that count."""
    counts = batch["labels"] != -100
    guesses = output["scores"].topk(4).indices
    return ((guesses == batch["labels"][..., None]).any(-1) & counts).sum(), counts.sum()


class Largest:
    """The largest score, which is not a mean."""

    def reset(self) -> None:
        self.largest = float("-inf")

    def update(self, output: Any, batch: Any) -> None:
        self.largest = max(self.largest, float(output["scores"].max()))

    def compute(self) -> float:
        return self.largest


SCORED = {"name": "tests.support.trainer:Scored"}
METRICS = {
    "first": "tests.support.trainer:first_right",
    "accuracy": "tests.support.trainer:num_right",
    "largest": "tests.support.trainer:Largest",
}


def evaluate(**changes: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Train, and return the evaluation and the trained model."""
    with sw.Trainer(**fields(model=SCORED, metrics=METRICS, ema=None, **changes)) as trainer:
        trainer.fit()
        return trainer.evaluate(), trainer.state_dict()


class Samples:
    """Samples by index, partly random as with augmentation; requested indices are recorded."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.requested: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.requested.append(index)
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels[: index % LENGTH] = -100
        ids[0] = (
            torch.randint(0, VOCAB, ()) + random.randrange(VOCAB) + np.random.randint(3)
        ) % VOCAB
        return {"ids": ids, "labels": labels}


class Stream:
    """An iterable dataset."""

    def __init__(self, size: int = 23) -> None:
        self.samples = Samples(size)

    def __iter__(self) -> Any:
        for index in range(self.samples.size):
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
            yield {"ids": ids, "labels": ids.roll(1)}


class StatefulStream(Stream):
    """An iterable dataset with a state."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < self.samples.size:
            self.position += 1
            generator = torch.Generator().manual_seed(self.position)
            ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
            yield {"ids": ids, "labels": ids.roll(1)}
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fields(**changes: Any) -> dict[str, Any]:
    """Return the fields of a training that uses many features."""
    data = {
        "train": Samples(),
        "evaluation": Samples(9),
        "batch_size": 4,
        **changes.pop("data", {}),
    }
    fields: dict[str, Any] = {
        "model": {"name": "tests.support.trainer:Net"},
        "data": data,
        "steps": 8,
        "optimizer": {"name": "AdamW", "args": {"lr": 0.02}},
        "lr_schedule": [
            {"name": "LinearLR", "args": {"start_factor": 0.1, "total_iters": 3}, "steps": 3},
            {"name": "CosineAnnealingLR", "args": {"T_max": "total_steps"}},
        ],
        "clip_norm": 1.0,
        "ema": 0.9,
        "plan": "ddp",
        "logs": {"console": "off"},
    }
    return fields | changes


def fit(**changes: Any) -> FitResult:
    """Train with these fields, on all ranks of a pool."""
    with sw.Trainer(**fields(**changes)) as trainer:
        return trainer.fit()


def fit_and_state(**changes: Any) -> tuple[FitResult, dict[str, Tensor], dict[str, Tensor]]:
    """Train; return the result, the model and its average."""
    with sw.Trainer(**fields(**changes)) as trainer:
        return trainer.fit(), trainer.state_dict(), trainer.state_dict(ema=True)


class StopAt(sw.Callback):
    """Stop after a step, and count the steps."""

    def __init__(self, step: int) -> None:
        self.step, self.count = step, 0

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        self.count += 1
        if trainer.step == self.step:
            trainer.stop()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def stop_and_go(
    folder: str, step: int = 3, changes: dict[str, Any] | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the losses until a stop, and those after it."""
    changes = changes or {}
    before = fit(folder=folder, callbacks=[StopAt(step)], **changes)
    assert before.stopped == "callback"
    return before.losses, fit(folder=folder, **changes).losses


def single() -> Net:
    """Return a model in float32, in which the order of additions matters."""
    return Net(dtype=torch.float32)


class TermRankOne(sw.Callback):
    """Send a signal to one rank only, after step 2."""

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        if trainer.rank == 1 and trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_by_one_rank(folder: str) -> tuple[FitResult, list[list[int]]]:
    """Return the result, and the samples that this rank read for each batch."""
    samples = Samples()
    read: list[list[int]] = []

    def collate(rows: list[Any]) -> Any:
        read.append(samples.requested[-len(rows) :])
        return default_collate(rows)

    data = {"train": samples, "collate": collate, "rowwise": True, "evaluation": None}
    result = fit(folder=folder, data=data, callbacks=[TermRankOne()])
    return result, read[1:]  # the first is the example batch
