"""Models in which Python looks at values of the batch, hand-written and drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.trainer import Net

Batch = dict[str, Tensor]
ROWS, WIDTH = 6, 4


def batch(seed: int, **changes: Tensor) -> Batch:
    """Return a batch whose mask is full for even seeds."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    mask = torch.rand(ROWS, WIDTH, generator=draw) > (0.3 if seed % 2 else -1.0)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=draw)
    return {"x": x, "mask": mask, "lengths": lengths, **changes}


def asserted(model: Any, h: Tensor, b: Batch) -> Tensor:
    assert (b["lengths"] > 0).all(), "lengths must be positive"
    return h


def looped(model: Any, h: Tensor, b: Batch) -> Tensor:
    for _ in range(int(b["lengths"].max())):
        h = h.tanh()
    return h


def on_buffer(model: Any, h: Tensor, b: Batch) -> Tensor:
    return h * 3 if (b["lengths"] < model.limit).all() else h


def overwritten(model: Any, h: Tensor, b: Batch) -> Tensor:
    table = torch.zeros(ROWS, dtype=torch.int64)
    table[1:].copy_(b["lengths"][1:])
    return h * 2 if table.max() > 3 else h


def nested(model: Any, h: Tensor, b: Batch) -> Tensor:
    part = b["x"][:, : int(b["lengths"].min())]
    if part.sum() > 0:
        h = h + part.shape[1]
        if b["mask"].all():
            return h.relu()
    return h


def rows(model: Any, h: Tensor, b: Batch) -> Tensor:
    return torch.cat([h[i, :n] for i, n in enumerate(b["lengths"].tolist())])


KINDS: dict[str, Callable[[Any, Tensor, Batch], Tensor]] = {
    "if": lambda model, h, b: h * 2 if b["mask"].all() else h,
    "item": lambda model, h, b: h[:, : b["lengths"].min().item()],
    "int": looped,
    "assert": asserted,
    "tolist": rows,
    "equal": lambda m, h, b: h + 1 if torch.equal(b["mask"], torch.ones_like(b["mask"])) else h,
    "allclose": lambda m, h, b: h + 1 if torch.allclose(b["lengths"], b["lengths"][:1]) else h,
    "index": lambda model, h, b: h[: b["lengths"][0]],
    "numpy": lambda model, h, b: h * float(b["lengths"].numpy()[0]),
    "buffer": on_buffer,
    "overwritten": overwritten,
    "nested": nested,
}
BREAKING: dict[str, Batch] = {  # changes of `batch(0)` in one row that break the guard
    "if": {"mask": torch.ones(ROWS, WIDTH).index_fill(0, torch.tensor([5]), 0).bool()},
    "item": {"lengths": torch.tensor([3, 3, 3, 3, 3, 2])},
    "int": {"lengths": torch.tensor([1, 1, 1, 1, 1, 2])},
    "tolist": {"lengths": torch.tensor([1, 1, 1, 1, 1, 2])},
    "equal": {"mask": torch.ones(ROWS, WIDTH).index_fill(0, torch.tensor([5]), 0).bool()},
    "allclose": {"lengths": torch.tensor([3, 3, 3, 3, 3, 3])},
    "index": {"lengths": torch.tensor([2, 1, 1, 1, 1, 1])},
    "numpy": {"lengths": torch.tensor([2, 1, 1, 1, 1, 1])},
    "buffer": {"lengths": torch.tensor([1, 1, 1, 1, 1, 2])},
    "overwritten": {"lengths": torch.tensor([1, 1, 1, 1, 1, 2])},
    "nested": {"lengths": torch.tensor([3, 3, 3, 3, 3, 2])},
}


class Looking(nn.Module):
    """A layer, and a function that looks at values of the batch."""

    def __init__(self, look: Callable[[Any, Tensor, Batch], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("limit", torch.tensor(4))
        self.look = look
        self.double()

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        h = self.down(self.up(x).tanh())
        return self.look(self, h, {"x": x, "mask": mask, "lengths": lengths}).square().mean()


# ---------------------------------------------------------------- models drawn at random

_VALUES: list[Callable[[Any, Tensor, Batch], Tensor]] = [
    lambda model, h, b: b["mask"],
    lambda model, h, b: b["lengths"] > 2,
    lambda model, h, b: b["x"].abs() > 1,
    lambda model, h, b: b["lengths"] < model.limit,
    lambda model, h, b: b["mask"][:, 0] & (b["lengths"] > 1),
    lambda model, h, b: b["x"].cumsum(0)[-1] > 0,
    lambda model, h, b: torch.where(b["mask"], b["lengths"][:, None], 0) > 3,
    lambda model, h, b: h > 0,  # depends on parameters: refused
]
_QUESTIONS: list[Callable[[Tensor], Any]] = [
    lambda t: bool(t.all()),
    lambda t: bool(t.any()),
    lambda t: int(t.sum()) % 3 == 0,
    lambda t: t.sum().item() > t.numel() // 2,
    lambda t: t.flatten().tolist()[0],
    lambda t: torch.equal(t, torch.ones_like(t)),
    lambda t: bool(t.float().mean() > 0.5),
]
_CHANGES: list[Callable[[Any, Tensor, Batch], Tensor]] = [
    lambda model, h, b: h * 2,
    lambda model, h, b: h.tanh(),
    lambda model, h, b: h + b["x"],
    lambda model, h, b: torch.where(b["mask"], h, 0),
    lambda model, h, b: h[:, : int(b["lengths"].min())].sum(1, keepdim=True) + h,
    lambda model, h, b: model.extra(h),
]


def drawn_model(seed: int) -> Looking:
    """Return a model with one to four branches, some of them nested, drawn from a seed."""
    draw = random.Random(seed)
    branches = [
        (draw.choice(_VALUES[: -1 if draw.random() < 0.9 else None]), draw.choice(_QUESTIONS),
         draw.choice(_CHANGES), draw.choice(_CHANGES), draw.random() < 0.4)
        for _ in range(draw.randint(1, 4))
    ]  # fmt: skip

    def look(model: Any, h: Tensor, b: Batch) -> Tensor:
        for value, question, then, otherwise, ends in branches:
            if question(value(model, h, b)):
                h = then(model, h, b)
                if ends:
                    return h
            else:
                h = otherwise(model, h, b)
        return h

    model = Looking(look)
    model.extra = nn.Linear(WIDTH, WIDTH).double()
    return model


class Looked(Net):
    """The trainer's model, with another loss for batches that contain a row of small tokens."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(ids, labels)
        return 2 * loss if (ids.sum(1) < 25).any() else loss
