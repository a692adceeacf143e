"""In-place writes, directly and through views, become new values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.frontend import capture
from tests.support.capture import assert_captured


class Body(nn.Module):
    """`function(x, w)` of a linear layer's output; the mean of the result is the loss."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(6, 4, dtype=torch.float64)
        self.w = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x), self.w).pow(2).sum()


def run(function):
    torch.manual_seed(0)
    model = Body(function)
    graph = assert_captured(model, (torch.randn(4, 6, dtype=torch.float64),))
    for node in graph.nodes:
        if not node.op.startswith(("autograd", "shardwise")):
            namespace, name, overload = node.op.split(".")
            schema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
            assert not schema.is_mutable, node.op
    return graph


def after(write):
    def function(x, w):
        y = x * 1.5
        write(y, w)
        return y

    return function


WRITES = {
    "add": lambda y, w: y.add_(w),
    "chain": lambda y, w: y.mul_(2).add_(w).div_(3).tanh_(),
    "row": lambda y, w: y[1].copy_(w),
    "rows": lambda y, w: y[1:3].add_(w),
    "item": lambda y, w: y[2, 1].fill_(3.0),
    "number": lambda y, w: y.__setitem__((0, 1), 5.0),
    "column": lambda y, w: y.__setitem__((slice(None), 2), w),
    "strided": lambda y, w: y[:, ::2].mul_(w[:2]),
    "transposed": lambda y, w: y.t()[0].copy_(w),
    "permuted": lambda y, w: y.permute(1, 0)[1:].zero_(),
    "view": lambda y, w: y.view(2, 8)[1, :4].copy_(w),
    "flat": lambda y, w: y.flatten()[3:7].add_(w),
    "unsqueezed": lambda y, w: y.unsqueeze(0)[0, 1:].mul_(w),
    "squeezed": lambda y, w: y.unsqueeze(1).squeeze(1).mul_(w),
    "narrow": lambda y, w: y.narrow(1, 1, 2).add_(w[:2]),
    "diagonal": lambda y, w: y.diagonal().copy_(w),
    "movedim": lambda y, w: y.movedim(0, 1)[0].copy_(w),
    "masked_fill": lambda y, w: y.masked_fill_(y > 0.5, 0.25),
    "index_put": lambda y, w: y.__setitem__(torch.tensor([0, 2]), w),
    "mask_write": lambda y, w: y.__setitem__(y > 0.5, 0.1),
    "scatter": lambda y, w: y.scatter_(0, torch.tensor([[0, 1, 2, 3]]), w[None]),
    "index_add": lambda y, w: y.index_add_(0, torch.tensor([1]), w[None]),
    "clamp": lambda y, w: y.clamp_(min=0.3, max=0.6),
    "broadcast copy": lambda y, w: y.copy_(w),
    "lower precision": lambda y, w: y.copy_(w.float()),
    "mixed dtypes": lambda y, w: y.add_(torch.ones(4, dtype=torch.float32)),
    "detached source": lambda y, w: y.copy_(w.detach()),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_a_new_value(name):
    run(after(WRITES[name]))


def test_views_made_before_a_write_see_it():
    def function(x, w):
        y = x * 1.5
        view, row = y.t(), y[1]
        y.mul_(w)
        row.add_(1.0)
        return view @ y + row

    run(function)


@pytest.mark.parametrize("name", ["chunk", "split", "unbind", "tensor_split"])
def test_writes_to_pieces_reach_the_base(name):  # torch allows it without gradients only
    def function(x, w):
        y = torch.ones(4, 4, dtype=torch.float64)
        if name == "chunk":
            y.chunk(2, dim=1)[1].mul_(3)
        elif name == "split":
            y.split([1, 3], dim=0)[1].mul_(3)
        elif name == "unbind":
            y.unbind(1)[2].mul_(3)
        else:
            y.tensor_split(3)[1].mul_(3)
        return x * y * w

    run(function)


def test_a_view_of_a_view_and_its_sibling_see_a_write():
    def function(x, w):
        y = x * 1.5
        left, right = y[:, :2], y[:, 2:]
        inner = left[1:]
        right.mul_(2)
        inner.mul_(w[:2])
        right.add_(left)
        return torch.cat([left, right, y], 1)

    run(function)


def test_views_made_between_writes_are_right():
    def function(x, w):
        y = torch.zeros(4, 4, dtype=torch.float64)
        for i in range(4):
            y[i] = x[i] * w
            y[i, :i] += y[i].sum()
        return y

    run(function)


def test_a_view_read_first_under_no_grad_keeps_its_gradient():
    def function(x, w):
        y = x * 1.5
        view = y.view(2, 8)
        y.mul_(w)
        with torch.no_grad():
            scale = view.max()
        return view * scale

    run(function)


def test_copies_do_not_see_writes():
    def function(x, w):
        y = x * 1.5
        copy, cast = y.clone(), y.to(torch.float64, copy=True)
        y.mul_(w)
        return copy + cast * y

    run(function)


def test_contiguous_of_contiguous_is_the_same_memory():
    def function(x, w):
        y = x * 1.5
        same, other = y.contiguous(), y.t().contiguous()
        y.mul_(w)
        return same + other

    run(function)


def test_inplace_views_and_logic():
    def function(x, w):
        y = x * 1.5
        y.unsqueeze_(0)
        y.squeeze_(0)
        mask = y > 0.5
        mask |= y < 0.1
        mask &= y < 0.9
        return torch.where(mask, y, w)

    run(function)


def test_dropout_in_place_at_zero_is_dropped():
    graph = run(lambda x, w: nn.functional.dropout(x * w, 0.0, True, inplace=True))
    assert not any("dropout" in node.op for node in graph.nodes)


def test_random_in_place_is_a_functional_draw():
    model = Body(lambda x, w: x * torch.empty(4, 4, dtype=torch.float64).uniform_(0.5, 1.0))
    graph = capture(model, (torch.randn(4, 6, dtype=torch.float64),))
    assert "aten.uniform.default" in [node.op for node in graph.nodes]


def test_a_write_that_cannot_be_inverted_falls_back_to_torch():
    def function(x, w):
        y = torch.ones(4, 4, dtype=torch.float64)
        y.unfold(0, 2, 2).mul_(3)
        y.as_strided((4,), (5,)).mul_(2)
        return x * y * w

    run(function)


def test_a_strided_write_with_gradients_is_refused():  # torch's as_strided_scatter is wrong
    def function(x, w):
        y = x * 1.5
        y.as_strided((4,), (5,)).mul_(w)
        return y

    with pytest.raises(CaptureError, match="as_strided"):
        capture(Body(function), (torch.randn(4, 6, dtype=torch.float64),))


def test_a_fallback_that_would_forget_no_grad_is_refused():
    def function(x, w):
        with torch.no_grad():
            scale = x.abs().max()
        y = torch.ones(4, 4, dtype=torch.float64)
        y.unfold(0, 2, 2).mul_(3)
        return x * y * w / scale

    with pytest.raises(CaptureError, match="no_grad"):
        capture(Body(function), (torch.randn(4, 6, dtype=torch.float64),))


def test_a_hidden_write_to_a_value_with_gradient_is_refused():
    def under_no_grad(x, w):
        y = x * 1.5
        with torch.no_grad():
            y.mul_(2)
        return y + w

    def through_detach(x, w):
        y = x * 1.5
        y.detach().mul_(2)
        return y + w

    for function in (under_no_grad, through_detach):
        with pytest.raises(CaptureError, match="without autograd noticing") as error:
            capture(Body(function), (torch.randn(4, 6, dtype=torch.float64),))
        assert "test_inplace.py" in str(error.value)


def test_writing_to_a_parameter_is_refused():
    def function(x, w):
        with torch.no_grad():
            w.clamp_(-1, 1)
        return x * w

    with pytest.raises(CaptureError, match="modifies parameter w in place"):
        capture(Body(function), (torch.randn(4, 6, dtype=torch.float64),))


def test_writing_to_the_batch_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            x[1:].mul_(2)
            return (x * self.w).sum()

    with pytest.raises(CaptureError, match="modifies input x in place") as error:
        capture(Model(), {"x": torch.ones(3, dtype=torch.float64)})
    line = Model.forward.__code__.co_firstlineno + 1
    assert error.value.where == f"test_inplace.py:{line}"


class Strided(nn.Module):
    """Windows through `as_strided`, of tensors in several orders of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        windows = h.transpose(0, 1).as_strided((6, 3, 2, 8), (32, 8, 8, 1))
        steps = torch.as_strided(h, (6, 5), (32, 3), 1)
        rows = h[:, :2].contiguous().as_strided((6, 3, 4), (16, 2, 1))
        return windows.square().sum() / 7 + steps.sin().sum() + (rows**3).mean()


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_strided_windows_do_not_depend_on_the_order_of_memory(strategy: str) -> None:
    model, batch = Strided(), {"x": torch.linspace(-2, 2, 120).view(6, 4, 5).cos()}
    graph = sw.capture(model, batch)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2))
    assert sw.verify(model, batch, plan).ok


def test_memory_with_gaps_is_refused_with_the_line() -> None:
    class Gaps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 1:3].as_strided((6, 9), (20, 1)).sum()

    with pytest.raises(CaptureError, match="outside of its tensor") as error:
        sw.capture(Gaps(), {"x": torch.ones(6, 4, 5)})
    assert "test_inplace.py" in str(error.value)
