"""`make demo`: a small GPT from one device to 4 processes.

Capture it, plan it with three strategies, verify each, print generated code, and train on 4 gloo
processes and on one.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import warnings
from fnmatch import fnmatchcase
from multiprocessing.queues import SimpleQueue

import small_gpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

import shardwise as sw

RANKS, STEPS, LEARNING_RATE = 4, 8, 3e-3


def train_one_process() -> list[float]:
    """Return the losses of the plain model on one process."""
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
    """Train this rank's part of the model, with the same loop."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
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
    """Return the losses of the parallel program on `RANKS` processes."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(train_rank, (folder, results), nprocs=RANKS)
        losses: list[float] = results.get()
        return losses


SHARING = ("all-reduced", "ZeRO 1", "ZeRO 2", "ZeRO 3")


def plan_table(program: sw.types.Program) -> Table:
    """Return the entries of the plan, and the local shapes of rank 0."""
    parameters = program.lowered.of_rank(0).parameters
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    for column in ("full", "rank 0", "sharding", "gradients"):
        table.add_column(column, no_wrap=True)
    for glob, entry in program.plan.parameters.items():
        item = next(p for p in parameters if fnmatchcase(p.name, glob))
        shardings = [f"{axis} {text}" for axis, text in entry.layout.items() if text != "replicate"]
        sync = SHARING[item.zero] if item.sync else "local"
        table.add_row(
            glob, _times(item.shape), _times(item.local_shape), ", ".join(shardings) or "-", sync
        )
    return table


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def parameter_bytes(program: sw.types.Program) -> tuple[int, int]:
    """Return the parameter bytes of rank 0 between steps, and of the full model."""
    sizes = dict(program.plan.mesh.axes)
    stored = total = 0
    for item in program.lowered.of_rank(0).parameters:
        local = math.prod(item.local_shape) * item.dtype.itemsize
        shards = math.prod(sizes[axis] for axis in item.sync) if item.zero == 3 else 1
        stored += math.ceil(local / shards)
        total += math.prod(item.shape) * item.dtype.itemsize
    return stored, total


def block_code(program: sw.types.Program) -> str:
    """Return the first class of the generated code: one of the model's blocks."""
    text = program.source(0)
    start = text.index("class Block")
    return text[start : text.index("\n\n\n", start)]


def verdict(certificate: sw.types.Certificate) -> str:
    """Return the certificate as one line, or in full if something differs."""
    if not certificate.ok:
        return f"[red]{certificate}[/]"
    count, error = len(certificate.comparisons), certificate.max_relative_error
    return f"[green]verified: {count} tensors equal one device, relative error {error:.0e}[/]"


def train(console: Console, plan: sw.Plan) -> None:
    """Train on one process and on several, and print both losses."""
    with console.status("one process, then 4"):
        single, parallel = train_one_process(), train_parallel(plan)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("step", "one process", f"{RANKS} processes", "difference"):
        table.add_column(column, justify="right")
    for step, (one, many) in enumerate(zip(single, parallel, strict=True)):
        table.add_row(str(step), f"{one:.6f}", f"{many:.6f}", f"{many - one:+.0e}")
    console.print(table)


def main() -> None:
    """Run and print all stages."""
    start = time.perf_counter()
    warnings.simplefilter("ignore")
    console = Console(highlight=False)
    model, batch = small_gpt.make()
    console.rule("[bold]capture", align="left")
    with console.status("capturing"):
        graph = sw.capture(model, batch)
    count = sum(p.numel() for p in model.parameters())
    shapes = ", ".join(f"{k} {_times(tuple(v.shape))}" for k, v in batch.items())
    console.print(f"{graph.name}: {len(graph.nodes)} nodes, {count:,} parameters, batch {shapes}")
    cluster = sw.Cluster.local(RANKS)
    make = {
        "fsdp": lambda: sw.strategies.fsdp(graph, cluster),
        "tensor": lambda: sw.strategies.tensor(graph, cluster),
        "hybrid(dp=2, tp=2)": lambda: sw.strategies.hybrid(graph, cluster, dp=2, tp=2),
    }
    for name, strategy in make.items():
        console.print()
        console.rule(f"[bold]{name}", align="left")
        with console.status("planning and verifying"):
            program = sw.compile(graph, strategy())
            certificate = sw.verify(model, batch, program.plan)
        console.print(plan_table(program))
        stored, total = parameter_bytes(program)
        console.print(f"rank 0 stores {stored:,} of {total:,} parameter bytes")
        console.print(verdict(certificate))
    console.print()
    console.rule(f"[bold]generated code: {name}", align="left")
    console.print(Syntax(block_code(program), "python", background_color="default", word_wrap=True))
    console.print()
    console.rule(f"[bold]{name}: AdamW on {RANKS} gloo processes", align="left")
    train(console, program.plan)
    console.print(f"[dim]{time.perf_counter() - start:.0f} s on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
