"""`ShardwiseTrainer` on ranks equals `transformers.Trainer` in one process with the same batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import BatchError
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
    """Compare training on ranks with training in one process; a batch has 8 rows in both."""
    replicas = {"ddp": ranks, "fsdp": ranks, "zero2": ranks, "hybrid": 2, "auto": ranks}.get(
        plan, 1
    )
    sizes = {
        "per_device_train_batch_size": 8 // replicas,
        "per_device_eval_batch_size": 8 // replicas,
    }
    keywords = {"compute_metrics": hf.metrics, **keywords}
    results = pool(ranks).run(
        hf.train, model, {**sizes, **(args or {})}, options, plan=plan, timeout=240, **keywords
    )
    expected = hf.train(model, {**(args or {}), **(plain or {})}, **keywords)
    for result in results:
        hf.assert_same(result, expected)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tensor_plan_equals_the_plain_trainer(pool: Callable[[int], Pool]) -> None:
    short = {"max_steps": 2, "dataloader_drop_last": True}
    check(pool, 2, "tensor", args=short, compute_metrics=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "options"), [("fsdp", {}), ("ddp", {}), ("pipeline", PIPELINE)])
def test_the_last_batch_of_an_epoch_may_have_one_row(
    pool: Callable[[int], Pool], plan: str, options: dict[str, Any]
) -> None:
    args = {"gradient_accumulation_steps": 1, "num_train_epochs": 1}
    check(pool, 2, plan, options, data="one more", args=args)


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
    ("ranks", "plan", "options"), [(2, "fsdp", {}), (2, "tensor", {}), (2, "pipeline", PIPELINE)]
)
def test_only_adapters_are_trained(
    pool: Callable[[int], Pool], ranks: int, plan: str, options: dict[str, Any]
) -> None:
    check(pool, ranks, plan, options, model="lora")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "options"), [("fsdp", {}), ("pipeline", PIPELINE)])
@pytest.mark.parametrize("case", ["smoothing", "own loss", "mean", "padded", "stream", "sgd"])
def test_features_of_the_trainer(
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


SAVED = {
    "gradient_accumulation_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "plan", "options"),
    [("gpt2", "pipeline", PIPELINE), ("gpt2", "fsdp", {}), ("lora", "tensor", {})],
)
def test_a_run_resumes_exactly_from_the_middle_of_an_epoch(
    pool: Callable[[int], Pool], tmp_path: Path, model: str, plan: str, options: dict[str, Any]
) -> None:
    rows = 4 if plan == "fsdp" else 8
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    args = {**SAVED, "output_dir": str(tmp_path), **sizes}
    uninterrupted = pool(2).run(hf.train, model, args, options, plan=plan, timeout=240)[0]
    middle = str(tmp_path / "checkpoint-2")
    resumed = pool(2).run(hf.train, model, args, options, plan=plan, resume=middle, timeout=240)[0]
    assert resumed["losses"] == uninterrupted["losses"]
    assert resumed["norms"] == uninterrupted["norms"]
    assert resumed["best"] == uninterrupted["best"]
    torch.testing.assert_close(resumed["parameters"], uninterrupted["parameters"], rtol=0, atol=0)

    # Under another plan and number of ranks, with the same batch size.
    other = {**args, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    result = hf.train(model, other, plan="ddp", resume=middle)
    hf.assert_same(result, uninterrupted)
    assert_opens(tmp_path / "checkpoint-2", model)


def assert_opens(folder: Path, model: str) -> None:
    """Open a checkpoint with its library; one of adapters has only these."""
    names = {path.name for path in folder.iterdir()}
    if model == "lora":
        from peft import PeftModel

        assert "model.safetensors" not in names
        PeftModel.from_pretrained(hf.gpt2(), folder)
    else:
        from transformers import GPT2LMHeadModel

        GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_meta_model_starts_from_a_folder(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    hf.gpt2().save_pretrained(tmp_path / "start")
    args = {"per_device_train_batch_size": 4, "output_dir": str(tmp_path / "out")}
    results = pool(2).run(hf.train_on_meta, str(tmp_path / "start"), args, timeout=240)
    expected = hf.train()
    hf.assert_same({**results[0], "parameters": results[0]["saved"], "metrics": {}}, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_batch_size_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    args = {**SAVED, "output_dir": str(tmp_path), "max_steps": 1, "per_device_train_batch_size": 4}
    hf.train("classifier", args, plan="ddp")
    with pytest.raises(BatchError, match="batches of 4 rows, these have 2"):
        hf.train("classifier", args | {"per_device_train_batch_size": 2}, plan="ddp", resume=True)
