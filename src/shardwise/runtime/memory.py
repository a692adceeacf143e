"""Save device memory: host memory, recomputation that saves products, allocator settings.

`host_empty` allocates pinned memory; `CopyStream` runs copies beside the computation;
`offload_activations` moves saved tensors to the host. On a CPU all of this is plain memory.
"""

import contextlib
import functools
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.errors import ProgramError
from shardwise.runtime.devices import has_streams, is_remote, module_of, synchronize
from shardwise.runtime.transport import Pending


def host_empty(shape: Sequence[int], dtype: torch.dtype, near: torch.device) -> Tensor:
    """Return uninitialized host memory, pinned if `near` is an accelerator with streams."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=has_streams(near))


def settle(device: torch.device) -> None:
    """Wait until copies from and to the host are done, before the host reads or writes."""
    if has_streams(device):
        module_of(device).current_stream(device).synchronize()
    else:
        synchronize(device)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return module_of(device).Stream(device)


class CopyStream:
    """Copies to a device that run beside its computation."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _copy_stream(device) if has_streams(device) else None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Run the body after the work issued so far, concurrently with work issued later."""
        if self.stream is None:
            yield
            return
        module = module_of(self.stream.device)
        self.stream.wait_stream(module.current_stream(self.stream.device))
        with module.stream(self.stream):
            yield

    def join(self, pending: Pending) -> Pending:
        """Return the pending tensor, which also waits for the copies on this stream."""
        stream = self.stream
        if stream is None:
            return pending

        def wait(tensor: Tensor) -> Tensor:
            module_of(stream.device).current_stream(stream.device).wait_stream(stream)
            return tensor

        return pending.then(wait)


_Saved = tuple[Tensor, torch.device, Any]  # in host memory, once it is copied


@contextlib.contextmanager
def offload_activations(min_bytes: int = 1 << 20) -> Iterator[None]:
    """Move tensors that autograd saves in the body to host memory until backward needs them.

    This applies to tensors on an accelerator of `min_bytes` or more that are not parameters.
    """

    def pack(tensor: Tensor) -> Tensor | _Saved:
        if not is_remote(tensor) or tensor.nbytes < min_bytes or _is_parameter(tensor):
            return tensor
        if not has_streams(tensor.device):
            return tensor.cpu(), tensor.device, None
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        module, stream = module_of(tensor.device), _copy_stream(tensor.device)
        stream.wait_stream(module.current_stream(tensor.device))
        with module.stream(stream):
            host.copy_(tensor, non_blocking=True)
            copied = module.Event()
            copied.record(stream)
        tensor.record_stream(stream)
        return host, tensor.device, copied

    def unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        host, device, copied = saved
        if copied is not None:
            module_of(device).current_stream(device).wait_event(copied)
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether the tensor is a parameter, or a view of one."""
    base = tensor._base if tensor._base is not None else tensor
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


# By default torch's allocator reserves device memory in segments of fixed size, whose remainders
# are too small for other tensors. Expandable segments are returned page by page when memory gets
# short: of ranks that reserved up to 22% more than their tensors needed while memory was free, 13
# of 15 run in at most 3% more than predicted (`benchmarks/results/memory.json`). Plans rely on
# that. Settings of the user (`PYTORCH_ALLOC_CONF`) take precedence. ROCm has no expandable
# segments: a cluster file reserves more there (`reserved_gib` of the preset mi300x).


GROWING = "expandable_segments:True"
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the user's environment variables


def grow_segments(device: torch.device) -> bool:
    """Make new segments of a CUDA device expandable, unless the user has configured the allocator.

    Return whether that was done.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if any(name in os.environ for name in SETTINGS):
        return False
    with warnings.catch_warnings():  # torch plans to rename this private function
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(GROWING)
    return True


# Recompute a block but save the results of products: matrices, convolutions, attention. Generated
# code calls a block as `checkpoint(block, x, context_fn=rt.keep_products, …)`. Its backward
# recomputes everything but the expensive part: forward saves the results of products, and the
# second forward reuses them in the same order. Only products are counted, so that hooks that gather
# parameters may run other operations the second time. A product whose result is only an output of
# the block is not saved: the second forward ends before it.

PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution",
    "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::linear",
    "aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::_thnn_fused_lstm_cell",
}  # fmt: skip
BATCHED = {"aten::bmm", "aten::baddbmm"}
# Operators that save nothing for backward: if only these follow the last product, it is not saved.
PASSING = {
    "aten::add", "aten::sub", "aten::neg", "aten::view", "aten::_unsafe_view", "aten::reshape",
    "aten::permute", "aten::transpose", "aten::t", "aten::expand", "aten::unsqueeze",
    "aten::squeeze", "aten::alias", "aten::detach", "aten::clone", "aten::_to_copy",
    "aten::copy_", "aten::empty", "aten::empty_like", "aten::zeros_like", "prim::device",
}  # fmt: skip
# A batched product over at most this many elements is cheap if its result exceeds its operands.
SHORT = 256

Products = deque[tuple[str, Any]]  # names and results


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward, and of its recomputation in backward."""
    products: Products = deque()
    return _Save(products), _Reuse(products)


class _Save(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Save the results of products."""

    def __init__(self, products: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products, self.needed = products, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if _is_expensive(name, args):
            self.products.append((name, tree_map_only(Tensor, Tensor.detach, result)))
            self.needed = False
        elif name not in PASSING and not name.startswith("c10d::"):
            self.needed = True
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.products and not self.needed:
            self.products.pop()


class _Reuse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reuse the results of products in the order in which they were saved."""

    def __init__(self, products: Products) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products, self.used = products, False

    def __enter__(self) -> Any:
        if self.used:  # by another backward of the same forward: recompute everything
            self.products.clear()
        self.used = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not self.products or not _is_expensive(name, args):
            return func(*args, **(kwargs or {}))
        saved_name, result = self.products.popleft()
        if saved_name != name:
            raise ProgramError(f"{name} is recomputed where forward had {saved_name}")
        return result


def _is_expensive(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call is a product that is worth saving.

    Batched products such as attention scores are not: short inner dim, large result.
    """
    if name not in PRODUCTS and "attention" not in name and "flash_attn" not in name:
        return False
    if name not in BATCHED:
        return True
    left, right = args[-2:]
    size = left.shape[0] * left.shape[1] * right.shape[2]
    return bool(left.shape[2] > SHORT or size <= left.numel() + right.numel())
