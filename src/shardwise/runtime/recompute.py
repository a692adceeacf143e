"""Recomputation that keeps the results of products: matrices, convolutions, attention.

Generated code calls a block as `checkpoint(block, x, context_fn=rt.keep_products, …)`. What the
block's backward needs is computed again, all but what is expensive: forward puts the results of
products aside, and the second forward takes them in the same order. Only products are counted, so
that hooks which gather parameters may do other work the second time.
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
SHORT = 256  # a batched product over fewer elements that gives more than it takes is cheap

Kept = deque[tuple[str, Any]]


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What surrounds a forward, and its repetition in backward."""
    kept: Kept = deque()
    return _Keep(kept), _Reuse(kept)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put the results of products aside."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

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
        return result


class _Reuse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Take the results of products in the order in which they were put aside."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = _name(func)
        if not _is_product(name) or _is_cheap(name, args):
            return func(*args, **(kwargs or {}))
        if not self.kept:
            raise ProgramError(
                f"{name} has no kept result: backward ran twice, or forward took another way",
                hint='recompute "full" repeats everything',
            )
        before, result = self.kept.popleft()
        if before != name:
            raise ProgramError(f"{name} is recomputed where forward had {before}")
        return result


def _name(func: Any) -> str:
    return str(func._schema.name)


def _is_product(name: str) -> bool:
    return name in PRODUCTS or "attention" in name or "flash_attn" in name


def _is_cheap(name: str, args: tuple[Any, ...]) -> bool:
    """Attention scores: a short inner dim, and a result larger than both operands."""
    if name not in BATCHED:
        return False
    left, right = args[-2:]
    size = left.shape[0] * left.shape[1] * right.shape[2]
    return bool(left.shape[2] <= SHORT and size > left.numel() + right.numel())
