"""Custom autograd functions become one node; checkpointed regions become recompute groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.frontend import capture
from tests.support.capture import assert_captured


class Doubling(torch.autograd.Function):
    """Its backward is deliberately not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * 2 + x, None


class Twice(torch.autograd.Function):
    """New style, several results, one of them without gradient."""

    @staticmethod
    def forward(x, sizes):
        return x.sum(0), x.argmax(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rows = inputs[0].shape[0]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return 3 * grad.expand(ctx.rows, -1), None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        y = Doubling.apply(self.linear(x), 2.0)
        total, best = Twice.apply(y, (1, 2))
        return (total * (best + 1)).sum()


def batch():
    return (torch.randn(5, 4, dtype=torch.float64),)


def test_a_custom_function_keeps_its_backward():
    graph = assert_captured(Model(), batch())
    nodes = [node for node in graph.nodes if node.op.startswith("autograd_function.")]
    assert [node.op for node in nodes] == [
        f"autograd_function.{__name__}.Doubling",
        f"autograd_function.{__name__}.Twice",
    ]
    assert nodes[0].args[1] == 2.0
    assert nodes[1].args[1] == (1, 2)
    assert len(nodes[1].outputs) == 2
    assert graph.functions[nodes[0].op] is Doubling
    assert nodes[0].source_text == "y = Doubling.apply(self.linear(x), 2.0)"


def test_apply_is_restored_also_after_an_error():
    class Broken(Model):
        def forward(self, x):
            return Doubling.apply(self.linear(x), object()).sum()

    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(CaptureError, match=r"argument 1 of Doubling\.apply is a object"):
        capture(Broken(), batch())
    assert torch.autograd.Function.__dict__["apply"] is before


def test_a_function_that_takes_a_module_is_refused():
    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            return module(x)

    class Outer(Model):
        def forward(self, x):
            return Block.apply(x, self.linear).sum()

    with pytest.raises(CaptureError, match="argument 1 of"):
        capture(Outer(), batch())


class Blocks(nn.Module):
    """Two checkpointed blocks between plain layers."""

    def __init__(self, call):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.call = call

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:3]:
            x = self.call(lambda x, block=block: block(x).tanh(), x)
        return self.blocks[3](x).sum()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_are_groups(reentrant):
    model = Blocks(lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    graph = assert_captured(model, batch())
    groups = [(node.op.split(".")[1], node.recompute) for node in graph.nodes]
    assert groups == [
        ("linear", None),
        ("linear", "checkpoint_0"),
        ("tanh", "checkpoint_0"),
        ("linear", "checkpoint_1"),
        ("tanh", "checkpoint_1"),
        ("linear", None),
        ("sum", None),
    ]


def test_checkpoint_sequential_and_no_grad_inside():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            y = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

            def scaled(y):
                with torch.no_grad():
                    scale = y.abs().max()
                return y / scale

            return checkpoint(scaled, y, use_reentrant=False).sum()

    graph = assert_captured(Sequence(), batch())
    inside = [node for node in graph.nodes if not node.grad_enabled]
    assert inside
    assert {node.recompute for node in inside} == {"checkpoint_1"}


def test_hugging_face_gradient_checkpointing():
    from tests.support import zoo

    model, data = zoo.build("llama")
    model.gradient_checkpointing_enable()
    graph = assert_captured(model, data)
    by_layer = {node.recompute: node.module.split(".")[2] for node in graph.nodes if node.recompute}
    assert by_layer == {"checkpoint_0": "0", "checkpoint_1": "1"}


def scaled(factor: float) -> type[torch.autograd.Function]:
    """Return a function of its own, of the same name each time."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * (factor + 1)

    return Scaled


class TwoOfOneName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.functions = [scaled(2.0), scaled(5.0)]

    def forward(self, x):
        y = self.linear(x)
        return sum(function.apply(y).sum() for function in self.functions)


def test_functions_that_share_a_name_are_different_operators():
    model = TwoOfOneName()
    graph = capture(model, batch())
    ops = [node.op for node in graph.nodes if node.op.startswith("autograd_function.")]
    assert len(set(ops)) == 2
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    certificate = sw.verify(model, batch(), plan)
    assert certificate.ok, certificate


class OneTuple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2,)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_function_that_returns_a_tuple_of_one_is_refused():
    class Uses(nn.Module):
        def forward(self, x):
            return OneTuple.apply(x)[0].sum()

    with pytest.raises(CaptureError, match="OneTuple"):
        capture(Uses(), batch())


class Configured(torch.autograd.Function):
    """Takes a dict with a tensor, a nested tuple and None; its backward is not the derivative."""

    @staticmethod
    def forward(ctx, x, options, missing, pair):
        assert missing is None
        ctx.save_for_backward(options["weight"])
        ctx.scale = options["scale"]
        return x * options["weight"] * options["scale"] + pair[0]["shift"]

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return 2 * grad * weight * ctx.scale, None, None, None


def test_functions_take_dicts():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x):
            y = Configured.apply(
                self.linear(x), {"weight": x, "scale": 3.0}, None, ({"shift": 1.0}, 2)
            )
            return Configured.apply(y, {"scale": 0.5, "weight": x}, None, ({"shift": 2.0},)).sum()

    graph = assert_captured(Both(), batch())
    functions = [op for op in graph.functions if "Configured" in op]
    assert len(functions) == 2  # of different structures
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2))
    torch.manual_seed(0)
    model = Both()
    assert sw.verify(model, batch(), plan).ok
