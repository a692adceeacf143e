"""Capture experts as what they are: tokens routed to experts.

Models of transformers loop over the experts that got tokens, which a graph cannot hold, or compute
with a copy of the weights for every token. While a model is traced, its experts run on the
operators of `shardwise.routing` instead, with the same result.
"""

import contextlib
import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.frontend.tracing import patched
from shardwise.routing import collect, dispatch, grouped_linear, route


def routed_experts() -> contextlib.AbstractContextManager[None]:
    """Make experts of transformers use the operators of `shardwise.routing`; know sizes of counts.

    `torch.bincount` has at least `minlength` elements, and exactly as many if no id is larger.
    """

    def count(ids: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if weights is not None or not minlength:
            return bincount(ids, weights, minlength)
        return functional.one_hot(ids, minlength).sum(0)  # which refuses larger ids

    bincount = torch.bincount
    patches: list[tuple[Any, str, Any]] = [(o, "bincount", count) for o in (torch, Tensor)]
    module = sys.modules.get("transformers.integrations.moe")
    if module is not None:
        patches.append((module.ExpertsInterface, "get_interface", lambda *_: _forward))
    return patched(*patches)


def _forward(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a module decorated by `use_experts_implementation`."""

    def linear(rows: Tensor, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        weight, transposed = getattr(self, name), bool(self.is_transposed)
        return cast(Tensor, grouped_linear(rows, weight, counts, bias, transposed))

    order, counts = route(top_k_index, self.num_experts)
    rows = dispatch(x, order, top_k_index.shape[-1])
    rows = linear(rows, "gate_up_proj" if self.has_gate else "up_proj")
    rows = linear(self._apply_gate(rows) if self.has_gate else self.act_fn(rows), "down_proj")
    if getattr(self, "has_post_expert_norm", False):  # older transformers lack the flag
        rows = self.post_expert_norm(rows)
    chosen: Tensor = collect(rows, order, top_k_index) * top_k_weights.unsqueeze(-1)
    return chosen.sum(1).to(x.dtype)
