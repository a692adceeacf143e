"""Compare solved all-reduces with gloo on four emulated hosts, one per network namespace.

    python -m benchmarks.collectives [--cases slow,trunk] [--sizes 16MB,64MB] [--rounds 5]

Needs root and Debian's iproute2. The namespaces are created and removed here (see
`shardwise.collectives.bench`); TCP leaves 95.6% of the link bandwidths to data. Both
implementations alternate in the same processes; figures are medians. "ours" is the selected
implementation: the solved program, or the library if that gains nothing. "of bound" is our time
divided by the lower bound for any algorithm, and "of links" is the same if headers counted as data.
Writes benchmarks/results/collectives.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.pipeline import machine
from shardwise.cli.collective import parse_bytes
from shardwise.cluster import Cluster
from shardwise.collectives import Network
from shardwise.collectives.bench.benchmark import Bench, Row, chosen, on_emulated_hosts, table
from shardwise.collectives.bench.emulation import FRAME

RESULTS = Path(__file__).parent / "results" / "collectives.json"
DATA = 1 / FRAME  # of the bandwidth of a link
OF_BOUND = 1.06  # at the largest size
NETWORK = "latency_us: 50, message_us: 60"  # of four processes on two cores
HEAD = "version: 2\nname: emulated\ndevices: {cpu: {preset: cpu}}\n"


def gbit(mbit: float) -> float:
    """Return the bandwidth for data in Gbit/s of a link of some Mbit/s."""
    return mbit * DATA / 1e3


def hosts(rates: list[float], network: str = NETWORK) -> str:
    """Return a cluster with a host of one rank for each bandwidth of a card in Mbit/s."""
    nodes = "".join(
        f"  - {{name: host{i}, devices: {{cpu: 1}}, nic: {{bandwidth_gbit_per_s: {gbit(rate)}}}}}\n"
        for i, rate in enumerate(rates)
    )
    return f"{HEAD}nodes:\n{nodes}network: {{{network}}}\n"


def trunk() -> str:
    """Return a cluster with a trunk of 200 Mbit/s between hosts 0 and 2 and hosts 1 and 3."""
    line = f'name: trunk, between: ["host[0,2]", "host[1,3]"], bandwidth_gbit_per_s: {gbit(200)}'
    return hosts([800] * 4, f"{NETWORK}, trunks: [{{{line}}}]")


def two_by_two() -> str:
    """Return a cluster of two hosts with two ranks, each with a card of 200 Mbit/s."""
    return (
        f"{HEAD}nodes:\n  - name: host[0-1]\n    devices: {{cpu: 2}}\n"
        "    link: {bandwidth_gb_per_s: 4, latency_us: 20}\n"
        f"    nic: {{count: 2, bandwidth_gbit_per_s: {gbit(200)}}}\nnetwork: {{{NETWORK}}}\n"
    )


def links(seed: int, low: float = 10, high: float = 500) -> str:
    """Return a cluster with a link between each pair of hosts, with log-uniform bandwidths."""
    draw = random.Random(seed)
    lines = [
        f"{{name: link{a}{b}, between: [host{a}, host{b}], bandwidth_gbit_per_s: "
        f"{gbit(math.exp(draw.uniform(math.log(low), math.log(high))))}}}"
        for a, b in combinations(range(4), 2)
    ]
    return hosts([100_000] * 4, f"{NETWORK}, trunks: [{', '.join(lines)}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster, its ranks in the order of the group, and the required speedup."""

    what: str
    cluster: Callable[[], str]
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    faster: float


CASES = {
    "slow": Case(
        what="one slow host: 3 of 800 Mbit/s, 1 of 200",
        cluster=lambda: hosts([800, 800, 800, 200]),
        faster=1.45,
    ),
    "trunk": Case(what="2x2, a trunk of 200 Mbit/s, ranks interleaved", cluster=trunk, faster=2.8),
    "cards": Case(
        what="2x2, a card of 200 Mbit/s for each rank",
        cluster=two_by_two,
        ranks=(0, 2, 1, 3),
        faster=2.7,
    ),
    "links": Case(
        what="random direct links of 10 to 500 Mbit/s", cluster=lambda: links(0), faster=5.0
    ),
    "uniform": Case(what="four hosts of 800 Mbit/s", cluster=lambda: hosts([800] * 4), faster=0.98),
}


def measured(case: Case, sizes: list[int], rounds: int) -> list[Row]:
    """Return the rows of a case."""
    cluster = Cluster.from_yaml(case.cluster())
    network = Network.of_cluster(cluster, case.ranks)
    bench = Bench(
        network=network,
        operation="all_reduce",
        sizes=sizes,
        rounds=rounds,
        timeout_s=1_800,
        uses=chosen(cluster, "all_reduce", case.ranks),
    )
    return on_emulated_hosts(bench)


def report(name: str, case: Case, rows: list[Row]) -> dict[str, Any]:
    """Print the measurements and return them."""
    print(f"\n{name}: {case.what}")
    print("\n".join(table(rows)))
    worst = min(row.faster for row in rows)
    near = rows[-1].of_bound
    reached = worst >= case.faster and (rows[-1].uses == "library" or near <= OF_BOUND)
    print(
        f"{'reached' if reached else 'MISSED'}: {worst:.2f}x faster (at least {case.faster}x), "
        f"{near:.3f} of the bound, {near * DATA:.3f} of the links' bound",
        flush=True,
    )
    return {
        "what": case.what,
        "cluster": case.cluster(),
        "ranks": case.ranks,
        "at_least": case.faster,
        "reached": reached,
        "rows": [row.to_json() for row in rows],
    }


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sizes", default="16MB,64MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", default="", help="seeds of further random links: 1,2,3")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes = sorted(parse_bytes(size) for size in options.sizes.split(","))
    cases = {name: CASES[name] for name in options.cases.split(",") if name}
    for seed in filter(None, options.seeds.split(",")):
        cases[f"links {seed}"] = Case(
            what=f"random direct links with seed {seed}",
            cluster=lambda seed=seed: links(int(seed)),  # type: ignore[misc]
            faster=5.0,
        )
    began = time.time()
    results = {
        name: report(name, case, measured(case, sizes, options.rounds))
        for name, case in cases.items()
    }
    result = {
        "command": f"python -m benchmarks.collectives --rounds {options.rounds}",
        "machine": machine(),
        "seconds": round(time.time() - began),
        "cases": results,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{options.out}")


if __name__ == "__main__":
    main()
