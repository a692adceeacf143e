"""What one device computes: products, attention, memory traffic, and the cost of a call.

Enters: a `Clock`. Leaves: rates by size as plain lists. All ranks measure the same things
at the same time, so that cores and memory that they share are shared here, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.dtypes import dtype_name, torch_dtypes
from shardwise.pages import keep_pages
from shardwise.profiling.timing import Clock, largest

Points = list[list[float]]

SIZES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
SEQUENCES = {"cpu": (64, 256, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
HEADS = {"cpu": 4, "cuda": 32}
HEAD_DIM = 64
TRAFFIC = {
    "cpu": tuple(2**n for n in (12, 14, 16, 18, 20, 22, 24, 26)),
    "cuda": tuple(2**n for n in (14, 17, 20, 22, 24, 26, 28, 30)),
}
DTYPES = {
    "cpu": torch_dtypes(can_train=True),
    "cuda": tuple(sorted(torch_dtypes(can_train=True), key=lambda dtype: dtype.itemsize)),
}
MIXED_SIZE = {"cpu": 256, "cuda": 4096}
CHAIN = 64  # calls of a chain, and as many in its backward
WINDOW_S = 0.4
LONGEST_CALL_S = 0.15  # products that would take longer are left out: emulated dtypes


def measure(clock: Clock, progress: Callable[[str], None], quick: bool) -> dict[str, Any]:
    """All rates of this rank's device."""
    kind = clock.device.type
    if kind == "cpu":
        keep_pages()
    kept = slice(None, None, 2) if quick else slice(None)
    progress("the cost of a call")
    overhead_s = _overhead(clock)
    found: dict[str, Any] = {"overhead_s": _recorded(clock), "matmul": {}, "attention": {}}
    paces = [_pace(clock, progress, 0)]
    for dtype in DTYPES[kind]:
        name = dtype_name(dtype)
        progress(f"products in {name}")
        found["matmul"][name] = _products(clock, dtype, SIZES[kind][kept], overhead_s)
    paces.append(_pace(clock, progress, 1))
    for dtype in DTYPES[kind][:2]:
        name = dtype_name(dtype)
        progress(f"attention in {name}")
        found["attention"][name] = _attention(clock, dtype, SEQUENCES[kind][kept], overhead_s)
    paces.append(_pace(clock, progress, 2))
    progress("memory")
    found["memory"] = _traffic(clock, TRAFFIC[kind][kept], overhead_s)
    progress("offload")
    found["host_bytes_per_s"] = _offload(clock)
    paces += [_pace(clock, progress, turn) for turn in (3, 4, 5)]
    return found | {"pace": max(paces)}  # a slow rank is slow at all times and on all its cores


def _pace(clock: Clock, progress: Callable[[str], None], turn: int) -> float:
    """How much of a mixed work this rank gets done, to compare with the others."""
    progress("how ranks differ")
    n = MIXED_SIZE[clock.device.type]
    a, x = _random(clock, torch.float32, n, n), _random(clock, torch.float32, n * n)

    def work() -> None:
        for _ in range(4):
            torch.mm(a, a)
            torch.add(x, x)

    with _on_core(clock, turn):
        return clock.pace(work, WINDOW_S)


@contextmanager
def _on_core(clock: Clock, turn: int) -> Iterator[None]:
    """On another core every turn, of those that this rank may use.

    A core that other programs keep busy slows every rank in turn and none for good; a rank that was
    bound to slow cores stays slow.
    """
    bound = clock.device.type == "cpu" and hasattr(os, "sched_setaffinity")
    if not bound or torch.get_num_threads() > 1:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.sched_setaffinity(0, {cores[(rank + turn) % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _run(clock: Clock, call: Callable[[], object], overhead_s: float) -> float:
    """Seconds of the work alone: without the call on a CPU, without launches on a GPU."""
    if clock.device.type == "cuda":
        seconds = clock.graph_seconds(call)
        return max(seconds - clock.gap_s, seconds / 2)
    seconds = clock.seconds(call)
    return max(seconds - overhead_s, seconds / 2)


def _overhead(clock: Clock) -> float:
    x = torch.ones(4, device=clock.device)
    out = torch.empty_like(x)
    return clock.seconds(lambda: torch.add(x, x, out=out))


def _recorded(clock: Clock) -> float:
    """Return the cost of a call as training makes it: recorded by autograd, or made by its
    backward.
    """
    x = torch.ones(4, device=clock.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = torch.mul(y, 1.0)
        torch.autograd.grad(y.sum(), x)

    return clock.seconds(chain) / (2 * CHAIN)


def _products(
    clock: Clock, dtype: torch.dtype, sizes: tuple[int, ...], overhead_s: float
) -> Points:
    """Rates up to the size that would take too long."""
    found: Points = []
    slowest, before = 0.0, sizes[0]
    for n in sizes:
        if slowest * (n / before) ** 3 > LONGEST_CALL_S:  # on any rank: all stop together
            break
        a, b = (_random(clock, dtype, n, n) for _ in range(2))
        out = torch.empty_like(a)
        call = partial(torch.mm, a, b, out=out)
        seconds = _run(clock, call, overhead_s)
        found.append([n, 2.0 * n**3 / seconds])
        slowest, before = largest(seconds, clock.device), n
    return found


def _attention(
    clock: Clock, dtype: torch.dtype, sequences: tuple[int, ...], overhead_s: float
) -> Points:
    found: Points = []
    for sequence in sequences:
        heads = HEADS[clock.device.type]
        shape = (1, heads, sequence, HEAD_DIM)
        q = _random(clock, dtype, *shape)

        def call(q: torch.Tensor = q) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

        seconds = _run(clock, call, overhead_s)
        found.append([sequence, 4.0 * heads * sequence**2 * HEAD_DIM / seconds])
    return found


def _random(clock: Clock, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random values: a GPU multiplies constants with less power, and so with a higher clock."""
    return torch.randn(*shape, device=clock.device).to(dtype)


def _traffic(clock: Clock, sizes: tuple[int, ...], overhead_s: float) -> Points:
    """Rates of an addition of two tensors into a third: bytes read and written."""
    found: Points = []
    for num_bytes in sizes:
        x = torch.ones(max(1, num_bytes // 12), device=clock.device)
        y, out = x.clone(), x.clone()
        call = partial(torch.add, x, y, out=out)
        found.append([12.0 * x.numel(), 12.0 * x.numel() / _run(clock, call, overhead_s)])
    return found


def _offload(clock: Clock) -> float:
    """Bytes per second between the device and the host's memory."""
    size = 2**26 if clock.device.type == "cuda" else 2**24
    x = torch.ones(size // 4, device=clock.device)
    host = torch.empty(x.shape, pin_memory=clock.device.type == "cuda")
    return size / clock.seconds(lambda: host.copy_(x, non_blocking=True))
