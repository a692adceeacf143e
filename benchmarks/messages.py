"""Count and time the messages of parameters and gradients, with sizes chosen for the links.

    python -m benchmarks.messages [--models gpt,llama] [--pairs 40] [--out messages.json]

"before" is the rule without a cluster, with parameters of a block as separate messages from 4 MiB
on. Messages are counted in a step of one rank of two, without sending them; `--pairs` alternates
real steps of both rules in two gloo processes of one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
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
from shardwise.runtime import store
from shardwise.runtime.parameters import buckets
from shardwise.runtime.tracing import Recorder

CLUSTERS = ("local", "h100:1x2")


@contextmanager
def separate_parameters() -> Iterator[None]:
    """Give parameters of a block messages of their own, as before."""
    changed = store.buckets
    store.buckets = lambda entries, key, size: buckets(
        entries, key, lambda e: e.numel * e.dtype.itemsize
    )
    try:
        yield
    finally:
        store.buckets = changed


def count(name: str, mode: str, where: str, *, before: bool) -> dict[str, Any]:
    """Return the collectives of a step by operation."""
    with torch.device("meta"):
        model, _ = MODELS[name]()
    _, batch = MODELS[name]()
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.local(2) if where == "local" else parse_cluster(where)
    plan = getattr(sw.strategies, mode)(graph, cluster)
    if before:
        plan = plan.with_(bucket_mib=0)
    run = SingleRank(sw.compile(graph, plan), 0, torch.device("cpu"))
    recorder = Recorder(0)
    run.mesh.note(recorder)
    for group in run.store.groups:
        group.axis = run.mesh.axis(*run.mesh.axes)
    for _ in range(2):
        run.module.train_step({k: torch.zeros_like(v) for k, v in batch.items()})
        events = [e for e in recorder.take() if e.lane == "communication"]
    return {"bucket_mib": plan.bucket_mib, **Counter(e.details["op"] for e in events)}


def step_of(name: str, mode: str, *, before: bool) -> Step:
    """Return a step under either rule."""
    if not before:
        return our_step(name, mode, torch.device("cpu"))
    make = getattr(sw.strategies, mode)
    former = lambda graph, cluster: make(graph, cluster).with_(bucket_mib=0)  # noqa: E731
    setattr(sw.strategies, mode, former)
    try:
        with separate_parameters():
            return our_step(name, mode, torch.device("cpu"))
    finally:
        setattr(sw.strategies, mode, make)


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
                with separate_parameters():
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
