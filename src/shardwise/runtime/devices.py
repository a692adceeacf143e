"""The device of a rank, whatever its kind, through torch's device-generic interface.

Streams, events and pinned memory are those of the device's module, `torch.cuda` or `torch.xpu`; a
CPU, and an accelerator whose module has none, computes in order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def is_accelerated(device: torch.device) -> bool:
    """Return whether a device has memory of its own, from which hosts and gloo cannot read."""
    return device.type not in ("cpu", "meta")


def is_remote(tensor: Tensor) -> bool:
    """Return whether a tensor is in the memory of an accelerator."""
    return is_accelerated(tensor.device)


def module_of(device: torch.device) -> Any:
    """Return the module of a kind of devices, such as `torch.cuda`."""
    return torch.get_device_module(device)


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Return whether work on the device can be ordered by streams and events."""
    names = ("Stream", "Event", "current_stream", "stream")
    return is_accelerated(device) and all(hasattr(module_of(device), name) for name in names)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if is_accelerated(device):
        module_of(device).synchronize(device)
