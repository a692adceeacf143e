from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import (
    Cluster,
    ClusterNode,
    Curve,
    Device,
    Factor,
    Link,
    Network,
    Nic,
    Switch,
    Trunk,
)
from shardwise.cost import collective_model
from shardwise.errors import ClusterError
from tests.support.work import calls

CPU = Device(
    name="cpu",
    kind="cpu",
    memory_bytes=2**34,
    matmul_flops_per_s=(("float32", Curve.constant(1e10)),),
    memory_bytes_per_s=Curve.constant(1e10),
    overhead_s=1e-6,
)
GPU = replace(CPU, name="gpu", kind="cuda")
LINK = Link(bandwidth_bytes_per_s=100.0, latency_s=1.0)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def one_node(count: int, device: Device = GPU, **link: object) -> Cluster:
    node = ClusterNode(name="n", devices=(device,) * count, link=replace(LINK, **link))  # type: ignore[arg-type]
    return Cluster(name="c", nodes=(node,))


def several(nodes: int, count: int, device: Device = GPU, **network: object) -> Cluster:
    node = ClusterNode(
        name=f"n[0-{nodes - 1}]",
        devices=(device,) * count,
        link=LINK,
        nic=Nic(bandwidth_bytes_per_s=10.0, count=count, latency_s=2.0),
    )
    return Cluster(name="c", nodes=(node,), network=Network(**network))  # type: ignore[arg-type]


def per_byte(cluster: Cluster, operation: str, groups: object) -> float:
    model = collective_model(cluster, operation, groups)  # type: ignore[arg-type]
    return model.seconds(1e15) / 1e15


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16])
def test_rings_over_a_crossbar(n: int) -> None:
    cluster, groups = one_node(n), [range(n)]
    assert per_byte(cluster, "all_reduce", groups) == pytest.approx(2 * (n - 1) / n / 100)
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert per_byte(cluster, operation, groups) == pytest.approx((n - 1) / n / 100)
    model = collective_model(cluster, "all_reduce", groups)
    ring = next(line for line in model.lines if line.algorithm == "ring")
    assert ring.latency_s == pytest.approx(2 * (n - 1))
    assert model.bottleneck.startswith("device")
    assert model.launch_s == 1e-6


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_group_of_one_takes_no_time(operation: str) -> None:
    model = collective_model(one_node(3), operation, [[0], [2]])
    assert model.seconds(1e9) == 0
    assert model.launch_s == 0


def test_a_shared_bus_carries_the_traffic_of_all_ranks() -> None:
    n = 4
    shared = one_node(n, bus_bytes_per_s=100.0)
    assert per_byte(shared, "all_reduce", [range(n)]) == pytest.approx(2 * (n - 1) / 100)
    assert per_byte(shared, "send", [[0, 1], [2, 3]]) == pytest.approx(2 / 100)
    assert per_byte(one_node(n), "send", [[0, 1], [2, 3]]) == pytest.approx(1 / 100)
    assert collective_model(shared, "all_reduce", [range(n)]).bottleneck == "bus n"


def test_a_ring_over_nodes_uses_all_cards() -> None:
    cluster = several(4, 4)
    everyone = per_byte(cluster, "all_gather", [range(16)])
    assert everyone == pytest.approx(15 / 16 / 4 / 10)
    one_group = per_byte(cluster, "all_gather", [[0, 4, 8, 12]])
    assert one_group == pytest.approx(3 / 4 / 10)
    together = per_byte(cluster, "all_gather", np.arange(16).reshape(4, 4).T)
    assert together == pytest.approx(one_group)  # a card for each group
    pooled = replace(cluster.nodes[0], nic=Nic(bandwidth_bytes_per_s=10.0))
    assert per_byte(
        replace(cluster, nodes=(pooled,)), "all_gather", np.arange(16).reshape(4, 4).T
    ) == pytest.approx(4 * one_group)


