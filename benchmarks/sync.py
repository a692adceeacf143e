"""Compare synchronization per parameter with DDP on emulated hosts of a slow network.

    python -m benchmarks.sync [--model words powersgd …] [--gbit 1 10] [--pairs 40] [--slow-host]

There are two hosts, and with `--slow-host` a third one, whose card has a tenth of the bandwidth.

Needs root and Debian's iproute2. Every process trains the same model with DDP and with a plan, step
by step in turns, with plain SGD on the same batches; DDP also runs with `sparse=True` embeddings.
Figures are medians of the slowest rank's steps, and losses must agree. Inexact forms are compared
with torch's communication hooks; a step of DiLoCo is the mean of a round. Writes
benchmarks/results/sync.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from benchmarks.collectives import hosts
from benchmarks.pipeline import machine
from shardwise.collectives import Network
from shardwise.collectives.bench.emulation import emulated, run_on_hosts

RESULTS = Path(__file__).parent / "results" / "sync.json"
WARM_UP, TIMEOUT_S = 2, 1800.0
RANK = 4  # of PowerSGD
Batch = dict[str, Tensor]


def network(gbit: float, slow: bool) -> sw.Cluster:
    """Return two hosts and, if asked for, a slow one."""
    rates = [gbit * 1000.0] * 2 + [gbit * 100.0] * slow
    return sw.Cluster.from_yaml(hosts(rates))


class Words(nn.Module):
    """A bag-of-words classifier with a table of 1,000,000 rows."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(1_000_000, 32, sparse=sparse)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.table(x).mean(1)), y)

    @staticmethod
    def batch() -> Batch:
        return {"x": torch.randint(0, 1_000_000, (64, 32)), "y": torch.randint(0, 10, (64,))}


class Dlrm(nn.Module):
    """A small DLRM: four tables, two perceptrons, and products of their outputs."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        sizes = (300_000, 200_000, 100_000, 50_000)
        self.tables = nn.ModuleList(nn.Embedding(rows, 32, sparse=sparse) for rows in sizes)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.1, 0.1)  # type: ignore[arg-type]
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(32 + 25, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(t(ids[:, i]) for i, t in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits = self.top(torch.cat([bottom, products], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, y)

    @staticmethod
    def batch() -> Batch:
        return {
            "dense": torch.randn(256, 13),
            "ids": torch.randint(0, 50_000, (256, 4)),
            "y": torch.randint(0, 2, (256,)).float(),
        }


class Wide(nn.Module):
    """Dense layers with 17 million parameters, for steps with little to compute."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.dense = nn.Sequential(
            nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.dense(x), y)

    @staticmethod
    def batch() -> Batch:
        return {"x": torch.randn(16, 256), "y": torch.randint(0, 10, (16,))}


class Vgg(nn.Module):
    """Some convolutions and large dense layers."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        convs = [
            m
            for a, b in pairwise(widths)
            for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        self.features = nn.Sequential(*convs, nn.Flatten())
        self.dense = nn.Sequential(
            nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 100)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.dense(self.features(x)), y)

    @staticmethod
    def batch() -> Batch:
        return {"x": torch.randn(32, 3, 32, 32), "y": torch.randint(0, 100, (32,))}


def powersgd_hook(model: DistributedDataParallel) -> None:
    """Compress as torch does, with the rank and warm-up of the plan."""
    state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=WARM_UP)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def fp16_hook(model: DistributedDataParallel) -> None:
    """Send gradients in fp16."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the synchronization of its parameters, and the highest ratio to another side.

    `hooks` are torch's communication hooks, each of which trains as a further side. Losses of
    `inexact` forms need not equal those of DDP. A step is the mean of `steps` of them.
    """

    model: Callable[..., Any]
    syncs: dict[str, sw.Sync]
    at_most: float
    against: str = "ddp"
    hooks: dict[str, Callable[[DistributedDataParallel], None]] = field(default_factory=dict)
    steps: int = 1
    learning_rate: float = 0.1

    @property
    def inexact(self) -> bool:
        return any(sync.inexact for sync in self.syncs.values())


def compressed(kind: str, **options: Any) -> dict[str, sw.Sync]:
    """Return the synchronization of all parameters with one compression."""
    return {"*": sw.Sync(compression=sw.Compression(kind=kind, warmup=WARM_UP, **options))}


CASES = {
    "words": Case(model=Words, syncs={"table.*": sw.Sync(sparse="gather")}, at_most=0.3),
    "dlrm": Case(model=Dlrm, syncs={"tables.*": sw.Sync(sparse="gather")}, at_most=0.4),
    "vgg": Case(model=Vgg, syncs={"dense.*": sw.Sync(factors=True)}, at_most=0.8),
    "powersgd": Case(
        model=Vgg,
        syncs=compressed("powersgd", rank=RANK),
        at_most=1.0,
        against="powersgd_hook",
        hooks={"powersgd_hook": powersgd_hook},
    ),
    # Torch has no hook of one bit, and its quantizing ones fail on gloo: fp16 is its smallest.
    "onebit": Case(
        model=Vgg,
        syncs=compressed("onebit"),
        at_most=1.0,
        against="fp16_hook",
        hooks={"fp16_hook": fp16_hook},
    ),
    "diloco": Case(
        model=Wide,
        syncs={"*": sw.Sync(every=50, outer=sw.OuterOptimizer())},
        at_most=0.2,
        steps=50,
        learning_rate=0.01,
    ),
}


def built(case: Case, sparse: bool = False) -> nn.Module:
    """Return the model with the same weights on every rank and side."""
    torch.manual_seed(0)
    model: nn.Module = case.model(sparse=sparse)
    return model


class Side:
    """One way to train, with the times of its steps, each the mean of `steps`."""

    def __init__(self, step: Callable[[Batch], float], steps: int = 1) -> None:
        self.step, self.seconds, self.losses = step, list[float](), list[float]()
        self.steps = steps

    def run(self, batch: Batch) -> None:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(self.steps):
            self.losses.append(self.step(batch))
        seconds = torch.tensor([time.perf_counter() - began]) / self.steps
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds.append(float(seconds))


def ddp_side(
    case: Case, sparse: bool, hook: Callable[[DistributedDataParallel], None] | None = None
) -> Side:
    """Train with DDP on this rank's rows; the loss is the mean over ranks."""
    # One bucket with hooks: callbacks of PowerSGD wait for a second message in gloo's two threads,
    # so that three buckets block each other forever.
    model = DistributedDataParallel(
        built(case, sparse),
        gradient_as_bucket_view=True,
        bucket_cap_mb=None if hook is None else 1024,
    )
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.learning_rate)
    ranks = dist.get_world_size()

    def step(batch: Batch) -> float:
        local = {n: torch.chunk(t, ranks)[dist.get_rank()] for n, t in batch.items()}
        optimizer.zero_grad()
        loss = model(**local)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / ranks

    return Side(step)


