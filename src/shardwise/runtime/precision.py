"""Scale the loss, so that small gradients in half precision do not underflow.

`LossScaler` holds the factor by which a loss is multiplied before backward. Gradients are divided
by it when they are complete; a step with an infinite or NaN gradient on any rank is skipped
by the optimizer on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mesh import ProcessMesh

__all__ = ["LossScaler"]


class LossScaler:
    """The factor on the loss; a dynamic one falls after overflows and grows in their absence.

    >>> scaler = LossScaler(init_scale=8.0, growth_interval=2)
    >>> [scaler.update(overflow) or scaler.scale for overflow in (True, False, False)]
    [4.0, 4.0, 8.0]
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
    ) -> None:
        self.scale = float(init_scale)
        self.growth_factor, self.backoff = growth_factor, backoff
        self.growth_interval, self.dynamic = growth_interval, dynamic
        self.good_steps = 0

    @classmethod
    def static(cls, scale: float) -> LossScaler:
        """Return a scaler whose factor never changes."""
        return cls(scale, dynamic=False)

    def update(self, overflow: bool) -> None:
        """Note the outcome of an optimizer step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` continues from."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def overflow_on_any_rank(tensors: Iterable[Tensor], mesh: ProcessMesh, near: torch.device) -> bool:
    """Return whether an element is infinite or NaN on any rank of the plan; all ranks call it."""
    norms = [torch.linalg.vector_norm(t, math.inf) for t in tensors if t.numel()]
    result = torch.zeros(1, dtype=torch.int32, device=near)
    if norms:
        finite = torch.stack([torch.isfinite(norm).to(near) for norm in norms]).all()
        result += ~finite
    return bool(mesh.everyone.all_reduce(result, "max").wait().item())
