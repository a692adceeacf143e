"""Lightning under every kind of plan equals plain Lightning in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from shardwise.integrations.lightning import ShardwiseStrategy
from tests.support.lightning import Classifier, Run, assert_same, fit
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed
OPTIONS = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
TWO_RANKS = [("ddp", {}), ("fsdp", {}), ("tensor", {}), ("pipeline", {"num_microbatches": 2})]


def fit_plans(plans: list[tuple[str, dict[str, Any]]]) -> list[Run]:
    return [
        fit(ShardwiseStrategy({"name": name, "args": options}), **OPTIONS)
        for name, options in plans
    ]


@pytest.mark.slow
def test_two_ranks_equal_plain_lightning(pool: Callable[[int], Pool]) -> None:
    expected = fit(**OPTIONS)
    for runs in pool(2).run(fit_plans, TWO_RANKS, timeout=110):
        for run in runs:
            assert_same(run, expected)


def fit_with_one_last_row(plans: list[tuple[str, dict[str, Any]]]) -> list[Run]:
    return [
        fit(ShardwiseStrategy({"name": name, "args": options}), rows=25) for name, options in plans
    ]


@pytest.mark.slow
def test_the_last_batch_of_an_epoch_may_have_one_row(pool: Callable[[int], Pool]) -> None:
    expected = fit(rows=25)
    for runs in pool(2).run(fit_with_one_last_row, TWO_RANKS, timeout=240):
        for run in runs:
            assert_same(run, expected)


@pytest.mark.slow
def test_three_dimensions_equal_plain_lightning(pool: Callable[[int], Pool]) -> None:
    expected = fit(**OPTIONS)
    plans = [
        ("hybrid", {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "zero": 1}),
        ("zero2", {}),
        ("auto", {}),
    ]
    for runs in pool(8).run(fit_plans, plans, timeout=600):
        for run in runs:
            assert_same(run, expected)


def with_dropout() -> Classifier:
    return Classifier(dropout=0.3)


def stop_and_go(folder: Path, first: str, then: str) -> tuple[Run, Run]:
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"num_microbatches": 2} if first == "pipeline" else {}
    strategy = ShardwiseStrategy({"name": first, "args": options})
    uninterrupted = fit(strategy, with_dropout, callbacks=[save], enable_checkpointing=True)
    resumed = fit(ShardwiseStrategy(then), with_dropout, ckpt_path=folder / "step=3.ckpt")
    return uninterrupted, resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [("tensor", "tensor"), pytest.param("pipeline", "fsdp", marks=pytest.mark.slow)],
)
def test_resuming_equals_an_uninterrupted_run(
    pool: Callable[[int], Pool], tmp_path: Path, first: str, then: str
) -> None:
    for uninterrupted, resumed in pool(2).run(stop_and_go, tmp_path, first, then, timeout=110):
        if first == then:
            assert resumed.losses == uninterrupted.losses[3:]
            assert all(
                torch.equal(resumed.state[name], uninterrupted.state[name])
                for name in uninterrupted.state
            )
        torch.testing.assert_close(resumed.losses, uninterrupted.losses[3:], rtol=1e-10, atol=1e-10)


def fit_unseeded() -> Run:
    def make() -> Classifier:
        torch.manual_seed(torch.distributed.get_rank())  # as without a seed
        return Classifier()

    return fit(ShardwiseStrategy("ddp"), make, max_steps=2)


@pytest.mark.slow
def test_ranks_start_with_the_weights_and_order_of_rank_0(pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(fit_unseeded, timeout=110)
    assert first.losses == second.losses
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)


class Scaled(Classifier):
    """A classifier whose step reads an attribute; hooks change an activation and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.downs[0].register_forward_hook(halved)
        self.embed.weight.register_hook(doubled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def halved(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2.0


class Changes(Callback):  # type: ignore[misc]
    """Anneal the attribute, freeze and unfreeze a weight, and add a hook to another."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module.scale = 1.0 if batch_idx < 2 else 1.0 / batch_idx
        module.embed.bias.requires_grad_(not 3 <= batch_idx < 6)
        if batch_idx == 4:
            module.head.weight.register_hook(doubled)


def fit_with_changes(plans: list[tuple[str, dict[str, Any]]]) -> list[Run]:
    changes: dict[str, Any] = {"rows": 61, "max_epochs": 1}
    return [
        fit(
            ShardwiseStrategy({"name": name, "args": options}),
            Scaled,
            callbacks=[Changes()],
            **changes,
        )
        for name, options in plans
    ]


@pytest.mark.slow
def test_callbacks_may_change_attributes_flags_and_hooks(pool: Callable[[int], Pool]) -> None:
    expected = fit("auto", Scaled, callbacks=[Changes()], rows=61, max_epochs=1)
    for runs in pool(2).run(fit_with_changes, [*TWO_RANKS, ("zero2", {})], timeout=240):
        for run in runs:
            assert_same(run, expected)
