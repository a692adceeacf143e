"""Compare predicted memory with real ranks on one GPU: `python -m benchmarks.memory`.

    python -m benchmarks.memory [--only "fsdp on 8"] [--out benchmarks/results/memory.json]
    python -m benchmarks.memory --fixed     # without expandable segments of torch's allocator
    python -m benchmarks.memory --tiny      # a small model; measures nothing without a GPU

One rank of a large plan trains Llama-3-8B in bf16 with AdamW over torch's `fake` process group: its
collectives transfer nothing, everything else is real. "measured" is
`torch.cuda.max_memory_allocated` of the second and third step, "reserved" is the memory of the
allocator, and "context" is the other memory of the process. "predicted" is `sw.simulate` on the
preset h200. Two more steps are limited to the memory of the smallest device on which a plan with
the predicted peak fits ("allowed"). Every case is a process; they compile concurrently and take
turns on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.memory_cases import CASES, Case
from shardwise import runtime as rt
from shardwise.api.compile import cast_model
from shardwise.api.memory import SingleRank
from shardwise.runtime.memory import grow_segments
from shardwise.runtime.mesh import axis_groups
from shardwise.runtime.transport.process_group import ProcessGroupTransport
from shardwise.simulation.memory import Budget

STEPS = 3
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "use_cache": False,
}  # fmt: skip
TINY = {
    **LLAMA_8B, "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip


def make_model(config: dict[str, Any]) -> torch.nn.Module:
    """Return a Hugging Face Llama without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**config)).train()


