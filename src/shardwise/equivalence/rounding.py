"""How far rounding alone moves each number of a training step.

Ranks add in another order than one device, so that results differ by rounding. Where large terms
cancel, the difference is large beside the result: the gradient of a bias before a batch norm is
zero but for rounding. The tolerance of every element is therefore measured, not guessed: the
captured graph runs a few times more, and every operation of its forward and backward pass has its
result changed by about 1e-12 of each element. The largest change that this makes in an element is
its noise (Monte Carlo arithmetic).

Equal values are changed equally, so that ties (of a top-k, of a maximum) stay ties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

EPSILON = 2.0**-40  # about 8,000 times the rounding of one operation in float64
LARGEST = 1e300  # beyond, a change could overflow
_ODD = -7046029254386353131  # multiplying by it mixes the bits of a number


class Jitter(TorchDispatchMode):
    """While active, every operation's float64 result is changed by up to `EPSILON`."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed * 0x5DEECE66D + 11

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or func.is_view:
            return result
        if isinstance(result, torch.Tensor):
            return self.change(result)
        if isinstance(result, tuple | list):
            return type(result)(self.change(r) for r in result)
        return result

    def change(self, value: Any) -> Any:
        """Return the values, each changed by an amount that depends on its bits."""
        if not isinstance(value, torch.Tensor) or value.is_sparse:
            return value
        if value.dtype == torch.complex128:
            real = self.change(torch.view_as_real(value.resolve_conj()))
            return torch.view_as_complex(real)
        if value.dtype != torch.float64:
            return value
        bits = (value.contiguous().view(torch.int64) ^ self.seed) * _ODD
        bits = (bits ^ (bits >> 29)) * _ODD
        part = (bits >> 11).to(torch.float64) * 2.0**-52  # -1 to 1
        return torch.where(value.abs() < LARGEST, value * (1 + EPSILON * part), value)


@contextlib.contextmanager
def jittered(jitter: Jitter | None) -> Iterator[None]:
    """Run operations under `jitter`; attention is then taken apart, so that it is reached too."""
    if jitter is None:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), jitter:
        yield


def distance(a: Any, b: Any) -> Any:
    """Return how far two tensors are apart, element by element; None for anything else."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None
    if a.shape != b.shape or not (b.is_floating_point() or b.is_complex()):
        return None
    return (a.detach() - b.detach()).abs().nan_to_num(0.0, 0.0, 0.0)


def farthest(known: Any, other: Any) -> Any:
    """Return the larger of two distances, element by element."""
    if known is None or other is None:
        return known if other is None else other
    return torch.maximum(known, other)