def test_small_messages_take_fewer_steps_large_ones_less_traffic() -> None:
    cluster = several(16, 1, latency_s=1.0)
    model = collective_model(cluster, "all_reduce", [range(16)])
    assert model.algorithm(1) == "tree"
    assert model.algorithm(1e9) == "ring"
    assert model.seconds(1) == pytest.approx(2 * 4 * 5, rel=0.1)


def test_the_slowest_link_sets_the_pace() -> None:
    slow = ClusterNode(
        name="slow",
        devices=(GPU,) * 2,
        link=replace(LINK, bandwidth_bytes_per_s=5.0),
        nic=Nic(bandwidth_bytes_per_s=40.0, count=2),
    )
    quick = replace(slow, name="quick", link=LINK, devices=(GPU,) * 4)
    cluster = Cluster(name="c", nodes=(quick, slow))
    assert per_byte(cluster, "all_reduce", [range(4)]) == pytest.approx(1.5 / 100)
    model = collective_model(cluster, "all_gather", [range(6)])
    assert model.bottleneck in ("device 4 out", "device 5 out")
    assert model.seconds(1e9) / 1e9 == pytest.approx(5 / 6 / 2 / 5)


def test_oversubscription_slows_traffic_across_the_switch() -> None:
    leaf = Switch(name="leaf", nodes=("n[0-3]",), every=2, oversubscription=4)
    plain, thin = several(4, 1), several(4, 1, switches=(leaf,))
    inside, across = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert per_byte(thin, "all_gather", inside) == per_byte(plain, "all_gather", inside)
    assert per_byte(thin, "all_gather", across) == pytest.approx(
        4 * per_byte(plain, "all_gather", across)
    )


def test_measured_factors_apply_inside_and_between_nodes() -> None:
    twice = (("all_gather", (Factor(latency=3.0, bytes=Curve.constant(2.0)),)),)
    near, far = one_node(2, collectives=twice), several(2, 1, collectives=twice)
    for cluster, plain in ((near, one_node(2)), (far, several(2, 1))):
        lines = [collective_model(c, "all_gather", [[0, 1]]).lines[0] for c in (cluster, plain)]
        assert lines[0].seconds(0) == pytest.approx(3 * lines[1].seconds(0))
        assert lines[0].seconds(1e12) == pytest.approx(2 * lines[1].seconds(1e12))
        assert per_byte(cluster, "all_reduce", [[0, 1]]) == per_byte(plain, "all_reduce", [[0, 1]])


def test_factors_are_interpolated_between_measured_ones() -> None:
    measured = tuple(
        Factor(ranks=n, latency=float(n), bytes=Curve(((1e3, 1.0), (1e6, float(n)))))
        for n in (2, 8)
    )
    cluster = one_node(16, CPU, collectives=(("all_gather", measured),))
    plain = one_node(16, CPU)
    for n, expected in ((2, 2.0), (4, 4.0), (8, 8.0), (16, 8.0)):
        lines = [collective_model(c, "all_gather", [range(n)]).lines[0] for c in (cluster, plain)]
        assert lines[0].latency_s / lines[1].latency_s == pytest.approx(expected)
        assert lines[0].factor.at(1e9) == pytest.approx(expected)
        assert lines[0].factor.at(1) == pytest.approx(1.0)


def networks() -> st.SearchStrategy[Cluster]:
    """Draw unequal nodes behind switches and a trunk, with a library that exchanges directly."""

    def build(counts: list[int], cards: list[int], bus: bool, every: int) -> Cluster:
        link = replace(LINK, bus_bytes_per_s=30.0) if bus else LINK
        nodes = tuple(
            ClusterNode(
                name=f"n{i}",
                devices=(CPU,) * count,
                link=link,
                nic=Nic(bandwidth_bytes_per_s=3.0 + i, count=cards[i % len(cards)]),
            )
            for i, count in enumerate(counts)
        )
        names = tuple(node.name for node in nodes)
        network = Network(
            switches=(Switch(name="s", nodes=names, every=every, uplink_bytes_per_s=2.0),),
            trunks=(
                Trunk(name="t", between=((names[0],), (names[-1],)), bandwidth_bytes_per_s=1.0),
            ),
        )
        return Cluster(name="c", nodes=nodes, network=network)

    sizes = st.lists(st.integers(1, 3), min_size=2, max_size=4)
    return st.builds(build, sizes, sizes, st.booleans(), st.integers(1, 3))


