"""Unseeded initial weights and freezing in callbacks, with every trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.integrations.lightning import ShardwiseStrategy
from tests.support import huggingface as hf
from tests.support.lightning import Classifier, Run, assert_same, trainer
from tests.support.lightning import loader as lightning_loader
from tests.support.pool import Pool
from tests.support.trainer import Net, fields

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero2", {}),
    ("fsdp", {}),
    ("tensor", {}),
    ("pipeline", {"num_microbatches": 2}),
]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ------------------------------------------------------------------ sw.Trainer


class Freezes(sw.Callback):
    """Freeze the first block for some steps, and the head until step 3."""

    def on_start(self, trainer: sw.Trainer) -> None:
        self.set_flags(trainer)

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        self.set_flags(trainer)

    def set_flags(self, trainer: sw.Trainer) -> None:
        for name, parameter in trainer.module.named_parameters():
            frozen = name.startswith("blocks.0") and 2 <= trainer.step < 5
            parameter.requires_grad_(
                not frozen and not (name == "head.weight" and trainer.step < 3)
            )


def train(plan: str, folder: Path | None = None, steps: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(rank())
    model = Net(dropout=0.0)
    model.head.weight.requires_grad_(False)
    options: dict[str, Any] = {"ema": None, "plan": plan, "callbacks": [Freezes()], "steps": steps}
    if folder is not None:
        options |= {"folder": str(folder), "checkpoints": {"every_steps": 4}, "resume": "auto"}
    with sw.Trainer(**fields(model=model, lr_schedule=[], **options)) as run:
        run.fit()
        return run.state_dict()


@pytest.mark.parametrize(("plan", "options"), PLANS)
def test_trainer_equals_one_process(
    pool: Callable[[int], Pool], plan: str, options: dict[str, Any]
) -> None:
    (expected,) = pool(1).run(train, "ddp", timeout=100)
    config = {"name": plan, "args": options} if options else plan
    for state in pool(2).run(train, config, timeout=200):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)


def test_trainer_resumes_after_flags_changed(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    expected = pool(2).run(train, "zero2", timeout=100)[0]
    pool(2).run(train, "zero2", tmp_path, 4, timeout=100)
    for state in pool(2).run(train, "zero2", tmp_path, timeout=100):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)


# ------------------------------------------------------------------ Lightning


class FreezesModule(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        module.embed.requires_grad_(trainer.global_step not in (1, 2))
        module.head.bias.requires_grad_(trainer.global_step >= 3)


def fit(plans: list[tuple[str, dict[str, Any]]]) -> list[Run]:
    runs = []
    for strategy in [ShardwiseStrategy({"name": n, "args": o}) for n, o in plans] or ["auto"]:
        torch.manual_seed(rank())
        module = Classifier().double()
        module.head.bias.requires_grad_(False)
        run, seen = trainer(strategy, max_steps=6, callbacks=[FreezesModule()])
        torch.manual_seed(9)  # the order of the data, which all ranks must share
        run.fit(module, lightning_loader(), lightning_loader(10, shuffle=False))
        state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        runs.append(Run(losses=seen.losses, rates=seen.rates, metrics=seen.metrics, state=state))
    return runs


def test_lightning_equals_one_process(pool: Callable[[int], Pool]) -> None:
    (expected,) = fit([])
    for runs in pool(2).run(fit, PLANS, timeout=300):
        for run in runs:
            assert_same(run, expected)


# ------------------------------------------------------------------ Hugging Face


def hugging_face(plan: str | None, options: dict[str, Any]) -> dict[str, Any]:
    from transformers import TrainerCallback

    class FreezesModel(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            model.transformer.h[0].requires_grad_(state.global_step not in (1, 2))

    replicas = dist.get_world_size() if plan in ("ddp", "zero2", "fsdp") else 1
    sizes = {"per_device_train_batch_size": 8 // replicas, "max_steps": 5}
    model = hf.gpt2(seed=rank())
    result = hf.train("gpt2", sizes, options, plan=plan, made=model, callbacks=[FreezesModel()])
    return {key: result[key] for key in ("losses", "norms", "parameters")}


@pytest.mark.parametrize(("plan", "options"), PLANS)
def test_hugging_face_equals_one_process(
    pool: Callable[[int], Pool], plan: str, options: dict[str, Any]
) -> None:
    expected = hugging_face(None, {})
    for result in pool(2).run(hugging_face, plan, options, timeout=240):
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-9, atol=1e-9)
        for name, value in expected["parameters"].items():
            torch.testing.assert_close(
                result["parameters"][name], value, rtol=1e-8, atol=1e-9, msg=name
            )
