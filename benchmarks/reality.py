"""Compare the automatic plan with all alternatives that a user has: `make bench-reality`.

    python -m benchmarks.reality [--ranks 2] [--models gpt,wide,vit] [--pairs 40] [--out FILE]

This machine is profiled, and a plan for it is tuned with measured times of operators and its step
time predicted. Then DDP, FSDP2, every named strategy and the automatic plan train the same model in
the same gloo processes of one thread each, alternating steps in a random order in every round.
Systems that are far behind in the first rounds are dropped. The ratio of medians is the automatic
plan over the best alternative, with a 90% interval from resampled rounds.

For two ranks on two cores: `taskset -c 0,1 python -m benchmarks.reality --ranks 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from benchmarks.pipeline import machine
from benchmarks.reality_models import MODELS, Made
from benchmarks.run import ratio
from shardwise.cost import OpTable
from shardwise.errors import ShardwiseError
from shardwise.profiling import profile
from shardwise.tuning.tune import tune

LIMITS = {"ratio": 1.03, "error": 0.15}
WARM_UP, SCREENED = 1, 2  # rounds of all systems
MAX_SLOWDOWN = 1.2  # compared with the best in the first rounds; slower systems are dropped
MAX_STAGES = 4  # of the named pipelines
BASELINES = ("DDP", "FSDP2")
TIMEOUT_S = 1800.0  # per model


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The systems that a group of processes measures; ours have the JSON of their plan."""

    model: str
    ranks: int
    systems: tuple[tuple[str, str], ...]
    pairs: int
    cores: tuple[int, ...] = ()  # of every rank, if they are pinned


def rivals(graph: sw.Graph, cluster: sw.Cluster) -> Iterator[tuple[str, sw.Plan]]:
    """Yield plans of every named strategy with default options, and hybrids."""
    ranks, pp = cluster.num_ranks, min(MAX_STAGES, cluster.num_ranks)
    made: dict[str, dict[str, Any]] = {n: {} for n in ("ddp", "zero1", "zero2", "fsdp", "tensor")}
    made |= {f"pipeline {s}": {"pp": pp, "schedule": s} for s in ("1f1b", "zb_h1")}
    if ranks >= 4:
        half, quarter = ranks // 2, ranks // 4
        made["hybrid tp=2"] = {"dp": half, "tp": 2}
        made["hybrid dp=2"] = {"dp": 2, "tp": half}
        made["hybrid pp=2"] = {"dp": half, "pp": 2, "num_microbatches": 4}
        made["hybrid 3d"] = {"dp": quarter, "tp": 2, "pp": 2, "num_microbatches": 4}
        made["hybrid fsdp"] = {"dp": half, "tp": 2, "zero": 3}
    for name, options in made.items():
        try:
            yield name, getattr(sw.strategies, name.split()[0])(graph, cluster, **options)
        except ShardwiseError as error:  # heads or rows are not divisible
            print(f"  {name}: {error.message}", flush=True)


class System:
    """A method to train a model on these processes."""

    def __init__(self, made: Made, name: str, plan: str) -> None:
        model, self.batch = made
        self.run, self.is_ours = _wrapped(model, self.batch, name, plan), bool(plan)
        if self.is_ours:
            self.optimizer: Any = sw.optimizer(self.run, torch.optim.AdamW, lr=1e-4)
        else:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            self.batch = {key: value.chunk(ranks)[rank] for key, value in self.batch.items()}
            self.optimizer = torch.optim.AdamW(self.run.parameters(), lr=1e-4)

    def step(self) -> tuple[float, float]:
        """Return the seconds of a step, and of its optimizer."""
        dist.barrier()
        start = time.perf_counter()
        if self.is_ours:
            self.run.train_step(self.batch)
        else:
            self.run(**self.batch).backward()
        computed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        end = time.perf_counter()
        return end - start, end - computed


