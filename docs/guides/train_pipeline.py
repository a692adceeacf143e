"""Train a small GPT in two pipeline stages and record the events of every rank.

torchrun --nproc-per-node 2 docs/guides/train_pipeline.py
"""
# ruff: noqa: T201

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import small_gpt


def main() -> None:
    """Train on every rank; the plan assigns the stage."""
    dist.init_process_group("gloo")
    model, batch = small_gpt.make()
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.local(dist.get_world_size())
    plan = sw.strategies.pipeline(
        graph, cluster, pp=2, schedule="zb_h1", num_microbatches=4, recompute="selective"
    )
    pm = sw.parallelize(model, batch, plan=plan, record=True)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=3e-3)
    for step in range(3):
        loss = pm.train_step(small_gpt.batch(step))  # of the global batch, the same on every rank
        sw.clip_grad_norm_(pm, 1.0)  # over all stages
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}", flush=True)
    pm.trace("trace.json")  # all ranks call it; rank 0 writes
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
