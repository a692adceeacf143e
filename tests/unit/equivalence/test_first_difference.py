"""Certificates locate the first difference of code that differs, raises or was edited."""

from __future__ import annotations

import pytest
import torch

from shardwise.cluster import Mesh
from shardwise.emit import emit
from shardwise.equivalence.edits import instrument
from shardwise.equivalence.ranks import Unassembled, full_values, gradient_layout
from shardwise.sharding.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Partial, Shard
from tests.unit.equivalence import mutations as m
from tests.unit.equivalence.cases import case

MESH = Mesh(axes=(("dp", 2), ("tp", 2)))


def test_a_value_is_assembled_from_shards_and_partial_sums() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    layout = Layout((("dp", Shard(0, ((2, 2, 1),))), ("tp", PARTIAL)))
    rows = {0: full[[0, 2]], 1: full[[1, 3]]}
    parts = [rows[rank // 2] * (0.25 if rank % 2 else 0.75) for rank in range(4)]
    ((_, value),) = full_values(parts, layout, (4, 3), MESH)
    assert torch.equal(value, full)


def test_a_value_is_assembled_from_two_axes_on_one_dim_and_from_maxima() -> None:
    full = torch.arange(7.0)
    layout = Layout((("dp", Shard(0, ((1, 7, 1),))), ("tp", Shard(0, ((1, 7, 1),)))))
    parts = [full[0:2], full[2:4], full[4:6], full[6:7]]
    ((_, value),) = full_values(parts, layout, (7,), MESH)
    assert torch.equal(value, full)
    partial_max = Layout((("dp", REPLICATE), ("tp", Partial("max"))))
    ((_, value),) = full_values([full, full - 1, full - 2, full], partial_max, (7,), MESH)
    assert torch.equal(value, full)


def test_differing_replicas_and_wrong_shapes_are_reported() -> None:
    layout = Layout((("dp", REPLICATE), ("tp", REPLICATE)))
    ones = torch.ones(3)
    _, (which, copy) = full_values([ones, ones, ones, ones + 1], layout, (3,), MESH)
    assert (which, copy.tolist()) == ("ranks 0 and 1 of dp, 1 of tp", [2.0, 2.0, 2.0])
    with pytest.raises(Unassembled, match=r"rank 3 .*\(2,\)"):
        full_values([ones, ones, ones, torch.ones(2)], layout, (3,), MESH)


def test_the_layout_of_a_gradient_is_the_dual_of_its_values_layout() -> None:
    layout = Layout((("a", PARTIAL_GRAD), ("b", PARTIAL), ("c", Shard(0, ((1, 4, 1),)))))
    assert str(gradient_layout(layout)) == "a:P b:R c:S(0)"


def test_a_program_that_raises_names_the_statement() -> None:
    subject = case("mlp", "tensor")
    index = m.find_step(subject.program, "rt.gather_fanout")
    text = subject.check(m.drop_step(subject.program, index)).first_difference
    assert text is not None
    for word in ("F.linear(", "node linear_1", "raised RuntimeError"):
        assert word in text


def test_edited_code_is_compared_statement_by_statement() -> None:
    subject = case("fused_gpt", "tensor")
    sources = [emit(subject.program, p.ranks[0]) for p in subject.program.rank_programs]
    assert subject.check(sources=sources).ok
    edited = [s.replace("F.gelu(", "F.relu(") for s in sources]
    assert edited != sources
    certificate = subject.check(sources=edited)
    assert not certificate.ok
    assert "F.relu(" in str(certificate)
    assert "edited" in str(certificate)


def test_probes_follow_assignments_in_forward_only() -> None:
    source = (
        "class A:\n    def __init__(self):\n        x = 1\n"
        "    def forward(self, x):\n        y, _ = x\n        return y\n"
    )
    text = instrument(source)
    assert text.count("rt.probe") == 1
    assert "'assignment 1 of y in A.forward', y" in text
