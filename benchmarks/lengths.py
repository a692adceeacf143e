"""Time batches of many lengths: `python -m benchmarks.lengths`.

    python -m benchmarks.lengths [--lengths 40] [--ranks 2] [--plan ddp] [--out FILE]

A GPT of four layers trains on batches of different lengths. "first" is the time of the steps when
every length is new, and "again" when all are known: the difference is the cost of new lengths.
Programs come from one symbolic trace if possible ("one trace"), from a capture for each length
("each"), or from graphs that such captures have cached on disk ("stored"). CPU seconds are those of
one rank, which are more precise than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from benchmarks.models import GPT, tokens
from shardwise.frontend import sizes

VOCABULARY, ROWS, SHORTEST = 211, 4, 16
METHODS = {"one trace": sizes.STATIC_CAPTURES, "each": 1 << 30, "stored": 1 << 30}


def worker(rank: int, world: int, port: int, plan: str, count: int, to: str) -> None:
    """Run one process; rank 0 writes the figures."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    results = {}
    for method, captures in METHODS.items():
        os.environ["SHARDWISE_CACHE"] = "off" if method == "one trace" else f"{to}.{rank}.cache"
        with mock.patch.object(sizes, "STATIC_CAPTURES", captures):
            results[method] = measure(plan, world, count)
    if rank == 0:
        Path(to).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(plan: str, world: int, count: int) -> dict[str, Any]:
    """Return the seconds and CPU seconds of all lengths, at first and again."""
    torch.manual_seed(0)
    model = GPT(vocab=VOCABULARY, width=64, heads=4, layers=4, length=SHORTEST + count + 1)
    first = tokens(ROWS, SHORTEST, VOCABULARY)
    made = getattr(sw.strategies, plan)(sw.capture(model, first), sw.Cluster.local(world))
    pm = sw.parallelize(model, first, made)
    batches = [tokens(ROWS, SHORTEST + 1 + n, VOCABULARY) for n in range(count)]
    result: dict[str, Any] = {}
    for when in ("first", "again"):
        clock, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            pm.train_step(batch)
        result[when] = {"s": time.perf_counter() - clock, "cpu_s": time.process_time() - cpu}
    return result


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plan", default="ddp")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        to = f"{folder}/figures.json"
        mp.spawn(worker, (args.ranks, port, args.plan, args.lengths, to), args.ranks)
        results = json.loads(Path(to).read_text())
    print(f"{args.lengths} lengths, {args.plan} on {args.ranks} ranks")
    print(f"{'':10} {'first s':>8} {'again s':>8} {'cpu first':>10} {'cpu again':>10} {'ratio':>6}")
    for method, row in results.items():
        first, again = row["first"], row["again"]
        print(
            f"{method:10} {first['s']:8.2f} {again['s']:8.2f} {first['cpu_s']:10.2f} "
            f"{again['cpu_s']:10.2f} {first['cpu_s'] / again['cpu_s']:6.2f}"
        )
    if args.out:
        machine = {"machine": platform.machine(), "torch": torch.__version__}
        figures = {"command": vars(args) | {"out": str(args.out)}, **machine, "figures": results}
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
