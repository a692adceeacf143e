"""`ShardwiseTrainer` in one process; tests/distributed/test_huggingface.py has several."""

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


def test_init_initializes_a_meta_model(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = hf.Classifier()
    losses = []
    for options in ({"model": hf.Classifier()}, {"model": model, "init": hf.Classifier}):
        trainer = make(tmp_path, args={"logging_steps": 1}, **options)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-7, atol=1e-9)


def test_the_users_optimizer_and_schedule_are_sharded(tmp_path: Path) -> None:
    results = []
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
        results.append((model.state_dict(), [g["lr"] for g in trainer.optimizer.param_groups]))
    assert isinstance(trainer.optimizer, ShardedOptimizer)
    torch.testing.assert_close(results[1], results[0])


def test_an_optimizer_that_lacks_parameters_is_refused(tmp_path: Path) -> None:
    model = hf.Classifier()
    optimizer = torch.optim.SGD(model.up.parameters(), lr=0.1)
    trainer = make(tmp_path, model=model, optimizers=(optimizer, None))
    with pytest.raises(OptimizerError, match=r"lacks 4 of 6 trained parameters, such as down\."):
        trainer.train()


def test_the_model_has_trained_weights_in_on_train_end(tmp_path: Path) -> None:
    weights = []

    class Collect(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights.append(kwargs["model"].down.weight.clone())

    before = hf.Classifier().down.weight
    trainer = make(tmp_path, callbacks=[Collect()])
    trainer.train()
    assert not torch.equal(weights[0], before)
    torch.testing.assert_close(weights[0], trainer.model.down.weight)


def test_predictions_equal_the_plain_trainer(tmp_path: Path) -> None:
    plain = make(tmp_path, Trainer).predict(hf.Points())
    result = make(tmp_path).predict(hf.Points())
    torch.testing.assert_close(torch.tensor(result.predictions), torch.tensor(plain.predictions))
    assert (result.label_ids == plain.label_ids).all()
    assert result.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-12)


def test_arguments_that_contradict_a_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="auto_find_batch_size"):
        make(tmp_path, args={"auto_find_batch_size": True})
    with pytest.raises(ShardwiseError, match="no strategy 'fsdb'; did you mean 'fsdp'"):
        make(tmp_path, plan="fsdb")


def test_saved_arguments_have_the_users_class(tmp_path: Path) -> None:
    trainer = make(tmp_path, replicas=2)
    batch_size = trainer.args.per_device_train_batch_size
    trainer.train()
    assert trainer.args.train_batch_size == 2 * batch_size
    assert type(pickle.loads(pickle.dumps(trainer.args))) is TrainingArguments


class Scaled(hf.Classifier):
    """A classifier whose forward reads a plain attribute."""

    scale = 1.0

    def forward(self, x: Any, labels: Any = None) -> Any:
        output = super().forward(x, labels)
        return {**output, "loss": output["loss"] * self.scale}


class Anneal(TrainerCallback):  # type: ignore[misc]
    """Change an attribute of the model, freeze a parameter, and leave it in eval mode."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        model.scale = 1.0 / (1 + state.global_step)
        model.up.weight.requires_grad_(state.global_step != 2)
        model.eval()


def test_callbacks_may_change_attributes_flags_and_modes(tmp_path: Path) -> None:
    results = []
    for kind in (Trainer, ShardwiseTrainer):
        torch.manual_seed(3)
        model, args = Scaled(), {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
        trainer = make(tmp_path, kind, model=model, callbacks=[Anneal()], args=args)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
        results.append((losses, model.state_dict()))
    torch.testing.assert_close(results[1], results[0])


def test_saving_does_not_change_the_config(tmp_path: Path) -> None:
    model = hf.gpt2()
    trainer = make(tmp_path, model=model)
    before = str(vars(model.config))
    trainer.save_model(str(tmp_path / "saved"))
    assert str(vars(model.config)) == before
