"""One rank of a measurement: `python -m shardwise.profiling.worker`, started by `processes.py`.

Enters: a JSON object on stdin. Leaves: JSON objects on stdout, one per line: `{"doing": …}` as
the work goes on, from rank 0, and `{"result": …}` at the end.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwise.profiling import compute
from shardwise.profiling import links as overlap
from shardwise.profiling import links as wires
from shardwise.profiling.compute import Clock


def main() -> None:
    """Measure what stdin asks for."""
    job = json.loads(sys.stdin.readline())
    rank, world = job["rank"], job["ranks"]
    device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(job["threads"])
    if world > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{job['store']}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=job["timeout_s"]),
        )
    result = _measure(job, device)
    _say({"result": result})
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may hold an orderly exit up


def _measure(job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    def progress(what: str) -> None:
        if job["rank"] == 0:
            _say({"doing": what})

    clock = Clock(
        device=device, budget_s=job["budget_s"], repeats=job["repeats"], gap_s=job["gap_s"]
    )
    found: dict[str, Any] = {"name": _name(device), "wires": []} | _memory(device)

    def exchange() -> None:
        if job["ranks"] > 1:
            found["wires"] += wires.measure_links(
                device, progress, job["budget_s"] / 2, job["quick"]
            )

    exchange()
    found |= compute.measure(clock, progress, job["quick"])
    found["overlap_loss"] = overlap.measure_overlap(device, progress) if job["ranks"] > 1 else 0.0
    if not job["quick"]:  # once more: from minute to minute, sends differ by a fifth
        exchange()
    return found


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return torch.cuda.get_device_name(device).lower().replace("nvidia ", "").replace(" ", "-")


def _memory(device: torch.device) -> dict[str, int]:
    """Return the device's memory, and what a process holds of it before any tensor of a model."""
    if device.type == "cpu":
        kib = 1 if sys.platform == "darwin" else 1024
        return {"reserved_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib}
    x = torch.ones(64, 64, device=device)
    torch.mm(x, x)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "memory_bytes": total,
        "reserved_bytes": total - free - torch.cuda.memory_reserved(device),
    }


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
