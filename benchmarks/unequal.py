"""Compare a plan for ranks of unequal speed with an even split: `python -m benchmarks.unequal`.

    taskset -c 0,1 python -m benchmarks.unequal [--models gpt] [--pairs 40] [--out FILE]

Two ranks have a core each. Another process always computes on the core of rank 1, which gets half
of it. The cluster is profiled in this state, and the automatic plan and `ddp` with even shares
alternate steps in it; the plan is tuned at full speed in between. The ratio of medians is the even
split over the automatic plan, with a 90% interval from resampled pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from benchmarks.pipeline import machine
from benchmarks.reality import Job, launch
from benchmarks.reality_models import MODELS
from benchmarks.run import ratio
from shardwise.profiling import profile
from shardwise.tuning.measurement_server import measure_plan
from shardwise.tuning.tune import tune

LIMIT = 1.25
BURN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Keep a core busy with another process."""
    process = subprocess.Popen([sys.executable, "-c", BURN, str(core)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def pinned(cores: list[int], module: str) -> Iterator[None]:
    """Pin child processes that run `module` to one core each, in the order of their start."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for core, pid in zip(cores, _children(module), strict=False):
                with contextlib.suppress(OSError):
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        os.sched_setaffinity(int(task.name), {core})
            time.sleep(0.2)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _children(module: str) -> list[int]:
    children = []
    for tasks in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in tasks.read_text().split():
            with contextlib.suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_text():
                    children.append(int(pid))
    return sorted(children)


def row(model: str, cluster: sw.Cluster, cores: list[int], pairs: int) -> dict[str, Any]:
    """Plan and measure a model."""
    module, batch = MODELS[model]()
    graph = sw.capture(module, batch)
    even = sw.strategies.ddp(graph, cluster)
    table = measure_plan(graph, even, cluster)
    auto = tune(graph, cluster, table=table, progress=False)
    plans = {"auto": auto, "ddp": even}
    systems = tuple((name, json.dumps(plan.to_json())) for name, plan in plans.items())
    job = Job(model=model, ranks=2, systems=systems, pairs=pairs, cores=tuple(cores))
    with busy(cores[1]):
        times = {name: [t for t, _ in rounds] for name, rounds in launch(job).items()}
    predicted = {
        n: sw.simulate(graph, p, cluster, table=table).step_time_s for n, p in plans.items()
    }
    return {
        "model": model,
        "plan": plans["auto"].figures.best.what,
        "mesh": str(plans["auto"].mesh),
        "stages": [[s.first, list(s.ranks)] for s in plans["auto"].stages],
        **ratio(times["ddp"], times["auto"]),
        "even_s": statistics.median(times["ddp"]),
        "auto_s": statistics.median(times["auto"]),
        "predicted": predicted,
    }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,vit")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="a shorter profile")
    parser.add_argument("--out", type=Path, default=Path("bench-results-unequal.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = []
    with busy(cores[1]), pinned(cores, "shardwise.profiling.worker"):
        cluster = profile(2, device="cpu", quick=options.quick)
    speeds = [cluster.device(rank).speed for rank in range(2)]
    print(f"speeds {speeds}", flush=True)
    for model in options.models.split(","):
        rows.append(row(model, cluster, cores, options.pairs))
        result = rows[-1]
        print(
            f"{model:6} even / auto {result['ratio']:.3f} [{result['low']:.3f}, "
            f"{result['high']:.3f}] limit {LIMIT}  {result['even_s'] * 1e3:.1f} / "
            f"{result['auto_s'] * 1e3:.1f} ms, predicted {result['predicted']['ddp'] * 1e3:.1f} "
            f"/ {result['predicted']['auto'] * 1e3:.1f}: {result['plan']} {result['mesh']}",
            flush=True,
        )
        command = " ".join(["python -m benchmarks.unequal", *sys.argv[1:]])
        document = {"machine": machine(), "command": command, "speeds": speeds, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
