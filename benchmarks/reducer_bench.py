"""The runtime's gradient synchronization against DDP and FSDP2, on a GPT written by hand.

    python benchmarks/reducer_bench.py --mode ddp  [--pairs 8] [--json result.json]
    python benchmarks/reducer_bench.py --mode fsdp

Two processes of one thread each over gloo. Both systems live in the same processes and take turns
step by step, so that a busy machine disturbs both alike; the ratio is the median of the pairs'.
Peak memory (`--memory`) is the highest resident size of a process of its own for each system.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime.parameters import ParameterSpec
from shardwise.runtime.processes import process_mesh
from shardwise.runtime.store import ParameterStore

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCAB = 4, 512, 8, 256, 8, 8192


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def ours(model: GPT, zero: int, world: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of the model under our store."""
    mesh = process_mesh({"dp": world})
    specs = [
        ParameterSpec(
            name=name,
            shape=tuple(p.shape),
            dtype=str(p.dtype).removeprefix("torch."),
            sync=("dp",),
            zero=zero,
            unit=".".join(name.split(".")[:2]) if name.startswith("blocks") else "",
        )
        for name, p in model.named_parameters()
    ]
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    store = ParameterStore(model, mesh, specs)
    store.load_state_dict(state)
    optimizer = torch.optim.AdamW([e.piece for e in store.entries], lr=1e-4)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        with store.step():
            loss = model(tokens, labels) / world
            loss.backward()
        store.link_gradients()
        optimizer.step()
        store.gather_updates()
        store.zero_grad()
        return loss

    return step


def theirs(model: GPT, mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of the model under DDP or FSDP2."""
    wrapped: nn.Module = model
    if mode == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = wrapped(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def peak_mib() -> float:
    """This process's highest resident size."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM")


def timed(step: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, labels: Tensor) -> float:
    """Seconds of one step of all ranks."""
    dist.barrier()
    begin = time.perf_counter()
    step(tokens, labels)
    dist.barrier()
    return time.perf_counter() - begin


def work(rank: int, world: int, args: argparse.Namespace, port: int, results: object) -> None:
    """One rank's process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    zero = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}[args.mode]
    other = "ddp" if args.mode == "ddp" else "fsdp"
    tokens = torch.randint(VOCAB, (args.batch // world, LENGTH))
    labels = torch.randint(VOCAB, (args.batch // world, LENGTH))
    steps = []
    if args.memory in (None, "theirs"):
        torch.manual_seed(0)
        steps.append(theirs(GPT(), other))
    if args.memory in (None, "ours"):
        torch.manual_seed(0)
        steps.append(ours(GPT(), zero, world))
    if args.memory:
        base = peak_mib()
        for _ in range(4):
            steps[0](tokens, labels)
        results.put((rank, args.memory, peak_mib(), base))  # type: ignore[attr-defined]
        return
    for step in steps:
        for _ in range(2):
            step(tokens, labels)
    pairs = []
    for i in range(args.pairs):
        order = steps if i % 2 == 0 else steps[::-1]
        times = {id(step): timed(step, tokens, labels) for step in order}
        pairs.append([times[id(step)] for step in steps])
    if rank == 0:
        results.put(pairs)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mode", choices=["ddp", "zero1", "zero2", "fsdp"], default="ddp")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", choices=["ours", "theirs"])
    parser.add_argument("--json")
    args = parser.parse_args()
    results = mp.get_context("spawn").Queue()
    port = 20000 + os.getpid() % 20000
    started = mp.start_processes(
        work, (args.ranks, args, port, results), nprocs=args.ranks, start_method="spawn", join=False
    )
    while not started.join():
        pass
    if args.memory:
        _, who, peak, base = results.get()
        print(f"{args.mode} {who}: peak {peak:.0f} MiB, {peak - base:.0f} over the start")
        return
    pairs = results.get()
    ratio = statistics.median(mine / other for other, mine in pairs)
    theirs_s, ours_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{args.mode}: theirs {theirs_s:.3f} s, ours {ours_s:.3f} s, ratio {ratio:.3f}")
    if args.json:
        record = {"mode": args.mode, "pairs": pairs, "ratio": ratio, "ranks": args.ranks}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
