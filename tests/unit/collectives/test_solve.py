from __future__ import annotations

import json

import networkx
import numpy as np
import pytest

from shardwise.cluster import Cluster
from shardwise.collectives import Network, Send, solve
from shardwise.collectives.messages.check import check
from shardwise.collectives.solver.classical import ring
from shardwise.collectives.solver.spec import demand_of
from shardwise.collectives.solver.trees import cheapest, depths, load_time, shallow
from shardwise.errors import ClusterError
from tests.support.work import calls

MBIT = 125e3
MB_64 = 16_000_000  # elements of 4 bytes


def library_s(network: Network) -> float:
    """Return the time of the ring in rank order, which gloo uses."""
    trees = ring(network, demand_of(network, "all_reduce"), range(network.num_ranks))
    assert trees is not None
    return load_time(network, trees) * MB_64 * 4


def switched(trunk: float, order: str, cards: float) -> Network:
    """Return hosts on two sides, `order` as "abab", with a trunk between them."""
    names = [str(i) for i in range(len(order))]
    capacities = {"there": trunk, "back": trunk}
    sends = {}
    for a in names:
        capacities |= {f"out {a}": cards, f"in {a}": cards}
    for a in names:
        for b in names:
            if a == b:
                continue
            used = [f"out {a}", f"in {b}"]
            if order[int(a)] != order[int(b)]:
                used.append("there" if order[int(a)] == "a" else "back")
            sends[a, b] = Send(resources=tuple(used), latency_s=5e-5)
    return Network.of(names, capacities, sends, message_s=2e-5)


# ------------------------------------------------------------ gains of the solver


def test_one_slow_host_is_a_leaf_of_every_tree():
    network = Network.of_cards([800 * MBIT] * 3 + [200 * MBIT], latency_s=5e-5, message_s=2e-5)
    solution = solve(network, "all_reduce", MB_64)
    assert solution.cut_bound_s == pytest.approx(64e6 / (200 * MBIT))
    assert solution.proved
    assert library_s(network) / solution.predicted_s > 1.45
    assert solution.predicted_s < 1.06 * solution.cut_bound_s
    halves = [solve(network, op, MB_64).lp_bound_s for op in ("reduce_scatter", "all_gather")]
    assert sum(halves) == pytest.approx(1.5 * solution.lp_bound_s)


def test_a_shared_trunk_is_crossed_once():
    network = switched(200 * MBIT, "abab", 800 * MBIT)
    solution = solve(network, "all_reduce", MB_64)
    assert library_s(network) / solution.predicted_s > 2.8
    assert solution.predicted_s < 1.06 * solution.cut_bound_s
    assert solution.bottlenecks[0].startswith(("there", "back"))


def test_cards_of_each_rank_are_used_at_once():
    text = """
    version: 2
    name: pairs
    devices: {cpu: {preset: cpu}}
    nodes:
      - name: host[0-1]
        devices: {cpu: 2}
        link: {bandwidth_gb_per_s: 4, latency_us: 20}
        nic: {count: 2, bandwidth_gbit_per_s: 0.2}
    network: {latency_us: 50}
    """
    network = Network.of_cluster(Cluster.from_yaml(text), [0, 2, 1, 3])
    solution = solve(network, "all_reduce", MB_64)
    assert library_s(network) / solution.predicted_s > 2.7
    assert solution.predicted_s < 1.06 * solution.cut_bound_s


def test_direct_links_of_random_speeds():
    random = np.random.default_rng(3)
    links = {(a, b): float(random.uniform(20, 1000)) * MBIT for a in range(4) for b in range(4)}
    network = Network.of_links({k: v for k, v in links.items() if k[0] != k[1]}, latency_s=5e-5)
    solution = solve(network, "all_reduce", MB_64)
    assert solution.proved
    assert solution.predicted_s < 1.06 * solution.cut_bound_s
    assert library_s(network) / solution.predicted_s > 2


def test_equal_hosts_gain_nothing():
    network = Network.of_cards([800 * MBIT] * 4, latency_s=5e-5)
    solution = solve(network, "all_reduce", MB_64)
    assert solution.bandwidth_s == pytest.approx(library_s(network))


def test_a_bus_counts_both_directions():
    names = ["0", "1", "2"]
    sends = {(a, b): Send(resources=("bus",)) for a in names for b in names if a != b}
    solution = solve(Network.of(names, {"bus": 1e9}, sends), "all_reduce", 1_000_000)
    assert solution.bandwidth_s == pytest.approx(4 * 4e6 / 1e9)  # 2 sums and 2 copies cross it
    assert solution.proved


# ------------------------------------------------------------ sizes


def test_small_messages_take_few_steps():
    network = Network.of_cards([1e9] * 8, latency_s=2e-5, message_s=5e-6)
    small = solve(network, "all_reduce", 16)
    large = solve(network, "all_reduce", MB_64)
    assert small.name == "recursive doubling"
    assert large.bandwidth_s < 1.001 * large.cut_bound_s
    assert small.predicted_s < 4 * (2e-5 + 2 * 5e-6)
    assert check(large.program).largest_message < MB_64


