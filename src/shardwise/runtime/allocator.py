"""How a GPU's memory is handed out: in segments that grow.

By default torch's allocator takes memory from the device in pieces that stay as they are, and what
is left over in them fits nothing else. Segments that grow (`expandable_segments`) are given back
page by page where memory gets short: of ranks that took up to 22% more than their tensors had, with
room to spare, 13 of 15 did with 3% more than predicted (`benchmarks/results/memory.json`). Plans
count on that. Settings of the user (`PYTORCH_ALLOC_CONF`) stay as they are. With ROCm segments do
not grow: a cluster file reserves more there (`reserved_gib` of the preset mi300x).
"""

from __future__ import annotations

import os
import warnings

import torch

__all__ = ["grow_segments"]

GROWING = "expandable_segments:True"
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # where users set the allocator


def grow_segments(device: torch.device) -> bool:
    """Have new segments of a CUDA device grow, where nothing else is set; whether that was done."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if any(name in os.environ for name in SETTINGS):
        return False
    with warnings.catch_warnings():  # torch means to give this another name, private as well
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(GROWING)
    return True
