"""Configs from files, keywords and overrides, and errors about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.training.config import TrainConfig, config_to_json, load_config

GOOD = """\
model: {name: model.py:make, args: {width: 8}}
data:
  train: data.py:samples
  batch_size: 4
optimizer: {name: SGD, args: {lr: 1e-2}}
steps: 10
"""


def load(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_files_keywords_and_overrides_have_the_same_fields(tmp_path: Path) -> None:
    config = load(
        tmp_path, GOOD, "optimizer.args.lr=0.5", "ema=0.9", "lr_schedule=StepLR", "plan=fsdp"
    )
    trainer = sw.Trainer(
        model={"name": "model.py:make", "args": {"width": 8}},
        data={"train": "data.py:samples", "batch_size": 4},
        optimizer={"name": "SGD", "args": {"lr": 0.5}},
        steps=10,
        ema=0.9,
        lr_schedule="StepLR",
        plan="fsdp",
    )
    assert trainer.config == config
    assert config.optimizer.args["lr"] == 0.5


def test_objects_may_replace_names() -> None:
    model = torch.nn.Linear(2, 2)
    trainer = sw.Trainer(
        model=model,
        data={"train": torch.utils.data.TensorDataset(torch.zeros(3)), "collate": len},
        optimizer=torch.optim.SGD,
        steps=1,
    )
    assert trainer.config.model is model
    assert trainer.config.optimizer.name is torch.optim.SGD
    assert config_to_json(trainer.config)["model"] == "<torch.nn.modules.linear:Linear>"


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        (GOOD + "optimiser: SGD\n", "did you mean 'optimizer'?", ":7 (opt"),
        (GOOD + "clip_norm: big\n", "'big'", "config.yaml:7 (clip_norm)"),
        (GOOD + "num_microbatches: 0\n", "0, must be", "(num_microbatches)"),
        (GOOD + "seed: true\n", "True", "(seed)"),
        (GOOD + "nonfinite: stp\n", "did you mean 'stop'?", "(nonfinite)"),
        (GOOD + "steps: 3\n", "duplicate field 'steps'", ":7"),
        (GOOD.replace("batch_size", "batchsize"), "did you mean 'batch_size'?", "data.batchsize"),
        (GOOD.replace("args: {lr: 1e-2}", "lr: 1e-2"), "'lr'", "optimizer.args.lr"),
        (
            GOOD.replace("model: {name: model.py:make, args: {width: 8}}\n", ""),
            "'model' is missing",
            "",
        ),
        (GOOD + "loss_fn: !!python/object/apply:os.system [id]\n", "not plain YAML", ":7"),
        (GOOD + "loss_fn: !!python/name:os.system\n", "not plain YAML", ":7"),
        (GOOD + "logs: {wandb: [\n", "not plain YAML", "config.yaml"),
        ("- 1\n", "a list", ""),
        ("", "empty", ""),
    ],
)
def test_an_invalid_config_is_reported_with_its_place(
    tmp_path: Path, text: str, message: str, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert where in str(caught.value)


def test_invalid_overrides_are_reported(tmp_path: Path) -> None:
    for text, message in (
        ("steps", "is not KEY=VALUE"),
        ("stepz=3", "did you mean 'steps'?"),
        ("steps=!!python/name:os.system", "not plain YAML"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, GOOD, text)
        assert message in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config"):
        load_config(tmp_path / "none.yaml")
