"""Compare pipelines with `torch.distributed.pipelining`: step time, peak memory and bubbles.

    python -m benchmarks.pipeline [--what time,memory,bubble] [--ranks 2,4] [--bubble-ranks 2,8]
    python -m benchmarks.pipeline --backend nccl --what time --ranks 2,4

Both run the same GPT, with an untied head, split at the same blocks, in the same gloo processes of
one thread and one core each, with 8 micro-batches and AdamW. First, both must compute the same loss
and gradients. Times and memory are measured as in `benchmarks.run`; memory is that of the rank with
the worst ratio.

A bubble is the share of a recorded step in which ranks wait, compared with a replay of the schedule
with the recorded times of its actions: the difference is the overhead of the executor. Rows that
need more cores than this machine has are skipped. Over NCCL, ranks have a GPU each, or share one
through sockets, where only the ratio counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

import shardwise as sw
from benchmarks.bubbles import bubble_fraction
from benchmarks.models import GPT, tokens
from benchmarks.run import Step, alternate, join, peak_bytes, ratio
from shardwise.schedules import Action, make, replay

LIMITS = {"time": 1.03, "memory": 1.03, "bubble": 5.0}  # ratios, and points of difference
MICROBATCHES = 8
LENGTH, VOCAB = 128, 2048
STEPS_RECORDED = 5
BASELINES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}
SCHEDULES = (*BASELINES, "zb_h1", "zb_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task for a group of processes: "time", "bubble", or memory of "ours" or the "baseline"."""

    kind: str
    ranks: int
    schedule: str
    pairs: int
    backend: str = "gloo"

    @property
    def stages(self) -> int:
        return self.ranks * (2 if self.schedule in ("interleaved", "zb_v") else 1)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        is_gpu = self.backend == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")

    @property
    def layers(self) -> int:
        return max(8, self.stages)

    @property
    def starts(self) -> list[int]:
        """The first block of every stage, and the end."""
        return [self.layers * stage // self.stages for stage in range(self.stages + 1)]


def gpt(job: Job) -> tuple[GPT, dict[str, Tensor]]:
    """Return a GPT with an untied head, and a batch of one sequence per micro-batch."""
    torch.manual_seed(0)
    model = GPT(layers=job.layers, width=384, heads=6, length=LENGTH, vocab=VOCAB)
    model.head = nn.Linear(384, VOCAB, bias=False)
    batch = tokens(MICROBATCHES, LENGTH, VOCAB)
    return model.to(job.device), {name: value.to(job.device) for name, value in batch.items()}


class Part(nn.Module):
    """A range of blocks of a GPT, with the embedding or the head at its ends."""

    def __init__(self, model: GPT, first: int, end: int) -> None:
        super().__init__()
        is_last = end == len(model.blocks)
        self.tok, self.pos = (model.tok, model.pos) if first == 0 else (None, None)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, end)})
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tok is not None and self.pos is not None:
            x = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of `GPT.forward`."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Baseline:
    """`torch.distributed.pipelining` as its documentation recommends."""

    def __init__(self, job: Job) -> None:
        model, self.batch = gpt(job)
        rank = dist.get_rank()
        local = [s for s in range(job.stages) if s % job.ranks == rank]
        self.parts = [Part(model, *job.starts[stage : stage + 2]) for stage in local]
        stages = [
            pipelining.PipelineStage(part, stage, job.stages, job.device)
            for part, stage in zip(self.parts, local, strict=True)
        ]
        is_one = len(stages) == 1
        self.schedule = BASELINES[job.schedule](
            stages[0] if is_one else stages, MICROBATCHES, loss_fn=mean_loss
        )
        self.is_first, self.is_last = rank == 0, rank == job.ranks - 1
        parameters = [p for part in self.parts for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def train(self) -> float | None:
        """Return the mean loss on the last rank."""
        losses: list[Tensor] = []
        inputs = (self.batch["input_ids"],) if self.is_first else ()
        targets = {"target": self.batch["labels"], "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **targets, return_outputs=False)
        return float(torch.stack(losses).detach().mean()) if losses else None

    def step(self) -> None:
        self.train()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients by the names of the model."""
        named = (pair for part in self.parts for pair in part.named_parameters())
        return {name: p.grad for name, p in named if p.grad is not None}


class Ours:
    """The same model under a plan of Shardwise."""

    def __init__(self, job: Job, *, record: bool = False) -> None:
        model, self.batch = gpt(job)
        plan = sw.strategies.pipeline(
            sw.capture(model, self.batch),
            sw.Cluster.local(job.ranks),
            pp=job.ranks,
            schedule=job.schedule,
            num_microbatches=MICROBATCHES,
            cuts=[f"blocks.{first}" for first in job.starts[1:-1]],
        )
        self.module = sw.parallelize(model, self.batch, plan=plan, record=record)
        self.optimizer = sw.optimizer(self.module, torch.optim.AdamW, lr=1e-4)

    def train(self) -> float:
        return float(self.module.train_step(self.batch))

    def step(self) -> None:
        self.train()
        self.optimizer.step()
        self.optimizer.zero_grad()


def check_equal(ours: Ours, baseline: Baseline) -> None:
    """Require that both compute the same loss and gradients, up to float32 rounding."""
    loss, expected_loss = ours.train(), baseline.train()
    if expected_loss is not None:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    gradients, expected = ours.module.gather_gradients(), baseline.gradients()
    assert expected, "no gradients"
    for name, grad in expected.items():
        torch.testing.assert_close(gradients[name], grad, rtol=1e-3, atol=1e-5, msg=name)
    ours.optimizer.zero_grad()
    baseline.optimizer.zero_grad()


def time_both(job: Job) -> Any:
    """Return the seconds of alternating steps of both."""
    ours, baseline = Ours(job), Baseline(job)
    check_equal(ours, baseline)
    return alternate(ours.step, baseline.step, job.pairs)


def memory_of(job: Job) -> int:
    """Return the peak memory of this rank."""

    def begin() -> Step:
        return Ours(job).step if job.kind == "ours" else Baseline(job).step

    return peak_bytes(begin)


def bubbles(job: Job) -> list[tuple[float, float]]:
    """Return the recorded and the replayed bubbles of some steps."""
    ours = Ours(job, record=True)
    schedule = make(
        job.schedule, num_groups=job.ranks, num_microbatches=MICROBATCHES, num_stages=job.stages
    )
    result = []
    for step in range(-3, STEPS_RECORDED):
        dist.barrier()
        ours.step()
        trace = ours.module.trace()
        if trace is not None and step >= 0:
            durations = dict(_durations(trace))
            replayed = replay(schedule, durations.__getitem__)
            result.append((bubble_fraction(trace).overall, replayed.bubble_fraction))
    return result


def _durations(trace: dict[str, Any]) -> Iterator[tuple[Action, float]]:
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "compute":
            yield Action.parse(event["name"]), event["dur"] * 1e-6


WORK: dict[str, Callable[[Job], Any]] = {
    "time": time_both,
    "ours": memory_of,
    "baseline": memory_of,
    "bubble": bubbles,
}


def worker(rank: int, port: int, job: Job, queue: Any) -> None:
    """Run one process, on a separate core if there are enough."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= job.ranks:
        os.sched_setaffinity(0, {cores[rank * (len(cores) // job.ranks)]})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.ranks))
    join(job.backend, rank, job.ranks)
    results: list[Any] = [None] * job.ranks
    dist.all_gather_object(results, WORK[job.kind](job))
    if rank == 0:
        queue.put(results)
    dist.barrier()
    dist.destroy_process_group()


def launch(job: Job) -> list[Any]:
    """Run a job in new processes and return the results of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.spawn(worker, (port, job, queue), nprocs=job.ranks, join=False)
    while not processes.join(timeout=1.0):
        pass
    results: list[Any] = queue.get()
    return results


def time_row(job: Job) -> dict[str, Any]:
    """Compare the step times of rank 0, which barriers make equal on all ranks."""
    ours, baseline = launch(job)[0]
    return ratio(ours, baseline)


def memory_row(job: Job) -> dict[str, Any]:
    """Return the peaks of all ranks, and the worst ratio."""
    ours, baseline = (
        launch(Job(kind=kind, ranks=job.ranks, schedule=job.schedule, pairs=0))
        for kind in ("ours", "baseline")
    )
    worst = max(a / b for a, b in zip(ours, baseline, strict=True))
    return {"ratio": worst, "ours_bytes": ours, "theirs_bytes": baseline}


def bubble_row(job: Job) -> dict[str, Any]:
    """Return medians over the recorded steps, in percent."""
    steps = launch(job)[0]
    recorded, replayed = (100 * statistics.median(column) for column in zip(*steps, strict=True))
    points = statistics.median(100 * (actual - ideal) for actual, ideal in steps)
    return {"points": points, "recorded": recorded, "replayed": replayed, "steps": steps}


ROWS = {"time": time_row, "memory": memory_row, "bubble": bubble_row}


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the selected jobs in the order of the table."""
    for kind in options.what:
        schedules = SCHEDULES if kind == "bubble" else tuple(BASELINES)
        for ranks in options.bubble_ranks if kind == "bubble" else options.ranks:
            for schedule in schedules:
                if schedule not in options.schedules:
                    continue
                if kind == "bubble" or schedule != "interleaved" or ranks == 2:
                    yield Job(
                        kind=kind,
                        ranks=ranks,
                        schedule=schedule,
                        pairs=options.pairs,
                        backend=options.backend,
                    )


def show(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    what, limit = row["what"], LIMITS[row["what"]]
    value = abs(row["points"]) if what == "bubble" else row["ratio"]
    verdict = "ok" if value <= limit else "above"
    name = f"{row['ranks']} ranks {row['schedule']:11} {what:6}"
    if what == "bubble":
        middle = f"{row['points']:+.1f} points, limit {limit:.0f} {verdict:6}"
        sizes = f"recorded {row['recorded']:.1f}%, replayed {row['replayed']:.1f}%"
    elif what == "time":
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        middle = f"{row['ratio']:.3f} {interval} limit {limit:.2f} {verdict:6}"
        sizes = f"{row['ours_s']:.3f} s / {row['theirs_s']:.3f} s"
    else:
        middle = f"{row['ratio']:.3f} {'':14} limit {limit:.2f} {verdict:6}"
        pairs = zip(row["ours_bytes"], row["theirs_bytes"], strict=True)
        sizes = ", ".join(f"{a / 2**20:.0f} / {b / 2**20:.0f}" for a, b in pairs) + " MiB"
    print(f"{name} {middle} {sizes}", flush=True)


def machine() -> dict[str, Any]:
    """Describe this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", type=_names, default=list(LIMITS))
    parser.add_argument("--ranks", type=_numbers, default=[2, 4])
    parser.add_argument("--bubble-ranks", type=_numbers, default=[2, 8])
    parser.add_argument("--schedules", type=_names, default=list(SCHEDULES))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--out", type=Path, default=Path("bench-results-pipeline.json"))
    options = parser.parse_args()
    rows = []
    cores = len(os.sched_getaffinity(0))
    for job in jobs(options):
        if job.backend == "gloo" and job.kind != "memory" and job.ranks > cores:
            print(f"{job.ranks} ranks {job.schedule:11} {job.kind:6} skipped: only {cores} cores")
            continue
        head = {"what": job.kind, "ranks": job.ranks, "schedule": job.schedule}
        rows.append({**head, **ROWS[job.kind](job)})
        show(rows[-1])
        command = " ".join(["python -m benchmarks.pipeline", *sys.argv[1:]])
        document = {"machine": machine(), "command": command, "rows": rows}
        options.out.write_text(json.dumps(document, indent=2) + "\n")


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
