"""The device of a rank, whatever its kind, through torch's device-generic interface.

Streams, events and pinned memory are those of the device's module, `torch.cuda` or `torch.xpu`; a
CPU, and an accelerator whose module has none, computes in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HOST = ("cpu", "meta")
module_of: Callable[[torch.device], Any] = torch.get_device_module


def is_remote(tensor: Tensor) -> bool:
    """Return whether a tensor is in memory that hosts and gloo cannot read."""
    return tensor.device.type not in _HOST


def accelerator() -> str:
    """Return the kind of torch's accelerator if one can be used, else `cpu`."""
    current = torch.accelerator.current_accelerator(check_available=False)
    return current.type if current is not None and module_of(current).is_available() else "cpu"


def backend_of(kind: str, ranks: int) -> str:
    """Return the backend of process groups for `ranks` on this machine.

    A device's own library needs a device for each rank; gloo copies through the host.
    """
    if kind in _HOST or ranks > module_of(torch.device(kind)).device_count():
        return "gloo"
    return dist.Backend.default_device_backend_map.get(kind, "gloo")


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Return whether work on the device can be ordered by streams and events."""
    names = ("Stream", "Event", "current_stream", "stream")
    return device.type not in _HOST and all(hasattr(module_of(device), name) for name in names)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type not in _HOST:
        module_of(device).synchronize(device)
