"""What a certificate says of code that differs, raises, or was edited by hand."""

from __future__ import annotations

import pytest
import torch

from shardwise.cluster import Mesh
from shardwise.emit import emit
from shardwise.equivalence.edits import instrument
from shardwise.equivalence.ranks import Unassembled, gradient_layout, whole_values
from shardwise.sharding.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Partial, Shard
from tests.unit.equivalence import mutations as m
from tests.unit.equivalence.cases import case

MESH = Mesh(axes=(("dp", 2), ("tp", 2)))


def test_a_value_is_assembled_from_shards_and_partial_sums() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    layout = Layout((("dp", Shard(0, ((2, 2, 1),))), ("tp", PARTIAL)))
    rows = {0: full[[0, 2]], 1: full[[1, 3]]}
    parts = [rows[rank // 2] * (0.25 if rank % 2 else 0.75) for rank in range(4)]
    ((_, found),) = whole_values(parts, layout, (4, 3), MESH)
    assert torch.equal(found, full)


def test_two_axes_on_one_dim_and_maxima() -> None:
    full = torch.arange(7.0)
    layout = Layout((("dp", Shard(0, ((1, 7, 1),))), ("tp", Shard(0, ((1, 7, 1),)))))
    parts = [full[0:2], full[2:4], full[4:6], full[6:7]]
    ((_, found),) = whole_values(parts, layout, (7,), MESH)
    assert torch.equal(found, full)
    most = Layout((("dp", REPLICATE), ("tp", Partial("max"))))
    ((_, found),) = whole_values([full, full - 1, full - 2, full], most, (7,), MESH)
    assert torch.equal(found, full)


def test_ranks_that_should_agree_and_shapes_are_checked() -> None:
    layout = Layout((("dp", REPLICATE), ("tp", REPLICATE)))
    ones = torch.ones(3)
    _, (which, copy) = whole_values([ones, ones, ones, ones + 1], layout, (3,), MESH)
    assert (which, copy.tolist()) == ("ranks 0 and 1 of dp, 1 of tp", [2.0, 2.0, 2.0])
    with pytest.raises(Unassembled, match="rank 3 holds shape"):
        whole_values([ones, ones, ones, torch.ones(2)], layout, (3,), MESH)


def test_gradients_lie_as_the_dual_of_their_value() -> None:
    layout = Layout((("a", PARTIAL_GRAD), ("b", PARTIAL), ("c", Shard(0, ((1, 4, 1),)))))
    assert str(gradient_layout(layout)) == "a:P b:R c:S(0)"


def test_a_program_that_raises_names_the_statement() -> None:
    found = case("mlp", "tensor")
    index = m.find_step(found.program, "rt.gather_fanout")
    text = found.check(m.drop_step(found.program, index)).first_difference
    assert text is not None
    for word in ("F.linear(", "node linear_1", "raised RuntimeError"):
        assert word in text


def test_edited_code_is_compared_statement_by_statement() -> None:
    found = case("fused_gpt", "tensor")
    sources = [emit(found.program, p.ranks[0]) for p in found.program.rank_programs]
    assert found.check(sources=sources).ok
    edited = [s.replace("F.gelu(", "F.relu(") for s in sources]
    assert edited != sources
    certificate = found.check(sources=edited)
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
