"""Refusals of inexact synchronization, and a check that detects a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.inexact import Inexact
from shardwise.runtime.rounds import Rounds
from tests.support.inexact import FORMS, make, plan_of


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"every": 2, "stale": 1}, "every=2"),
        ({"fragments": 2}, "every=1"),
        ({"every": 3, "overlap": 3}, "overlap=3"),
        ({"every": 3, "fragments": 4}, "fragments=4"),
        ({"kind": "owner", "owner": 0, "every": 4}, "owner 0"),
        ({"kind": "owner", "owner": 0, "stale": 1, "sparse": "rows"}, "owner 0"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"every": 4, "outer": 0.7}, "outer=0.7"),
        ({"sparse": "gather", "every": 4}, "every 4"),
    ],
)
def test_nonsense_is_refused_with_a_hint(options: dict[str, Any], number: str) -> None:
    with pytest.raises(sw.errors.PlanError, match=number) as raised:
        sw.Sync(**options)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("sync", "zero"), [(FORMS["stale_1"], 3), (FORMS["int8"], 2), (FORMS["local_sgd"], 1)]
)
def test_sharded_parameters_are_refused(sync: sw.Sync, zero: int) -> None:
    model, batches = make()
    strategy = getattr(sw.strategies, {1: "zero1", 2: "zero2", 3: "fsdp"}[zero])
    graph = sw.capture(model, batches[0])
    plan = strategy(graph, sw.Cluster.local(2), constraints={"*": sync})
    with pytest.raises(sw.errors.PlanError, match=f"zero={zero}") as raised:
        sw.compile(graph, plan)
    assert "zero=0" in str(raised.value.hint)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.phase = nn.Linear(4, 4), nn.Parameter(torch.ones(4, dtype=torch.cfloat))
        self.count = nn.Parameter(torch.zeros(4, dtype=torch.long), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x * self.phase.real) + self.count).square().mean()


@pytest.mark.parametrize(
    ("glob", "sync", "words"),
    [
        ("*", sw.Sync(kind="owner", owner=7, stale=1), "owner=7"),
        ("count", FORMS["int8"], "no gradient"),
        ("phase", FORMS["int8"], "complex64"),
    ],
)
def test_parameters_that_do_not_suit_are_refused(glob: str, sync: sw.Sync, words: str) -> None:
    graph = sw.capture(Odd(), {"x": torch.randn(6, 4)})
    with pytest.raises(sw.errors.PlanError, match=words) as raised:
        sw.compile(graph, sw.strategies.ddp(graph, sw.Cluster.local(2), constraints={glob: sync}))
    assert raised.value.hint


def test_files_and_text_keep_the_form() -> None:
    model, batches = make()
    plan = plan_of(model, batches[0], {"*": FORMS["diloco_int8"]}, 2)
    again = sw.Plan.from_json(plan.to_json())
    assert again.entry("up.weight").sync == FORMS["diloco_int8"]
    assert "a round every 2 updates" in str(plan)
    assert not Inexact()


def test_verify_names_the_difference_and_detects_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batches = make()
    plan = plan_of(model, batches[0], {"*": FORMS["diloco_int8"]}, 2)
    certificate = sw.verify(model, batches[0], plan)
    assert certificate.ok
    assert "every 2 updates" in certificate.inexact[0]
    monkeypatch.setattr(Rounds, "begin", lambda self: self.state.anchors.clear() or _begin(self))
    assert not sw.verify(model, batches[0], plan)


def _begin(rounds: Rounds) -> None:
    for _, entries in rounds.fragments:
        rounds.state.anchors |= {e.spec.name: e.piece.detach().clone() for e in entries}