def _wrapped(model: torch.nn.Module, batch: Any, name: str, plan: str) -> Any:
    """Wrap the model with DDP, FSDP2 or a plan."""
    if plan:
        return sw.parallelize(model, batch, plan=sw.Plan.from_json(json.loads(plan)))
    if name == "DDP":
        return DistributedDataParallel(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measure(job: Job) -> dict[str, list[tuple[float, float]]]:
    """Return the times of every system in its rounds."""
    systems = {name: System(MODELS[job.model](), name, plan) for name, plan in job.systems}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    names = list(systems)
    order = random.Random(0)  # the same on every rank
    for at in range(WARM_UP + SCREENED + job.pairs):
        for name in order.sample(names, len(names)):
            times = systems[name].step()
            if at >= WARM_UP:
                results[name].append(times)
        if at == WARM_UP + SCREENED - 1:
            names = _fast_enough(results)
    return results


def _fast_enough(results: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return the systems close to the best on rank 0, and clear their times."""
    medians = {name: statistics.median(t for t, _ in times) for name, times in results.items()}
    best = min((seconds, name) for name, seconds in medians.items() if name != "auto")[0]
    near = [
        name
        for name, seconds in medians.items()
        if seconds <= MAX_SLOWDOWN * best or name == "auto"
    ]
    box = [near]
    dist.broadcast_object_list(box)
    for name in box[0]:
        results[name].clear()
    return box[0]


def worker(rank: int, port: int, job: Job, queue: Any) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    if job.cores:
        os.sched_setaffinity(0, {job.cores[rank]})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=job.ranks)
    results = measure(job)
    if rank == 0:
        queue.put(results)
    dist.barrier()
    dist.destroy_process_group()


def launch(job: Job) -> dict[str, list[tuple[float, float]]]:
    """Run a job in new processes; return the times of rank 0, which barriers make equal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.spawn(worker, (port, job, queue), nprocs=job.ranks, join=False)
    while not processes.join(timeout=1.0):
        pass
    results: dict[str, list[tuple[float, float]]] = queue.get()
    return results


def row(model: str, cluster: sw.Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, predict and measure one model."""
    module, batch = MODELS[model]()
    graph = sw.capture(module, batch)
    started = time.perf_counter()
    table = OpTable()
    auto = tune(graph, cluster, table=table)
    planned = time.perf_counter() - started
    plans = {n: p for n, p in rivals(graph, cluster) if not options.only or n in options.only}
    plans["auto"] = auto
    predicted = {}
    for name, plan in plans.items():
        estimate = sw.simulate(graph, plan, cluster, table=table)
        computed_s = sw.simulate(graph, plan, cluster).step_time_s
        causes = dict(estimate.timeline.causes)
        predicted[name] = {"s": estimate.step_time_s, "computed_s": computed_s, "causes": causes}
    systems = [(name, json.dumps(plan.to_json())) for name, plan in plans.items()]
    systems += [(name, "") for name in BASELINES]
    times = launch(
        Job(model=model, ranks=cluster.num_ranks, systems=tuple(systems), pairs=options.pairs)
    )
    return _row(model, cluster, auto, planned, predicted, times)


def _row(
    model: str,
    cluster: sw.Cluster,
    auto: sw.Plan,
    planned: float,
    predicted: dict[str, Any],
    times: dict[str, list[tuple[float, float]]],
) -> dict[str, Any]:
    medians = {name: statistics.median(t for t, _ in rounds) for name, rounds in times.items()}
    best = min((name for name in medians if name != "auto"), key=lambda name: medians[name])
    both = zip(times["auto"], times[best], strict=False)
    ours, rival = zip(*(((a[0], b[0])) for a, b in both), strict=True)
    return {
        "model": model,
        "ranks": cluster.num_ranks,
        "plan": auto.figures.best.what,
        "planned_s": planned,
        "best_rival": best,
        **ratio(list(ours), list(rival)),
        "predicted_s": predicted["auto"]["s"],
        "error": predicted["auto"]["s"] / medians["auto"] - 1,
        "systems": {
            name: {
                "measured_s": medians[name],
                "optimizer_s": statistics.median(t for _, t in times[name]),
                "rounds": len(times[name]),
                "rounds_s": [round(t, 6) for t, _ in times[name]],
                **({"predicted": predicted[name]} if name in predicted else {}),
            }
            for name in sorted(medians, key=lambda name: medians[name])
        },
    }


def show(row: dict[str, Any]) -> None:
    """Print the lines of a model."""
    print(
        f"{row['model']:6} {row['ranks']:2} ranks  {row['ratio']:.3f} "
        f"[{row['low']:.3f}, {row['high']:.3f}] of {row['best_rival']:14} "
        f"{row['ours_s'] * 1e3:.1f} ms, predicted {row['predicted_s'] * 1e3:.1f} "
        f"({row['error']:+.1%}): {row['plan']}",
        flush=True,
    )
    for name, system in row["systems"].items():
        text = f"    {name:14} {system['measured_s'] * 1e3:8.1f} ms"
        text += f"  optimizer {system['optimizer_s'] * 1e3:6.1f}"
        if "predicted" in system:
            predicted = system["predicted"]
            causes = {k: round(v * 1e3, 1) for k, v in predicted["causes"].items() if v}
            text += f"  predicted {predicted['s'] * 1e3:8.1f} "
            text += f"({predicted['computed_s'] * 1e3:.1f} without table)  {causes}"
        print(text, flush=True)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", type=lambda text: text.split(","), help="named strategies")
    parser.add_argument("--cluster", type=Path, help="an existing profile")
    parser.add_argument("--quick", action="store_true", help="a shorter profile")
    parser.add_argument("--out", type=Path, default=Path("bench-results-reality.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cluster:
        cluster = sw.Cluster.load(options.cluster)
    else:
        cluster = profile(options.ranks, device="cpu", quick=options.quick)
    models = options.models.split(",")
    rows = []
    for model in models:
        runs_here = options.cluster and len(models) == 1
        rows += [row(model, cluster, options)] if runs_here else _elsewhere(model, cluster, options)
        if runs_here:
            show(rows[-1])
        command = " ".join(["python -m benchmarks.reality", *sys.argv[1:]])
        document = {"machine": machine(), "command": command, "cluster": cluster.to_yaml()}
        options.out.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n")


def _elsewhere(
    model: str, cluster: sw.Cluster, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure a model in a separate process, as tuning must begin before costs are computed."""
    with tempfile.TemporaryDirectory() as folder:
        cluster_file, out = Path(folder) / "cluster.yaml", Path(folder) / "row.json"
        cluster_file.write_text(cluster.to_yaml())
        arguments = [
            "--cluster",
            cluster_file,
            "--models",
            model,
            "--pairs",
            options.pairs,
            "--out",
            out,
        ]
        arguments += ["--only", ",".join(options.only)] if options.only else []
        command = [sys.executable, "-m", "benchmarks.reality", *map(str, arguments)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
        return rows


if __name__ == "__main__":
    main()
