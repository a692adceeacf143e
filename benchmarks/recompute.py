"""Compare predicted with measured memory: `make bench-recompute`.

    python -m benchmarks.recompute [--only fsdp] [--out benchmarks/results/recompute.json]

A GPT of 12 blocks trains under plans that differ in the activations saved for backward. "peak" is
the highest running sum of allocation events of `torch.profiler`, opened before the model is built,
from the second step on. "above" is the peak without the memory between steps (parameters and
optimizer state): activations, gradients and temporary memory. "kept" is the maximum at the start of
a backward pass, without the same and without gradients. Every rank is a process; predictions are
made in this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import record_function

import shardwise as sw
from benchmarks.models import GPT, tokens

LIMIT = 0.10
STEPS = 3
SIZES = {"layers": 12, "width": 256, "heads": 8, "length": 256, "vocab": 2048}
BATCH = 8

# name -> strategy, ranks, options
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recompute none": ("ddp", 1, {}),
    "recompute full": ("ddp", 1, {"recompute": "full"}),
    "recompute selective": ("ddp", 1, {"recompute": "selective"}),
    "ddp": ("ddp", 2, {}),
    "zero1": ("zero1", 2, {}),
    "zero2": ("zero2", 2, {}),
    "fsdp": ("fsdp", 2, {}),
    "fsdp full": ("fsdp", 2, {"recompute": "full"}),
    "tensor": ("tensor", 2, {}),
    "bf16": ("ddp", 2, {"precision": "bf16"}),
    "accumulation": ("ddp", 2, {"num_microbatches": 4}),
    "gpipe": ("pipeline", 2, {"schedule": "gpipe", "pp": 2, "num_microbatches": 8}),
    "1f1b": ("pipeline", 2, {"schedule": "1f1b", "pp": 2, "num_microbatches": 8}),
    "zb_h1": ("pipeline", 2, {"schedule": "zb_h1", "pp": 2, "num_microbatches": 8}),
    "interleaved": ("pipeline", 2, {"schedule": "interleaved", "pp": 2, "num_microbatches": 8}),
}


def make_model(sizes: dict[str, int], device: str = "cpu") -> torch.nn.Module:
    """Return the GPT, with weights or on meta tensors."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(**sizes)


def make_batch(sizes: dict[str, int], batch: int) -> dict[str, torch.Tensor]:
    """Return random tokens."""
    return tokens(batch, sizes["length"], sizes["vocab"])


def plan_for(
    model: torch.nn.Module, batch: Any, strategy: str, ranks: int, options: dict[str, Any]
) -> sw.Plan:
    """Return the plan of a case."""
    graph = sw.capture(model, batch)
    plan: sw.Plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)
    return plan


# ---------------------------------------------------------------- measuring


