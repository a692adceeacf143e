"""Every architecture of the zoo: the graph computes the model's loss and gradients."""

from __future__ import annotations

import pytest

from tests.support import zoo
from tests.support.capture import assert_captured

FAST = ("mlp", "resnet", "unet", "fused_gpt", "dlrm", "llama", "gpt2", "bert", "t5", "mixtral")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in zoo.names()]
)
def test_a_captured_zoo_model_equals_the_model(name):
    graph = assert_captured(*zoo.build(name))
    assert all(node.source for node in graph.nodes)
    assert not graph.warnings
