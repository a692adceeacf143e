from __future__ import annotations

from typing import Any

import pytest

from shardwise.cluster import Cluster
from shardwise.collectives import Network
from shardwise.cost import collective_model
from shardwise.cost.selection import select
from shardwise.profiling.fit import (
    Timing,
    errors,
    fit_line,
    nondecreasing,
    rounded,
    speeds,
    timings,
)
from shardwise.profiling.machine import assemble


def rank_result(speed: float, links: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements of a rank of this speed."""
    return {
        "name": "cpu",
        "matmul": {"float32": [[64, 1e10 * speed], [512, 4e10 * speed]]},
        "attention": {"float32": [[64, 1e10 * speed]]},
        "memory": [[4096, 2e9 * speed], [2**20, 8e9 * speed]],
        "overhead_s": 2e-6 / speed,
        "pace": 100.0 * speed,
        "host_bytes_per_s": 5e9 * speed,
        "reserved_bytes": 2**28,
        "links": links,
    }


def link_rows(world: int, start_s: float = 1e-4, s_per_byte: float = 1e-9) -> list[dict[str, Any]]:
    """Return the rows of a link whose collectives differ from any ring."""
    everyone = [list(range(world))]
    pairs = [[i, i + 1] for i in range(0, world, 2)]
    shapes = [("send", [[0, 1]])] + ([("send", pairs)] if world > 2 else [])
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        shapes += [(operation, everyone)] + ([(operation, pairs)] if world > 2 else [])
    rows = []
    for index, (operation, groups) in enumerate(shapes):
        for size in (1024, 16384, 2**18, 2**22, 2**26):
            cache = 1.0 if size < 2**24 else 1.5
            seconds = start_s * (1 + 0.3 * index) + size * s_per_byte * cache * (1 + 0.2 * index)
            if operation == "broadcast":
                seconds += start_s * 3
            rows.append(
                {"operation": operation, "groups": groups, "bytes": size, "seconds": seconds}
            )
    return rows


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_model_reproduces_the_measurements(world: int) -> None:
    results = [rank_result(1.0, link_rows(world)) for _ in range(world)]
    cluster = assemble(results, "cpu")
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    measured = timings(results)
    assert {t.operation for t in measured} >= {"send", "all_reduce", "reduce_scatter"}
    assert max(abs(e) for e in errors(cluster, measured)) < 0.2


def test_a_slow_rank_has_a_lower_speed() -> None:
    cluster = assemble([rank_result(1.0, link_rows(2)), rank_result(0.5, link_rows(2))], "cpu")
    fast, slow = cluster.device(0), cluster.device(1)
    assert (fast.speed, slow.speed) == (1.0, 0.5)
    assert slow.matmul_rate("float32", 512, 512, 512) == pytest.approx(2e10)
    assert fast.matmul_rate("float32", 512, 512, 512) == pytest.approx(4e10)
    assert slow.overhead_s == 2 * fast.overhead_s
    assert slow.memory_rate(1e9) == fast.memory_rate(1e9) / 2


def test_noise_does_not_make_ranks_unequal() -> None:
    assert speeds([rank_result(s, []) for s in (1.05, 0.97, 1.0, 0.95)]) == (1.0,) * 4
    assert speeds([rank_result(s, []) for s in (1.05, 0.97, 0.5, 0.95)]) == (1.0, 1.0, 0.52, 1.0)


def test_pairs_that_slow_each_other_share_a_bus() -> None:
    crowded = link_rows(4)
    for item in crowded:
        if item["operation"] == "send" and len(item["groups"]) == 2:
            item["seconds"] *= 2
    cluster = assemble([rank_result(1.0, crowded)] * 4, "cpu")
    assert "bus localhost" in cluster.capacities
    one, two = (collective_model(cluster, "send", g) for g in ([[0, 1]], [[0, 1], [2, 3]]))
    assert two.seconds(2**26) > 1.5 * one.seconds(2**26)
    assert two.bottleneck == "bus localhost"


def test_one_rank_has_no_link() -> None:
    cluster = assemble([rank_result(1.0, [])], "cpu")
    assert cluster.nodes[0].link is None
    assert cluster.num_ranks == 1


def test_spikes_are_removed() -> None:
    assert nondecreasing([1.0, 9.0, 2.0, 3.0]) == [1.0, 2.0, 2.0, 3.0]
    noisy, clean = link_rows(2), link_rows(2)
    noisy[1]["seconds"] *= 20
    results = [rank_result(1.0, noisy + clean)] * 2
    assert assemble(results, "cpu") == assemble([rank_result(1.0, clean)] * 2, "cpu")


def test_a_fitted_line_rises() -> None:
    points = [
        Timing(operation="send", groups=((0, 1),), num_bytes=n, seconds=s)
        for n, s in ((1000, 2e-4), (100000, 1e-4))
    ]
    latency_s, s_per_byte = fit_line(points)
    assert latency_s > 0
    assert s_per_byte > 0
    assert rounded(123456.0, digits=2) == 120000.0


@pytest.mark.parametrize(("speed", "uses"), [(0.5, "shared"), (0.95, "library")])
def test_shared_memory_is_selected_by_its_measured_time(speed: float, uses: str) -> None:
    rows = link_rows(2)
    rows += [
        {**row, "operation": f"shared {row['operation']}", "seconds": speed * row["seconds"]}
        for row in rows
        if row["operation"] == "all_reduce"
    ]
    rows.append({"operation": "message", "groups": [[0, 1]], "bytes": 1024, "seconds": 3e-5})
    cluster = assemble([rank_result(1.0, rows)] * 2, "cpu")
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    assert Network.of_cluster(cluster).message_s == 3e-5
    assert max(abs(e) for e in errors(cluster, timings([rank_result(1.0, rows)] * 2))) < 0.2
    choice = select(cluster, "all_reduce", [[0, 1]])
    assert choice is not None
    assert choice.uses == uses
    measured_s = speed * choice.predicted_s["library"]
    assert 0.99 * measured_s < choice.predicted_s["shared"] < 1.4 * measured_s