def measure(
    strategy: str, ranks: int, options: dict[str, Any], sizes: dict[str, int], batch_size: int
) -> dict[str, int]:
    """Return the memory of one rank of a running job."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        model, batch = make_model(sizes), make_batch(sizes, batch_size)
        pm = sw.parallelize(model, batch, plan_for(model, batch, strategy, ranks, options))
        del model
        optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-4)
        _mark_backward(pm.store)
        for step in range(STEPS):
            with record_function(f"step {min(step, 1)} begins"):
                pass
            pm.train_step(batch)
            optimizer.step()
            optimizer.zero_grad()
    return _read(profile)


def _mark_backward(store: Any) -> None:
    """Mark the start of each backward pass in the profile, with the bytes of gradients."""
    original = store.backward

    @contextlib.contextmanager
    def backward(*args: Any, **kwargs: Any) -> Iterator[None]:
        gradients = [e.leaf.grad.nbytes for e in store.entries if e.leaf.grad is not None]
        with record_function(f"backward {sum(gradients)}"):
            pass
        with original(*args, **kwargs):
            yield

    store.backward = backward


def _read(profile: Any) -> dict[str, int]:
    """Return the peaks from the second step on, above the memory between steps."""
    events = profile.profiler.kineto_results.events()
    running = between = peak = saved = 0
    measuring = False
    for event in sorted(events, key=lambda e: e.start_ns()):
        name = event.name()
        if name == "[memory]":
            running += event.nbytes()
            peak = max(peak, running) if measuring else 0
        elif name == "step 1 begins":
            between, measuring = running, True
        elif name.startswith("backward ") and measuring:
            saved = max(saved, running - between - int(name.split()[1]))
    return {"peak": peak, "above": peak - between, "kept": saved}


def _patient_all_reduce(*args: Any, **kwargs: Any) -> Any:
    """Wait until the thread of gloo, which is not profiled, has released the tensor."""
    work = _all_reduce(*args, **kwargs)
    if work is not None:
        work.wait()
        time.sleep(1e-3)
    return work


_all_reduce = dist.all_reduce


def _worker(rank: int, port: int, queue: Any, job: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    ranks = job[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        dist.all_reduce = _patient_all_reduce
    queue.put((rank, measure(*job)))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure_all(*job: Any) -> list[dict[str, int]]:
    """Return the memory of every rank, in new processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, (port, queue, job), nprocs=job[1])
    results = dict(queue.get() for _ in range(job[1]))
    return [results[rank] for rank in range(job[1])]


# ---------------------------------------------------------------- predicting


def predict(
    strategy: str, ranks: int, options: dict[str, Any], sizes: dict[str, int], batch_size: int
) -> list[dict[str, int]]:
    """Predict the same figures for every rank from a model on meta tensors."""
    model, batch = make_model(sizes, "meta"), make_batch(sizes, batch_size)
    plan = plan_for(model, batch, strategy, ranks, options)
    graph = sw.capture(model, batch, plan=plan)
    rows = []
    for rank in range(ranks):
        memory = sw.compile(graph, plan).memory(rank)
        state = int(memory.parts["parameters"] + memory.parts["optimizer"])
        rows.append(
            {
                "peak": memory.peak_bytes,
                "above": memory.peak_bytes - state,
                "kept": memory.activations_peak_bytes,
            }
        )
    return rows


def compare(name: str, sizes: dict[str, int], batch: int) -> list[dict[str, Any]]:
    """Return a row for each rank of a case."""
    strategy, ranks, options = CASES[name]
    pairs = zip(
        measure_all(strategy, ranks, options, sizes, batch),
        predict(strategy, ranks, options, sizes, batch),
        strict=True,
    )
    return [
        {"case": name, "rank": rank, "measured": measured, "predicted": predicted}
        for rank, (measured, predicted) in enumerate(pairs)
    ]


def show(row: dict[str, Any]) -> None:
    """Print a line of the table: measured, predicted and ratio of three figures."""
    parts = []
    for figure in ("peak", "above", "kept"):
        actual, predicted = row["measured"][figure], row["predicted"][figure]
        sizes = f"{actual / 2**20:7.1f} {predicted / 2**20:7.1f}"
        parts.append(f"{figure} {sizes} {predicted / actual:5.3f}")
    print(f"{row['case']:20} {row['rank']}  {'   '.join(parts)}", flush=True)


def largest_error(row: dict[str, Any]) -> float:
    """Return the largest relative error of a row."""
    return max(
        abs(row["predicted"][figure] / row["measured"][figure] - 1)
        for figure in ("peak", "above", "kept")
    )


def main() -> None:
    """Measure, predict, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="benchmarks/results/recompute.json")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    print(f"{'MiB':20} rank  measured, predicted, ratio")
    rows = []
    for name in names:
        for row in compare(name, SIZES, BATCH):
            rows.append(row)
            show(row)
    worst = max(rows, key=largest_error)
    error = largest_error(worst)
    print(f"worst: {worst['case']}, error {error:.1%}, limit {LIMIT:.0%}")
    machine = {"cpu": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    result = {"machine": machine, "sizes": {**SIZES, "batch": BATCH}, "rows": rows}
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    if error > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