def pairs(groups: np.ndarray) -> Iterator[tuple[int, int]]:
    for group in groups.tolist():
        yield from itertools.permutations(group, 2)


@given(networks(), st.data())
def test_direct_exchange_equals_the_sum_over_pairs(cluster: Cluster, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(cluster.num_ranks)))
    size = data.draw(st.integers(2, cluster.num_ranks))
    count = data.draw(st.integers(1, cluster.num_ranks // size))
    groups = np.array(ranks[: size * count]).reshape(count, size)
    load: dict[str, float] = defaultdict(float)
    for a, b in pairs(groups):
        for resource in cluster.path(a, b).resources:
            load[resource] += 1 / size
    expected = max(used / cluster.capacities[name] for name, used in load.items())
    assert per_byte(cluster, "all_to_all", groups) == pytest.approx(expected)
    assert per_byte(cluster, "all_gather", groups) == pytest.approx(expected)


@given(networks(), st.data(), st.sampled_from(OPERATIONS))
def test_concurrent_groups_never_take_less_time(
    cluster: Cluster, data: st.DataObject, operation: str
) -> None:
    cuda = tuple(
        replace(node, devices=tuple(replace(d, kind="cuda") for d in node.devices))
        for node in cluster.nodes
    )
    cluster = data.draw(st.sampled_from([cluster, replace(cluster, nodes=cuda)]))
    ranks = data.draw(st.permutations(range(cluster.num_ranks)))
    half = cluster.num_ranks // 2
    groups = np.array(ranks[: 2 * half]).reshape(2, half)
    both = collective_model(cluster, operation, groups)
    for num_bytes in (0.0, 1.0, 1e6):
        separate = [collective_model(cluster, operation, groups[i : i + 1]) for i in (0, 1)]
        assert both.seconds(num_bytes) >= max(m.seconds(num_bytes) for m in separate) - 1e-9
        assert both.seconds(num_bytes) <= sum(m.seconds(num_bytes) for m in separate) * 2 + 1e-9


@pytest.mark.parametrize("n", [2, 3, 5, 6, 8, 13])
def test_traffic_of_trees(n: int) -> None:
    cluster = several(n, 1)
    model = collective_model(cluster, "all_reduce", [range(n)])
    line = next(line for line in model.lines if line.algorithm == "tree")
    assert 1 / 10 <= line.s_per_byte <= 2 / 10 + 1e-12


@pytest.mark.parametrize("operation", OPERATIONS)
def test_modelling_sixteen_thousand_ranks_is_fast(operation: str) -> None:
    leaf = Switch(name="leaf", nodes=("node[0-2047]",), every=16, oversubscription=2)
    cluster = Cluster.preset("h100", nodes=2048)
    cluster = replace(cluster, network=replace(cluster.network, switches=(leaf,)))
    assert cluster.topology.num_ranks == 16384
    every = np.arange(16384)
    shapes = [every.reshape(1, -1), every.reshape(-1, 8), every.reshape(-1, 8).T]
    for groups in shapes:  # 0.03 s; never some work for every pair, nor much for every rank
        assert calls(lambda ranks=groups: collective_model(cluster, operation, ranks)) < 16384


@pytest.mark.parametrize(
    ("operation", "groups", "message"),
    [
        ("all_reduc", [[0, 1]], "did you mean 'all_reduce'"),
        ("all_reduce", [0, 1], "groups have shape"),
        ("all_reduce", [[0, 9]], "ranks 0 to 9 in a cluster of 4 ranks"),
        ("send", [[0, 1, 2]], "send is between 2 ranks, not 3"),
    ],
)
def test_invalid_requests_raise(operation: str, groups: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        collective_model(one_node(4), operation, groups)  # type: ignore[arg-type]
