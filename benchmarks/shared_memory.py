"""All-reduce through shared memory against gloo's, on one host: `make bench-shared-memory`.

    python -m benchmarks.shared_memory [--pairs 40] [--out benchmarks/results/shared_memory.json]
    python -m benchmarks.shared_memory --tiny

Processes of one host sum float32 buffers: by `dist.all_reduce` over gloo, and by `SharedBuckets`
with the buffers in shared memory ("resident", as gradients are) and in memory of their own
("staged"). The three alternate. A collective takes as long as its slowest rank; "cpu ms" is what
all ranks together spent. "faster" is gloo's time by ours in each round: the median, and between
which ratios it lies with 90% (bootstrap); "cpu" is the same of what was spent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.runtime.collectives.shared_memory import SharedBuckets

MB = 1_000_000
RANKS, SIZES_MB = (2, 4), (1, 16, 64)
WAYS = ("gloo", "resident", "staged")
ASKED_MB, ASKED_FASTER = 16, 1.8
WARM = 3


def worker(rank: int, world: int, port: int, sizes: tuple[int, ...], rounds: int, to: str) -> None:
    """One process; rank 0 writes the figures of all."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    shared = SharedBuckets.open(timeout_s=120)
    assert shared is not None
    found = {size: sample(shared, size * MB // 4, rounds) for size in sizes}
    if rank == 0:
        Path(to).write_text(json.dumps(found))
    shared.close()
    dist.barrier()
    dist.destroy_process_group()


def sample(shared: SharedBuckets, numel: int, rounds: int) -> dict[str, list[list[float]]]:
    """(seconds, CPU seconds) of each way in each round, after some that do not count."""
    bucket, private = shared.allocate(numel), torch.empty(numel)
    buffers = {"gloo": private, "resident": bucket, "staged": private}
    calls: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(private),
        "resident": lambda: shared.all_reduce(bucket).wait(),
        "staged": lambda: shared.all_reduce(private).wait(),
    }
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(rounds + WARM):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            buffers[way].fill_(shared.rank + 1)
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            calls[way]()
            spent = [time.perf_counter() - began, time.process_time() - cpu]
            assert float(buffers[way][-1]) == shared.num_ranks * (shared.num_ranks + 1) / 2
            rows = [torch.empty(2, dtype=torch.float64) for _ in range(shared.num_ranks)]
            dist.all_gather(rows, torch.tensor(spent, dtype=torch.float64))
            seconds, cpus = zip(*(row.tolist() for row in rows), strict=True)
            if number >= WARM:
                found[way].append([max(seconds), sum(cpus)])
    shared.free(bucket)
    return found


def run_ranks(world: int, sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """What rank 0 wrote."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="shardwise-shared-") as folder:
        to = Path(folder, "found.json")
        arguments = (world, port, sizes, rounds, str(to))
        start: Any = mp.start_processes  # type: ignore[attr-defined]
        start(worker, arguments, nprocs=world, start_method="fork")
        result: dict[str, Any] = json.loads(to.read_text())
    return result


def summary(world: int, size: str, found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians, and how much faster than gloo."""
    rows = {way: np.array(found[way]) for way in WAYS}
    result: dict[str, Any] = {"ranks": world, "mb": int(size)}
    for way in WAYS:
        result[way] = {
            "ms": float(np.median(rows[way][:, 0])) * 1e3,
            "cpu_ms": float(np.median(rows[way][:, 1])) * 1e3,
        }
        ratios = rows["gloo"][:, 0] / rows[way][:, 0]
        result[way]["faster"] = float(np.median(ratios))
        result[way]["faster_90"] = interval(ratios)
        result[way]["less_cpu"] = float(np.median(rows["gloo"][:, 1] / rows[way][:, 1]))
    return result


def interval(ratios: Any) -> list[float]:
    """Between which values the median lies with 90%."""
    chance = np.random.default_rng(0)
    medians = np.median(chance.choice(ratios, size=(2000, len(ratios))), axis=1)
    return [float(edge) for edge in np.quantile(medians, [0.05, 0.95])]


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'ranks':>5}{'MB':>5}{'way':>10}{'ms':>10}{'cpu ms':>9}{'faster':>8}{'90%':>14}{'cpu':>7}"
    )
    for row in rows:
        for way in WAYS:
            each = row[way]
            low, high = each["faster_90"]
            between = f"{low:.2f} - {high:.2f}"
            print(
                f"{row['ranks']:5}{row['mb']:5}{way:>10}{each['ms']:10.2f}{each['cpu_ms']:9.2f}"
                f"{each['faster']:8.2f}{between:>14}{each['less_cpu']:7.2f}"
            )


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=40, help="rounds of all three ways")
    parser.add_argument("--tiny", action="store_true", help="one size, few rounds")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    sizes, rounds = ((1,), 5) if options.tiny else (SIZES_MB, options.pairs)
    rows = []
    for world in RANKS:
        found = run_ranks(world, sizes, rounds)
        rows += [summary(world, size, found[size]) for size in found]
    show(rows)
    asked = [row["resident"]["faster"] for row in rows if row["mb"] == ASKED_MB]
    result = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "pairs": rounds,
        "asked": {"mb": ASKED_MB, "faster": ASKED_FASTER},
        "rows": rows,
        "ok": all(ratio >= ASKED_FASTER for ratio in asked),
    }
    if asked:
        print(
            f"resident, {ASKED_MB} MB: at least {min(asked):.2f} times faster than gloo, "
            f"{ASKED_FASTER} asked"
        )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
