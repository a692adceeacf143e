"""Capture packed sequences as padded ones with lengths.

The layout of a packed sequence depends on the lengths in the batch. While a model is traced,
`pack_padded_sequence` keeps the padded batch, recurrent layers become `PackedLayer`, and
`pad_packed_sequence` returns the padded result: the same numbers for any lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch.nn.utils import rnn

from shardwise.errors import CaptureError
from shardwise.frontend.errors import running_frame
from shardwise.frontend.tracing import patched
from shardwise.packed import PackedLayer

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_BY_ROW = (  # functions of single rows, which commute with packing
    *(F.dropout, F.linear, F.relu, F.gelu, F.silu, F.embedding, F.layer_norm, F.leaky_relu),
    *(torch.tanh, torch.sigmoid, torch.relu),
)
_PADDED = "pad_packed_sequence(packed, batch_first=True), and a mask of the positions"


class Rows:
    """Stands for the data of a packed sequence: the padded batch, whose padding does not count."""

    def __init__(self, padded: Tensor, lengths: Tensor, *, is_zeroed: bool = False) -> None:
        self.padded, self.lengths, self.is_zeroed = padded, lengths, is_zeroed
        self.dtype, self.device, self.is_cuda = padded.dtype, padded.device, padded.is_cuda

    def mask(self) -> Tensor:
        """Return which positions exist, `[b, t]`."""
        positions = torch.arange(self.padded.shape[1], device=self.device)
        return positions < self.lengths.to(self.device)[:, None]

    def dim(self) -> int:
        return self.padded.dim() - 1

    def size(self, dim: int) -> int:
        return self.padded.shape[dim] if dim in (-1, self.dim() - 1) else _refuse("size")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse(name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rows = [arg for arg in args if isinstance(arg, cls)]
        if function is F.cross_entropy and len(rows) == 2:
            return _cross_entropy(rows[0], rows[1], *args[2:], **kwargs)
        if function not in _BY_ROW or any(row.lengths is not rows[0].lengths for row in rows):
            _refuse(getattr(function, "__name__", str(function)))
        result = function(*(a.padded if isinstance(a, cls) else a for a in args), **kwargs)
        return cls(result, rows[0].lengths)


class _Sizes(SimpleNamespace):
    """Stands for the batch sizes of a packed sequence, of which only the first is known."""

    def __getitem__(self, index: int) -> int:
        return cast(int, self.rows) if index == 0 else _refuse("batch_sizes")


def _refuse(name: str) -> Any:
    frame = running_frame()
    raise CaptureError(
        f"{name} is used on the data of a packed sequence, whose layout depends on the lengths",
        where=None if frame is None else str(frame),
        hint=_PADDED,
    )


def _cross_entropy(
    rows: Rows, labels: Rows, weight: Any = None, ignore_index: int = -100, **kwargs: Any
) -> Tensor:
    targets = labels.padded.masked_fill(~labels.mask(), ignore_index)
    flat = rows.padded.flatten(0, 1), targets.flatten(0, 1)
    if kwargs.get("reduction", "mean") == "none":
        _refuse("cross_entropy(reduction='none')")
    return F.cross_entropy(*flat, weight=weight, ignore_index=ignore_index, **kwargs)


def pack(input: Tensor, lengths: Any, batch_first: bool) -> rnn.PackedSequence:
    """Return a packed sequence that holds the padded batch."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    rows: Any = Rows(input if batch_first else input.transpose(0, 1), lengths)
    sizes: Any = _Sizes(rows=rows.padded.shape[0], device=torch.device("cpu"))
    return rnn.PackedSequence(rows, sizes)


def pad(
    sequence: Any, batch_first: bool, padding_value: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    """Return the padded batch and its lengths; the longest one is the size, unless it is given."""
    rows: Rows = sequence.data
    padded, lengths = rows.padded, rows.lengths
    if total_length is None or total_length < padded.shape[1]:
        longest = int(lengths.max())  # becomes a guard
        if total_length is not None and total_length < longest:
            raise ValueError(f"total_length={total_length}, but a sequence has {longest} items")
        total_length = total_length or longest
    if padding_value or not rows.is_zeroed:
        mask = rows.mask().view(*padded.shape[:2], *[1] * (padded.dim() - 2))
        padded = padded.masked_fill(~mask, padding_value)
    if total_length <= padded.shape[1]:
        padded = padded[:, :total_length]
    else:
        more = [0, 0] * (padded.dim() - 2) + [0, total_length - padded.shape[1]]
        padded = F.pad(padded, more, value=padding_value)
    return padded if batch_first else padded.transpose(0, 1), lengths


def _layer(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def layer(rows: Any, *args: Any) -> Any:
        if not isinstance(rows, Rows):
            return original(rows, *args)
        _, hx, weights, has_biases, layers, dropout, training, bidirectional = args
        states = list(hx) if isinstance(hx, tuple | list) else [hx]
        groups = layers if dropout and training and layers > 1 else 1  # dropout is between layers
        size, x, ends = layers // groups, rows.padded, []
        for number in range(groups):
            if number:
                x = F.dropout(x, dropout)
            x, *last = PackedLayer.apply(  # type: ignore[no-untyped-call]
                kind, size, bool(bidirectional), bool(has_biases), x, rows.lengths,
                *(state.chunk(groups)[number] for state in states),
                *_part(weights, number, groups),
            )  # fmt: skip
            ends.append(last)
        finals = [torch.cat(parts) if groups > 1 else parts[0] for parts in zip(*ends, strict=True)]
        return Rows(x, rows.lengths, is_zeroed=True), *finals

    return layer


def _part(weights: Sequence[Tensor], number: int, groups: int) -> Sequence[Tensor]:
    count = len(weights) // groups
    return weights[number * count : (number + 1) * count]


# The bodies of torch's functions while a model is traced, whatever name they were imported by.
def _pack_padded_sequence(
    input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> Any:
    from shardwise.frontend import packed_sequences

    return packed_sequences.pack(input, lengths, batch_first)


def _pad_packed_sequence(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None
) -> Any:
    from shardwise.frontend import packed_sequences

    return packed_sequences.pad(sequence, batch_first, padding_value, total_length)


@contextlib.contextmanager
def padded_sequences() -> Iterator[None]:
    """Keep packed sequences padded inside a `with` block."""
    functions: list[tuple[Any, Any]] = [
        (rnn.pack_padded_sequence, _pack_padded_sequence),
        (rnn.pad_packed_sequence, _pad_packed_sequence),
    ]
    vf: Any = _VF
    layers = [(vf, kind, _layer(kind, getattr(vf, kind))) for kind in _KINDS]
    codes = [function.__code__ for function, _ in functions]
    with patched(*layers):
        for function, replacement in functions:
            function.__code__ = replacement.__code__
        try:
            yield
        finally:
            for (function, _), code in zip(functions, codes, strict=True):
                function.__code__ = code
