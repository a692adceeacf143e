"""Models that cannot be captured are refused at the user's line, with a hint for the cause."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError


class Model(nn.Module):
    """A layer; its forward is one of the functions below."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.recurrent = nn.Linear(4, 4), nn.GRU(4, 4)


def penalty(self: Any, x: Tensor, n: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def own_backward(self: Any, x: Tensor, n: Tensor) -> Tensor:
    loss: Tensor = self.layer(x).sum()
    loss.backward()
    return loss


def functional(self: Any, x: Tensor, n: Tensor) -> Tensor:
    return torch.func.grad(lambda a: self.layer(a).sum())(x).sum()


def cond(self: Any, x: Tensor, n: Tensor) -> Tensor:
    y = self.layer(x)
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).sum()


def cond_on_layers(self: Any, x: Tensor, n: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: self.layer(x).sum(), lambda x: x.sum(), (x,))


def ctc(self: Any, x: Tensor, n: Tensor) -> Tensor:
    log = F.log_softmax(self.layer(x), -1)[:, None].expand(-1, 3, -1)
    return F.ctc_loss(log, n.view(3, 1), torch.full((3,), 6), torch.ones(3, dtype=torch.int64))


def unique(self: Any, x: Tensor, n: Tensor) -> Tensor:
    return self.layer(x[torch.unique(n)]).sum()


def masked(self: Any, x: Tensor, n: Tensor) -> Tensor:
    return self.layer(x)[x > 0].mean()


def asserted(self: Any, x: Tensor, n: Tensor) -> Tensor:
    y = self.layer(x)
    assert bool((y > 0).all()), "y must be positive"
    return y.sum()


def raised(self: Any, x: Tensor, n: Tensor) -> Tensor:
    if torch.isnan(self.layer(x)).any(): raise ValueError("no number")  # noqa: E701  # fmt: skip
    return self.layer(x).sum()


def branched(self: Any, x: Tensor, n: Tensor) -> Tensor:
    y = self.layer(x)
    return y.sum() if y.sum() > 0 else y.mean()


def packed(self: Any, x: Tensor, n: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x.view(3, 2, 4), n, True, False)
    return self.recurrent(packed)[0].data.sum()


def jagged(self: Any, x: Tensor, n: Tensor) -> Tensor:
    rows = [self.layer(x)[:k] for k in n.tolist()]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged).values().sum()


@pytest.mark.parametrize(
    ("function", "line", "hint"),
    [
        (packed, "self.recurrent(packed)", "lengths - 1"),
        (jagged, "torch.nested", "pad_sequence"),
        (penalty, "torch.autograd.grad(", "on differences"),
        (own_backward, "loss.backward()", "write the derivative out"),
        (functional, "torch.func.grad(", "write the derivative out"),
        (cond, "torch.cond(", "torch.where(condition, a, b)"),
        (cond_on_layers, "torch.cond(", "torch.where(condition, a, b)"),
        (ctc, "F.ctc_loss(", "torch.library.custom_op"),
        (unique, "torch.unique(n)", "F.one_hot(ids, n)"),
        (masked, "[x > 0]", "torch.where(mask, x, 0).sum() / mask.sum()"),
        (asserted, "assert bool(", "torch.compiler.is_compiling()"),
        (raised, "raise ValueError", "torch.compiler.is_compiling()"),
        (branched, "if y.sum() > 0", "torch.where(condition, a, b)"),
    ],
)
def test_the_hint_matches_the_cause(function: Any, line: str, hint: str) -> None:
    code = function.__code__.replace(co_name="forward")  # torch keeps frames of this name
    kind = type("Model", (Model,), {"forward": types.FunctionType(code, globals())})
    with pytest.raises(CaptureError) as caught:
        sw.capture(kind(), {"x": torch.rand(6, 4), "n": torch.tensor([1, 2, 2])})
    assert "test_cures.py" in (caught.value.where or "")
    assert line in (caught.value.where or "")
    assert hint in (caught.value.hint or "")
    assert "experts" not in (caught.value.hint or "")


def masked_loss(output: Tensor, batch: Any) -> Tensor:
    return output[batch["n"] > 1].mean()


class Layer(nn.Linear):
    """Takes one input more than it needs."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_errors_name_lines_outside_of_forward() -> None:
    with pytest.raises(CaptureError) as caught:
        sw.capture(Layer(4, 4), {"x": torch.rand(3, 4), "n": torch.tensor([1, 2, 2])}, masked_loss)
    assert 'output[batch["n"] > 1]' in (caught.value.where or "")


@pytest.mark.parametrize(
    ("function", "line"), [(cond, "torch.cond("), (unique, "torch.unique(n)"), (masked, "[x > 0]")]
)
def test_errors_name_lines_of_functions_that_forward_calls(function: Any, line: str) -> None:
    forward: Any = lambda self, x, n: function(self, x, n)  # noqa: E731
    forward = types.FunctionType(
        forward.__code__.replace(co_name="forward"), globals(), "forward", None, forward.__closure__
    )
    kind = type("Model", (Model,), {"forward": forward})
    with pytest.raises(CaptureError) as caught:
        sw.capture(kind(), {"x": torch.rand(6, 4), "n": torch.tensor([1, 2, 2])})
    assert line in (caught.value.where or "")
