"""Which value is the loss.

Enters: the model's output, and the user's `loss_fn` if there is one. Leaves: a scalar tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import LossError

LossFn = Callable[[Any, Any], Any]
_HINT = (
    'loss_fn=lambda output, batch: output["..."], or return the loss alone, as .loss or ["loss"]'
)


def find_loss(output: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Return the loss of one step, or a `LossError` that says how to mark it.

    >>> find_loss({"loss": torch.tensor(1.0), "aux": torch.tensor(2.0)}, None, None)
    tensor(1.)
    """
    if loss_fn is not None:
        return _checked(_marked(loss_fn(output, batch)), "loss_fn's result")
    marked = _marked(output)
    if marked is not None:
        return _checked(marked, "the model's loss")
    scalars = [leaf for leaf in pytree.tree_leaves(output) if _is_scalar(leaf)]
    if len(scalars) == 1:
        return _checked(scalars[0], "the only scalar")
    if scalars:
        raise LossError(
            f"the model returns {len(scalars)} scalars and none is marked as the loss", hint=_HINT
        )
    raise LossError(f"the model's output has no scalar: {_describe(output)}", hint=_HINT)


def _marked(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _checked(loss: Any, what: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"{what} is {_describe(loss)}, not a tensor", hint=_HINT)
    if loss.numel() != 1:
        raise LossError(
            f"{what} has shape {list(loss.shape)}; a loss is one number",
            hint="reduce it: loss.mean(), or loss_fn=lambda output, batch: ...",
        )
    if not loss.is_floating_point():
        raise LossError(f"{what} has dtype {loss.dtype}; a loss is floating-point", hint=_HINT)
    return loss.reshape(()) if loss.dim() else loss


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in output.items()) + "}"
    if isinstance(output, tuple | list):
        return "(" + ", ".join(map(_describe, output)) + ")"
    return f"a {type(output).__name__}"
