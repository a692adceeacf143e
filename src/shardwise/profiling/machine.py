"""Measure this machine as a cluster, for `shardwise profile`.

Ranks measure rates, overheads, links and speeds while all of them are busy.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.cluster import Cluster, ClusterNode
from shardwise.cluster.cluster import machine_memory_bytes
from shardwise.errors import ClusterError
from shardwise.processes import run_workers

BUDGET_S, QUICK_BUDGET_S = 0.1, 0.03  # per measured size
TIMEOUT_S = 300.0


def profile(
    num_ranks: int | None = None,
    *,
    device: str | None = None,
    quick: bool = False,
    threads: int = 1,
    slow: Mapping[int, float] | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[str], None] = lambda what: None,
    report: Callable[[str], None] = lambda note: None,
) -> Cluster:
    """Measure this machine with `num_ranks` processes: its GPUs, or its cores over gloo.

    `slow={1: 0.5}` makes rank 1 repeat its work, as if it had half the speed. Each process of a CPU
    uses `threads` threads; torchrun starts them with one. `progress` receives the step that is
    measured, `report` the steps that failed.
    """
    from shardwise.cost.kernels import GAP_S

    kind, ranks = _choose_device(device, num_ranks)
    repeats = _repeats(slow or {}, ranks)
    common = {
        "ranks": ranks,
        "device": kind,
        "quick": quick,
        "threads": threads,
        "budget_s": QUICK_BUDGET_S if quick else BUDGET_S,
        "timeout_s": timeout_s,
        "gap_s": GAP_S,
    }
    defaults = {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # see `shardwise doctor`
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    environment = {name: os.environ.get(name, value) for name, value in defaults.items()}
    results = run_workers(
        "shardwise.profiling.worker",
        [common | {"rank": rank, "repeats": repeats[rank]} for rank in range(ranks)],
        timeout_s,
        progress,
        environment=environment,
        hint="shardwise profile --quick, or fewer --ranks",
    )
    from shardwise.profiling.compute import training_factor, with_training_rates

    progress("training of two models")
    cluster = assemble(results, kind)
    factor = training_factor(cluster, report)
    (node,) = cluster.nodes
    devices = tuple(with_training_rates(device, factor) for device in node.devices)
    return replace(cluster, nodes=(replace(node, devices=devices),))


def assemble(results: list[dict[str, Any]], kind: str) -> Cluster:
    """Return the cluster that the ranks measured."""
    from shardwise.profiling.fit import device_of, link_of, rounded, speeds, timings

    ranks = len(results)
    speed = speeds(results)
    share = machine_memory_bytes() // ranks
    base = device_of(
        results,
        speed,
        kind,
        memory_bytes=int(results[0].get("memory_bytes", share)),
        reserved_bytes=min(int(max(r["reserved_bytes"] for r in results)), share // 2),
        host_memory_bytes=share,
    )
    devices = tuple(replace(base, speed=s, overhead_s=rounded(base.overhead_s / s)) for s in speed)
    node = ClusterNode(name="localhost", devices=devices)
    if ranks > 1:
        node = replace(node, link=link_of(node, timings(results)))
    return Cluster(name="profiled", nodes=(node,))


def _choose_device(device: str | None, num_ranks: int | None) -> tuple[str, int]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = device or ("cuda" if gpus else "cpu")
    ranks = num_ranks or (gpus if kind == "cuda" else os.cpu_count() or 1)
    if kind not in ("cpu", "cuda"):
        raise ClusterError(f"no device {kind!r}", hint='device="cpu"')
    if ranks < 1 or (kind == "cuda" and ranks > gpus):
        raise ClusterError(
            f"{num_ranks} ranks on {gpus} GPUs", hint="at most one rank per GPU, or --device cpu"
        )
    return kind, ranks


def _repeats(slow: Mapping[int, float], ranks: int) -> list[int]:
    """Return how often each rank repeats its work."""
    repeats = [1] * ranks
    for rank, speed in slow.items():
        if not 0 <= rank < ranks or not 0 < speed <= 1:
            raise ClusterError(
                f"cannot slow rank {rank} of {ranks} to {speed}", hint="slow={1: 0.5}"
            )
        repeats[rank] = round(1 / speed)
    return repeats
