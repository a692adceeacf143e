"""Compare generated code of one rank with its model on one GPU, eager and compiled.

    python -m benchmarks.gpu [--pairs 40] [--model gpt_1b] [--out gpu-results.json]

Both use bf16 weights and AdamW and alternate steps in one process; the ratio of medians has a 90%
interval.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardwise as sw
from benchmarks.models import MODELS, loss_of
from benchmarks.run import WARM_UP, ratio

LIMIT = 1.02
Step = Callable[[], None]


def steps(name: str, compiled: bool) -> tuple[Step, Step]:
    """Return the steps of Shardwise and of the plain model, with the same initial weights."""
    model, batch = MODELS[name]()
    model = model.cuda().bfloat16()
    batch = {key: value.cuda() for key, value in batch.items()}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(1))
    pm = sw.parallelize(model, batch, plan=plan, compile=compiled)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-4, fused=True)
    plain_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def ours() -> None:
        pm.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        loss_of(run(**batch)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    return ours, plain


def alternate(ours: Step, plain: Step, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of alternating steps, synchronized with the device."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-WARM_UP, pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            torch.cuda.synchronize()
            start = time.perf_counter()
            (ours, plain)[which]()
            torch.cuda.synchronize()
            if pair >= 0:
                times[which].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--model", default="gpt_1b")
    parser.add_argument("--out", default="bench-results-gpu.json")
    options = parser.parse_args()
    rows = []
    for compiled in (False, True):
        row = ratio(*alternate(*steps(options.model, compiled), options.pairs))
        rows.append({"model": options.model, "compiled": compiled, **row})
        verdict = "ok" if row["ratio"] <= LIMIT else "above"
        print(
            f"{options.model} {'compiled' if compiled else 'eager':9} {row['ratio']:.4f} "
            f"[{row['low']:.4f}, {row['high']:.4f}] limit {LIMIT} {verdict} "
            f"{row['ours_s'] * 1e3:.1f} ms / {row['theirs_s'] * 1e3:.1f} ms",
            flush=True,
        )
        torch.cuda.empty_cache()
    Path(options.out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
