"""`ShardwiseTrainer` on ranks equals `transformers.Trainer` on one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import huggingface as hf
from tests.support.pool import Pool

pytest.importorskip("accelerate", reason="the Hugging Face integration is an extra")
pytestmark = pytest.mark.distributed

PIPELINE = {"num_microbatches": 2}
HYBRID = {"dp": 2, "tp": 2, "zero": 1}


def check(
    pool: Callable[[int], Pool],
    ranks: int,
    plan: str,
    options: dict[str, Any] | None = None,
    *,
    model: str = "gpt2",
    args: dict[str, Any] | None = None,
    plain: dict[str, Any] | None = None,
    **keywords: Any,
) -> None:
    """Train on ranks and alone; a batch has 8 rows in both."""
    replicas = {"ddp": ranks, "fsdp": ranks, "zero2": ranks, "hybrid": 2, "auto": ranks}.get(
        plan, 1
    )
    sizes = {
        "per_device_train_batch_size": 8 // replicas,
        "per_device_eval_batch_size": 8 // replicas,
    }
    keywords = {"compute_metrics": hf.metrics, **keywords}
    found = pool(ranks).run(
        hf.train, model, {**sizes, **(args or {})}, options, plan=plan, timeout=240, **keywords
    )
    expected = hf.train(model, {**(args or {}), **(plain or {})}, **keywords)
    for one in found:
        hf.assert_same(one, expected)


@pytest.mark.timeout(240)
def test_tensor_plan_equals_the_plain_trainer(pool: Callable[[int], Pool]) -> None:
    short = {"max_steps": 2, "dataloader_drop_last": True}
    check(pool, 2, "tensor", args=short, compute_metrics=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "plan", "options"),
    [
        (2, "ddp", {}),
        (2, "tensor", {}),
        (2, "fsdp", {}),
        (4, "zero2", {}),
        (2, "pipeline", PIPELINE),
        (4, "hybrid", HYBRID),
        (2, "auto", {}),
    ],
)
def test_plans_equal_the_plain_trainer(
    pool: Callable[[int], Pool], ranks: int, plan: str, options: dict[str, Any]
) -> None:
    check(pool, ranks, plan, options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "plan", "options"),
    [(2, "fsdp", {}), (2, "tensor", {}), (2, "pipeline", PIPELINE)],
)
def test_adapters_are_trained_and_the_rest_is_not(
    pool: Callable[[int], Pool], ranks: int, plan: str, options: dict[str, Any]
) -> None:
    check(pool, ranks, plan, options, model="lora")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "options"), [("fsdp", {}), ("pipeline", PIPELINE)])
@pytest.mark.parametrize("case", ["smoothing", "own loss", "mean", "padded", "stream", "sgd"])
def test_what_a_trainer_can_do(
    pool: Callable[[int], Pool], plan: str, options: dict[str, Any], case: str
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "smoothing": {"args": {"label_smoothing_factor": 0.1}},
        "own loss": {"compute_loss_func": hf.sum_over_items},
        "mean": {"model": "classifier"},
        "padded": {"data_collator": hf.padded, "args": {"num_train_epochs": 1}},
        "stream": {"data": "stream", "args": {"max_steps": 3}},
        "sgd": {"args": {"optim": "sgd", "lr_scheduler_type": "linear", "max_grad_norm": 0.0}},
    }
    check(pool, 2, plan, options, **settings[case])
