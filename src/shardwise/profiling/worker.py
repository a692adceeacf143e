"""Run one rank of a measurement: `python -m shardwise.profiling.worker`.

`shardwise.processes.run_workers` starts it. It reads a job as JSON from stdin, and writes JSON
objects to stdout, one per line: `{"doing": …}` for progress, from rank 0 only, and `{"result": …}`.
"""

import datetime
import json
import os
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwise.profiling import compute
from shardwise.profiling.links import measure_links, measure_overlap


def main() -> None:
    """Run the job on stdin."""
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
    _write({"result": _measure(job, device)})
    os._exit(0)  # gloo's threads may delay an orderly exit


def _measure(job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    def progress(step: str) -> None:
        if job["rank"] == 0:
            _write({"doing": step})

    def links() -> list[dict[str, Any]]:
        several = job["ranks"] > 1
        budget_s = job["budget_s"] / 2
        return measure_links(device, progress, budget_s, job["quick"]) if several else []

    clock = compute.Clock(
        device=device, budget_s=job["budget_s"], repeats=job["repeats"], gap_s=job["gap_s"]
    )
    result = _describe(device) | {"links": links()}
    result |= compute.measure(clock, progress, job["quick"])
    result["overlap_loss"] = measure_overlap(device, progress) if job["ranks"] > 1 else 0.0
    if not job["quick"]:  # measure again: sends differ by a fifth from minute to minute
        result["links"] += links()
    return result


def _describe(device: torch.device) -> dict[str, Any]:
    """Return the name and memory of the device, and the memory that a process needs of it."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"name": "cpu", "reserved_bytes": peak}
    x = torch.ones(64, 64, device=device)
    torch.mm(x, x)  # loads cuBLAS, whose memory every program needs
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device).lower().replace("nvidia ", "").replace(" ", "-")
    return {
        "name": name,
        "memory_bytes": total,
        "reserved_bytes": total - free - torch.cuda.memory_reserved(device),
    }


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
