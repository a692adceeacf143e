"""no_grad and autocast regions, and origins and names of nodes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from shardwise.errors import CaptureError
from shardwise.frontend import capture
from shardwise.ir.operators import interpret
from tests.support import zoo
from tests.support.capture import assert_captured

F64 = torch.float64


class Model(nn.Module):
    def __init__(self, function, dtype=F64):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=dtype)
        self.function = function

    def forward(self, x):
        return self.function(self.linear, x)


def x(dtype=F64):
    return (torch.randn(4, 3, dtype=dtype),)


def test_no_grad_regions_and_detach():
    def function(f, x):
        y = f(x)
        with torch.no_grad():
            scale = y.abs().max()
            with torch.enable_grad():
                z = y * 2
        return (y / scale + z + y.detach() * y).sum()

    graph = assert_captured(Model(function), x())
    flags = {node.op.split(".")[1]: node.grad_enabled for node in graph.nodes}
    assert flags["abs"] is False
    assert flags["max"] is False
    assert flags["div"] is True


def test_autocast_regions():
    def function(f, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = f(x)
            with torch.autocast("cpu", enabled=False):
                z = f(x)
        return y.float().sum() + z.sum()

    model = Model(function, torch.float32)
    graph = assert_captured(model, x(torch.float32), tolerance=1e-6)
    linears = [node for node in graph.nodes if node.op == "aten.linear.default"]
    assert [node.autocast for node in linears] == [("cpu", torch.bfloat16, True), None]
    assert [graph.values[node.outputs[0]].dtype for node in linears] == [
        torch.bfloat16,
        torch.float32,
    ]


def test_an_autocast_around_capture_is_recorded():
    model = Model(lambda f, x: f(x).float().sum(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(model, x(torch.float32))
    assert graph.nodes[0].autocast == ("cpu", torch.bfloat16, True)


def test_capture_under_no_grad_keeps_gradients():
    model = Model(lambda f, x: f(x).sum())
    with torch.no_grad():
        graph = capture(model, x())
    assert all(node.grad_enabled for node in graph.nodes)


def test_every_node_knows_its_module_and_line():
    model, batch = zoo.build("llama")
    graph = capture(model, batch)
    modules = dict(model.named_modules())
    for node in graph.nodes:
        assert node.module in modules
        assert graph.module_classes[node.module] == type(modules[node.module]).__name__
        assert node.module_class == type(modules[node.module]).__name__
        assert ":" in node.source
    attention = next(n for n in graph.nodes if "attention" in n.op)
    assert attention.module == "model.layers.0.self_attn"
    assert attention.source.startswith("modeling_llama.py:")
    plain = capture(*zoo.build("fused_gpt"))
    linear = next(n for n in plain.nodes if n.op == "aten.linear.default")
    assert linear.module == "blocks.0.qkv"
    assert linear.source_text.endswith("for u in p['qkv'](p['n1'](x)).chunk(3, dim=-1)") or (
        "qkv" in linear.source_text
    )


def test_attention_of_hugging_face_is_causal_as_in_eager_mode():
    graph = capture(*zoo.build("llama"))
    attention = next(n for n in graph.nodes if "attention" in n.op)
    assert attention.args[3:6] == (None, 0.0, True)
    assert not any("cumsum" in node.op for node in graph.nodes)


def test_a_cache_in_the_output_is_dropped_with_a_warning():
    model, batch = zoo.build("llama")
    model.config.use_cache = True
    graph = assert_captured(model, batch)
    assert not any("empty" in node.op for node in graph.nodes)
    assert len(graph.nodes) == len(capture(*zoo.build("llama")).nodes)


def test_packed_positions_given_by_the_user_are_respected():
    model, batch = zoo.build("llama")
    batch["position_ids"] = torch.tensor([[*range(8), *range(8)]] * 4)
    assert_captured(model, batch)
    ones = torch.ones(4, 16, dtype=torch.int64)
    ones[0, :3] = 0
    model, batch = zoo.build("llama")
    assert_captured(model, {**batch, "attention_mask": ones})


NAMES = """
import torch
from tests.support import zoo
from shardwise.frontend import capture
graph = capture(*zoo.build("bart"))
print(graph.fingerprint, hash(str([n.source for n in graph.nodes])) and len(graph.nodes))
print([n.name for n in graph.nodes], list(graph.values))
"""


@pytest.mark.slow
def test_names_do_not_depend_on_the_process():
    def names(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-1000:]
        return done.stdout

    assert names("1") == names("2")


def test_names_are_identifiers_and_not_builtins():
    graph = capture(*zoo.build("llama"))
    for name in graph.values:
        assert name.isidentifier()
        assert not hasattr(__builtins__, name)


def test_casts_and_factories_are_plain():
    def function(f, x):
        y = f(x).to(x.device).to(F64).contiguous().to(x).type_as(x).expand_as(x)
        mask = torch.zeros(4, 3, device=x.device, dtype=F64) + torch.ones_like(x, device="cpu")
        return (y * mask.to(dtype=torch.float32, device=x.device)).sum()

    graph = assert_captured(Model(function), x())
    ops = [node.op for node in graph.nodes]
    assert ops.count("aten.to.dtype") == 1
    assert not any("device" in dict(node.kwargs) for node in graph.nodes)
    assert "expand" not in str(ops)


def test_items_used_only_in_assertions_are_dropped():
    def function(f, x):
        torch._check(x.max().item() < 1e6)
        return f(x).sum()

    graph = capture(Model(function), x())
    assert [n.op for n in graph.nodes] == ["aten.linear.default", "aten.sum.default"]


DATA_DEPENDENT = {
    "if": (lambda f, x: f(x).sum() if f(x).sum() > 0 else f(x).mean(), "torch.where"),
    "item": (lambda f, x: f(x).sum() * f(x).max().item(), "keep it a tensor"),
    "int": (lambda f, x: f(x)[: int(f(x).abs().max())].sum(), "torch.where"),
    "nonzero": (lambda f, x: f(x)[(x > 0).nonzero()[:, 0]].sum(), "torch.where"),
    "mask": (lambda f, x: f(x)[x > 0].sum(), "torch.where"),
    "unique": (lambda f, x: f(x).sum() + x.unique().sum(), "F.one_hot"),
    "tolist": (lambda f, x: f(x).sum() * f(x)[0].tolist()[0], "keep it a tensor"),
    "numpy": (lambda f, x: f(x).sum() * float(f(x).detach().numpy()[0, 0]), "torch"),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_data_dependence_is_refused_at_the_users_line(name):
    function, cure = DATA_DEPENDENT[name]
    with pytest.raises(CaptureError) as error:
        capture(Model(function), x())
    assert "test_regions.py:" in error.value.where
    assert cure in error.value.hint


def test_an_error_in_the_model_is_reported_with_its_cause():
    with pytest.raises(CaptureError, match="same reduction dim") as error:
        capture(Model(lambda f, x: f(x[:, :2]).sum()), x())
    assert error.value.__cause__ is not None
    assert "test_regions.py:" in str(error.value)


def test_random_nodes_can_be_replaced():
    model = Model(lambda f, x: nn.functional.dropout(f(x), 0.5).sum())
    batch = x()
    graph = capture(model, batch)
    parameters = dict(model.named_parameters())
    values = interpret(
        graph, parameters, {}, {"0": batch[0]}, random=lambda node, f, args, kwargs: args[0]
    )
    assert torch.equal(values[graph.loss], model.linear(batch[0]).sum())
