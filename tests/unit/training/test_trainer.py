"""Training in one process: losses, resuming, checkpoints and refused configs."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import shardwise as sw
from shardwise.errors import ConfigError, TrainingError
from shardwise.training.sampling import Position
from tests.support import trainer as support


def plain_losses(steps: int, **changes: Any) -> list[float]:
    """Return the losses of the same training in plain PyTorch, without dropout."""
    fields = support.fields(**changes)
    torch.manual_seed(0)
    model = support.Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    source = sw.Trainer(**fields).config.data.train
    from shardwise.training.config import DataConfig
    from shardwise.training.data import make_source
    from shardwise.training.sampling import make_loading

    config = DataConfig(train=source, batch_size=4)
    losses = []
    loading = make_loading(source, config, None, training=True)
    for item in make_source(loading, 0).batches(Position()):
        loss = model(**item.batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == steps:
            return losses
    raise AssertionError


NO_DROPOUT = {"name": "tests.support.trainer:Net", "args": {"dropout": 0.0}}


def test_training_equals_plain_torch() -> None:
    result = support.fit(model=NO_DROPOUT, lr_schedule=(), ema=None)
    assert result.losses == pytest.approx(plain_losses(8), rel=1e-12)


@pytest.mark.slow
def test_accumulation_keeps_the_loss_of_the_full_batch() -> None:
    full = support.fit(model=NO_DROPOUT)
    parts = support.fit(model=NO_DROPOUT, num_microbatches=3)
    assert parts.losses == pytest.approx(full.losses, rel=1e-12)


def test_evaluation_is_the_mean_over_all_labels() -> None:
    data = support.Samples(9)
    with sw.Trainer(**support.fields(ema=None, data={"evaluation": data})) as trainer:
        loss = trainer.evaluate()["evaluation_loss"]
        model = support.Net()
        model.load_state_dict(trainer.state_dict())
    from shardwise.training.state import seeded

    rows = []
    for index in range(9):
        with seeded(0, 0, index):
            rows.append(data[index])
    with torch.no_grad():
        assert loss == pytest.approx(model.eval()(**default_collate(rows)).item(), rel=1e-12)


@pytest.mark.parametrize(
    "step", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 6))]
)
def test_a_resumed_run_is_bit_equal(tmp_path: Path, step: int) -> None:
    uninterrupted = support.fit(model="tests.support.trainer:single").losses
    changes = {"model": "tests.support.trainer:single"}
    before, after = support.stop_and_go(str(tmp_path), step, changes)
    assert before + after == uninterrupted
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in lines if "loss" in row] == list(uninterrupted)


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first = support.fit(folder=str(tmp_path))
    again = support.fit(folder=str(tmp_path))
    assert (again.steps, again.losses) == (8, ())
    assert again.checkpoint == first.checkpoint
    with pytest.raises(ConfigError, match="resume: never, but the folder has"):
        support.fit(folder=str(tmp_path), resume="never")


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_data(tmp_path: Path) -> None:
    support.fit(folder=str(tmp_path), callbacks=[support.StopAt(2)])
    with pytest.raises(TrainingError, match="data size 23, now it is 22"):
        support.fit(folder=str(tmp_path), data={"train": support.Samples(22)})
    with pytest.raises(TrainingError, match="data seed 0, now it is 1"):
        support.fit(folder=str(tmp_path), seed=1)


def test_a_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        support.fit(resume=str(tmp_path / "none"))


class Kill(sw.Callback):
    """Send a signal to this process after a step."""

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_and_stops_after_the_step(tmp_path: Path) -> None:
    uninterrupted = support.fit().losses
    stopped = support.fit(folder=str(tmp_path), callbacks=[Kill()])
    assert (stopped.stopped, stopped.steps) == ("signal", 2)
    assert stopped.checkpoint == tmp_path / "checkpoints" / "step-00000002"
    assert stopped.losses + support.fit(folder=str(tmp_path)).losses == uninterrupted


class Spoil(sw.Callback):
    """Make a parameter NaN."""

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        if trainer.step == 4:
            with torch.no_grad():
                next(trainer.module.parameters()).fill_(math.nan)


def test_a_nan_loss_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    changes = {"folder": str(tmp_path), "callbacks": [Spoil()], "checkpoints": {"every_steps": 3}}
    with pytest.raises(TrainingError, match=r"loss is nan at step 5 .*checkpoint of step 3"):
        support.fit(**changes)
    assert support.fit(folder=str(tmp_path)).resumed_from == (
        tmp_path / "checkpoints" / "step-00000003"
    )


@pytest.mark.slow
def test_nan_parameters_are_not_saved(tmp_path: Path) -> None:
    changes = {"folder": str(tmp_path), "callbacks": [Spoil()], "checkpoints": {"every_steps": 2}}
    with pytest.raises(TrainingError, match="after step 4: not saved"):
        support.fit(**changes)


@pytest.mark.slow
def test_an_infinite_loss_may_be_skipped() -> None:
    class Once(support.Samples):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return {**sample, "scale": torch.tensor(math.inf if index == 3 else 1.0)}

    class Scaled(support.Net):
        def forward(self, ids: Any, labels: Any, scale: Any) -> Any:
            return super().forward(ids, labels) * scale.mean()

    changes = {"model": Scaled(0.0), "data": {"train": Once(8), "evaluation": None}, "steps": 4}
    losses = support.fit(**changes, nonfinite="skip", clip_norm=None).losses
    assert sum(math.isinf(loss) for loss in losses) == 2
    assert math.isfinite(losses[-1]) or math.isfinite(losses[-2])


@pytest.mark.slow
def test_early_stop_is_patient_and_resumes(tmp_path: Path) -> None:
    changes = {
        "evaluation": {"every_steps": 1},
        "optimizer": {"name": "SGD", "args": {"lr": 0.0}},
        "lr_schedule": (),
        "early_stop": {"patience": 3, "min_delta": 0.01},
    }
    assert support.fit(**changes).steps == 4
    support.fit(**changes, folder=str(tmp_path), callbacks=[support.StopAt(2)])
    assert support.fit(**changes, folder=str(tmp_path)).steps == 4


@pytest.mark.slow
def test_the_average_is_exponential() -> None:
    biases: list[torch.Tensor] = []

    class Collect(sw.Callback):
        def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
            biases.append(trainer.state_dict()["head.bias"])

    torch.manual_seed(0)
    expected = support.Net().head.bias.detach()
    _, _, average = support.fit_and_state(callbacks=[Collect()])
    for value in biases:
        expected = 0.9 * expected + 0.1 * value
    torch.testing.assert_close(average["head.bias"], expected)


@pytest.mark.slow
def test_plateaus_and_epochs_advance_the_schedule() -> None:
    plateau = {
        "name": "ReduceLROnPlateau",
        "args": {"patience": 0, "threshold": 0.9},
        "each": "evaluation",
    }
    changes = {"optimizer": {"name": "SGD", "args": {"lr": 0.5}}, "evaluation": {"every_steps": 1}}
    result = support.fit(**changes, lr_schedule=plateau, steps=6)
    assert result.metrics["learning_rate"] < 0.5
    by_epoch = {"name": "StepLR", "args": {"step_size": 1}, "each": "epoch"}
    result = support.fit(**changes, lr_schedule=by_epoch, steps=None, epochs=2)
    assert result.metrics["learning_rate"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "set either steps or epochs"),
        ({"model": "tests.support.trainer:Nett"}, "did you mean 'Net'?"),
        ({"model": "nowhere.py:Net"}, "no file nowhere.py"),
        ({"model": "no_such_module:Net"}, "no module 'no_such_module'"),
        ({"model": {"name": "tests.support.trainer:Net", "args": {"dropot": 1}}}, "did you mean"),
        ({"optimizer": "adamw"}, "did you mean 'AdamW'?"),
        ({"optimizer": {"name": "SGD", "args": {"learning": 1}}}, "SGD: "),
        ({"optimizer": {"groups": [{"params": "nothing.*"}]}}, "no parameter matches 'nothing.*'"),
        ({"lr_schedule": "CosineAnealingLR"}, "did you mean 'CosineAnnealingLR'?"),
        ({"lr_schedule": ["LinearLR", "ConstantLR"]}, "lr_schedule.0"),
        ({"plan": "fsdpp"}, "did you mean 'fsdp'?"),
        ({"plan": "none.json"}, "no plan none.json"),
        ({"plan": {"name": "ddp", "args": {"sed": 1}}}, "did you mean 'seed'?"),
        ({"cluster": "h100:2x8"}, "has 16 ranks, but 1 were started"),
        ({"device": "gpu"}, "'gpu'"),
        ({"logs": {"tensorboard": True}}, "tensorboard needs a folder"),
        ({"data": {"evaluation": None}, "evaluation": {"every_steps": 1}}, "no evaluation data"),
        ({"data": {"batch_size": 100}}, "23 samples, fewer than a batch of 100"),
        ({"folder": "/proc/none"}, "cannot create the folder"),
    ],
)
def test_mistakes_are_reported_before_anything_is_computed(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(sw.errors.ShardwiseError) as caught:
        support.fit(**changes)
    assert message in str(caught.value)


def test_a_missing_wandb_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[wandb\]'"):
        support.fit(logs={"wandb": {"project": "x"}})


@pytest.mark.slow
def test_figures_are_written_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    support.fit(folder=str(tmp_path), steps=1, logs={"tensorboard": True, "console": "off"})
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_dry_run_needs_no_devices() -> None:
    result = sw.Trainer(**support.fields(cluster="h100:2", plan="fsdp", precision="bf16")).dry_run()
    assert result.plan.num_ranks == 2
    assert result.estimate.step_time_s > 0
    assert "memory" in str(result)
