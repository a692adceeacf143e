"""Checkpoints: saved state that any plan, plain PyTorch and Hugging Face can continue from.

Enters: a module and its optimizer, parallel or plain, on every rank. Leaves: a folder of
safetensors files with `checkpoint.json`, under the names and shapes of the single device; and back.
"""

from __future__ import annotations

from shardwise.checkpoint.convert import convert_checkpoint
from shardwise.checkpoint.load import Loaded, load_checkpoint
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.opening import verify_checkpoint
from shardwise.checkpoint.save import Saving, save_checkpoint

__all__ = [
    "CheckpointManager",
    "Loaded",
    "Saving",
    "convert_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]
