"""`ShardwiseTrainer` in one process; on several: tests/distributed/test_huggingface.py."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import OptimizerError, PlanError, ShardwiseError
from tests.support import huggingface as hf

pytest.importorskip("accelerate", reason="the Hugging Face integration is an extra")

from transformers import Trainer, TrainerCallback, TrainingArguments

from shardwise.integrations.huggingface import ShardwiseTrainer
from shardwise.runtime import ShardedOptimizer


def make(folder: Path, kind: Any = ShardwiseTrainer, **keywords: Any) -> Any:
    args = {**hf.ARGS, "output_dir": str(folder), "max_steps": 2, **keywords.pop("args", {})}
    model = keywords.pop("model", None) or hf.Classifier()
    if kind is ShardwiseTrainer:
        keywords.setdefault("plan", "ddp")
    return kind(model, TrainingArguments(**args), train_dataset=hf.Points(), **keywords)


def test_a_model_on_meta_gets_its_weights_from_init(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = hf.Classifier()
    losses = []
    for options in ({"model": hf.Classifier()}, {"model": model, "init": hf.Classifier}):
        trainer = make(tmp_path, args={"logging_steps": 1}, **options)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-7, atol=1e-9)


def test_optimizer_and_schedule_of_the_user_are_the_same_on_parts(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, ShardwiseTrainer):
        model = hf.Classifier()
        groups = [
            {"params": model.up.parameters(), "lr": 0.3},
            {"params": [*model.norm.parameters(), *model.down.parameters()]},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        trainer = make(tmp_path, kind, model=model, optimizers=(optimizer, schedule))
        trainer.train()
        found.append((model.state_dict(), [g["lr"] for g in trainer.optimizer.param_groups]))
    assert isinstance(trainer.optimizer, ShardedOptimizer)
    torch.testing.assert_close(found[1], found[0])


def test_an_optimizer_that_lacks_parameters_is_refused(tmp_path: Path) -> None:
    model = hf.Classifier()
    optimizer = torch.optim.SGD(model.up.parameters(), lr=0.1)
    trainer = make(tmp_path, model=model, optimizers=(optimizer, None))
    with pytest.raises(OptimizerError, match=r"lacks 4 of 6 parameters that are trained, down\."):
        trainer.train()


def test_the_model_is_trained_when_callbacks_see_the_end(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(given["model"].down.weight.clone())

    before = hf.Classifier().down.weight
    trainer = make(tmp_path, callbacks=[Look()])
    trainer.train()
    assert not torch.equal(seen[0], before)
    torch.testing.assert_close(seen[0], trainer.model.down.weight)


def test_predictions_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    plain = make(tmp_path, Trainer).predict(hf.Points())
    found = make(tmp_path).predict(hf.Points())
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(plain.predictions))
    assert (found.label_ids == plain.label_ids).all()
    assert found.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-12)


def test_what_contradicts_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="auto_find_batch_size"):
        make(tmp_path, args={"auto_find_batch_size": True})
    with pytest.raises(ShardwiseError, match="no strategy 'fsdb'; did you mean 'fsdp'"):
        make(tmp_path, plan="fsdb")


def test_the_users_arguments_stay_and_are_what_is_saved(tmp_path: Path) -> None:
    trainer = make(tmp_path, replicas=2)
    given = trainer.args.per_device_train_batch_size
    trainer.train()
    assert trainer.args.train_batch_size == 2 * given
    assert type(pickle.loads(pickle.dumps(trainer.args))) is TrainingArguments


class Scaled(hf.Classifier):
    """Its forward reads a plain attribute."""

    scale = 1.0

    def forward(self, x: Any, labels: Any = None) -> Any:
        found = super().forward(x, labels)
        return {**found, "loss": found["loss"] * self.scale}


class Anneal(TrainerCallback):  # type: ignore[misc]
    """Changes an attribute of the model, freezes a part of it, and leaves it in eval mode."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        model.scale = 1.0 / (1 + state.global_step)
        model.up.weight.requires_grad_(state.global_step != 2)
        model.eval()


def test_callbacks_may_change_attributes_flags_and_modes(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, ShardwiseTrainer):
        torch.manual_seed(3)
        model, args = Scaled(), {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
        trainer = make(tmp_path, kind, model=model, callbacks=[Anneal()], args=args)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
        found.append((losses, model.state_dict()))
    torch.testing.assert_close(found[1], found[0])


def test_saving_leaves_the_config_of_the_model_as_it_was(tmp_path: Path) -> None:
    model = hf.gpt2()
    trainer = make(tmp_path, model=model)
    before = str(vars(model.config))
    trainer.save_model(str(tmp_path / "saved"))
    assert str(vars(model.config)) == before
