"""Save device memory: host memory, recomputation that keeps products, allocator settings.

`host_empty` allocates pinned memory; `CopyStream` runs copies beside the computation;
`offload_activations` moves saved tensors to the host. On a CPU all of this is plain memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.errors import ProgramError
from shardwise.runtime.transport import Pending


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


# Recompute a block but keep the results of products: matrices, convolutions, attention. Generated
# code calls a block as `checkpoint(block, x, context_fn=rt.keep_products, …)`. Its backward
# recomputes everything but the expensive part: forward saves the results of products, and the
# second forward takes them in the same order. Only products are counted, so that hooks which gather
# parameters may do other work the second time. A product whose result only leaves the block is not
# saved: the second forward ends before it.

PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution",
    "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::linear",
    "aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::_thnn_fused_lstm_cell",
}  # fmt: skip
BATCHED = {"aten::bmm", "aten::baddbmm"}
# After the last product: what saves nothing for backward, so that nothing needs its result.
PASSING = {
    "aten::add", "aten::sub", "aten::neg", "aten::view", "aten::_unsafe_view", "aten::reshape",
    "aten::permute", "aten::transpose", "aten::t", "aten::expand", "aten::unsqueeze",
    "aten::squeeze", "aten::alias", "aten::detach", "aten::clone", "aten::_to_copy",
    "aten::copy_", "aten::empty", "aten::empty_like", "aten::zeros_like", "prim::device",
}  # fmt: skip
SHORT = 256  # a batched product over fewer elements that gives more than it takes is cheap

Kept = deque[tuple[str, Any]]


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward, and of its repetition in backward."""
    saved: Kept = deque()
    return _Keep(saved), _Reuse(saved)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put the results of products aside."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.needed = kept, True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _name(func)
        if _is_product(name) and not _is_cheap(name, args):
            self.kept.append((name, tree_map_only(Tensor, Tensor.detach, result)))
            self.needed = False
        elif name not in PASSING and not name.startswith("c10d::"):
            self.needed = True
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.kept and not self.needed:
            self.kept.pop()


class _Reuse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Take the results of products in the order in which they were put aside."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.used = kept, False

    def __enter__(self) -> Any:
        if self.used:  # by another backward of the same forward: compute everything again
            self.kept.clear()
        self.used = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = _name(func)
        if not self.kept or not _is_product(name) or _is_cheap(name, args):
            return func(*args, **(kwargs or {}))
        before, result = self.kept.popleft()
        if before != name:
            raise ProgramError(f"{name} is recomputed where forward had {before}")
        return result


def _name(func: Any) -> str:
    return str(func._schema.name)


def _is_product(name: str) -> bool:
    return name in PRODUCTS or "attention" in name or "flash_attn" in name


def _is_cheap(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a product is cheap, as attention scores are: short inner dim, large result."""
    if name not in BATCHED:
        return False
    left, right = args[-2:]
    size = left.shape[0] * left.shape[1] * right.shape[2]
    return bool(left.shape[2] <= SHORT and size > left.numel() + right.numel())
