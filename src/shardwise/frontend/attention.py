"""Capture attention of packed documents as what it computes: attention under a mask.

`flex_attention` calls a compiled kernel with the user's functions inside, and `varlen_attn` a
kernel of GPUs with the ends of documents. While a model is traced, and where it is the reference
of `sw.verify`, both compute a mask instead, which is an ordinary tensor that plans shard.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwise.errors import CaptureError
from shardwise.frontend.errors import running_frame
from shardwise.frontend.tracing import patched


@contextlib.contextmanager
def masked_attention() -> Iterator[None]:
    """Make `flex_attention` and `varlen_attn` compute with masks, on any device."""
    patches: list[tuple[Any, str, Any]] = [
        (flex, "flex_attention_hop", _flex),
        (flex, "create_mask", _create_mask),
        (flex, "_validate_device", lambda *_: None),
        (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ]
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):
        patches.append((torch.ops.torch_attn, "_varlen_attn", _varlen))
    with torch.compiler.set_stance("force_eager"), patched(*patches):  # of a compiled one, too
        yield


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Any, Any]:
    """Compute what the operator of `flex_attention` does; only its first result can be used."""
    sizes = (*query.shape[:3], key.shape[2])
    block_rows, block_columns, mask_mod = block_mask[-3:]
    mask = None
    if mask_mod is not flex.noop_mask:
        mask = _everywhere(mask_mod, sizes, query.device)
    elif block_rows < sizes[2] or block_columns < sizes[3]:
        hint = "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        raise _refusal("a BlockMask without a mask_mod cannot be captured", hint)
    if key.shape[0] < query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    grouped, repeats = key, query.shape[1] // key.shape[1]
    if repeats > 1:
        grouped = key.repeat_interleave(repeats, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    products = (query @ grouped.transpose(-2, -1)).to(wide) * scale
    scores = _everywhere(score_mod, sizes, query.device, products)
    if scores is products:  # then nothing else uses them
        out = scaled_dot_product_attention(
            query, key, value, mask, scale=scale, enable_gqa=repeats > 1
        )
        return out, _Unavailable(), _Unavailable()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)  # their result is 0
    weights = torch.softmax(scores.masked_fill(unseen, 0.0), -1).masked_fill(unseen, 0.0)
    if repeats > 1:
        value = value.repeat_interleave(repeats, 1)
    return weights.to(query.dtype) @ value, _Unavailable(), _Unavailable()


def _create_mask(
    mask_mod: Callable[..., Tensor], batch: int | None, heads: int | None, *sizes: Any
) -> Tensor:
    """Do what `create_mask` does for `create_block_mask`, whose blocks nothing uses."""
    *rest, device = sizes
    full = (batch or 1, heads or 1, *rest)
    return _everywhere(mask_mod, full, device).expand(full)


def _everywhere(
    function: Callable[..., Tensor], sizes: tuple[int, ...], device: Any, *scores: Tensor
) -> Tensor:
    """Apply a function of (score, batch, head, row, column) to all of them at once."""
    places = []
    for dim, size in enumerate(sizes):
        places.append(torch.arange(size, device=device).view(_along({dim: size})))
    with _Elementwise(places):
        result = function(*scores, *places)
    return result if result.shape[2:] == sizes[2:] else result.expand(-1, -1, *sizes[2:])


def _along(sizes: dict[int, int]) -> list[int]:
    return [sizes.get(dim, 1) for dim in range(4)]


_FACTORIES = (Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, Tensor.new_tensor)


class _Elementwise(TorchFunctionMode):
    """Read tables at all places without indices; refuse what does not treat each place alone."""

    def __init__(self, places: list[Tensor]) -> None:
        super().__init__()
        self.dims = {id(place): (dim, place.numel()) for dim, place in enumerate(places)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__ and (view := self._view(*args)) is not None:
            return view
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func not in _FACTORIES:
            shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            places = [shape for shape in shapes if len(shape) == 4]
            if places and result.shape != tuple(map(max, zip(*places, strict=True))):
                raise _refusal(
                    f"{getattr(func, '__name__', func)} in a mask_mod or score_mod does not "
                    "compute one value for each place",
                    "elementwise operations, and tables indexed in all dims at once: table[b, i]",
                )
        return result

    def _view(self, table: Tensor, index: Any) -> Tensor | None:
        """Return `table[b, i]` as a view with one dim for each of batch, head, row and column."""
        indices = index if isinstance(index, tuple) else (index,)
        places = [self.dims.get(id(i), (-1, -1)) for i in indices]
        sizes = dict(places)
        if len(sizes) < len(places) or table.shape != tuple(size for _, size in places):
            return None
        order = sorted(range(len(places)), key=places.__getitem__)
        return table.permute(order).reshape(_along(sizes))


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor | None, *options: Any
) -> tuple[Tensor, Any, None]:
    """Compute what the operator of `varlen_attn` does; only its first result can be used."""
    _, _, _, scale, (left, right), enable_gqa, *others = options
    if ends_k is None or any(other is not None for other in others[:2]):
        raise _refusal("varlen_attn with a block table cannot be captured", "plain keys and values")

    def documents(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the document of every row, its distance from the end, and if there is one."""
        rows, ends = torch.arange(x.shape[0], device=x.device), ends[1:].long()
        document = torch.searchsorted(ends, rows, right=True)
        last = ends[document.clamp(max=ends.shape[0] - 1)]
        return document, last - rows, rows < ends[-1]

    (doc_q, to_end_q, valid), (doc_k, to_end_k, _) = (
        documents(query, ends_q),
        documents(key, ends_k),
    )
    mask = (doc_q.unsqueeze(1) == doc_k) & valid.unsqueeze(1)
    ahead = to_end_q.unsqueeze(1) - to_end_k  # documents are aligned at their ends
    if left >= 0:
        mask = mask & (ahead >= -left)
    if right >= 0:
        mask = mask & (ahead <= right)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    return out.squeeze(0).transpose(0, 1), _Unavailable(), None


class _Unavailable:
    """A result that a masked attention does not compute."""

    def numel(self) -> int:
        raise _refusal(
            "the log-sum-exp and maximum of flex_attention cannot be captured",
            "flex_attention without return_lse and return_aux",
        )


def _refusal(message: str, hint: str) -> CaptureError:
    frame = running_frame()
    return CaptureError(message, where=None if frame is None else str(frame), hint=hint)
