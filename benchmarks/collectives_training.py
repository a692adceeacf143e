"""Train a GPT with data parallelism on emulated hosts, one of them slow: our all-reduce and gloo.

    python -m benchmarks.collectives_training [--steps 7]

Needs root and Debian's iproute2. Three hosts have cards of 800 Mbit/s, one of 200. Every process
has two copies of the model under the same plan, one with collectives solved for the links
(`sw.collectives.choose`). Both take turns, step by step, on the same batches. Figures are medians
of steps, and both must have the same losses. Writes benchmarks/results/collectives_training.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.collectives import hosts
from benchmarks.models import GPT, tokens
from benchmarks.pipeline import machine
from shardwise.collectives import Network
from shardwise.collectives.bench.emulation import emulated, run_on_hosts

RESULTS = Path(__file__).parent / "results" / "collectives_training.json"
RATES = [800.0, 800.0, 800.0, 200.0]
LENGTH, VOCAB = 16, 4096
AT_MOST = 0.75  # of the library's step
TIMEOUT_S = 900.0
WARM_UP = 2


def model() -> GPT:
    """Return a model with 35 MB of gradients, for few tokens."""
    torch.manual_seed(0)
    return GPT(layers=4, width=384, heads=6, length=LENGTH, vocab=VOCAB)


class Side:
    """A model under a plan, with its optimizer."""

    def __init__(self, plan: sw.Plan, batch: dict[str, torch.Tensor]) -> None:
        self.module = sw.parallelize(model(), batch, plan=plan)
        self.optimizer = sw.optimizer(self.module, torch.optim.AdamW, lr=1e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        dist.barrier()
        began = time.perf_counter()
        loss = self.module.train_step(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds.append(float(seconds))
        self.losses.append(float(loss))


def train(steps: int) -> dict[str, Any]:
    """Train both sides alternately, on all ranks."""
    cluster = sw.Cluster.from_yaml(hosts(RATES))
    batches = [tokens(4, LENGTH, VOCAB) for _ in range(2)]
    plan = sw.strategies.ddp(sw.capture(model(), batches[0]), cluster)
    solved = sw.collectives.choose(plan, cluster)
    sides = {"library": Side(plan, batches[0]), "ours": Side(solved, batches[0])}
    for number in range(WARM_UP + steps):
        for side in sides.values():
            side.step(batches[number % 2])
    return {
        "collectives": [f"{c.operation}: {c.uses}" for c in solved.collectives],
        "parameters": sum(p.numel() for p in model().parameters()),
        **{
            name: {"seconds": side.seconds[WARM_UP:], "losses": side.losses}
            for name, side in sides.items()
        },
    }


def worker(folder: Path, rank: int, steps: int) -> None:
    """Run one rank in its namespace."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=len(RATES),
        timeout=timedelta(seconds=120),
    )
    result = train(steps)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Emulate, train, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(Path(options.worker[0]), int(options.worker[1]), options.steps)
        return
    network = Network.of_cluster(sw.Cluster.from_yaml(hosts(RATES)))
    module = [
        sys.executable,
        "-m",
        "benchmarks.collectives_training",
        "--steps",
        str(options.steps),
    ]
    with tempfile.TemporaryDirectory() as folder, emulated(network) as plan:
        commands = [[*module, "--worker", folder, str(rank)] for rank in range(len(RATES))]
        run_on_hosts(plan, commands, timeout_s=TIMEOUT_S, environment={"OMP_NUM_THREADS": "1"})
        figures = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    library, ours = (statistics.median(figures[side]["seconds"]) for side in ("library", "ours"))
    pairs = zip(figures["library"]["losses"], figures["ours"]["losses"], strict=True)
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    reached = ours <= AT_MOST * library and difference < 1e-4
    print(f"GPT of {figures['parameters']:,} parameters, {', '.join(figures['collectives'])}")
    print(
        f"library {library * 1e3:.0f} ms, ours {ours * 1e3:.0f} ms per step: {ours / library:.3f}"
    )
    print(f"losses from {figures['ours']['losses'][0]:.4f} to {figures['ours']['losses'][-1]:.4f}")
    print(
        f"{'reached' if reached else 'MISSED'}: {ours / library:.3f} of the library's step "
        f"(at most {AT_MOST}), losses differ by {difference:.1e}"
    )
    result = {"command": "python -m benchmarks.collectives_training", "machine": machine()}
    result |= {"ratio": ours / library, "at_most": AT_MOST, "losses_apart": difference, **figures}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
