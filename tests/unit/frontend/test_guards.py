"""Capture with guards: Python looks at values of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError
from tests.support.capture import assert_captured
from tests.support.guarded import BREAKING, KINDS, Looking, batch


def broken(graph: sw.Graph, model: nn.Module, inputs: dict[str, Tensor]) -> str | None:
    assert graph.guards is not None
    guard = graph.guards.find_broken(inputs, dict(model.named_buffers()))
    return None if guard is None else guard.source


@pytest.mark.parametrize("kind", KINDS)
def test_python_may_look_at_values_of_the_batch(kind: str) -> None:
    model = Looking(KINDS[kind])
    graph = assert_captured(model, batch(0))
    assert graph.guards is not None
    assert f"guards {len(graph.guards)}" in str(graph)
    assert "guarded.py:" in graph.guards.checks[0].source
    assert broken(graph, model, batch(0)) is None
    if kind in BREAKING:
        other = batch(0, **BREAKING[kind])
        assert "guarded.py:" in (broken(graph, model, other) or "")
        again = assert_captured(model, other)
        assert again.fingerprint != graph.fingerprint
        assert broken(again, model, other) is None


def test_a_failing_assertion_is_an_error_at_its_line() -> None:
    with pytest.raises(CaptureError, match="lengths must be positive") as caught:
        sw.capture(Looking(KINDS["assert"]), batch(0, lengths=torch.zeros(6, dtype=torch.int64)))
    assert "assert (b" in (caught.value.where or "")


class Counting(nn.Linear):
    """Looks at a buffer that forward changes later on."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).mean()
        y = y * 2 if self.count < 3 else y
        self.count += 1
        return y


def test_values_that_change_in_every_step_are_refused() -> None:
    with pytest.raises(CaptureError, match="buffer count") as caught:
        sw.capture(Counting(), torch.randn(2, 4))
    assert "self.count < 3" in (caught.value.where or "")
    with pytest.raises(CaptureError, match="depends on a tensor's value"):
        sw.capture(Looking(lambda m, h, b: h * 2 if h.sum() > 0 else h), batch(0))


def test_a_batch_without_data_cannot_be_looked_at() -> None:
    empty = {name: tensor.to("meta") for name, tensor in batch(0).items()}
    with pytest.raises(CaptureError, match="depends on a tensor's value"):
        sw.capture(Looking(KINDS["if"]), empty)


def test_numbers_that_nothing_uses_are_not_guarded() -> None:
    def look(model: nn.Module, h: Tensor, b: dict[str, Tensor]) -> Tensor:
        print("longest", b["lengths"].max().item())
        return h

    assert sw.capture(Looking(look), batch(0)).guards is None


@pytest.mark.parametrize("kind", ["if", "nested", "buffer"])
def test_verification_keeps_the_values_that_python_looks_at(kind: str) -> None:
    model = Looking(KINDS[kind])
    plan = sw.strategies.tensor(sw.capture(model, batch(0)), sw.Cluster.local(2))
    certificate = sw.verify(model, batch(0), plan)
    assert certificate.ok
    assert len(certificate.trials) == 2
    assert any("guarded.py:" in line for line in certificate.not_exercised)
    program = sw.compile(sw.capture(model, batch(0)), plan)
    assert "Valid only for batches" in program.source(0)


def test_separate_micro_batches_must_agree() -> None:
    model = Looking(KINDS["if"])
    graph, cluster = sw.capture(model, batch(0)), sw.Cluster.local(1)
    plan = sw.strategies.ddp(graph, cluster, num_microbatches=2).with_(per_microbatch=True)
    assert sw.verify(model, batch(0), plan).ok
    for function in (sw.verify, lambda m, b, p: sw.capture(m, b, plan=p)):
        with pytest.raises(sw.errors.BatchError, match="micro-batches 0 and 1") as caught:
            function(model, batch(0, **BREAKING["if"]), plan)
        assert "guarded.py:" in (caught.value.where or "")
