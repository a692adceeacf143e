from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Cluster, ClusterNode, Device, Link, Mesh

sizes = st.integers(1, 5)
meshes = st.dictionaries(st.sampled_from(["dp", "fsdp", "tp", "cp", "pp"]), sizes, max_size=4).map(
    lambda axes: Mesh.of(**axes)
)
positive = st.floats(1e-6, 1e18)
links = st.builds(Link, bandwidth_bytes_per_s=positive, latency_s=st.floats(0, 1))
devices = st.builds(
    Device,
    kind=st.text(min_size=1),
    memory_bytes=st.integers(1, 2**60),
    flops_per_s=st.dictionaries(st.sampled_from(["float32", "bfloat16"]), positive).map(
        lambda rates: tuple(rates.items())
    ),
)
nodes = st.builds(ClusterNode, name=st.text(), device=devices, count=sizes, link=links)
clusters = st.builds(
    Cluster,
    name=st.text(),
    nodes=st.lists(nodes, min_size=1, max_size=3).map(tuple),
    network=links,
)


@given(meshes)
def test_rank_and_coordinate_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(st.data(), meshes)
def test_groups_partition_the_ranks(data: st.DataObject, mesh: Mesh) -> None:
    axes = data.draw(st.permutations(mesh.names).flatmap(lambda p: st.sampled_from([p, p[:1]])))
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        fixed = [{k: v for k, v in mesh.coordinate(r).items() if k not in axes} for r in group]
        assert all(rest == fixed[0] for rest in fixed)
        along = [[mesh.coordinate(rank)[axis] for axis in axes] for rank in group]
        assert along == sorted(along)


@given(clusters)
def test_json_round_trip(cluster: Cluster) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster
