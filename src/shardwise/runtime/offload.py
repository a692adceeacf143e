"""Host memory for offloaded tensors, and the allocator settings of device memory.

`host_empty` allocates pinned memory; `CopyStream` runs copies beside the computation;
`offload_activations` moves saved tensors to the host. On a CPU all of this is plain memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.runtime.transport.base import Pending

__all__ = ["grow_segments", "offload_activations"]


def host_empty(shape: Sequence[int], dtype: torch.dtype, near: torch.device) -> Tensor:
    """Return uninitialized host memory, pinned if `near` is a GPU."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=near.type == "cuda")


def settle(device: torch.device) -> None:
    """Wait until copies from and to the host are done, before the host reads or writes."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CopyStream:
    """Copies to a device that run beside its computation."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _copy_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Do what is inside after all that was started before, beside all that follows."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self, pending: Pending) -> Pending:
        """Return the tensor once the work done inside is complete."""
        stream = self.stream
        if stream is None:
            return pending

        def wait(tensor: Tensor) -> Tensor:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
            return tensor

        return pending.then(wait)


@dataclass(slots=True)
class _Saved:
    """An activation in host memory."""

    host: Tensor
    device: torch.device
    copied: torch.cuda.Event


@contextlib.contextmanager
def offload_activations(min_bytes: int = 1 << 20) -> Iterator[None]:
    """Keep what autograd saves inside in host memory until backward needs it.

    This concerns tensors on a GPU of `min_bytes` or more that are not parameters.
    """

    def pack(tensor: Tensor) -> Tensor | _Saved:
        if not tensor.is_cuda or tensor.nbytes < min_bytes or _is_parameter(tensor):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        tensor.record_stream(stream)
        return _Saved(host, tensor.device, copied)

    def unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        torch.cuda.current_stream(saved.device).wait_event(saved.copied)
        return saved.host.to(saved.device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether the tensor is a parameter, or a view of one."""
    base = tensor._base if tensor._base is not None else tensor
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


# By default torch's allocator takes memory from the device in segments of fixed size, whose
# remainders fit nothing else. Expandable segments are returned page by page when memory gets short:
# of ranks that took up to 22% more than their tensors had, with room to spare, 13 of 15 fit in 3%
# more than predicted (`benchmarks/results/memory.json`). Plans rely on that. Settings of the user
# (`PYTORCH_ALLOC_CONF`) are respected. ROCm has no expandable segments: a cluster file reserves
# more there (`reserved_gib` of the preset mi300x).


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
