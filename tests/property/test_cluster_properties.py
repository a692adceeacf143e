from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import (
    Cluster,
    ClusterNode,
    Curve,
    Device,
    Factor,
    Link,
    Mesh,
    Network,
    Nic,
    Ssh,
    Start,
    Switch,
    Trunk,
)

sizes = st.integers(1, 5)
meshes = st.dictionaries(st.sampled_from(["dp", "fsdp", "tp", "cp", "pp"]), sizes, max_size=4).map(
    lambda axes: Mesh.of(**axes)
)
positive = st.floats(1e-6, 1e18)
latency = st.just(0.0) | st.floats(1e-12, 1)
efficiency = st.floats(1e-6, 2)  # sums in a switch exceed the link's bandwidth
words = st.text("abc: #-{}'\"\\é 0123", min_size=1)
curves = st.dictionaries(positive, positive, min_size=1).map(
    lambda points: Curve(tuple(sorted(points.items())))
)
factors = st.dictionaries(
    st.sampled_from(["all_reduce", "send"]),
    st.lists(
        st.builds(Factor, latency=positive, bytes=curves, ranks=sizes),
        min_size=1,
        unique_by=lambda factor: factor.ranks,
    ).map(tuple),
).map(lambda mapping: tuple(mapping.items()))
links = st.builds(
    Link,
    bandwidth_bytes_per_s=positive,
    latency_s=latency,
    bus_bytes_per_s=positive | st.just(math.inf),
    efficiency=efficiency,
    collectives=factors,
)
nics = st.builds(
    Nic, bandwidth_bytes_per_s=positive, latency_s=latency, count=sizes, efficiency=efficiency
)
rates = st.dictionaries(st.sampled_from(["float32", "bfloat16"]), curves, min_size=1).map(
    lambda mapping: tuple(mapping.items())
)
devices = st.builds(
    Device,
    name=words,
    kind=st.just("cuda"),
    memory_bytes=st.integers(2**40, 2**50),
    reserved_bytes=st.integers(0, 2**39),
    matmul_flops_per_s=rates,
    attention_flops_per_s=rates | st.just(()),
    memory_bytes_per_s=curves,
    overhead_s=latency,
    host_bytes_per_s=positive | st.just(math.inf),
    host_memory_bytes=st.integers(0, 2**50),
    price_per_hour=latency,
    overlap_loss=latency,
    speed=positive,
)
ssh = st.builds(
    Ssh,
    user=words,
    key=words,
    port=st.integers(1, 65535),
    program=words,
    options=st.lists(words, max_size=2).map(tuple),
)
variables = st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]*", fullmatch=True), words, max_size=2)
starts = st.builds(
    Start, folder=words, python=words, environment=variables.map(lambda v: tuple(v.items()))
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.sampled_from([["a"], ["a", "b[0-2]"], ["x[1-2]", "x[3-4].de", "y"]]))
    kinds = draw(st.lists(devices, min_size=1, max_size=2))
    picked = st.lists(st.sampled_from(kinds), min_size=1, max_size=3).map(tuple)
    nodes = tuple(
        ClusterNode(
            name=name,
            devices=draw(picked),
            link=draw(links),
            nic=draw(nics),
            ssh=draw(ssh | st.none()),
            start=draw(starts | st.just(Start())),
        )
        for name in names
    )
    switch = st.builds(
        Switch,
        name=words,
        nodes=st.just(tuple(names)),
        every=sizes,
        oversubscription=positive,
        latency_s=latency,
    )
    trunk = st.builds(
        Trunk,
        name=words,
        between=st.just(((names[0],), (names[-1],))),
        bandwidth_bytes_per_s=positive,
        latency_s=latency,
    )
    network = Network(
        latency_s=draw(latency),
        collectives=draw(factors),
        switches=(draw(switch),) if draw(st.booleans()) else (),
        trunks=(draw(trunk),) if len(names) > 1 and draw(st.booleans()) else (),
    )
    return Cluster(
        name=draw(words),
        nodes=nodes,
        network=network,
        port=draw(st.integers(1, 65535)),
        start=draw(starts | st.just(Start())),
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


@given(clusters())
def test_yaml_round_trip(cluster: Cluster) -> None:
    again = Cluster.from_yaml(cluster.to_yaml())
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint
