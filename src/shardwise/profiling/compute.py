"""What one device computes: products, attention, memory traffic, and the cost of a call.

All ranks measure the same things
at the same time, so that cores and memory that they share are shared here, too.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.cluster import Cluster, Curve, Device
from shardwise.cluster.device import Rates
from shardwise.dtypes import dtype_name, torch_dtypes
from shardwise.malloc_tuning import keep_heap
from shardwise.profiling.fit import rounded

# Timing on one rank, while all ranks are busy.


SHORTEST_SAMPLE_S = 2.0e-4  # well above the clock's resolution and the cost of reading it
FEWEST_SAMPLES = 3
MOST_SAMPLES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How this rank measures: for `budget_s` at a time, and every call `repeats` times over.

    A rank that is to appear slow repeats its work. `gap_s` lies between two kernels of a GPU.
    """

    device: torch.device
    budget_s: float
    repeats: int = 1
    gap_s: float = 0.0

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds per call, with all ranks starting at the same moment."""
        number = self._calls_per_sample(call)
        meet()
        samples: list[float] = []
        end = time.perf_counter() + self.budget_s
        while len(samples) < FEWEST_SAMPLES or (
            time.perf_counter() < end and len(samples) < MOST_SAMPLES
        ):
            samples.append(self._sample(call, number))
        return median(samples)

    def pace(self, call: Callable[[], object], window_s: float) -> float:
        """Calls per second that this rank gets done in a window in which all ranks are busy."""
        self._sample(call, 1)
        meet()
        started = time.perf_counter()
        calls, passed_s = 0, 0.0
        while passed_s < window_s:
            self._sample(call, 1)
            calls += 1
            passed_s = time.perf_counter() - started
        return calls / passed_s

    def _calls_per_sample(self, call: Callable[[], object]) -> int:
        self._sample(call, 1)
        once = max(self._sample(call, 1), 1e-7)
        return max(1, math.ceil(SHORTEST_SAMPLE_S / once))

    def _sample(self, call: Callable[[], object], number: int) -> float:
        self._wait()
        started = time.perf_counter()
        for _ in range(number * self.repeats):
            call()
        self._wait()
        return (time.perf_counter() - started) / number

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def graph_seconds(self, call: Callable[[], object], number: int = 20) -> float:
        """Seconds per call on a GPU without its launches: a recorded graph of many calls."""
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(number):
                call()
        return self.seconds(graph.replay) / number


def largest(value: float, device: torch.device) -> float:
    """Return the largest value of any rank, so that all decide alike."""
    if not dist.is_initialized():
        return value
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def meet() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def timed(call: Callable[[], object], work: torch.Tensor) -> float:
    """Seconds of a message between ranks that computed until then, and meet first.

    In training, what a message carries has left the caches, or has just been written.
    """
    _ = work + 1.0
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    meet()
    started = time.perf_counter()
    call()
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter() - started


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
        keep_heap()
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


# What training takes on this machine over what its rates say: `training_factor`.
#
# Rates are those of one call after the other on the same tensors. A training step finds its
# operands out of the caches, runs Python between the calls, and waits for the slowest rank. Two
# small models are trained here, on all ranks at once and without communication, to see what that
# costs.


ROWS, POSITIONS, WIDTH, WORDS, REFERENCE_HEADS = 8, 128, 256, 1024, 4
PIXELS, CHANNELS = 48, 32


class _Transformer(nn.Module):
    """Two blocks that compute much for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.attend = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(4 * WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for i in range(2):
            parts = self.attend[i](self.norms[2 * i](x)).chunk(3, -1)
            q, k, v = (p.unflatten(-1, (REFERENCE_HEADS, -1)).transpose(1, 2) for p in parts)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class _Convolutions(nn.Module):
    """A few layers on images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.layers = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(CHANNELS, WORDS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.first(pixels))
        for layer in self.layers:
            x = F.relu(x + layer(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out.square().mean()


def training_factor(cluster: Cluster, report: Callable[[str], None] = lambda note: None) -> float:
    """Measured over computed seconds of training: the mean of two models, 1 where none runs.

    `report` is told why one did not run.
    """
    from shardwise.cost import OpTable
    from shardwise.frontend import capture
    from shardwise.planner.strategies import ddp
    from shardwise.tuning.measurement_server import compute_factors, measurement_server

    rows = ROWS * cluster.num_ranks
    batches: list[tuple[nn.Module, Tensor]] = [
        (_Transformer(), torch.zeros(rows, POSITIONS, dtype=torch.int64)),
        (_Convolutions(), torch.zeros(rows, 3, PIXELS, PIXELS)),
    ]
    found, table = [], OpTable()
    graphs = [capture(model, (batch,)) for model, batch in batches]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(measurement_server(graph, cluster)) for graph in graphs]
        for server in servers:
            found += compute_factors(server, ddp(server.graph, cluster), table)
    for note in table.notes:
        report(note)
    if not found:
        report("nothing was trained: rates are those of single calls, which programs do not reach")
    return math.prod(training for _, training, _ in found) ** (1 / len(found)) if found else 1.0


def at_training(device: Device, factor: float) -> Device:
    """Return the device with the rates that training reaches."""

    def slower(curve: Curve) -> Curve:
        return Curve(tuple((x, rounded(rate / factor)) for x, rate in curve.points))

    def rates(each: Rates) -> Rates:
        return tuple((dtype, slower(curve)) for dtype, curve in each)

    return replace(
        device,
        matmul_flops_per_s=rates(device.matmul_flops_per_s),
        attention_flops_per_s=rates(device.attention_flops_per_s),
        memory_bytes_per_s=slower(device.memory_bytes_per_s),
        overhead_s=rounded(device.overhead_s * factor),
    )
