"""Measure the compute rates of one device: products, attention, memory traffic, and calls.

All ranks measure the same operation at the same time, so that they share cores and memory as in
training.
"""

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
from shardwise.runtime.devices import barrier, process_rank, synchronize

MIN_SAMPLE_S = 2.0e-4  # well above the clock's resolution and the cost of reading it
MIN_SAMPLES, MAX_SAMPLES = 3, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time calls on this rank while all ranks are busy, for `budget_s` each.

    A rank that should appear slow repeats every call. `gap_s` is the time between two kernels of a
    GPU, `overhead_s` that of a call on a CPU.
    """

    device: torch.device
    budget_s: float
    repeats: int = 1
    gap_s: float = 0.0
    overhead_s: float = 0.0

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds per call; all ranks start at the same time."""
        self._sample(call, 1)
        number = max(1, math.ceil(MIN_SAMPLE_S / max(self._sample(call, 1), 1e-7)))
        barrier()
        samples: list[float] = []
        end = time.perf_counter() + self.budget_s
        while len(samples) < MIN_SAMPLES or (
            time.perf_counter() < end and len(samples) < MAX_SAMPLES
        ):
            samples.append(self._sample(call, number))
        return median(samples)

    def pace(self, call: Callable[[], object], window_s: float) -> float:
        """Return the calls per second that this rank completes while all ranks are busy."""
        self._sample(call, 1)
        barrier()
        start = time.perf_counter()
        calls, elapsed_s = 0, 0.0
        while elapsed_s < window_s:
            self._sample(call, 1)
            calls += 1
            elapsed_s = time.perf_counter() - start
        return calls / elapsed_s

    def _sample(self, call: Callable[[], object], number: int) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(number * self.repeats):
            call()
        synchronize(self.device)
        return (time.perf_counter() - start) / number

    def execution_s(self, call: Callable[[], object]) -> float:
        """Return the seconds without the overhead of the call on a CPU, or of launches on a GPU."""
        is_cuda = self.device.type == "cuda"
        seconds = self.graph_seconds(call) if is_cuda else self.seconds(call)
        return max(seconds - (self.gap_s if is_cuda else self.overhead_s), seconds / 2)

    def graph_seconds(self, call: Callable[[], object], number: int = 20) -> float:
        """Return the seconds per call on a GPU without launches, by a CUDA graph of many calls."""
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(number):
                call()
        return self.seconds(graph.replay) / number


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the maximum over ranks, so that all ranks make the same decision."""
    if not dist.is_initialized():
        return value
    maximum = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return float(maximum)


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
CHAIN = 64  # calls of a chain, and again in its backward
WINDOW_S = 0.4
MAX_CALL_S = 0.15  # products that would take longer are skipped: emulated dtypes


def measure(clock: Clock, progress: Callable[[str], None], quick: bool) -> dict[str, Any]:
    """Return all rates of this rank's device."""
    kind = clock.device.type
    if kind == "cpu":
        keep_heap()
    selected = slice(None, None, 2) if quick else slice(None)
    progress("the cost of a call")
    clock = replace(clock, overhead_s=_overhead(clock))
    rates: dict[str, Any] = {"overhead_s": _training_overhead(clock), "matmul": {}, "attention": {}}
    paces = [_pace(clock, progress, 0)]
    for dtype in DTYPES[kind]:
        name = dtype_name(dtype)
        progress(f"products in {name}")
        rates["matmul"][name] = _products(clock, dtype, SIZES[kind][selected])
    paces.append(_pace(clock, progress, 1))
    for dtype in DTYPES[kind][:2]:
        name = dtype_name(dtype)
        progress(f"attention in {name}")
        rates["attention"][name] = _attention(clock, dtype, SEQUENCES[kind][selected])
    paces.append(_pace(clock, progress, 2))
    progress("memory")
    rates["memory"] = _traffic(clock, TRAFFIC[kind][selected])
    progress("offload")
    rates["host_bytes_per_s"] = _offload(clock)
    paces += [_pace(clock, progress, turn) for turn in (3, 4, 5)]
    return rates | {"pace": max(paces)}  # a slow rank is slow at all times and on all its cores


def _pace(clock: Clock, progress: Callable[[str], None], turn: int) -> float:
    """Return the rate of a mixed workload, to compare ranks."""
    progress("differences between ranks")
    n = MIXED_SIZE[clock.device.type]
    a, x = _random(clock, torch.float32, n, n), _random(clock, torch.float32, n * n)

    def mixed() -> None:
        for _ in range(4):
            torch.mm(a, a)
            torch.add(x, x)

    with _on_core(clock, turn):
        return clock.pace(mixed, WINDOW_S)


