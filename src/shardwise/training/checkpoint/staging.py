"""State copied aside, so that training goes on while it is written.

Parameters and optimizer state change when the optimizer steps, and at no other time: they may be
copied while the next forward and backward run, if that step waits for the copy. Buffers change in
a forward and are copied at once. A tensor that was changed in another way while it was copied is
noticed by torch's count of its changes, and the save fails rather than mix two states.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.training.checkpoint.plan import Portion

__all__ = ["Staging"]


class Staging:
    """What one rank writes, first in the memory of the module, then copied aside."""

    def __init__(self, mine: Sequence[Portion], *, at_once: bool) -> None:
        self._views: dict[int, Tensor] = {i: p.placed.view for i, p in enumerate(mine)}
        self._names = [f"{p.held.name} ({p.section})" for p in mine]
        self._copies: dict[int, Tensor] = {}
        self._versions = {i: _version(view) for i, view in self._views.items()}
        self._stream = _side_stream(self._views.values())
        self.finished = threading.Event()
        chosen = [i for i, p in enumerate(mine) if at_once or p.held.volatile]
        self._copy(chosen)

    def copy(self) -> None:
        """Copy what is not copied yet."""
        try:
            self._copy(list(self._views))
        finally:
            self._views.clear()
            self.finished.set()

    def _copy(self, chosen: Sequence[int]) -> None:
        for index in chosen:
            self._copies[index] = _aside(self._views[index], self._stream)
        if self._stream is not None:
            self._stream.synchronize()
        for index in chosen:
            if _version(self._views.pop(index)) != self._versions[index]:
                raise CheckpointError(
                    f"{self._names[index]} was changed while it was copied for a checkpoint, "
                    "other than by a step of the optimizer",
                    hint="saving.staged() before the change, or save_checkpoint(…, wait=True)",
                )

    def take(self, index: int) -> Tensor:
        """A box in host memory, contiguous; it is given away."""
        if index in self._copies:
            return self._copies.pop(index)
        return self._views[index].detach().cpu().contiguous()


def _version(view: Tensor) -> int:
    return 0 if view.is_inference() else view._version


def _side_stream(views: Iterable[Tensor]) -> torch.cuda.Stream | None:
    """A stream beside the computation, behind all that was started so far."""
    for view in views:
        if view.is_cuda:
            stream = torch.cuda.Stream(view.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(view.device))
            return stream
    return None


def _aside(view: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    if not view.is_cuda:
        return view.detach().clone(memory_format=torch.contiguous_format)
    host = torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        return host.copy_(view.detach(), non_blocking=True)
