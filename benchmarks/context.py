"""Compare ring and gathered attention with torch's `context_parallel` on the same ranks.

    python -m benchmarks.context [--ranks 8] [--length 8192] [--pairs 40] [--out FILE]
    python -m benchmarks.context --backend nccl --ranks 2 --length 32768

Causal blocks train on one sequence that all ranks divide. Steps of both systems alternate in the
same processes; the ratio of medians has a 90% interval from resampled pairs. "ring" is compared
with torch's rotation by all-to-all, "gather" with its all-gather. Torch divides the sequence in
head-tail order, and sums gradients in one all-reduce after backward. It supports the kernels of
GPUs only: over gloo, its ring runs around the kernel of CPUs, called directly instead of through
DTensor. Over NCCL, weights are bfloat16, and ranks may share a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, mse_loss

import shardwise as sw
from benchmarks.pipeline import machine
from benchmarks.run import Step, alternate, join, ratio

LIMIT = 1.0
WIDTH, HEADS, LAYERS = 512, 8, 2
METHODS = {"ring": "alltoall", "gather": "allgather"}


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Blocks, and the mean squared error of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse_loss(x, y)


def make(length: int, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and one sequence."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = {name: torch.randn(1, length, WIDTH).to(device, dtype) for name in "xy"}
    return Model().to(device, dtype), batch


def our_step(method: str, length: int, device: torch.device, losses: list[float]) -> Step:
    """Return a step of a plan that divides the sequence."""
    model, batch = make(length, device)
    graph = sw.capture(model, batch)
    cluster = sw.Cluster.local(dist.get_world_size())
    plan = sw.strategies.context(graph, cluster, attention=method)
    pm = sw.parallelize(model, batch, plan=plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-4)

    def step() -> None:
        losses.append(pm.train_step(batch).item())
        optimizer.step()
        optimizer.zero_grad()

    return step


def their_step(method: str, length: int, device: torch.device, losses: list[float]) -> Step:
    """Return the same step under torch's context parallelism."""
    model, batch = make(length, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(device.type, (ranks,))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def run_on_gpu() -> Tensor:
        buffers = [tensor.clone() for tensor in batch.values()]
        divided = context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1, 1], no_restore_buffers=set(buffers)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), divided:
            loss = model(*buffers)
            loss.backward()
        return loss

    def run_on_cpu() -> Tensor:
        parts = (x.chunk(2 * ranks, 1) for x in batch.values())
        own = [torch.cat([part[rank], part[2 * ranks - 1 - rank]], 1) for part in parts]
        with mock.patch("torch.nn.functional.scaled_dot_product_attention", CpuRing.attend):
            loss = model(*own)
        loss.backward()
        return loss

    def step() -> None:
        set_rotate_method(METHODS[method])
        mean = (run_on_cpu() if device.type == "cpu" else run_on_gpu()).detach().clone()
        flat = torch.cat([p.grad.view(-1) for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        flat /= ranks
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)

    return step


class CpuRing(torch.autograd.Function):
    """Torch's ring around the flash kernel of CPUs, for which it has no handler."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        return CpuRing.apply(q, k, v, is_causal)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logs, *_ = torch_ring._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=is_causal, dropout_p=0.0
        )
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        results = torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grads[0], "grad_out", q, k, v, out, logs, ctx.is_causal,
            dropout_p=0.0,
        )  # fmt: skip
        return (*results[:3], None)


def worker(rank: int, port: int, options: argparse.Namespace, queue: Any) -> None:
    """Time all methods in one process."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.ranks))
    device = join(options.backend, rank, options.ranks)
    rows = {}
    for method in METHODS:
        losses: tuple[list[float], list[float]] = ([], [])
        steps = [
            make_step(method, options.length, device, own)
            for make_step, own in zip((our_step, their_step), losses, strict=True)
        ]
        rows[method] = {
            **ratio(*alternate(steps[0], steps[1], options.pairs)),
            "losses": [[own[0], own[-1]] for own in losses],  # equal up to rounding
        }
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.spawn(worker, (port, options, queue), nprocs=options.ranks, join=False)
    while not processes.join(timeout=1.0):
        pass
    shown = {name: getattr(options, name) for name in ("backend", "ranks", "length")}
    figures = {"limit": LIMIT, **shown, "machine": machine(), "methods": queue.get()}
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
