"""LightningModules, data and trainers for tests, on one process and in the pool's workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 6, 5


class Classifier(L.LightningModule):
    """A small residual network that logs by step, epoch, dict, metric and list."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout))
            for _ in range(2)
        )
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for up, down in zip(self.blocks, self.downs, strict=True):
            x = x + down(up(x))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"hits": (logits.argmax(-1) == y).sum()}, on_epoch=True, reduce_fx="sum")
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        return {"loss": loss, "total": logits.sum()}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val_loss", loss)
        self.outputs.append(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("val_worst", torch.stack(self.outputs).max())
        self.outputs.clear()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Recorder(L.Callback):
    """Record the loss of every step and the metrics of every epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of a training run, comparable between processes."""

    losses: list[float]
    rates: list[float]
    metrics: list[dict[str, float]]
    state: dict[str, Tensor]


def loader(rows: int = 22, batch_size: int = 6, *, shuffle: bool = True) -> DataLoader[Any]:
    """Return rows whose number is not a multiple of the batch size."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


class PoolEnvironment(LightningEnvironment):
    """The processes of the test pool, which have a process group."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank() % max(1, torch.cuda.device_count() if uses_gpus() else 1024)

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...

    def teardown(self) -> None: ...


def uses_gpus() -> bool:
    """Return whether the pool of this process communicates over NCCL."""
    return dist.is_initialized() and dist.get_backend() == "nccl"


def trainer(
    strategy: Any = "auto", folder: Any = None, **options: Any
) -> tuple[L.Trainer, Recorder]:
    """Return a silent float64 trainer over all ranks of the pool if there is one.

    Ranks that share a GPU are nodes of one device each.
    """
    recorder = Recorder()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ranks = 1 if isinstance(strategy, str) else ranks
    devices = min(ranks, torch.cuda.device_count()) if uses_gpus() else ranks
    settings: dict[str, Any] = {
        "precision": "64-true",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "plugins": [PoolEnvironment()] if ranks > 1 else None,
        "devices": devices,
        "num_nodes": ranks // devices,
    }
    settings.update(options)
    settings["callbacks"] = [recorder, *options.get("callbacks", [])]
    warnings.simplefilter("ignore")
    made = L.Trainer(
        accelerator="gpu" if uses_gpus() else "cpu",
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    return made, recorder


def fit(
    strategy: Any = "auto",
    make: Callable[[], L.LightningModule] = Classifier,
    ckpt_path: Any = None,
    rows: int = 22,
    **options: Any,
) -> Run:
    """Train a classifier for two epochs, with validation."""
    L.seed_everything(5, verbose=False)
    module = make()
    made, recorder = trainer(strategy, **options)
    made.fit(module, loader(rows), loader(10, shuffle=False), ckpt_path=ckpt_path)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return Run(losses=recorder.losses, rates=recorder.rates, metrics=recorder.metrics, state=state)


def assert_same(actual: Run, expected: Run, tolerance: float = 1e-10) -> None:
    """Require equal losses, learning rates, logged values and final weights."""
    assert actual.losses, "nothing was trained"
    torch.testing.assert_close(actual.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.rates, expected.rates, rtol=tolerance, atol=tolerance)
    assert len(actual.metrics) == len(expected.metrics)
    for metrics, expected_metrics in zip(actual.metrics, expected.metrics, strict=True):
        _close(metrics, expected_metrics, tolerance)
    _close(actual.state, expected.state, tolerance)


def _close(actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name],
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
