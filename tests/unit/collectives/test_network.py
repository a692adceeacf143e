from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from shardwise.cluster import Cluster
from shardwise.collectives import Network, Send, solve
from shardwise.collectives.solver.network import find_symmetry
from shardwise.errors import ClusterError

TWO = {("a", "b"): Send(resources=("link",)), ("b", "a"): Send(resources=("link",))}


def test_a_cluster_gives_the_resources_of_each_path():
    cluster = Cluster.preset("h100", nodes=2)
    network = Network.of_cluster(cluster)
    for a, b in ((0, 1), (0, 9), (12, 3)):
        edge = int(network.edge[a, b])
        used = [network.resources[r] for r in network.uses[edge] if r >= 0]
        assert sorted(used) == sorted(cluster.path(a, b).resources)
        assert network.latency_s[edge] == cluster.path(a, b).latency_s
        for name in used:
            index = network.resources.index(name)
            assert network.capacity[index] == cluster.capacities[name]


def test_some_ranks_of_a_cluster():
    network = Network.of_cluster(Cluster.preset("h100", nodes=2), [1, 9, 3])
    assert network.names == ("1", "9", "3")
    assert network.num_edges == 6
    assert network.groups == ((0, 2), (1,))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "fast", True])
def test_bandwidths_are_above_zero(value):
    with pytest.raises(ClusterError, match=r"capacity of 'link' is .*above 0"):
        Network.of(["a", "b"], {"link": value}, TWO)


def test_unknown_ranks_and_resources_are_named():
    with pytest.raises(ClusterError, match="no rank 'c'"):
        Network.of(["a", "b"], {"link": 1.0}, {("a", "c"): Send(resources=())})
    with pytest.raises(ClusterError, match="no resource 'lnik'; did you mean 'link'"):
        Network.of(["a", "b"], {"link": 1.0}, {("a", "b"): Send(resources=("lnik",))})
    with pytest.raises(ClusterError, match="rank 7 is outside a cluster of 4"):
        Network.of_cluster(Cluster.local(4), [0, 7])
    with pytest.raises(ClusterError, match="2 ranks are named 'a'"):
        Network.of(["a", "a"], {}, {})
    with pytest.raises(ClusterError, match="latency is -1"):
        Network.of(["a", "b"], {}, {("a", "b"): Send(resources=(), latency_s=-1)})


def test_an_unreachable_rank_raises_only_if_the_operation_needs_it():
    one_way = Network.of_links({(0, 1): 1e9, (1, 2): 1e9})
    assert solve(one_way, "broadcast", 10, root=0).program.num_messages
    with pytest.raises(ClusterError, match="rank 0 cannot be reached from rank 1"):
        solve(one_way, "broadcast", 10, root=1)
    with pytest.raises(ClusterError, match="rank 0 cannot be reached from rank"):
        solve(one_way, "all_reduce", 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "all_reduec"}, "did you mean 'all_reduce'"),
        ({"operation": "all_reduce", "root": 1}, "has no root"),
        ({"operation": "reduce", "root": 4}, "root 4 is outside a network of 4"),
        ({"operation": "all_gather", "counts": [1, 2]}, "add up to 3, not 10"),
        ({"operation": "all_gather", "counts": [1, 9]}, "2 shares for 4 ranks"),
        ({"operation": "all_reduce", "counts": [1, 2, 3, 4]}, "has no shares"),
    ],
)
def test_invalid_requests_raise(arguments, message):
    operation = arguments.pop("operation")
    with pytest.raises(ClusterError, match=message):
        solve(Network.of_cards([1e9] * 4), operation, 10, **arguments)


def test_symmetry_finds_devices_and_nodes():
    symmetry = find_symmetry(Network.of_cluster(Cluster.preset("h100", nodes=4)))
    assert symmetry.order == 32
    assert symmetry.representatives() == [0]


def test_symmetry_separates_the_root_and_slow_ranks():
    network = Network.of_cards([8.0, 8.0, 8.0, 2.0])
    assert find_symmetry(network).order == 3
    rooted = find_symmetry(network, [1, 0, 0, 0])
    assert rooted.order == 2
    assert rooted.representatives() == [0, 1, 3]


def test_symmetry_of_a_ring_is_its_rotation():
    network = Network.of_links({(i, (i + 1) % 5): 1.0 for i in range(5)})
    assert find_symmetry(network).order == 5


def test_every_element_of_the_group_preserves_the_network():
    network = Network.of_cluster(Cluster.preset("a100-80", nodes=3, devices_per_node=4))
    symmetry = find_symmetry(network)
    for turn in symmetry.elements:
        moved = network.edge[turn[network.source], turn[network.target]]
        assert (network.latency_s[moved] == network.latency_s).all()
        np.testing.assert_array_equal(network.bandwidth[moved], network.bandwidth)
    sizes = np.bincount(symmetry.resource_orbit)
    assert set(sizes[sizes > 0]) <= {1, 3, 4, 12}


@pytest.mark.parametrize("capacity", [1e-320, 1e300, "1e9", None, True])
def test_capacities_out_of_range_raise(capacity):
    with pytest.raises(ClusterError, match="capacity of 'link' is"):
        Network.of(["a", "b"], {"link": capacity}, {("a", "b"): Send(resources=("link",))})


def test_numpy_numbers_and_integer_names_are_accepted():
    sends = {(0, 1): Send(resources=("link",)), (1, 0): Send(resources=("link",))}
    for rate in (np.float32(1e9), np.int64(10**9), Fraction(10**9)):
        network = Network.of([0, 1], {"link": rate}, sends)
        assert network.capacity.tolist() == [1e9]
    with pytest.raises(ClusterError, match="no rank '2'"):
        Network.of([0, 1], {}, {(0, 2): Send(resources=())})


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, "1"])
def test_times_of_messages_are_checked(seconds):
    with pytest.raises(ClusterError, match="message_s is"):
        Network.of(["a"], {}, {}, message_s=seconds)
    send = Send(resources=(), latency_s=seconds)
    with pytest.raises(ClusterError, match="at: send a -> b"):
        Network.of(["a", "b"], {}, {("a", "b"): send})


def test_cards_need_a_rate_in_each_direction():
    with pytest.raises(ClusterError, match=r"\b2\b.*\b1\b"):
        Network.of_cards([1e9, 1e9], [1e9])
