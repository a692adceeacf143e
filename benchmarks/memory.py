"""Predicted memory next to that of real ranks on one GPU: `python -m benchmarks.memory`.

    python -m benchmarks.memory [--only "fsdp on 8"] [--out benchmarks/results/memory.json]
    python -m benchmarks.memory --tiny      # a small model; without a GPU it only runs

One rank of a large plan trains Llama-3-8B in bf16 with AdamW over torch's `fake` process group: its
collectives move nothing, all else is real. "measured" is `torch.cuda.max_memory_allocated` of
the second and third step, "reserved" what the allocator took from the device, "context" what the
process has beside that. "predicted" is `sw.simulate` on a cluster of the preset h200. Every case is
a process; they compile at the same time and take turns on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
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
from shardwise import runtime as rt
from shardwise.api import capture_for_plan
from shardwise.api.compiled import PipelineProgram
from shardwise.api.parallel import _Step
from shardwise.api.scheduled import ScheduledStep
from shardwise.emit import LoadedPipeline, build, load
from shardwise.runtime.mesh import axis_groups
from shardwise.runtime.processes import ProcessGroupTransport, _combinations

LIMIT = 0.05
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

# name -> strategy, ranks, rows of the batch, length of a row, options; ranks "first" or "last"
CASES: dict[str, tuple[str, int, int, int, dict[str, Any], str]] = {
    "fsdp on 8": ("fsdp", 8, 8, 8192, {}, "first"),
    "fsdp on 8, recomputed": ("fsdp", 8, 16, 8192, {"recompute": "full"}, "first"),
    "fsdp on 8, selectively, 2 micro-batches": (
        "fsdp", 8, 16, 8192, {"recompute": "selective", "num_microbatches": 2}, "first",
    ),
    "dp 8 x tp 8 on 64": (
        "hybrid", 64, 32, 8192, {"dp": 8, "tp": 8, "zero": 1, "num_microbatches": 2}, "first",
    ),
    "dp 16 x tp 8 x pp 8 on 1,024": (
        "hybrid", 1024, 256, 8192,
        {"dp": 16, "tp": 8, "pp": 8, "zero": 1, "num_microbatches": 16}, "first",
    ),
    "dp 16 x tp 8 x pp 8 on 1,024, last stage": (
        "hybrid", 1024, 256, 8192,
        {"dp": 16, "tp": 8, "pp": 8, "zero": 1, "num_microbatches": 16}, "last",
    ),
    "dp 32 x tp 8 x pp 4 on 1,024, recomputed": (
        "hybrid", 1024, 256, 8192,
        {"dp": 32, "tp": 8, "pp": 4, "zero": 2, "num_microbatches": 8, "recompute": "full"},
        "first",
    ),
}  # fmt: skip


def make_model(config: dict[str, Any]) -> torch.nn.Module:
    """A Hugging Face Llama without data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**config)).train()


