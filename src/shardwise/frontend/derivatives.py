"""Refuses a forward pass that takes derivatives itself, at the user's line.

`torch.autograd.grad` and `backward` inside of `forward` run torch's engine on tensors without data:
what they return is part of no graph. A penalty on gradients is the usual case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shardwise.errors import CaptureError
from shardwise.frontend.provenance import running_frame

_HINT = (
    "write the derivative out with torch operations; a penalty on gradients also works on "
    "differences: (critic(a) - critic(b)).abs() / (a - b).flatten(1).norm(dim=1)"
)


@contextlib.contextmanager
def refusing_derivatives() -> Iterator[None]:
    """Inside, `torch.autograd.grad` and `backward` raise a `CaptureError`."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def refuse(*args: Any, **kwargs: Any) -> Any:
        frame = running_frame()
        raise CaptureError(
            "forward takes derivatives itself (torch.autograd.grad or backward), which a graph of "
            "the step cannot hold",
            where=None if frame is None else str(frame),
            hint=_HINT,
        )

    autograd._engine_run_backward = refuse
    try:
        yield
    finally:
        autograd._engine_run_backward = engine
