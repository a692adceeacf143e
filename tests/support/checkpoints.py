"""Training that stops and resumes under another plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from tests.support import zoo
from tests.support.training import device_of_rank, make, plan_for, to_device

BEFORE, AFTER = 2, 5

# name -> ranks, strategy, options; "one" is plain PyTorch.
SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "", {}),
    "ddp2": (2, "ddp", {}),
    "fsdp4": (4, "fsdp", {}),
    "tp2": (2, "tensor", {}),
    "pp2": (2, "pipeline", {"pp": 2, "num_microbatches": 3}),
    "tp2xpp2": (4, "hybrid", {"tp": 2, "pp": 2, "num_microbatches": 3}),
    "fsdp3": (3, "fsdp", {}),
}
FURTHER: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2": (2, "fsdp", {}),
    "zero1x2": (2, "zero1", {}),
    "zero2x3": (3, "zero2", {}),
    "hybrid": (4, "hybrid", {"dp": 2, "tp": 2, "zero": 3}),
    "uneven": (2, "tensor", {"shares": {"tp": (1, 3)}}),
    "host1": (2, "zero1", {"offload": ("optimizer",)}),
    "host3": (2, "fsdp", {"offload": ("parameters",)}),
}
GROUPS = [{"params": "*norm*", "weight_decay": 0.0}, {"params": "*bias", "lr": 0.02}]


@dataclass(frozen=True)
class Run:
    """The losses of some steps, and the full state after them."""

    losses: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]


class Plain:
    """Training on one device, with the interface of `Parallel`."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.module, self.batch = model, batch
        names = dict(model.named_parameters())
        trained = {n: p for n, p in names.items() if p.requires_grad}
        norm = {n for n in trained if "norm" in n}
        bias = {n for n in trained if n.endswith("bias")} - norm
        others = [p for n, p in trained.items() if n not in norm | bias]
        groups = [
            {"params": [trained[n] for n in trained if n in norm], "weight_decay": 0.0},
            {"params": [trained[n] for n in trained if n in bias], "lr": 0.02},
            {"params": others},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.names = {id(p): n for n, p in names.items()}

    def step(self) -> float:
        output = self.module(**self.batch)
        loss = output["loss"] if isinstance(output, dict) else zoo.loss_of(output)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        model = {n: t.detach().clone() for n, t in self.module.state_dict().items()}
        state = self.optimizer.state.items()
        return model, {self.names[id(p)]: {k: t.clone() for k, t in v.items()} for p, v in state}


class Parallel:
    """Training on this rank of a plan."""

    def __init__(self, name: str, model: nn.Module, batch: Any) -> None:
        ranks, strategy, options = {**SETTINGS, **FURTHER}[name]
        plan = plan_for(model, batch, strategy, ranks, **options)
        self.module, self.batch = sw.parallelize(model, batch, plan=plan), batch
        self.optimizer: Any = sw.optimizer(self.module, torch.optim.AdamW, GROUPS, lr=0.01)

    def step(self) -> float:
        loss = self.module.train_step(self.batch).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        return self.module.gather_state_dict(), self.optimizer.state_dict()["state"]


def start(setting: str, model_name: str) -> Plain | Parallel:
    model, batch = to_device(*make(model_name), device_of_rank())
    return Plain(model, batch) if setting == "one" else Parallel(setting, model, batch)


def save_run(setting: str, model_name: str, path: Path) -> Run:
    """Train some steps and save a checkpoint."""
    with KeepDouble():
        run = start(setting, model_name)
        losses = [run.step() for _ in range(BEFORE)]
        model, optimizer = run.state()
        sw.save_checkpoint(path, run.module, run.optimizer, step=BEFORE, extra={"seen": 7})
        return Run(losses, model, optimizer)


def load_runs(setting: str, model_name: str, paths: list[Path]) -> list[tuple[Run, list[float]]]:
    """Load each checkpoint; return the loaded state and the losses of further steps."""
    runs = []
    with KeepDouble():
        run = start(setting, model_name)
        for path in paths:
            loaded = sw.load_checkpoint(path, run.module, run.optimizer)
            assert (loaded.step, loaded.extra) == (BEFORE, {"seen": 7})
            model, optimizer = run.state()
            runs.append((Run([], model, optimizer), [run.step() for _ in range(AFTER)]))
    return runs


def continued(model_name: str) -> list[float]:
    """Return the losses of one device that did not stop."""
    with KeepDouble():
        run = start("one", model_name)
        return [run.step() for _ in range(BEFORE + AFTER)]


def assert_same_state(actual: Run, saved: Run) -> None:
    """Require bit-equal parameters, buffers and optimizer state."""
    assert set(actual.model) == set(saved.model)
    for name, tensor in saved.model.items():
        assert torch.equal(actual.model[name], tensor), name
    assert set(actual.optimizer) == set(saved.optimizer)
    for name, values in saved.optimizer.items():
        assert set(actual.optimizer[name]) == set(values), name
        for key, value in values.items():
            assert torch.equal(actual.optimizer[name][key], value), f"{key} of {name}"
