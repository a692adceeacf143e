"""Compare all-reduce through shared memory with gloo on one host: `make bench-shared-memory`.

    python -m benchmarks.shared_memory [--pairs 40] [--out benchmarks/results/shared_memory.json]
    python -m benchmarks.shared_memory --tiny

Processes of one host reduce float32 buffers with `dist.all_reduce` over gloo, and with
`SharedBuckets` with buffers in shared memory ("resident", like gradients) and in private memory
("staged"). The three alternate. A collective takes as long as its slowest rank; "cpu ms" is the CPU
time of all ranks. "faster" is the median ratio of gloo's time to ours, with a 90% bootstrap
interval; "cpu" is the same ratio of CPU times.
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
METHODS = ("gloo", "resident", "staged")
TARGET_MB, TARGET_SPEEDUP = 16, 1.8
WARM = 3


def worker(rank: int, world: int, port: int, sizes: tuple[int, ...], rounds: int, to: str) -> None:
    """Run one process; rank 0 writes the figures of all."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    shared = SharedBuckets.open(timeout_s=120)
    assert shared is not None
    samples = {size: sample(shared, size * MB // 4, rounds) for size in sizes}
    if rank == 0:
        Path(to).write_text(json.dumps(samples))
    shared.close()
    dist.barrier()
    dist.destroy_process_group()


def sample(shared: SharedBuckets, numel: int, rounds: int) -> dict[str, list[list[float]]]:
    """Return (seconds, CPU seconds) of each method in each round after warm-up."""
    bucket, private = shared.allocate(numel), torch.empty(numel)
    buffers = {"gloo": private, "resident": bucket, "staged": private}
    calls: dict[str, Callable[[], object]] = {
        "gloo": lambda: dist.all_reduce(private),
        "resident": lambda: shared.all_reduce(bucket).wait(),
        "staged": lambda: shared.all_reduce(private).wait(),
    }
    samples: dict[str, list[list[float]]] = {method: [] for method in METHODS}
    for number in range(rounds + WARM):
        for method in METHODS[number % 3 :] + METHODS[: number % 3]:
            buffers[method].fill_(shared.rank + 1)
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            calls[method]()
            spent = [time.perf_counter() - began, time.process_time() - cpu]
            assert float(buffers[method][-1]) == shared.num_ranks * (shared.num_ranks + 1) / 2
            rows = [torch.empty(2, dtype=torch.float64) for _ in range(shared.num_ranks)]
            dist.all_gather(rows, torch.tensor(spent, dtype=torch.float64))
            seconds, cpus = zip(*(row.tolist() for row in rows), strict=True)
            if number >= WARM:
                samples[method].append([max(seconds), sum(cpus)])
    shared.free(bucket)
    return samples


def run_ranks(world: int, sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Run the ranks and return the figures of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="shardwise-shared-") as folder:
        to = Path(folder, "samples.json")
        arguments = (world, port, sizes, rounds, str(to))
        start: Any = mp.start_processes  # type: ignore[attr-defined]
        start(worker, arguments, nprocs=world, start_method="fork")
        result: dict[str, Any] = json.loads(to.read_text())
    return result


def summary(world: int, size: str, samples: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return medians, and the speedup over gloo."""
    rows = {method: np.array(samples[method]) for method in METHODS}
    result: dict[str, Any] = {"ranks": world, "mb": int(size)}
    for method in METHODS:
        ratios = rows["gloo"][:, 0] / rows[method][:, 0]
        result[method] = {
            "ms": float(np.median(rows[method][:, 0])) * 1e3,
            "cpu_ms": float(np.median(rows[method][:, 1])) * 1e3,
            "faster": float(np.median(ratios)),
            "faster_90": interval(ratios),
            "less_cpu": float(np.median(rows["gloo"][:, 1] / rows[method][:, 1])),
        }
    return result


def interval(ratios: Any) -> list[float]:
    """Return a 90% bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, size=(2000, len(ratios))), axis=1)
    return [float(edge) for edge in np.quantile(medians, [0.05, 0.95])]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'ranks':>5}{'MB':>5}{'method':>10}{'ms':>10}{'cpu ms':>9}", end="")
    print(f"{'faster':>8}{'90%':>14}{'cpu':>7}")
    for row in rows:
        for method in METHODS:
            figures = row[method]
            low, high = figures["faster_90"]
            between = f"{low:.2f} - {high:.2f}"
            print(
                f"{row['ranks']:5}{row['mb']:5}{method:>10}{figures['ms']:10.2f}{figures['cpu_ms']:9.2f}"
                f"{figures['faster']:8.2f}{between:>14}{figures['less_cpu']:7.2f}"
            )


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=40, help="rounds of all three methods")
    parser.add_argument("--tiny", action="store_true", help="one size, few rounds")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    sizes, rounds = ((1,), 5) if options.tiny else (SIZES_MB, options.pairs)
    rows = []
    for world in RANKS:
        samples = run_ranks(world, sizes, rounds)
        rows += [summary(world, size, samples[size]) for size in samples]
    show(rows)
    speedups = [row["resident"]["faster"] for row in rows if row["mb"] == TARGET_MB]
    result = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "pairs": rounds,
        "asked": {"mb": TARGET_MB, "faster": TARGET_SPEEDUP},
        "rows": rows,
        "ok": all(speedup >= TARGET_SPEEDUP for speedup in speedups),
    }
    if speedups:
        print(
            f"resident, {TARGET_MB} MB: at least {min(speedups):.2f} times faster than gloo, "
            f"target {TARGET_SPEEDUP}"
        )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