def test_an_unlimited_network_is_all_latency():
    names = ["0", "1", "2"]
    sends = {(a, b): Send(resources=(), latency_s=1e-5) for a in names for b in names if a != b}
    solution = solve(Network.of(names, {}, sends), "all_reduce", 1000)
    assert solution.lp_bound_s == 0
    assert solution.predicted_s > 0
    assert "latencies" in str(solution)


def test_one_rank_sends_no_messages():
    network = Network.of(["0"], {}, {})
    for operation in ("all_reduce", "broadcast", "all_gather"):
        assert solve(network, operation, 10).program.num_messages == 0


def test_the_same_network_gives_the_same_program():
    network = Network.of_cards([3e8, 5e8, 2e8, 9e8, 4e8], latency_s=1e-5)
    first, second = (solve(network, "all_reduce", 123_457) for _ in range(2))
    assert first == second


def test_the_text_says_how_far_it_is_proved():
    solution = solve(Network.of_cards([1e9] * 3), "all_reduce", 999_999)
    assert "proved: no algorithm uses the network better" in str(solution)
    assert solution.to_json()["proved"] is True


# ------------------------------------------------------------ trees


@pytest.mark.parametrize("seed", range(6))
def test_cheapest_trees_equal_those_of_networkx(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 10))
    cost = random.integers(1, 9, size=(count, count)).astype(float)
    if seed % 2:
        cost = random.uniform(0, 1, size=(count, count))
    graph = networkx.DiGraph()
    for a in range(count):
        for b in range(1, count):
            if a != b:
                graph.add_edge(a, b, weight=cost[a, b])
    best = networkx.minimum_spanning_arborescence(graph)
    parent = cheapest(cost, 0)
    total = sum(cost[parent[b], b] for b in range(1, count))
    assert parent[0] == -1
    assert (depths(parent)[1:] > 0).all()
    assert total == pytest.approx(sum(d["weight"] for _, _, d in best.edges(data=True)))


def test_shallow_trees_respect_the_depth_limit():
    line = np.full((5, 5), 10.0)
    for i in range(4):
        line[i, i + 1] = 1.0
    ones = np.ones((5, 5))
    both, weights = np.array([0, 0]), np.array([0.0, 100.0])
    deep, complete = shallow(line, ones, both, weights, 4)
    assert complete.all()
    assert depths(deep).max(axis=1).tolist() == [4, 1]
    flat, complete = shallow(line, ones, both, weights, 2)
    assert complete.all()
    assert depths(flat).max() == 2
    assert not shallow(np.where(line < 10, line, np.inf), ones, both, weights, 2)[1].any()


# ------------------------------------------------------------ work


def num_calls(network: Network, num_bytes: int) -> int:
    return calls(lambda: solve(network, "all_reduce", num_bytes // 4))


def test_solving_eight_ranks_is_cheap():
    random = np.random.default_rng(0)
    cards = Network.of_cards(list(random.uniform(1e8, 1e9, 8)), latency_s=1e-5, message_s=5e-6)
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    bandwidths = {pair: float(np.exp(random.uniform(14, 19))) for pair in pairs}
    mesh = Network.of_links(bandwidths, latency_s=5e-5)
    for network in (cards, mesh):  # about 0.1 s; the limit allows less than twice
        assert num_calls(network, 64_000_000) < 300_000


@pytest.mark.slow
def test_hundreds_of_ranks_by_symmetry():
    assert num_calls(Network.of_cluster(Cluster.preset("h100", nodes=4)), 2**28) < 1_000_000
    assert num_calls(Network.of_cluster(Cluster.preset("h100", nodes=64)), 2**30) < 40_000_000


@pytest.mark.parametrize("wrong", [{"numel": 2.5}, {"numel": "9"}, {"item_bytes": 2.5}])
def test_sizes_are_whole_numbers(wrong):
    arguments = {"numel": 8, **wrong}
    with pytest.raises(ClusterError, match="must be a whole number"):
        solve(Network.of_cards([1e9] * 2), "all_reduce", **arguments)


def test_roots_and_counts_of_other_types():
    network = Network.of_cards([1e9] * 2)
    rooted = solve(network, "broadcast", np.int64(8), root=np.int64(1)).program
    assert json.loads(json.dumps(rooted.to_json()))["root"] == 1
    uneven = solve(network, "all_gather", 8, counts=np.array([5, 3])).program
    assert json.loads(json.dumps(uneven.to_json()))["counts"] == [5, 3]
    with pytest.raises(ClusterError, match="must be a whole number"):
        solve(network, "broadcast", 8, root=1.5)
    with pytest.raises(ClusterError, match="no operation None"):
        solve(network, None, 8)


def test_without_a_bound_nothing_is_proved():
    few = solve(Network.of_cards([1e9] * 7), "reduce_scatter", 3)
    assert not few.proved
    assert few.to_json()["gap"] is None
    assert "not proved optimal: there is no bound" in str(few)
    assert solve(Network.of_cards([1e9] * 7), "reduce_scatter", 0).proved
