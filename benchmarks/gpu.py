"""Compare generated code of one rank on one GPU with its model, eager and under torch.compile.

    python -m benchmarks.gpu [--models gpt,llama,vit,small] [--programs blocks,compiled]
        [--pairs 40] [--limit 110] [--out bench-results-gpu.json]
    python -m benchmarks.gpu --models tiny --pairs 3      # a trial run, also on a CPU

All programs use bf16 weights and a fused AdamW. They alternate steps with a rival in one process;
the ratio of medians has a 90% interval. The rival is `torch.compile` of the model, for the small
model also the eager model. The time to the first step begins with an empty compilation cache, and
for Shardwise with capture and planning; peak memory is that of tensors, without the other programs.
A model stops after `--limit` seconds with the pairs that it has (at least 5), and a program that
runs out of memory is reported as such.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from benchmarks.gpu_models import MODELS
from benchmarks.run import ratio

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP, MIN_PAIRS = 5, 5
Step = Callable[[], torch.Tensor]
OURS: dict[str, dict[str, Any]] = {  # options of `parallelize`
    "eager": {"compile": False},
    "blocks": {"compile": "blocks"},
    "compiled": {"compile": True},
    "cuda-graph": {"compile": "cuda-graph"},
}
RIVALS = ("torch eager", "torch.compile")


def make_step(program: str, name: str) -> Step:
    """Return the training step of a program: ours, or one of the rivals."""
    model, batch = MODELS[name]()
    model = model.to(DEVICE).bfloat16()
    batch = {
        k: v.to(DEVICE, torch.bfloat16 if v.is_floating_point() else v.dtype)
        for k, v in batch.items()
    }
    if program in RIVALS:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if program == "torch.compile" else model

        def rival() -> torch.Tensor:
            loss = run(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return rival
    options = dict(OURS[program])
    compile = options.pop("compile")
    cluster = sw.Cluster.preset("h200", devices_per_node=1)
    plan = sw.strategies.ddp(sw.capture(model, batch), cluster, **options)
    pm = sw.parallelize(model, batch, plan=plan, compile=compile)
    sharded = sw.optimizer(pm, torch.optim.AdamW, lr=1e-4)

    def ours() -> torch.Tensor:
        loss = pm.train_step(batch)
        sharded.step()
        sharded.zero_grad()
        return loss

    return ours


@dataclass
class Program:
    """A program that is ready to run, and its figures so far."""

    step: Step
    first_step_s: float
    peak_bytes: int
    seconds: float  # median of its warm-up
    losses: list[float]


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(step: Step) -> tuple[float, torch.Tensor]:
    """Return the seconds of a step, synchronized with the device."""
    synchronize()
    start = time.perf_counter()
    loss = step()
    synchronize()
    return time.perf_counter() - start, loss


def prepare(program: str, name: str) -> Program:
    """Build a program with an empty compilation cache, and measure it alone."""
    gc.collect()
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder, environment(TORCHINDUCTOR_CACHE_DIR=folder):
        start = time.perf_counter()
        step = make_step(program, name)
        losses = [float(step())]
        synchronize()
        first_step_s = time.perf_counter() - start
        for _ in range(2):
            losses.append(float(step()))
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UP):
        elapsed, loss = timed(step)
        seconds.append(elapsed)
        losses.append(float(loss))
    peak = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
    return Program(step, first_step_s, peak, statistics.median(seconds), losses)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def alternate(ours: Step, rival: Step, pairs: int, end: float) -> dict[str, float]:
    """Return the ratio of alternating steps, until `end` at the latest."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        if pair >= MIN_PAIRS and time.perf_counter() > end:
            break
        for which in (0, 1) if pair % 2 else (1, 0):
            times[which].append(timed((ours, rival)[which])[0])
    return ratio(*times)


def compare(name: str, programs: list[str], pairs: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for every program and rival of a model."""
    end = time.perf_counter() + limit_s
    rivals = [*(["torch eager"] if name in ("small", "tiny") else []), "torch.compile"]
    for index, rival_name in enumerate(rivals):
        torch._dynamo.reset()  # sizes of other models would make those of this one dynamic
        rival = attempt(rival_name, name)
        for number, program in enumerate(programs):
            row: dict[str, Any] = {"model": name, "program": program, "rival": rival_name}
            ours = attempt(program, name)
            if isinstance(ours, str) or isinstance(rival, str):
                yield row | {"failed": ours if isinstance(ours, str) else rival}
                continue
            left = (len(rivals) - index - 1) * len(programs) + len(programs) - number
            share = max(end - time.perf_counter(), 0.0) / left
            yield row | {
                **alternate(ours.step, rival.step, pairs, time.perf_counter() + share),
                "first_step_s": ours.first_step_s,
                "rival_first_step_s": rival.first_step_s,
                "first_step_ratio": ours.first_step_s / rival.first_step_s,
                "peak_bytes": ours.peak_bytes,
                "rival_peak_bytes": rival.peak_bytes,
                "peak_ratio": ours.peak_bytes / max(rival.peak_bytes, 1),
                "losses": ours.losses,
                "rival_losses": rival.losses,
            }
            del ours
            release()
        del rival
        release()


def attempt(program: str, name: str) -> Program | str:
    """Return a program, or the reason why it does not run."""
    try:
        return prepare(program, name)
    except (torch.OutOfMemoryError, sw.ShardwiseError, RuntimeError) as error:
        release()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def release() -> None:
    """Return the memory of programs that no longer exist."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    head = f"{row['model']:6} {row['program']:11} / {row['rival']:13}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    last = f"{row['losses'][-1]:.4f} / {row['rival_losses'][-1]:.4f}"
    return (
        f"{head} {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] of {row['pairs']} pairs, "
        f"{row['ours_s'] * 1e3:.1f} / {row['theirs_s'] * 1e3:.1f} ms; first step "
        f"{row['first_step_s']:.1f} / {row['rival_first_step_s']:.1f} s; memory "
        f"{row['peak_bytes'] / 2**30:.2f} / {row['rival_peak_bytes'] / 2**30:.2f} GiB; "
        f"losses after {len(row['losses'])} steps {last}"
    )


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,llama,vit,small")
    parser.add_argument("--programs", default="")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--limit", type=float, default=110, help="seconds of each model")
    parser.add_argument("--out", default="bench-results-gpu.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    torch.compile(torch.sin)(torch.ones(8, device=DEVICE))  # imports the compiler, for all programs
    for name in options.models.split(","):
        default = "cuda-graph,compiled" if name == "small" else "blocks,compiled"
        programs = (options.programs or default).split(",")
        for row in compare(name, programs, options.pairs, options.limit):
            rows.append(row)
            print(line(row), flush=True)
            machine = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor()
            result = {"machine": machine, "torch": torch.__version__, "rows": rows}
            Path(options.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
