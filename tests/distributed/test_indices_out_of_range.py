"""Token ids and labels out of range raise on every rank, as they do on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import BatchError
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed

VOCAB = 131


class Tagger(nn.Module):
    """An embedding, a sharded head, and one of several losses."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor, value: Tensor) -> Tensor:
        x = self.tokens(ids) + self.tokens((value * 4).long())
        scores = self.head(torch.relu(self.up(x)))
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]  # shifted: the first label is not used
        if self.loss == "nll":
            logs = torch.log_softmax(scores, -1).flatten(0, 1)
            return F.nll_loss(logs, labels.flatten(), ignore_index=-100)
        if self.loss == "gather":
            labels = labels.clamp_min(0)
            return -torch.log_softmax(scores, -1).gather(2, labels[..., None]).mean()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch(**changes: tuple[tuple[int, int], float]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {
        "ids": torch.randint(0, VOCAB, (4, 5), generator=generator),
        "labels": torch.randint(0, VOCAB, (4, 5), generator=generator),
        "value": torch.rand(4, 5, generator=generator, dtype=torch.float64),
    }
    values["labels"][:, 0] = -7  # never read
    values["labels"][1, 2:] = -100
    for name, (index, value) in changes.items():
        values[name][index] = value
    return values


BAD = {
    "an id too large": {"ids": ((3, 1), VOCAB)},
    "a negative id": {"ids": ((0, 4), -1)},
    "a label too large": {"labels": ((2, 3), VOCAB + 5)},
    "a negative label": {"labels": ((3, 4), -1)},
}
GOOD = {"a label that is not read": {"labels": ((2, 0), 99)}}


def train(loss: str, strategy: str, ranks: int, options: dict[str, Any]) -> dict[str, str]:
    """Return the outcome of each kind of batch on this rank."""
    torch.manual_seed(0)
    model = Tagger(loss).double()
    graph = sw.capture(model, batch())
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)
    pm = sw.parallelize(model, batch(), plan, timeout_s=20)
    outcomes = {}
    for name, changes in {**BAD, **GOOD, "a good batch": {}}.items():
        for step in (pm.train_step, pm.eval_step):
            try:
                step(batch(**changes))
                outcomes[f"{name} {step.__name__}"] = "ok"
            except BatchError as error:
                outcomes[f"{name} {step.__name__}"] = f"{error.message} at {error.where}"
        pm.zero_grad()
    if "tensor" in strategy:  # every rank sees the computed index of a sharded table
        with pytest.raises(BatchError, match=r"index 4000, and takes 0 to 130") as raised:
            pm.train_step(batch(value=((0, 0), 1000.0)))
        assert "test_indices_out_of_range.py:" in str(raised.value.where)
    return outcomes


def check(
    pool: Callable[[int], Pool], loss: str, strategy: str, ranks: int, **options: int
) -> None:
    answers = pool(ranks).run(train, loss, strategy, ranks, options, timeout=120)
    assert all(answer == answers[0] for answer in answers)
    for name, text in answers[0].items():
        if name.startswith(tuple(BAD)) and not (loss == "gather" and "negative label" in name):
            assert " takes 0 to 130" in text, name
            assert "test_indices_out_of_range.py:" in text, name
            assert ("labels" if "label" in name else "ids") in text, name
        else:
            assert text == "ok", name


@pytest.mark.parametrize("strategy", ["tensor", "ddp"])
def test_every_rank_raises(pool: Callable[[int], Pool], strategy: str) -> None:
    check(pool, "cross entropy", strategy, 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross entropy", "nll", "gather"])
@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ("tensor", 3, {}),
        ("ddp", 3, {}),
        ("zero2", 2, {}),
        ("fsdp", 2, {}),
        ("pipeline", 2, {"num_microbatches": 2}),
        ("hybrid", 4, {"dp": 2, "tp": 2}),
    ],
)
def test_every_rank_raises_under_every_strategy(
    pool: Callable[[int], Pool], loss: str, strategy: str, ranks: int, options: dict[str, int]
) -> None:
    check(pool, loss, strategy, ranks, **options)


def test_operators_check_the_indices_they_use() -> None:
    from shardwise.runtime import require_in_range

    require_in_range(torch.tensor([0, 12, -100]), 13, "the loss", ignored=-100)
    require_in_range(torch.tensor([-13, 12]), 13, "index", low=-13)
    require_in_range(torch.empty(0, dtype=torch.long), 13, "embedding")
    require_in_range(torch.empty(3, dtype=torch.long, device="meta"), 13, "embedding")
    with pytest.raises(BatchError, match="the index 13, and takes 0 to 12, or -100 to be ignored"):
        require_in_range(torch.tensor([0, 13, -100]), 13, "the loss", ignored=-100)
