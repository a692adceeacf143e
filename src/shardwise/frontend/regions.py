"""Whether torch's functionalization, which forgets `no_grad`, would change gradients.

Enters: an exported graph about to be decomposed. Leaves: nothing, or a `CaptureError`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.errors import CaptureError


def check_regions_can_go(
    module: fx.GraphModule, reason: Exception, *, nested: bool = False
) -> None:
    """Refuse when a `no_grad` region returns something that would otherwise have a gradient."""
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            check_regions_can_go(child, reason, nested=True)
    for node in module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.HigherOrderOperator):
            continue
        if str(target) != "wrap_with_set_grad_enabled" or node.args[0]:
            continue
        values = node.meta.get("val") or ()
        returned = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        operands = [a for a in node.args[2:] if isinstance(a, fx.Node)]
        if returned and any(_may_need_grad(a, nested=nested) for a in operands):
            raise CaptureError(
                f"{reason}, next to a no_grad region whose results depend on parameters",
                hint="replace the in-place write by an operation that returns a new tensor",
            )


def _may_need_grad(node: fx.Node, *, nested: bool) -> bool:
    """Whether a trainable parameter is upstream of `node`; in a nested graph, any real input."""
    seen, stack = {node}, [node]
    while stack:
        here = stack.pop()
        value: Any = here.meta.get("val")
        is_input = here.op == "placeholder" and isinstance(value, torch.Tensor)
        if is_input and (value.requires_grad or (nested and value.is_floating_point())):
            return True
        if here.target is torch.ops.aten.detach.default:
            continue
        fresh = [n for n in here.all_input_nodes if n not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return False
