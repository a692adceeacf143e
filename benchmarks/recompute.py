"""Predicted memory next to measured memory: `make bench-recompute`.

    python -m benchmarks.recompute [--only fsdp] [--out benchmarks/results/recompute.json]

A GPT of 12 blocks trains under plans that differ in what they keep for backward. "peak" is the
highest running sum of allocation events of `torch.profiler` opened before the model is built, from
the second step on. "above" is the peak less what lives between steps (parameters, optimizer
state): activations, gradients and temporary memory. "kept" is the most that lives when a backward
begins, less the same and gradients. Every rank is a process; predictions are made in this one.
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
    "interleaved": (
        "pipeline",
        2,
        {"schedule": "interleaved", "pp": 2, "num_microbatches": 8},
    ),
}


def make_model(sizes: dict[str, int], device: str = "cpu") -> torch.nn.Module:
    """Return the GPT, with weights or on meta."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(**sizes)


def make_batch(sizes: dict[str, int], batch: int) -> dict[str, torch.Tensor]:
    """Random tokens."""
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
    """What one rank of a running job holds."""
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
    """Leave a mark in the profile where a backward begins, with the bytes of gradients."""
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
    """Peaks from the second step on, above what lives between steps."""
    found = profile.profiler.kineto_results.events()
    running = between = peak = kept = 0
    measuring = False
    for event in sorted(found, key=lambda e: e.start_ns()):
        name = event.name()
        if name == "[memory]":
            running += event.nbytes()
            peak = max(peak, running) if measuring else 0
        elif name == "step 1 begins":
            between, measuring = running, True
        elif name.startswith("backward ") and measuring:
            kept = max(kept, running - between - int(name.split()[1]))
    return {"peak": peak, "above": peak - between, "kept": kept}


def _patient_all_reduce(*args: Any, **kwargs: Any) -> Any:
    """Let gloo's thread, which the profiler does not see, forget a tensor before this one does."""
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
    """What every rank holds, in fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, (port, queue, job), nprocs=job[1])
    found = dict(queue.get() for _ in range(job[1]))
    return [found[rank] for rank in range(job[1])]


# ---------------------------------------------------------------- predicting


def predict(
    strategy: str, ranks: int, options: dict[str, Any], sizes: dict[str, int], batch_size: int
) -> list[dict[str, int]]:
    """Return the same numbers of every rank, from a model on meta."""
    model, batch = make_model(sizes, "meta"), make_batch(sizes, batch_size)
    plan = plan_for(model, batch, strategy, ranks, options)
    graph = sw.capture(model, batch, plan=plan)
    rows = []
    for rank in range(ranks):
        found = sw.compile(graph, plan).memory(rank)
        state = int(found.parts["parameters"] + found.parts["optimizer"])
        rows.append(
            {
                "peak": found.peak_bytes,
                "above": found.peak_bytes - state,
                "kept": found.activations_peak_bytes,
            }
        )
    return rows


def compare(name: str, sizes: dict[str, int], batch: int) -> list[dict[str, Any]]:
    """Rows of one case: a rank each."""
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
    """One line of the table: measured, predicted and their ratio, three times."""
    parts = []
    for what in ("peak", "above", "kept"):
        found, said = row["measured"][what], row["predicted"][what]
        parts.append(f"{what} {found / 2**20:7.1f} {said / 2**20:7.1f} {said / found:5.3f}")
    print(f"{row['case']:20} {row['rank']}  {'   '.join(parts)}", flush=True)


def off(row: dict[str, Any]) -> float:
    """How far the prediction is off where it is worst."""
    return max(
        abs(row["predicted"][what] / row["measured"][what] - 1)
        for what in ("peak", "above", "kept")
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
    worst = max(rows, key=off)
    print(f"worst: {worst['case']}, {100 * off(worst):.1f}% off, limit {100 * LIMIT:.0f}%")
    machine = {"cpu": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    result = {"machine": machine, "sizes": {**SIZES, "batch": BATCH}, "rows": rows}
    Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    if off(worst) > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
