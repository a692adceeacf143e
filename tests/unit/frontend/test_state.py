"""Parameters, buffers, constants, and the model's copy without weights."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from shardwise.errors import CaptureError
from shardwise.frontend import capture, skeleton
from shardwise.ir.operators import interpret
from tests.support import zoo
from tests.support.capture import assert_captured

F64 = torch.float64


class Counter(nn.Module):
    """Buffers that forward updates: in place, by assignment, through a view, under no_grad."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=F64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3, dtype=F64))
        self.register_buffer("last", torch.zeros(2, 3, dtype=F64), persistent=False)
        self.register_buffer("same", torch.ones(3, dtype=F64))

    def forward(self, x):
        y = self.linear(x)
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        with torch.no_grad():
            self.last[1].copy_(y[0])
        return (y * self.same + self.mean).sum() + self.last.sum()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Counter()

    def forward(self, x):
        return self.inner(x)


def x():
    return (torch.randn(4, 3, dtype=F64),)


@pytest.mark.parametrize("kind", [Counter, Nested])
def test_buffer_updates_are_recorded(kind):
    graph = assert_captured(kind(), x())
    changed = {b.name.removeprefix("inner."): b.mutation is not None for b in graph.buffers}
    assert changed == {"steps": True, "mean": True, "last": True, "same": False}
    assert {b.name.removeprefix("inner."): b.persistent for b in graph.buffers}["last"] is False


def test_a_buffer_that_becomes_the_input_is_recorded():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=F64))
            self.register_buffer("last", torch.zeros(4, 3, dtype=F64))

        def forward(self, x):
            loss = (self.last.clone() * self.w * x).sum()
            self.last.copy_(x)
            return loss

    graph = assert_captured(Model(), x())
    assert graph.buffers[0].mutation == graph.inputs[0].value


def test_one_batch_norm_called_twice_updates_twice():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, dtype=F64)

        def forward(self, x):
            return (self.norm(x) * self.norm(x * 2 + 1)).sum()

    assert_captured(Model(), x())


def test_batch_norm_in_training_is_one_node():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    model = model.to(F64)
    graph = assert_captured(model, x(), lambda y, b: (y**3).sum())
    first, second = [n for n in graph.nodes if n.op == "shardwise.batch_norm.default"]
    assert len(first.outputs) == 3
    assert second.args[1:3] == (None, None)
    assert [b.mutation is not None for b in graph.buffers] == [True] * 6


def test_batch_norm_without_statistics_and_in_evaluation():
    norm = nn.BatchNorm1d(3, track_running_stats=False, dtype=F64)
    graph = assert_captured(norm, x(), lambda y, b: (y**3).sum())
    assert len(graph.nodes[0].outputs) == 1
    model = nn.BatchNorm1d(3, dtype=F64)
    graph = assert_captured(model, x(), lambda y, b: (y**3).sum(), training=False)
    assert graph.nodes[0].op == "aten.batch_norm.default"
    assert all(b.mutation is None for b in graph.buffers)


def test_frozen_batch_norm_inside_a_training_model_stays_in_evaluation():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(F64)
    model[1].eval()
    graph = assert_captured(model, x(), lambda y, b: (y**3).sum(), training=True)
    assert "aten.batch_norm.default" in [n.op for n in graph.nodes]


def test_tied_frozen_and_unused_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, dtype=F64), nn.Linear(3, 3, dtype=F64)
            self.unused = nn.Linear(3, 3, dtype=F64)
            self.b.weight = self.a.weight
            self.a.bias.requires_grad_(False)

        def forward(self, x):
            return self.b(self.a(x)).sum()

    graph = assert_captured(Model(), x())
    by_name = {p.name: p for p in graph.parameters}
    assert list(by_name) == ["a.weight", "a.bias", "b.bias", "unused.weight", "unused.bias"]
    assert by_name["a.weight"].aliases == ("b.weight",)
    assert not by_name["a.bias"].requires_grad
    assert by_name["a.weight"].value == "p_a_weight"


def test_capture_does_not_change_the_model():
    model, batch = zoo.build("resnet")
    flags = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    capture(model, batch, training=False)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_meta_model_gives_the_real_models_graph():
    model, batch = zoo.build("llama")
    real = capture(model, batch)
    assert capture(model.to("meta"), batch).fingerprint == real.fingerprint


def test_a_skeleton_has_no_weights_and_captures_the_same_graph():
    model, batch = zoo.build("fused_gpt")
    graph = capture(model, batch)
    weights = [weakref.ref(p) for p in model.parameters()]
    copy = skeleton(model)
    assert all(p.device.type == "meta" for p in copy.parameters())
    assert copy.head.weight is copy.tok.weight
    assert capture(copy, batch).fingerprint == graph.fingerprint
    evaluated = capture(copy, batch, training=False)
    assert not evaluated.training
    assert copy.training
    del model
    gc.collect()
    assert all(ref() is None for ref in weights)


def test_a_model_that_cannot_be_deep_copied():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=F64)
            self.lock = threading.Lock()

        def forward(self, x):
            with self.lock:
                return self.linear(x).sum()

    assert_captured(Model(), x())


def test_constants_travel_with_the_graph():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=F64))
            self.table = torch.arange(3.0, dtype=F64)  # a plain attribute

        def forward(self, x):
            scale = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
            return (x * self.w * self.table * scale).sum()

    graph = assert_captured(Model(), x())
    assert sorted(c.data.tolist() for c in graph.constants) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


def test_a_plain_tensor_that_forward_changes_is_refused():
    class Model(nn.Module):
        def __init__(self, assign):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=F64))
            self.seen, self.assign = torch.zeros(3, dtype=F64), assign

        def forward(self, x):
            if self.assign:
                self.seen = self.seen + 1
            else:
                self.seen += 1
            return (x * self.w * self.seen).sum()

    for assign in (True, False):
        with pytest.raises(CaptureError, match="register_buffer"):
            capture(Model(assign), x())


def test_a_tensor_stored_as_an_attribute_is_allowed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=F64))
            self.attention = None

        def forward(self, x):
            self.attention = x * self.w
            self.fresh = self.attention * 2
            return self.fresh.sum()

    model = Model()
    assert_captured(model, x())


def test_a_parameter_reached_through_a_closure_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=F64))
            self.function = lambda x: x * self.w

        def forward(self, x):
            return self.function(x).sum()

    with pytest.raises(CaptureError, match="parameter or buffer w "):
        capture(Model(), x())


def test_weight_norm_and_parametrizations():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
        nn.utils.weight_norm(nn.Linear(3, 3)),
    ).to(F64)
    model[1].eval()
    model(*x())
    assert_captured(model, x(), lambda y, b: y.pow(2).sum())


def test_the_empty_start_of_a_cache_is_dropped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=F64)

        def forward(self, x):
            cache = torch.tensor([], dtype=F64)
            return torch.cat([cache, self.linear(x)], dim=-2).sum()

    graph = assert_captured(Model(), x())
    assert [n.op for n in graph.nodes] == ["aten.linear.default", "aten.sum.default"]
    assert not graph.constants


def test_interpret_names_the_missing_tensor():
    model, batch = zoo.build("mlp")
    graph = capture(model, batch)
    with pytest.raises(Exception, match=r"no tensor for parameter layers\.0\.weight"):
        interpret(graph, {}, {}, batch)