def make_batch(rows: int, length: int, vocab: int) -> dict[str, torch.Tensor]:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (rows, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


class SingleRank:
    """One rank of a plan over the `fake` process group, without the others."""

    def __init__(
        self, graph: sw.Graph, plan: sw.Plan, rank: int, device: torch.device | str
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=plan.num_ranks, store=FakeStore())
        self.device = torch.device(device)
        program = sw.compile(graph, plan)
        mesh = _mesh(plan, rank)
        rng = rt.Rng(plan.seed, plan.rng, mesh)
        step: rt.StepProgram
        if isinstance(program, PipelineProgram):
            loaded = LoadedPipeline(program.text, graph, mesh, rng, self.device)
            self.store = loaded.make_store()
            step = ScheduledStep(graph, plan, loaded, self.store, None)
        else:
            generated = load(program.source(mesh.rank), graph.functions)
            module = build(generated, mesh, rng, self.device, graph)
            self.store = rt.ParameterStore(
                module, mesh, generated.PARAMETERS, generated.BUFFERS, device=self.device
            )
            step = _Step(graph, plan, generated, module, mesh, self.device, None)
        self.module = rt.ParallelModule(self.store, mesh, rng, lambda *_: step, check_batches=False)
        self.module._naming_failures = contextlib.nullcontext  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _mesh(plan: sw.Plan, rank: int) -> rt.ProcessMesh:
    """The rank's mesh, with the process groups that this rank is in and no others."""
    stage = next(s for s in plan.all_stages if rank in s.ranks)
    axes = dict(stage.mesh.axes)
    groups = axis_groups(axes, _combinations(tuple(axes)), stage.ranks)
    return rt.ProcessMesh(
        axes,
        stage.ranks.index(rank),
        ProcessGroupTransport([g for g in groups if rank in g]),
        ranks=stage.ranks,
        groups=plan.groups,
        microbatches=plan.microbatches,
        timed=plan.splits_time,
    )


def measure(one: SingleRank, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """The most memory of a few steps, once the optimizer's state is there."""
    cuda = one.device.type == "cuda"
    optimizer = sw.optimizer(one.module, torch.optim.AdamW, lr=1e-4)
    for step in range(STEPS):
        if cuda and step == 1:
            torch.cuda.reset_peak_memory_stats()
        one.module.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
    if not cuda:
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "measured": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - reserved,
    }


def plan_of(name: str, config: dict[str, Any], length: int) -> tuple[Any, Any, sw.Plan]:
    """The model, batch and plan of a case."""
    strategy, ranks, rows, _, options, _ = CASES[name]
    model = make_model(config)
    batch = make_batch(rows, length, config["vocab_size"])
    cluster = sw.Cluster.preset("h200", nodes=ranks // 8)
    graph = sw.capture(model, batch)
    plan = getattr(sw.strategies, strategy)(graph, cluster, precision="bf16", **options)
    return model, batch, plan


def run_case(name: str, *, tiny: bool, lock: str) -> dict[str, Any]:
    """A case, measured where there is a GPU."""
    _, ranks, _, length, _, where = CASES[name]
    start = time.perf_counter()
    model, batch, plan = plan_of(name, TINY if tiny else LLAMA_8B, 64 if tiny else length)
    graph = capture_for_plan(model, batch, plan)
    estimate = sw.simulate(graph, plan, sw.Cluster.preset("h200", nodes=ranks // 8))
    group = 0 if where == "first" else len(plan.groups) - 1
    use = estimate.memory[group]
    row: dict[str, Any] = {
        "case": name,
        "rank": plan.groups[group][0],
        "predicted": round(use.peak_bytes),
        "when": use.when,
        "parts": {part: round(size) for part, size in use.parts.items()},
        "over_time": [[action, round(size)] for action, size in use.over_time],
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open(lock, "w") as turn:
        prepared = _prepared(graph, plan, plan.groups[group][0], device, turn)
        row["compile_s"] = round(time.perf_counter() - start, 1)
        try:
            row |= measure(prepared, batch)
        except torch.OutOfMemoryError:
            row["out_of_memory"] = True
    if "measured" in row:
        row["error"] = row["predicted"] / row["measured"] - 1
    return row


def _prepared(graph: Any, plan: sw.Plan, rank: int, device: str, turn: Any) -> SingleRank:
    """The rank; programs are compiled before the GPU is this process's."""
    sw.compile(graph, plan)
    fcntl.flock(turn, fcntl.LOCK_EX)
    return SingleRank(graph, plan, rank, device)


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    shown = f"{row['case']:44} rank {row['rank']:<5} {row['predicted'] / 2**30:8.2f} GiB predicted"
    if "measured" in row:
        shown += (
            f" {row['measured'] / 2**30:8.2f} measured {row['error']:+.1%} "
            f"(reserved {row['reserved'] / 2**30:.2f}, context {row['context'] / 2**30:.2f})"
        )
    if row.get("out_of_memory"):
        shown += " out of memory"
    return f"{shown} in {row['when']}"


def main() -> None:
    """Run the cases, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=CASES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="memory-results.json")
    options = parser.parse_args()
    if options.case:
        row = run_case(options.case, tiny=options.tiny, lock=options.lock)
        Path(options.out).write_text(json.dumps(row))
        return
    rows = list(_all(options))
    info = {"torch": torch.__version__, "model": "tiny" if options.tiny else "Llama-3-8B"}
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
            running[name] = (subprocess.Popen(command, env=dict(os.environ)), out)
        time.sleep(0.2)
        for name, (process, out) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                if process.returncode == 0:
                    row = json.loads(out.read_text())
                    print(show(row), flush=True)
                    yield row
                else:
                    print(f"{name}: failed with {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
