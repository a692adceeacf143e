"""The device of a rank, whatever its kind, through torch's device-generic interface.

Streams, events and pinned memory are those of the device's module, `torch.cuda` or `torch.xpu`; a
CPU, and an accelerator whose module has none, computes in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_HOST = ("cpu", "meta")
module_of: Callable[[torch.device], Any] = torch.get_device_module


def is_remote(tensor: Tensor) -> bool:
    """Return whether a tensor is in memory that hosts and gloo cannot read."""
    return tensor.device.type not in _HOST


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Return whether work on the device can be ordered by streams and events."""
    names = ("Stream", "Event", "current_stream", "stream")
    return device.type not in _HOST and all(hasattr(module_of(device), name) for name in names)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type not in _HOST:
        module_of(device).synchronize(device)
