"""A small model with dropout, its samples, and trainings of them on any number of ranks."""

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
    """The same with its scores as an output beside the loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def first_right(output: Any, batch: Any) -> Tensor:
    """Whether the last label of each sample is among the three best guesses."""
    best = output["scores"][:, -1].topk(3).indices
    return (best == batch["labels"][:, -1:]).any(-1)


def right(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The right tokens of a batch, and how many count."""
    counts = batch["labels"] != -100
    guesses = output["scores"].topk(4).indices
    return ((guesses == batch["labels"][..., None]).any(-1) & counts).sum(), counts.sum()


class Largest:
    """The largest score of all, which is no mean."""

    def reset(self) -> None:
        self.found = float("-inf")

    def update(self, output: Any, batch: Any) -> None:
        self.found = max(self.found, float(output["scores"].max()))

    def compute(self) -> float:
        return self.found


SCORED = {"name": "tests.support.trainer:Scored"}
METRICS = {
    "first": "tests.support.trainer:first_right",
    "accuracy": "tests.support.trainer:right",
    "largest": "tests.support.trainer:Largest",
}


def evaluate(**changes: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The evaluation after a training, and the model that it is of."""
    with sw.Trainer(**fields(model=SCORED, metrics=METRICS, ema=None, **changes)) as trainer:
        trainer.fit()
        return trainer.evaluate(), trainer.state_dict()


class Samples:
    """Samples by number, which note who was asked for; some numbers are drawn, as for noise."""

    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        made = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=made)
        labels = torch.randint(0, VOCAB, (LENGTH,), generator=made)
        labels[: index % LENGTH] = -100
        ids[0] = (
            torch.randint(0, VOCAB, ()) + random.randrange(VOCAB) + np.random.randint(3)
        ) % VOCAB
        return {"ids": ids, "labels": labels}


class Stream:
    """The same samples in order, without numbers."""

    def __init__(self, size: int = 23) -> None:
        self.samples = Samples(size)

    def __iter__(self) -> Any:
        for index in range(self.samples.size):
            made = torch.Generator().manual_seed(index)
            ids = torch.randint(0, VOCAB, (LENGTH,), generator=made)
            yield {"ids": ids, "labels": ids.roll(1)}


class StatefulStream(Stream):
    """A stream that knows where it is."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < self.samples.size:
            self.at += 1
            made = torch.Generator().manual_seed(self.at)
            ids = torch.randint(0, VOCAB, (LENGTH,), generator=made)
            yield {"ids": ids, "labels": ids.roll(1)}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def fields(**changes: Any) -> dict[str, Any]:
    """The fields of a training that has a bit of everything."""
    data = {
        "train": Samples(),
        "evaluation": Samples(9),
        "batch_size": 4,
        **changes.pop("data", {}),
    }
    found: dict[str, Any] = {
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
    return found | changes


def fit(**changes: Any) -> FitResult:
    """Train with these fields; all ranks of a pool call it."""
    with sw.Trainer(**fields(**changes)) as trainer:
        return trainer.fit()


def fit_and_state(**changes: Any) -> tuple[FitResult, dict[str, Tensor], dict[str, Tensor]]:
    """As `fit`, with the model and its average at the end."""
    with sw.Trainer(**fields(**changes)) as trainer:
        return trainer.fit(), trainer.state_dict(), trainer.state_dict(ema=True)


class StopAt(sw.Callback):
    """Stops after some step, and counts what it saw."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        self.seen += 1
        if trainer.step == self.step:
            trainer.stop()

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def stop_and_go(
    folder: str, step: int = 3, changes: dict[str, Any] | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The losses until a stop, and those after it."""
    changes = changes or {}
    before = fit(folder=folder, callbacks=[StopAt(step)], **changes)
    assert before.stopped == "callback"
    return before.losses, fit(folder=folder, **changes).losses


def single() -> Net:
    """In float32, where an order of additions shows."""
    return Net(dtype=torch.float32)


class TermRankOne(sw.Callback):
    """A signal to one rank alone, after the first step."""

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        if trainer.rank == 1 and trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_by_one_rank(folder: str) -> tuple[FitResult, list[list[int]]]:
    """How it ended, and which samples this rank read for each of the first batches."""
    samples = Samples()
    read: list[list[int]] = []

    def collate(rows: list[Any]) -> Any:
        read.append(samples.asked[-len(rows) :])
        return default_collate(rows)

    data = {"train": samples, "collate": collate, "rowwise": True, "evaluation": None}
    result = fit(folder=folder, data=data, callbacks=[TermRankOne()])
    return result, read[1:]  # the first is an example of a batch
