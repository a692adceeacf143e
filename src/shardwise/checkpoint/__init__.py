"""Save and load checkpoints that any plan, plain PyTorch and Hugging Face can continue from.

A checkpoint is a folder of safetensors files and `checkpoint.json`, with the names and shapes of a
single device, whatever plan wrote it.
"""

from shardwise.checkpoint.convert import convert_checkpoint
from shardwise.checkpoint.load import Loaded, load_checkpoint
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.open import verify_checkpoint
from shardwise.checkpoint.save import Saving, save_checkpoint
