"""Everything around the step over NCCL: trainers, checkpoints, collectives, recordings, precision.

The workers are those of `tests/distributed`. References are computed by one rank on the same kind
of device, because CUDA draws other random numbers than a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.reports.measured import compare
from shardwise.reports.recorded import read_trace
from tests.distributed import test_collective_backends as solved
from tests.distributed import test_measured as recordings
from tests.distributed import test_precision as precision
from tests.support import bytes_model, checkpoints, training
from tests.support import huggingface as hf
from tests.support import lightning as pl
from tests.support import trainer as trainers
from tests.support.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
Ranks = Callable[[int], Pool]


@pytest.mark.parametrize(
    ("model", "strategy", "num_ranks", "options"),
    [
        ("odd", "ddp", 3, {}),
        ("odd", "zero2", 3, {}),
        ("fused_gpt", "tensor", 3, {}),
        ("fused_gpt", "hybrid", 4, solved.HYBRID),
    ],
)
def test_solved_collectives(
    ranks: Ranks, model: str, strategy: str, num_ranks: int, options: dict[str, Any]
) -> None:
    solved.check(ranks, model, strategy, num_ranks, options)


TRAINER_PLANS: dict[str, tuple[int, Any]] = {
    "zero2": (2, "zero2"),
    "fsdp": (3, "fsdp"),
    "3d": (4, {"name": "hybrid", "args": {"tp": 2, "pp": 2, "num_microbatches": 2}}),
}


@pytest.mark.parametrize("name", TRAINER_PLANS)
def test_trainer(ranks: Ranks, name: str) -> None:
    """Losses, evaluation, weights and their average equal those of one rank, with dropout."""
    num_ranks, plan = TRAINER_PLANS[name]
    options = {"epochs": 2, "steps": None, "data": {"drop_last": False}}
    single, state, average = ranks(1).run(trainers.fit_and_state, plan="ddp", **options)[0]
    for result, actual, actual_average in ranks(num_ranks).run(
        trainers.fit_and_state, plan=plan, timeout=300, **options
    ):
        assert result.losses == pytest.approx(single.losses, rel=1e-9)
        assert result.metrics["evaluation_loss"] == pytest.approx(
            single.metrics["evaluation_loss"], rel=1e-9
        )
        for key, tensor in state.items():
            torch.testing.assert_close(actual[key], tensor, rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(actual_average[key], average[key], rtol=1e-8, atol=1e-10)


def test_trainer_resumes_under_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    """The trainer saves asynchronously; 3 ranks begin, 2 go on."""
    folder = str(tmp_path)
    uninterrupted = ranks(1).run(trainers.fit)[0]
    stop = {"folder": folder, "callbacks": [trainers.StopAt(3)]}
    first = ranks(3).run(trainers.fit, plan="fsdp", timeout=300, **stop)[0]
    second = ranks(2).run(trainers.fit, plan="tensor", folder=folder, timeout=300)[0]
    assert first.losses + second.losses == pytest.approx(uninterrupted.losses, rel=1e-9)


@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {}), ("pipeline", precision.PIPELINE)])
def test_loss_scaling(ranks: Ranks, strategy: str, options: dict[str, Any]) -> None:
    precision.test_an_infinite_gradient_skips_the_step(ranks, strategy, options)


@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    [("bf16", "pipeline", precision.PIPELINE), ("bf16", "fsdp", {}), ("fp16", "ddp", {})],
)
def test_mixed_precision(ranks: Ranks, kind: str, strategy: str, options: dict[str, Any]) -> None:
    wide = ranks(2).run(bytes_model.train, None, strategy, 2, timeout=300, **options)[0]
    narrow = ranks(2).run(bytes_model.train, kind, strategy, 2, timeout=300, **options)[0]
    assert precision.worst(narrow, wide) < 0.02


@pytest.mark.parametrize("name", ["pipeline", "ddp", "fsdp", "tensor"])
def test_recordings(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """CUDA events are laid over the prediction by cause."""
    path = tmp_path / "run.json"
    ranks(recordings.PLANS[name][0]).run(recordings.record, name, str(path), timeout=120)
    model, batch, plan = recordings.planned(name)
    estimate = sw.simulate(sw.capture(model, batch), plan, sw.Cluster.local(plan.num_ranks))
    comparison = compare(read_trace(path), plan, estimate)
    assert comparison.step.steps == 3
    for rank in comparison.step.ranks:
        assert sum(rank.causes.values()) == pytest.approx(rank.end, rel=1e-6)
        assert rank.causes["forward"] > 0


def local_batches_and_compilation(strategy: str) -> list[list[float]]:
    """Return losses of full batches, of this rank's part of them, and under torch.compile."""
    losses = []
    for compiled, local in ((False, False), (False, True), (True, False)):
        model, inputs = training.to_device(*training.make("fused_gpt"), training.device_of_rank())
        plan = training.plan_for(model, inputs, strategy, 2)
        pm = sw.parallelize(model, inputs, plan=plan, compile=compiled)
        optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=0.01)
        row = []
        for _ in range(3):
            batch = pm.local_batch(inputs) if local else inputs
            row.append(pm.train_step(batch, local=local).item())
            sw.clip_grad_norm_(pm, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(row)
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_local_batches_and_compiled_programs(ranks: Ranks, strategy: str) -> None:
    runs = ranks(2).run(local_batches_and_compilation, strategy, timeout=400)
    for full, *others in runs:
        assert others == [pytest.approx(full, rel=1e-9)] * 2


@pytest.mark.parametrize(("before", "after"), [("fsdp2", "tp2xpp2"), ("tp2xpp2", "fsdp2")])
def test_checkpoints_under_another_plan(
    ranks: Ranks, before: str, after: str, tmp_path: Path
) -> None:
    sizes = {"fsdp2": 2, "tp2xpp2": 4}
    saved = ranks(sizes[before]).run(checkpoints.save_run, before, "fused_gpt", tmp_path / "a")[0]
    runs = ranks(sizes[after]).run(checkpoints.load_runs, after, "fused_gpt", [tmp_path / "a"])[0]
    expected = checkpoints.continued("fused_gpt")[checkpoints.BEFORE :]
    for run, losses in runs:
        checkpoints.assert_same_state(run, saved)
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("plan", "options"), [("fsdp", {}), ("tensor", {}), ("pipeline", {"num_microbatches": 2})]
)
def test_hugging_face_trainer(ranks: Ranks, plan: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers", "5.20", reason="the extra needs transformers 5.20")
    rows = 8 // (2 if plan == "fsdp" else 1)
    args = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    expected = ranks(1).run(hf.train, "gpt2", {}, timeout=240)[0]
    for result in ranks(2).run(hf.train, "gpt2", args, options, plan=plan, timeout=240):
        hf.assert_same(result, expected)


def fit_lightning(name: str | None, options: dict[str, Any]) -> pl.Run:
    from shardwise.integrations.lightning import ShardwiseStrategy

    strategy = ShardwiseStrategy({"name": name, "args": options}) if name else "auto"
    return pl.fit(strategy, gradient_clip_val=0.3, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("name", "options"), [("fsdp", {}), ("tensor", {}), ("pipeline", {"num_microbatches": 2})]
)
def test_lightning(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    expected = ranks(1).run(fit_lightning, None, {}, timeout=240)[0]
    for run in ranks(2).run(fit_lightning, name, options, timeout=240):
        pl.assert_same(run, expected)
