"""Compare step time and memory with DDP, FSDP2 and the plain model: `make bench`.

    python -m benchmarks.run [--pairs 40] [--models gpt,llama] [--out bench-results.json]
    python -m benchmarks.run --backend nccl --ranks 4

Both systems alternate steps in two gloo processes of one thread each; the ratio of medians has a
90% interval from resampled pairs. "one rank" compares the generated code with the eager model in a
single process. Peak memory is the highest running sum of allocation events of `torch.profiler`,
opened before the model is built, from the second step on, measured separately for each system.
Over NCCL, ranks have a GPU each, or share one through sockets, where only the ratio counts; memory
is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from benchmarks.models import MODELS, block_modules, loss_of
from shardwise.runtime.rendezvous import shared_gpu_environment

LIMITS = {"ddp": 1.03, "fsdp": 1.0, "one rank": 1.02, "fsdp memory": 1.05}
WARM_UP = 4
Step = Callable[[], None]


def join(backend: str, rank: int, ranks: int) -> torch.device:
    """Join the group that `MASTER_ADDR` describes; return the device of this rank."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if ranks > torch.cuda.device_count():
            os.environ.update(shared_gpu_environment(rank))
    if ranks > 1:
        dist.init_process_group(backend, rank=rank, world_size=ranks)
    return device


def on_device(name: str, device: torch.device) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a model and its batch on a device."""
    model, batch = MODELS[name]()
    return model.to(device), {key: value.to(device) for key, value in batch.items()}


def baseline_step(name: str, mode: str, device: torch.device) -> Step:
    """Return a step of DDP, FSDP2 or the plain model, as its documentation recommends."""
    model, batch = on_device(name, device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    run: Any = model
    if mode == "ddp":
        run = DistributedDataParallel(model)
    elif mode == "fsdp":
        mesh = dist.device_mesh.init_device_mesh(device.type, (ranks,))
        for block in block_modules(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    part = {key: value.chunk(ranks)[rank] for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss_of(run(**part)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(name: str, mode: str, device: torch.device) -> Step:
    """Return the same step under a plan of Shardwise."""
    model, batch = on_device(name, device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    strategy = getattr(sw.strategies, "ddp" if mode == "one rank" else mode)
    plan = strategy(sw.capture(model, batch), sw.Cluster.local(ranks))
    pm = sw.parallelize(model, batch, plan=plan)
    del model
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-4)

    def step() -> None:
        pm.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def alternate(ours: Step, baseline: Step, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of alternating steps; the order changes in every pair."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-WARM_UP, pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            _meet()
            start = time.perf_counter()
            (ours, baseline)[which]()
            _meet()
            if pair >= 0:
                times[which].append(time.perf_counter() - start)
    return times


def _meet() -> None:
    """Wait for this rank's device and for all ranks."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def ratio(ours: list[float], baseline: list[float]) -> dict[str, float]:
    """Return the ratio of medians with a 90% interval from resampled pairs."""
    rng = random.Random(0)
    drawn = []
    for _ in range(2000):
        picks = [rng.randrange(len(ours)) for _ in ours]
        median = statistics.median(ours[i] for i in picks)
        drawn.append(median / statistics.median(baseline[i] for i in picks))
    drawn.sort()
    return {
        "ratio": statistics.median(ours) / statistics.median(baseline),
        "low": drawn[100],
        "high": drawn[1899],
        "ours_s": statistics.median(ours),
        "theirs_s": statistics.median(baseline),
        "pairs": len(ours),
    }


def peak_bytes(make: Callable[[], Step], steps: int = 3) -> int:
    """Return the highest running sum of allocations from the second step on."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        step = make()
        step()
        with torch.profiler.record_function("second step"):
            for _ in range(steps - 1):
                step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    start = min(e.start_ns() for e in events if e.name() == "second step")
    running = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        running += event.nbytes()
        if event.start_ns() >= start:
            peak = max(peak, running)
    return peak


def worker(rank: int, ranks: int, port: int, job: dict[str, Any], queue: Any) -> None:
    """Run one process: time both systems, or measure the memory of one."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    device = join(job["backend"], rank, ranks)
    name, mode = job["model"], job["mode"]
    if job["kind"] == "time":
        ours, baseline = our_step(name, mode, device), baseline_step(name, mode, device)
        result: Any = alternate(ours, baseline, job["pairs"])
    else:
        make = our_step if job["kind"] == "ours" else baseline_step
        result = peak_bytes(lambda: make(name, mode, device))
    if rank == 0:
        queue.put(result)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def launch(ranks: int, job: dict[str, Any]) -> Any:
    """Run a job in new processes and return the result of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = mp.spawn(worker, (ranks, port, job, queue), nprocs=ranks, join=False)
    while not processes.join(timeout=1.0):
        pass
    return queue.get()


def measure(name: str, pairs: int, backend: str, num_ranks: int) -> list[dict[str, Any]]:
    """Return all rows of a model."""
    rows = []
    job = {"model": name, "backend": backend, "pairs": pairs}
    for mode, ranks, rival in (
        ("ddp", num_ranks, "DDP"),
        ("fsdp", num_ranks, "FSDP2"),
        ("one rank", 1, "eager"),
    ):
        ours, baseline = launch(ranks, {**job, "kind": "time", "mode": mode})
        rows.append({"model": name, "what": mode, "rival": rival, **ratio(ours, baseline)})
        show(rows[-1])
    if backend == "nccl":
        return rows
    ours_bytes, baseline_bytes = (
        launch(num_ranks, {**job, "kind": kind, "mode": "fsdp"}) for kind in ("ours", "baseline")
    )
    rows.append(
        {
            "model": name,
            "what": "fsdp memory",
            "rival": "FSDP2",
            "ratio": ours_bytes / baseline_bytes,
            "ours_bytes": ours_bytes,
            "theirs_bytes": baseline_bytes,
        }
    )
    show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    limit = LIMITS[row["what"]]
    verdict = "ok" if row["ratio"] <= limit else "above"
    interval = f"[{row['low']:.3f}, {row['high']:.3f}]" if "low" in row else " " * 14
    if "ours_s" in row:
        sizes = f"{row['ours_s']:.3f} s / {row['theirs_s']:.3f} s"
    else:
        sizes = f"{row['ours_bytes'] / 2**20:.0f} MiB / {row['theirs_bytes'] / 2**20:.0f} MiB"
    print(
        f"{row['model']:8} {row['what']:12} vs {row['rival']:6} {row['ratio']:.3f} {interval:16} "
        f"limit {limit:.2f} {verdict:6} {sizes}",
        flush=True,
    )


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--models", default="gpt,llama")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", default="bench-results.json")
    options = parser.parse_args()
    rows = [
        row
        for name in options.models.split(",")
        for row in measure(name, options.pairs, options.backend, options.ranks)
    ]
    machine = {"cpu": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    Path(options.out).write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
