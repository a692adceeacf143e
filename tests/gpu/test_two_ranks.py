"""Two processes on one GPU over gloo equal one process, in bf16.

The reference is the model in float64; both the parallel and the single-process bf16 step are
measured against it, so that rounding is not mistaken for a fault: the parallel one may be no
further away than the single one, up to a small factor.
"""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise as sw
from benchmarks.models import GPT, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor")


def make() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(layers=2, width=256, heads=8, length=64, vocab=1009)
    return model, tokens(6, 64, 1009)


def gradients_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model(**batch).backward()
    return {n: p.grad.double().cpu() for n, p in model.named_parameters()}


def worker(rank: int, port: int, strategy: str, queue: object) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, batch = make()
    model = model.cuda().bfloat16()
    batch = {k: v.cuda() for k, v in batch.items()}
    plan = getattr(sw.strategies, strategy)(sw.capture(model, batch), sw.Cluster.local(2))
    pm = sw.parallelize(model, batch, plan=plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    loss = pm.train_step(batch)
    gradients = {n: g.double().cpu() for n, g in pm.gather_gradients().items()}
    sw.clip_grad_norm_(pm, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    second = pm.train_step(batch)
    if rank == 0:
        plain = {n: g.numpy() for n, g in gradients.items()}
        queue.put((loss.item(), second.item(), plain))  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()


def run(strategy: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").Queue()
    processes = mp.spawn(worker, (port, strategy, queue), nprocs=2, join=False)
    result = queue.get(timeout=240)
    result = (result[0], result[1], {k: torch.from_numpy(v) for k, v in result[2].items()})
    while not processes.join(timeout=5):
        pass
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_in_bf16_equal_one(strategy: str) -> None:
    model, batch = make()
    exact = gradients_of(model.double(), batch)
    exact_loss = model(**batch).item()
    single, batch = make()
    single = single.cuda().bfloat16()
    mine = gradients_of(single, {k: v.cuda() for k, v in batch.items()})
    loss, second, found = run(strategy)
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    assert second < loss
    for name, gradient in exact.items():
        scale = gradient.norm()
        single_error = (mine[name] - gradient).norm() / scale
        error = (found[name] - gradient).norm() / scale
        assert error <= 2.0 * single_error + 1e-2, (name, error.item(), single_error.item())
