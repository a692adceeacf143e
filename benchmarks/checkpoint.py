"""Memory and time of checkpoints: `make bench-checkpoint`.

    python -m benchmarks.checkpoint [--folder /disk/tmp] [--out benchmarks/results/checkpoint.json]
    python -m benchmarks.checkpoint --tiny

A Hugging Face Llama with 1.1 GB of parameters trains with AdamW under `fsdp` on 4 processes, is
saved, and is loaded on 2. "shard" is the size of a rank's parameters and optimizer state; "extra"
is the increase of its resident memory at the peak (VmHWM, reset before). "blocked" is the share of
the duration of an asynchronous save that blocks training. The model starts on meta tensors, so that
no process ever stores all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw

MAX_BEYOND_SHARD = 256 << 20
MAX_BLOCKED = 0.10
SIZES = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 13, "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip
TINY = {**SIZES, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
SAVING_RANKS, LOADING_RANKS = 4, 2


def make(sizes: dict[str, int]) -> tuple[torch.nn.Module, Any]:
    """Return the model on meta, and a small batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    ids = torch.arange(4 * 16).view(4, 16) % sizes["vocab_size"]
    return model, {"input_ids": ids, "labels": ids}


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes: VmRSS now, or VmHWM at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} on this system")


class Peak:
    """Measure the increase of resident memory at its peak."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self.before = resident("VmRSS")

    def above(self) -> int:
        return resident("VmHWM") - self.before


def start(sizes: dict[str, int], ranks: int) -> tuple[Any, Any, Any]:
    """Return this rank of a fully sharded model, its optimizer and the batch."""
    model, batch = make(sizes)
    plan = sw.strategies.fsdp(sw.capture(model, batch), sw.Cluster.local(ranks))
    pm = sw.parallelize(model, batch, plan=plan, device="cpu", timeout_s=600.0)
    return pm, sw.optimizer(pm, torch.optim.AdamW, lr=1e-4), batch


def step(pm: Any, optimizer: Any, batch: Any) -> float:
    """Run a training step."""
    loss = pm.train_step(batch).item()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def shard_bytes(pm: Any) -> int:
    """Return the bytes of this rank's parameters and optimizer state, which is twice as large."""
    return 3 * sum(e.piece.nbytes for e in pm.store.entries)


def save(sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Save synchronously to measure memory, and during training to measure time."""
    pm, optimizer, batch = start(sizes, SAVING_RANKS)
    for _ in range(2):
        step(pm, optimizer, batch)
    peak = Peak()
    sw.save_checkpoint(folder / "sync", pm, optimizer, wait=False).wait()
    extra = peak.above()
    shutil.rmtree(folder / "sync", ignore_errors=True)
    begin = time.perf_counter()
    step(pm, optimizer, batch)
    plain_step_s = time.perf_counter() - begin
    saving = sw.save_checkpoint(folder / "async", pm, optimizer, wait=False)
    for _ in range(4):
        step(pm, optimizer, batch)
    saving.wait()
    return {
        "shard": shard_bytes(pm),
        "extra": extra,
        "blocked_s": saving.blocked_s,
        "duration_s": saving.duration_s,
        "step_s": plain_step_s,
    }


def load(sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Load the checkpoint on fewer ranks."""
    pm, optimizer, batch = start(sizes, LOADING_RANKS)
    peak = Peak()
    begin = time.perf_counter()
    sw.load_checkpoint(folder / "async", pm, optimizer)
    duration = time.perf_counter() - begin
    extra = peak.above()
    loss = step(pm, optimizer, batch)
    return {"shard": shard_bytes(pm), "extra": extra, "duration_s": duration, "loss": loss}


def worker(rank: int, world: int, port: int, task: str, sizes: dict[str, int], folder: str) -> None:
    """Run one process and write its result to a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    run = {"save": save, "load": load}[task]
    result = run(sizes, Path(folder))
    Path(folder, f"{task}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(task: str, ranks: int, sizes: dict[str, int], folder: Path) -> list[dict[str, Any]]:
    """Return the results of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (ranks, port, task, sizes, str(folder)), nprocs=ranks)  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"{task}-{rank}.json").read_text()) for rank in range(ranks)]


def measure(sizes: dict[str, int], parent: Path | None) -> dict[str, Any]:
    """Save and load in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="shardwise-checkpoint-") as name:
        folder = Path(name)
        saved = run_ranks("save", SAVING_RANKS, sizes, folder)
        size = sum(file.stat().st_size for file in (folder / "async").iterdir())
        loaded = run_ranks("load", LOADING_RANKS, sizes, folder)
    blocked = max(row["blocked_s"] / row["duration_s"] for row in saved)
    extra = max(r["extra"] - r["shard"] for r in (*saved, *loaded))
    return {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "sizes": sizes,
        "checkpoint_bytes": size,
        "save": saved,
        "load": loaded,
        "blocked_share": blocked,
        "beyond_shard_bytes": extra,
        "ok": blocked < MAX_BLOCKED and extra < MAX_BEYOND_SHARD,
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    mib = 2.0**20
    print(f"checkpoint of {result['checkpoint_bytes'] / mib:,.0f} MiB, with optimizer state")
    print(f"{'':6}{'rank':>5}{'shard MiB':>11}{'extra MiB':>11}{'seconds':>9}{'blocked':>9}")
    for what in ("save", "load"):
        for rank, row in enumerate(result[what]):
            share = f"{row['blocked_s'] / row['duration_s']:.1%}" if what == "save" else ""
            sizes = f"{row['shard'] / mib:11,.0f}{row['extra'] / mib:11,.0f}"
            print(f"{what:6}{rank:5}{sizes}{row['duration_s']:9.1f}{share:>9}")
    print(
        f"beyond a shard {result['beyond_shard_bytes'] / mib:,.0f} MiB of "
        f"{MAX_BEYOND_SHARD / mib:.0f}, blocked {result['blocked_share']:.1%} of {MAX_BLOCKED:.0%}"
    )


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--folder", type=Path, help="where to write checkpoints")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    result = measure(TINY if options.tiny else SIZES, options.folder)
    show(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    if not result["ok"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
