"""What a local computation says to other ranks, noted instead of sent.

Enters: the sums over ranks that functions of `local` ask for. Leaves: `Talk`s, by phase.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwise.cost.kernels import Talk
from shardwise.sharding.rule import MeshAxis

Axis = MeshAxis | None


class Talks:
    """What is said to other ranks while this is entered, and where tensors are made then."""

    active: Talks | None = None

    def __init__(self, device: str = "meta") -> None:
        self.device = device
        self._phases: tuple[list[Talk], list[Talk]] = ([], [])
        self._phase = 0

    def __enter__(self) -> Talks:
        Talks.active = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        Talks.active = None

    def turn(self) -> None:
        """From now on it is backward."""
        self._phase = 1

    def note(self, talk: Talk) -> None:
        self._phases[self._phase].append(talk)

    @property
    def forward(self) -> tuple[Talk, ...]:
        return tuple(self._phases[0])

    @property
    def backward(self) -> tuple[Talk, ...]:
        return tuple(self._phases[1])


def device() -> str:
    """Where tensors are made that come from no others."""
    return Talks.active.device if Talks.active is not None else "cpu"


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks, outside autograd: a copy that is reduced in place."""
    if axis is None:
        return x
    if Talks.active is not None:
        size = x.numel() * x.element_size()
        Talks.active.note(Talk(op="all_reduce", num_bytes=size, axes=axis.names))
    return x.detach().clone(memory_format=torch.contiguous_format)


class _Reduce(torch.autograd.Function):
    """The sum over ranks; backward passes, or sums too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, again: bool) -> Tensor:
        ctx.axis, ctx.again = axis, again
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (all_reduce(grads[0], ctx.axis) if ctx.again else grads[0]), None, None


def reduce(x: Tensor, axis: Axis, again: bool = False) -> Tensor:
    """The differentiable sum over ranks."""
    return x if axis is None else _Reduce.apply(x, axis, again)  # type: ignore[no-untyped-call]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def drop(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Remove dims of one, unless they are kept."""
    return x if keepdim or not x.dim() else x.squeeze(tuple(dims))