def make_batch(rows: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    """Return random tokens, which are also the labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (rows, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


class FakeGroupRank(SingleRank):
    """A single rank of a plan over the `fake` process group."""

    def __init__(
        self, graph: sw.Graph, plan: sw.Plan, rank: int, device: torch.device | str
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=plan.num_ranks, store=FakeStore())
        device = torch.device(device)
        grow_segments(device)
        super().__init__(sw.compile(graph, plan), rank, device, mesh=_mesh(plan, rank))
        self.module._naming_failures = contextlib.nullcontext  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _mesh(plan: sw.Plan, rank: int) -> rt.ProcessMesh:
    """Return the rank's mesh, with only the process groups of this rank."""
    stage = next(s for s in plan.all_stages if rank in s.ranks)
    axes = dict(stage.mesh.axes)
    counts = range(1, len(axes) + 1)
    combinations = [names for n in counts for names in itertools.combinations(axes, n)]
    groups = axis_groups(axes, combinations, stage.ranks)
    return rt.ProcessMesh(
        axes,
        stage.ranks.index(rank),
        ProcessGroupTransport([g for g in groups if rank in g]),
        ranks=stage.ranks,
        groups=plan.groups,
        num_microbatches=plan.num_microbatches,
        timed=plan.splits_time,
    )


def measure(
    rank: FakeGroupRank, batch: dict[str, torch.Tensor], allowed: float | None = None
) -> dict[str, Any]:
    """Return the peak memory of some steps, with the state of the optimizer.

    With `allowed`, two more steps are limited to that many bytes of the device; `in_allowed` is
    whether they succeed.
    """
    cuda = rank.device.type == "cuda"
    optimizer = sw.optimizer(rank.module, torch.optim.AdamW, lr=1e-4)
    for step in range(STEPS):
        if cuda and step == 1:
            torch.cuda.reset_peak_memory_stats()
        _step(rank, optimizer, batch)
    if not cuda:
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    figures = {
        "measured": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - torch.cuda.memory_reserved(),
    }
    if allowed is not None:
        figures["in_allowed"] = _repeat(rank, optimizer, batch, allowed / total)
    return figures


def _step(rank: FakeGroupRank, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    rank.module.train_step(batch)
    optimizer.step()
    optimizer.zero_grad()


def _repeat(
    rank: FakeGroupRank, optimizer: Any, batch: dict[str, torch.Tensor], share: float
) -> bool:
    """Return whether two steps succeed with a share of the device's memory."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0))
    try:
        for _ in range(2):
            _step(rank, optimizer, batch)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def plan_of(case: Case, config: dict[str, Any], length: int) -> tuple[Any, Any, sw.Plan]:
    """Return the model, batch and plan of a case."""
    model = make_model(config)
    batch = make_batch(case.rows, length, config["vocab_size"])
    if case.strategy == "plan":
        graph = sw.capture(cast_model(model, torch.bfloat16), batch)
        return model, batch, sw.plan(graph, _cluster(case), precision="bf16", **case.options)
    make = getattr(sw.strategies, case.strategy)
    plan = make(sw.capture(model, batch), _cluster(case), precision="bf16", **case.options)
    return model, batch, plan


def _cluster(case: Case) -> sw.Cluster:
    return sw.Cluster.preset("h200", nodes=case.ranks // 8)


def run_case(name: str, *, tiny: bool, lock: str) -> list[dict[str, Any]]:
    """Return a row for every group of a case, measured if there is a GPU."""
    case = CASES[name]
    start = time.perf_counter()
    model, batch, plan = plan_of(case, TINY if tiny else LLAMA_8B, 64 if tiny else case.length)
    graph = sw.capture(model, batch, plan=plan)
    estimate = sw.simulate(graph, plan, _cluster(case))
    sw.compile(graph, plan)  # before this process uses the GPU
    taken = Budget.of(_cluster(case).device(0)).taken
    rows = []
    with open(lock, "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for group in case.groups:
            use = estimate.memory[group]
            row = _described(name, plan, use) | {"compile_s": round(time.perf_counter() - start, 1)}
            row |= _measured(graph, plan, row["rank"], batch, taken(use.peak_bytes))
            if "measured" in row:
                row["error"] = row["predicted"] / row["measured"] - 1
            rows.append(row)
    return rows


def _described(name: str, plan: sw.Plan, use: Any) -> dict[str, Any]:
    return {
        "case": name,
        "plan": _short(plan),
        "rank": plan.groups[use.group][0],
        "predicted": round(use.peak_bytes),
        "limit": round(use.limit_bytes),
        "when": use.when,
        "parts": {part: round(size) for part, size in use.parts.items()},
    }


def _short(plan: sw.Plan) -> str:
    stages = len(plan.all_stages)
    return (
        f"{stages} x {plan.mesh}, {plan.num_microbatches} micro-batches, "
        f"recompute {plan.recompute}, {plan.schedule or 'one pass'}"
    )


def _measured(graph: Any, plan: sw.Plan, rank: int, batch: Any, allowed: float) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fake_rank = FakeGroupRank(graph, plan, rank, device)
    try:
        return measure(fake_rank, batch, allowed)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        fake_rank.close()
        del fake_rank
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def show(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    shown = f"{row['case']:48} rank {row['rank']:<5} {row['predicted'] / 2**30:8.2f} GiB predicted"
    if "measured" in row:
        shown += (
            f" {row['measured'] / 2**30:8.2f} measured {row['error']:+.1%} "
            f"(reserved {row['reserved'] / row['measured'] - 1:+.1%}, "
            f"context {row['context'] / 2**30:.2f}, in allowed: {row.get('in_allowed')})"
        )
    if row.get("out_of_memory"):
        shown += " out of memory"
    return f"{shown} in {row['when']}"


def main() -> None:
    """Run the cases, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=CASES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="memory-results.json")
    options = parser.parse_args()
    if options.case:
        rows = run_case(options.case, tiny=options.tiny, lock=options.lock)
        Path(options.out).write_text(json.dumps(rows))
        return
    rows = list(_all(options))
    info = {"torch": torch.__version__, "model": "tiny" if options.tiny else "Llama-3-8B"}
    info["segments"] = "fixed" if options.fixed else "growing"
    if torch.cuda.is_available():
        info["device"] = torch.cuda.get_device_name()
    Path(options.out).write_text(json.dumps({**info, "rows": rows}, indent=2) + "\n")


def _all(options: Any) -> Any:
    waiting = list(options.only or CASES)
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    folder = Path(tempfile.mkdtemp())
    while waiting or running:
        while waiting and len(running) < options.processes:
            name = waiting.pop(0)
            out = folder / f"{len(waiting)}.json"
            command = [sys.executable, "-m", "benchmarks.memory", "--case", name]
            command += ["--lock", str(folder / "lock"), "--out", str(out)]
            command += ["--tiny"] if options.tiny else []
            fixed = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if options.fixed else {}
            running[name] = (subprocess.Popen(command, env={**os.environ, **fixed}), out)
        time.sleep(0.2)
        for name, (process, out) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode == 0:
                    for row in json.loads(out.read_text()):
                        print(show(row), flush=True)
                        yield row
                else:
                    print(f"{name}: failed with {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
