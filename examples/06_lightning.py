"""Train a small GPT with PyTorch Lightning under a plan, stop, and resume.

python examples/06_lightning.py --plan fsdp --devices 2
torchrun --nproc-per-node 2 examples/06_lightning.py --plan pipeline --devices 2
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import small_gpt
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shardwise.integrations.lightning import ShardwiseStrategy


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of consecutive numbers."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in small_gpt.batch(index, rows=1).items()}


class GPT(L.LightningModule):
    """An ordinary LightningModule without any parallel code."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = small_gpt.SmallGPT()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(options: argparse.Namespace, epochs: int, ckpt_path: str | None = None) -> L.Trainer:
    """Train up to some epochs, with a batch of 8 over all ranks together."""
    trainer = L.Trainer(
        strategy=ShardwiseStrategy(options.plan),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[ModelCheckpoint("checkpoints", "last", enable_version_counter=False)],
        enable_progress_bar=False,
    )
    trainer.fit(GPT(), DataLoader(Rows(), batch_size=8, shuffle=True), ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        print(f"epoch {epochs - 1}  loss {trainer.callback_metrics['loss_epoch']:.4f}")
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="ddp")
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    L.seed_everything(0)
    first = fit(arguments, epochs=1)
    fit(arguments, epochs=2, ckpt_path="checkpoints/last.ckpt")
    if first.is_global_zero:  # it is a plain Lightning checkpoint
        restored = GPT.load_from_checkpoint("checkpoints/last.ckpt")
        print(f"last.ckpt on one process: loss {restored.model(**small_gpt.batch(0)):.4f}")