@contextmanager
def _on_core(clock: Clock, turn: int) -> Iterator[None]:
    """Bind this rank to another of its cores every turn.

    A core that other programs keep busy slows every rank in turn and none permanently; a rank that
    was bound to slow cores stays slow.
    """
    can_bind = clock.device.type == "cpu" and hasattr(os, "sched_setaffinity")
    if not can_bind or torch.get_num_threads() > 1:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(process_rank() + turn) % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _overhead(clock: Clock) -> float:
    x = torch.ones(4, device=clock.device)
    out = torch.empty_like(x)
    return clock.seconds(lambda: torch.add(x, x, out=out))


def _training_overhead(clock: Clock) -> float:
    """Return the overhead of a call in training: recorded by autograd, or part of its backward."""
    x = torch.ones(4, device=clock.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = torch.mul(y, 1.0)
        torch.autograd.grad(y.sum(), x)

    return clock.seconds(chain) / (2 * CHAIN)


def _products(clock: Clock, dtype: torch.dtype, sizes: tuple[int, ...]) -> Points:
    """Return rates by size, up to sizes that would take too long."""
    points: Points = []
    slowest_s, previous = 0.0, sizes[0]
    for n in sizes:
        if slowest_s * (n / previous) ** 3 > MAX_CALL_S:  # on any rank: all stop together
            break
        a, b = (_random(clock, dtype, n, n) for _ in range(2))
        call = partial(torch.mm, a, b, out=torch.empty_like(a))
        seconds = clock.execution_s(call)
        points.append([n, 2.0 * n**3 / seconds])
        slowest_s, previous = max_over_ranks(seconds, clock.device), n
    return points


def _attention(clock: Clock, dtype: torch.dtype, sequences: tuple[int, ...]) -> Points:
    points: Points = []
    heads = HEADS[clock.device.type]
    for sequence in sequences:
        q = _random(clock, dtype, 1, heads, sequence, HEAD_DIM)
        call = partial(F.scaled_dot_product_attention, q, q, q)
        seconds = clock.execution_s(call)
        points.append([sequence, 4.0 * heads * sequence**2 * HEAD_DIM / seconds])
    return points


def _random(clock: Clock, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random values: a GPU multiplies constants with less power, so at a higher clock."""
    return torch.randn(*shape, device=clock.device).to(dtype)


def _traffic(clock: Clock, sizes: tuple[int, ...]) -> Points:
    """Return the bytes read and written per second by adding two tensors into a third."""
    points: Points = []
    for num_bytes in sizes:
        x = torch.ones(max(1, num_bytes // 12), device=clock.device)
        call = partial(torch.add, x, x.clone(), out=x.clone())
        moved = 12.0 * x.numel()
        points.append([moved, moved / clock.execution_s(call)])
    return points


def _offload(clock: Clock) -> float:
    """Return the bytes per second from the device to the host's memory."""
    size = 2**26 if clock.device.type == "cuda" else 2**24
    x = torch.ones(size // 4, device=clock.device)
    host = torch.empty(x.shape, pin_memory=clock.device.type == "cuda")
    return size / clock.seconds(lambda: host.copy_(x, non_blocking=True))


# ------------------------------------------------------------ training
#
# Rates are those of repeated calls on the same tensors. In a training step, operands have left the
# caches, Python runs between the calls, and ranks wait for the slowest one. To measure what that
# costs, two small models are trained on all ranks at once, without communication.


ROWS, POSITIONS, WIDTH, WORDS, REFERENCE_HEADS = 8, 128, 256, 1024, 4
PIXELS, CHANNELS = 48, 32


class _Transformer(nn.Module):
    """Two blocks that do much computation per parameter."""

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
    """Return the ratio of measured to computed seconds of training, as the mean of two models.

    It is 1 if neither model runs; `report` receives the reasons.
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
    factors, table = [], OpTable()
    graphs = [capture(model, (batch,)) for model, batch in batches]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(measurement_server(graph, cluster)) for graph in graphs]
        for server in servers:
            factors += compute_factors(server, ddp(server.graph, cluster), table)
    for note in table.notes:
        report(note)
    if not factors:
        report("no model could be trained: rates are those of single calls, which programs miss")
        return 1.0
    return math.prod(training for _, training, _ in factors) ** (1 / len(factors))


def with_training_rates(device: Device, factor: float) -> Device:
    """Return the device with the rates that training reaches."""

    def slower(curve: Curve) -> Curve:
        return Curve(tuple((x, rounded(rate / factor)) for x, rate in curve.points))

    def slower_rates(rates: Rates) -> Rates:
        return tuple((dtype, slower(curve)) for dtype, curve in rates)

    return replace(
        device,
        matmul_flops_per_s=slower_rates(device.matmul_flops_per_s),
        attention_flops_per_s=slower_rates(device.attention_flops_per_s),
        memory_bytes_per_s=slower(device.memory_bytes_per_s),
        overhead_s=rounded(device.overhead_s * factor),
    )
