from __future__ import annotations

import pytest

from shardwise.cluster import Mesh
from shardwise.errors import ClusterError, ShardwiseError
from shardwise.shares import Shares


def test_ranks_are_row_major_with_the_last_axis_fastest() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    assert (mesh.size, mesh.names, mesh.shape) == (6, ("dp", "tp"), (2, 3))
    assert mesh.coordinate(4) == {"dp": 1, "tp": 1}
    assert mesh.rank({"tp": 2, "dp": 0}) == 2
    assert mesh.axis_size("tp") == 3


def test_groups_along_axes() -> None:
    mesh = Mesh.of(dp=2, tp=2, pp=2)
    assert mesh.groups(["pp"]) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(["dp", "pp"]) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups(["pp", "dp"]) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert mesh.groups([]) == tuple((rank,) for rank in range(8))


def test_text_and_equality() -> None:
    assert str(Mesh.of(dp=2, tp=2)) == "Mesh(dp=2, tp=2)"
    assert Mesh.of(dp=2, tp=2) == Mesh(axes=(("dp", 2), ("tp", 2)))
    assert Mesh.of(dp=2, tp=2) != Mesh.of(tp=2, dp=2)
    assert Mesh.of().size == 1


def test_ranks_may_take_unequal_shares() -> None:
    mesh = Mesh.of(dp=(2, 1), tp=2)
    assert str(mesh) == "Mesh(dp=2:1, tp=2)"
    assert (mesh.size, mesh.shape, mesh.axis_size("dp")) == (4, (2, 2), 2)
    assert type(mesh.axis_size("dp")) is int
    assert mesh.groups(["dp"]) == Mesh.of(dp=2, tp=2).groups(["dp"])
    assert mesh == Mesh.of(dp=Shares(4, 2), tp=2)
    assert mesh != Mesh.of(dp=2, tp=2)
    assert Mesh.of(dp=[3, 3], tp=2) == Mesh.of(dp=2, tp=2)
    assert mesh.to_json() == {"dp": [2, 1], "tp": 2}
    assert Mesh.from_json(mesh.to_json()) == mesh
    with pytest.raises(ClusterError, match=r"mesh axis dp has shares \[0, 0\]"):
        Mesh.of(dp=(0, 0))


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_an_axis_needs_a_rank(size: int) -> None:
    with pytest.raises(ClusterError, match="mesh axis dp has size"):
        Mesh.of(dp=size)


def test_errors_describe_the_mistake() -> None:
    mesh = Mesh.of(fsdp=2, tp=2)
    with pytest.raises(ClusterError, match=r"no axis 'fdsp'; did you mean 'fsdp'\?"):
        mesh.groups(["fdsp"])
    with pytest.raises(ClusterError, match=r"rank 4 is outside Mesh\(fsdp=2, tp=2\)"):
        mesh.coordinate(4)
    with pytest.raises(ClusterError, match="no axis tp"):
        mesh.rank({"fsdp": 0})
    with pytest.raises(ClusterError, match="index 2 on axis tp"):
        mesh.rank({"fsdp": 0, "tp": 2})
    with pytest.raises(ClusterError, match="repeat a name"):
        mesh.groups(["tp", "tp"])
    with pytest.raises(ClusterError, match="given twice"):
        Mesh(axes=(("dp", 2), ("dp", 2)))
    with pytest.raises(ClusterError, match="is not a name"):
        Mesh(axes=(("", 2),))
    assert issubclass(ClusterError, ShardwiseError)
    assert issubclass(ClusterError, ValueError)
