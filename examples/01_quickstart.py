"""Train a small GPT on several processes and save the full model.

torchrun --nproc-per-node 4 examples/01_quickstart.py --tp 2 --out model.pt
"""

from __future__ import annotations

import argparse

import small_gpt
import torch
import torch.distributed as dist

import shardwise as sw


def main() -> None:
    """Capture, plan, parallelize, train and save, on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", default="model.pt")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model, batch = small_gpt.make()
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.local(ranks)
    plan = sw.strategies.hybrid(graph, cluster, dp=ranks // options.tp, tp=options.tp)
    if rank == 0:
        print(plan)

    pm = sw.parallelize(model, batch, plan=plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        loss = pm.train_step(small_gpt.batch(step))
        norm = sw.clip_grad_norm_(pm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0:
            print(f"step {step}  loss {loss:.4f}  gradient norm {norm:.3f}", flush=True)

    state = pm.gather_state_dict()
    if rank == 0:
        torch.save(state, options.out)
        fresh, _ = small_gpt.make(seed=1)
        fresh.load_state_dict(torch.load(options.out))
        print(f"{options.out} on one process: loss {fresh(**small_gpt.batch(0)):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
