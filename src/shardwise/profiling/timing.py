"""Timing on one rank, while all ranks are busy.

Enters: something to call. Leaves: seconds per call: the median of samples, because training goes at
what the machine usually gives, with all that runs beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

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
