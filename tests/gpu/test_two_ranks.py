"""Two processes on one GPU over gloo equal one process, in bf16.

The reference is the model in float64; both the parallel and the single-process bf16 step are
measured against it, so that rounding is not mistaken for a fault: the parallel one may be no
further away than the single one, up to a small factor.
"""

from __future__ import annotations

import os
import socket
from typing import Any

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
STAGES = {"pp": 2, "num_microbatches": 3}
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero1", {}),
    ("zero2", {}),
    ("fsdp", {}),
    ("tensor", {}),
    ("ddp", {"num_microbatches": 3, "precision": "bf16"}),
    ("fsdp", {"recompute": "full", "precision": "bf16", "offload": ("parameters",)}),
    ("zero1", {"recompute": "selective", "offload": ("optimizer", "activations")}),
    ("pipeline", STAGES),
    ("pipeline", {**STAGES, "precision": "bf16", "recompute": "full"}),
    ("pipeline", {**STAGES, "schedule": "zero_bubble", "precision": "bf16"}),
]


def make() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(layers=2, width=256, heads=8, length=64, vocab=1009)
    return model, tokens(6, 64, 1009)


def gradients_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model(**batch).backward()
    return {n: p.grad.double().cpu() for n, p in model.named_parameters()}


def worker(rank: int, port: int, strategy: str, options: dict[str, Any], queue: object) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, batch = make()
    model = model.cuda() if "precision" in options else model.cuda().bfloat16()
    batch = {k: v.cuda() for k, v in batch.items()}
    make_plan = getattr(sw.strategies, strategy)
    plan = make_plan(sw.capture(model, batch), sw.Cluster.local(2), **options)
    pm = sw.parallelize(model, batch, plan=plan, record=True)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    loss = pm.train_step(batch)
    gradients = {n: g.double().cpu() for n, g in pm.gather_gradients().items()}
    sw.clip_grad_norm_(pm, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    second = pm.train_step(batch)
    trace = pm.trace()
    if rank == 0:
        assert trace is not None
        assert any(event["name"].endswith("F0") for event in trace["traceEvents"])
        plain = {n: g.numpy() for n, g in gradients.items()}
        queue.put((loss.item(), second.item(), plain))  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()


def run(strategy: str, options: dict[str, Any]) -> tuple[float, float, dict[str, torch.Tensor]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").Queue()
    processes = mp.spawn(worker, (port, strategy, options, queue), nprocs=2, join=False)
    result = queue.get(timeout=240)
    result = (result[0], result[1], {k: torch.from_numpy(v) for k, v in result[2].items()})
    while not processes.join(timeout=5):
        pass
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "options"), STRATEGIES)
def test_two_ranks_in_bf16_equal_one(strategy: str, options: dict[str, Any]) -> None:
    model, batch = make()
    exact = gradients_of(model.double(), batch)
    exact_loss = model(**batch).item()
    single, batch = make()
    single = single.cuda().bfloat16()
    single_rank = gradients_of(single, {k: v.cuda() for k, v in batch.items()})
    loss, second, gradients = run(strategy, options)
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    assert second < loss
    for name, gradient in exact.items():
        scale = gradient.norm()
        single_error = (single_rank[name] - gradient).norm() / scale
        error = (gradients[name] - gradient).norm() / scale
        assert error <= 2.0 * single_error + 1e-2, (name, error.item(), single_error.item())
