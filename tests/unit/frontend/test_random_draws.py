"""Random draws may decide control flow only if their comparison has a certain outcome."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.errors import CaptureError
from shardwise.frontend import capture
from tests.support.capture import assert_captured


class LayerDrop(nn.Module):
    def __init__(self, draw, p):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.draw, self.p = draw, p

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.draw() < self.p:
                continue
            x = layer(x)
        return x.sum()


DRAWS = {
    "torch.rand([])": lambda: torch.rand([]),
    "torch.rand(())": lambda: torch.rand(()),
    "torch.rand(1)": lambda: torch.rand(1),
    "torch.rand(1).item()": lambda: torch.rand(1).item(),
    "torch.rand(size=(1,))": lambda: torch.rand(size=(1,), device="cpu"),
    "random.random()": lambda: random.random(),
    "random.uniform(0, 1)": lambda: random.uniform(0, 1),
    "np.random.uniform(0, 1)": lambda: np.random.uniform(0, 1),
    "np.random.rand()": lambda: np.random.rand(),
}


def batch():
    return (torch.randn(2, 4, dtype=torch.float64),)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_compared_with_zero_is_certain(name):
    graph = assert_captured(LayerDrop(DRAWS[name], 0.0), batch())
    assert sum(node.op == "aten.linear.default" for node in graph.nodes) == 3
    assert not any("rand" in node.op for node in graph.nodes)


@pytest.mark.parametrize("name", DRAWS)
def test_other_probabilities_are_refused_at_the_users_line(name):
    with pytest.raises(CaptureError, match="decides which code runs") as error:
        capture(LayerDrop(DRAWS[name], 0.3), batch())
    assert "test_random_draws.py" in error.value.where
    assert "layerdrop" in error.value.hint


def test_probability_one_and_the_other_comparisons_are_certain():
    class Model(LayerDrop):
        def forward(self, x):
            assert torch.rand([]) < 1.0
            assert torch.rand([]) >= 0
            assert not torch.rand([]) > 1
            assert not torch.rand([]) >= 1.0
            return self.layers[0](x).sum()

    capture(Model(None, 0.0), batch())


def test_a_draw_used_as_a_tensor_is_a_node():
    class Model(LayerDrop):
        def forward(self, x):
            keep = torch.rand(1, dtype=torch.float64)
            gate = (torch.rand(1) < 0.5).double()
            return (self.layers[0](x) * keep * gate + keep.sqrt()).sum()

    graph = capture(Model(None, 0.0), batch())
    assert [node.op for node in graph.nodes].count("aten.rand.default") == 2


def test_other_python_and_numpy_numbers_are_refused_unless_seeded():
    class Model(LayerDrop):
        def forward(self, x):
            return (self.layers[0](x) * self.draw()).sum()

    for draw in (lambda: random.randint(0, 9), lambda: float(np.random.permutation(9)[0])):
        with pytest.raises(CaptureError, match="freeze"):
            capture(Model(draw, 0.0), batch())
    with pytest.raises(CaptureError, match="freeze"):
        capture(Model(random.random, 0.0), batch())

    def seeded():
        np.random.seed(1)
        return float(np.random.permutation(9)[0] + 1)

    assert_captured(Model(seeded, 0.0), batch())


def test_generators_keep_their_state():
    model, data = LayerDrop(DRAWS["random.random()"], 0.0), batch()
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    capture(model, data)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_dropout_is_kept_when_on_and_dropped_when_off():
    class Model(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4, dtype=torch.float64), nn.Dropout(p)

        def forward(self, x):
            return self.dropout(self.linear(x)).sum()

    def dropouts(graph):
        return [node for node in graph.nodes if "dropout" in node.op]

    (node,) = dropouts(assert_captured(Model(0.4), batch()))
    assert node.args[1:] == (0.4, True)
    assert not dropouts(capture(Model(0.0), batch()))
    assert not dropouts(capture(Model(0.4), batch(), training=False))
