"""Recompute a block but keep the results of products: matrices, convolutions, attention.

Generated code calls a block as `checkpoint(block, x, context_fn=rt.keep_products, …)`. Its backward
recomputes everything but the expensive part: forward saves the results of products, and the second
forward takes them in the same order. Only products are counted, so that hooks which gather
parameters may do other work the second time. A product whose result only leaves the block is not
saved: the second forward ends before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.errors import ProgramError

__all__ = ["keep_products"]

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