def own_side(case: Case, batch: Batch, cluster: sw.Cluster) -> Side:
    """Train with the plan of the case."""
    model = built(case)
    plan = sw.strategies.ddp(sw.capture(model, batch), cluster, constraints=case.syncs)
    module = sw.parallelize(model, batch, plan)
    optimizer = sw.optimizer(module, torch.optim.SGD, lr=case.learning_rate)

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = module.train_step(batch)
        optimizer.step()
        return float(loss)

    return Side(step, case.steps)


def train(name: str, pairs: int, cluster: sw.Cluster) -> dict[str, Any]:
    """Train all sides in turns, on all ranks."""
    case, ranks = CASES[name], cluster.num_ranks
    torch.manual_seed(1)
    drawn = [case.model.batch() for _ in range(2)]
    # DDP is exact for equal parts only.
    batches = [{n: t[: len(t) // ranks * ranks] for n, t in batch.items()} for batch in drawn]
    sides = {"ddp": ddp_side(case, False), "ours": own_side(case, batches[0], cluster)}
    if name in ("words", "dlrm"):
        sides["ddp_sparse"] = ddp_side(case, True)
    sides |= {name: ddp_side(case, False, hook) for name, hook in case.hooks.items()}
    for number in range(WARM_UP + pairs):
        for side in sides.values():
            side.run(batches[number % 2])
    return {n: {"seconds": s.seconds[WARM_UP:], "losses": s.losses} for n, s in sides.items()}


def worker(folder: Path, rank: int, name: str, pairs: int, cluster: sw.Cluster) -> None:
    """Run one rank in its namespace."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=cluster.num_ranks,
        timeout=timedelta(seconds=300),
    )
    result = train(name, pairs, cluster)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, gbit: float, pairs: int, slow: bool) -> dict[str, Any]:
    """Emulate the hosts, train, and return the figures."""
    cluster = network(gbit, slow)
    with tempfile.TemporaryDirectory() as folder, emulated(Network.of_cluster(cluster)) as layout:
        commands = [
            [
                *(sys.executable, "-m", "benchmarks.sync", "--model", name, "--gbit", str(gbit)),
                *("--pairs", str(pairs), "--worker", folder, str(rank)),
                *(["--slow-host"] if slow else []),
            ]
            for rank in range(cluster.num_ranks)
        ]
        run_on_hosts(layout, commands, timeout_s=TIMEOUT_S, environment={"OMP_NUM_THREADS": "1"})
        figures = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    medians = {side: statistics.median(values["seconds"]) for side, values in figures.items()}
    losses = [figures[side]["losses"] for side in ("ddp", "ours")]
    assert all(map(math.isfinite, [*losses[0], *losses[1]])), losses
    case = CASES[name]
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=not case.inexact))
    result = {
        "model": name,
        "gbit_per_s": gbit,
        "slow_host": slow,
        "pairs": pairs,
        "medians_s": medians,
        "against": case.against,
        "ratio": medians["ours"] / medians[case.against],
        "at_most": case.at_most,
        "losses_apart": apart,
        "losses": [losses[1][0], losses[1][-1]],
        "seconds": {side: values["seconds"] for side, values in figures.items()},
    }
    times = ", ".join(f"{side} {value * 1e3:.1f} ms" for side, value in medians.items())
    reached = result["ratio"] <= result["at_most"] and (case.inexact or apart < 1e-4)
    print(
        f"{name}, {gbit:g} Gbit/s{' and a slow host' if slow else ''}: {times}; "
        f"{'reached' if reached else 'MISSED'}: "
        f"{result['ratio']:.3f} of {case.against} (at most {result['at_most']}), losses "
        f"{apart:.1e} apart, from {losses[1][0]:.3f} to {losses[1][-1]:.3f}",
        flush=True,
    )
    return result


def main() -> None:
    """Measure the cases, and write their figures next to those of earlier runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--gbit", nargs="+", type=float, default=[1.0, 10.0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--slow-host", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, rank = options.worker
        cluster = network(options.gbit[0], options.slow_host)
        worker(Path(folder), int(rank), options.model[0], options.pairs, cluster)
        return
    earlier = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    cases = {
        (c["model"], c["gbit_per_s"], c.get("slow_host", False)): c
        for c in earlier.get("cases", [])
    }
    for name in options.model:
        for gbit in options.gbit:
            cases[name, gbit, options.slow_host] = measure(
                name, gbit, options.pairs, options.slow_host
            )
            result = {"command": "python -m benchmarks.sync", "machine": machine()}
            result["cases"] = list(cases.values())
            options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
