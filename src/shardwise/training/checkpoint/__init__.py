"""Checkpoints: saved state that any plan, plain PyTorch and Hugging Face can continue from.

Enters: a module and its optimizer, parallel or plain, on every rank. Leaves: a folder of
safetensors files with `checkpoint.json`, under the names and shapes of the single device; and back.
"""

from __future__ import annotations

from shardwise.training.checkpoint.convert import convert_checkpoint
from shardwise.training.checkpoint.folder import CheckpointManager
from shardwise.training.checkpoint.loading import Loaded, load_checkpoint
from shardwise.training.checkpoint.saving import Saving, save_checkpoint
from shardwise.training.checkpoint.verify import verify_checkpoint

__all__ = [
    "CheckpointManager",
    "Loaded",
    "Saving",
    "convert_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]
