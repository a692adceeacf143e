"""Count and time the messages of parameters and gradients, with sizes chosen for the links.

    python -m benchmarks.messages [--models gpt,llama] [--pairs 40] [--out messages.json]

"before" is the former rule: parameters from 4 MiB on by themselves, smaller ones up to 25 MiB.
Messages are counted in a step of one rank of two, without sending them; `--pairs` alternates real
steps of both rules in two gloo processes of one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from benchmarks.models import MODELS
from benchmarks.run import Step, alternate, our_step, ratio
from shardwise.api.memory import SingleRank
from shardwise.cluster.presets import parse_cluster
from shardwise.runtime import grad_sync, store
from shardwise.runtime.parameters import Entry, buckets
from shardwise.runtime.tracing import Recorder

CLUSTERS = ("local", "h100:1x2")


def former_buckets(
    entries: Iterable[Entry], key: Callable[[Entry], Hashable], _: Callable[[Entry], int]
) -> list[list[Entry]]:
    """Group entries as before: from 4 MiB on by themselves, others up to 25 MiB, the first to 1."""
    result: list[list[Entry]] = []
    waiting: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        if entry.numel * entry.dtype.itemsize >= 4 << 20:
            result.append([entry])
            continue
        bucket = waiting.setdefault(key(entry), [])
        bucket.append(entry)
        filled = sum(e.numel * e.dtype.itemsize for e in bucket)
        if filled >= (25 << 20 if result else 1 << 20):
            result.append(waiting.pop(key(entry)))
    return result + list(waiting.values())


@contextmanager
def as_before() -> Iterator[None]:
    """Form messages by the former rule, in steps that run for the first time."""
    store.buckets = grad_sync.buckets = former_buckets
    try:
        yield
    finally:
        store.buckets = grad_sync.buckets = buckets


def count(name: str, mode: str, where: str, *, before: bool) -> dict[str, Any]:
    """Return the collectives of a step by operation."""
    with torch.device("meta"):
        model, _ = MODELS[name]()
    _, batch = MODELS[name]()
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.local(2) if where == "local" else parse_cluster(where)
    plan = getattr(sw.strategies, mode)(graph, cluster)
    run = SingleRank(sw.compile(graph, plan), 0, torch.device("cpu"))
    recorder = Recorder(0)
    run.mesh.note(recorder)
    for group in run.store.groups:
        group.axis = run.mesh.axis(*run.mesh.axes)
    for _ in range(2):
        run.module.train_step({k: torch.zeros_like(v) for k, v in batch.items()})
        events = [e for e in recorder.take() if e.lane == "communication"]
    size = 0 if before else plan.bucket_mib
    return {"bucket_mib": size, **Counter(e.details["op"] for e in events)}


def step_of(name: str, mode: str, *, before: bool) -> Step:
    """Return a step under either rule."""
    if not before:
        return our_step(name, mode, torch.device("cpu"))
    with as_before():
        step = our_step(name, mode, torch.device("cpu"))
        step()
    return step


def worker(rank: int, port: int, name: str, mode: str, pairs: int, queue: Any) -> None:
    """Time both rules on one of two ranks."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    steps = (step_of(name, mode, before=before) for before in (False, True))
    times = alternate(*steps, pairs)
    if rank == 0:
        queue.put(times)
    dist.barrier()
    dist.destroy_process_group()


def timed(name: str, mode: str, pairs: int) -> dict[str, float]:
    """Return the ratio of the steps' medians, after to before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    job = (port, name, mode, pairs, queue)
    processes = mp.spawn(worker, job, nprocs=2, join=False)
    while not processes.join(timeout=1.0):
        pass
    return ratio(*queue.get())


def main() -> None:
    """Print and write the counts and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,llama")
    parser.add_argument("--modes", default="ddp,fsdp")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        for mode in options.modes.split(","):
            for where in CLUSTERS:
                row: dict[str, Any] = {"model": name, "mode": mode, "cluster": where}
                with as_before():
                    row["before"] = count(name, mode, where, before=True)
                row["after"] = count(name, mode, where, before=False)
                rows.append(row)
                print(row, flush=True)
            if options.pairs:
                rows.append({"model": name, "mode": mode, **timed(name, mode, options.pairs)})
                print(rows[-1], flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
