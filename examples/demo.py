"""`make demo`: a small GPT from one device to 4 processes.

Captures it, plans it with three strategies, verifies each, shows generated code, and trains on 4
gloo processes next to one.
"""

from __future__ import annotations

import tempfile
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import small_gpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import shardwise as sw

RANKS, STEPS, LEARNING_RATE = 4, 8, 3e-3


def train_alone() -> list[float]:
    """The losses of the plain model on one process."""
    model, _ = small_gpt.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = model(**small_gpt.batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_rank(rank: int, folder: str, results: SimpleQueue[list[float]]) -> None:
    """One of the ranks: the same loop, with this rank's part of the model."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model, batch = small_gpt.make()
    part = sw.parallelize(model, batch, plan=sw.Plan.load(f"{folder}/plan.json"))
    optimizer = sw.optimizer(part, torch.optim.AdamW, lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        losses.append(part.train_step(small_gpt.batch(step)).item())
        sw.clip_grad_norm_(part, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        results.put(losses)
    dist.barrier()
    dist.destroy_process_group()


def train_parallel(plan: sw.Plan) -> list[float]:
    """The losses of the parallel program on `RANKS` processes."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(train_rank, (folder, results), nprocs=RANKS)
        return results.get()


def excerpt(program: sw.Program, lines: int = 40) -> str:
    """The first lines of the first module that the program's code defines."""
    with tempfile.TemporaryDirectory() as folder:
        program.save(folder)
        text = max((p.read_text() for p in Path(folder).glob("*.py")), key=len)
    start = text.find("class ")
    return "\n".join(text[max(start, 0) :].splitlines()[:lines])


def main() -> None:
    """Print every stage."""
    console = Console()
    model, batch = small_gpt.make()
    graph = sw.capture(model, batch)
    console.print(f"captured {graph.name}: {len(graph.nodes)} nodes")
    cluster = sw.Cluster.local(RANKS)
    plans = {
        "fsdp": sw.strategies.fsdp(graph, cluster),
        "tensor": sw.strategies.tensor(graph, cluster),
        "hybrid(dp=2, tp=2)": sw.strategies.hybrid(graph, cluster, dp=2, tp=2),
    }
    for name, plan in plans.items():
        console.rule(name)
        print(plan)
        print(sw.verify(model, batch, plan))
    chosen = plans["hybrid(dp=2, tp=2)"]
    console.rule("generated code")
    print(excerpt(sw.compile(graph, chosen)))
    console.rule(f"training on {RANKS} gloo processes")
    table = Table("step", "one process", f"{RANKS} processes", box=None)
    for step, (one, many) in enumerate(zip(train_alone(), train_parallel(chosen), strict=True)):
        table.add_row(str(step), f"{one:.6f}", f"{many:.6f}")
    console.print(table)


if __name__ == "__main__":
    main()
