"""What computing and communicating cost each other when they happen at once.

Enters: the ranks of a measurement. Leaves: the part of a message's time by which a computation that
goes on meanwhile, and the message itself, take longer than each alone: 0 where hardware of its own
moves the bytes, 1 where the same core does one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from shardwise.profiling.timing import largest, meet
from shardwise.runtime.transport.base import Group
from shardwise.runtime.transport.process_group import ProcessGroupTransport

NUM_BYTES = {"cpu": 1 << 23, "cuda": 1 << 27}  # messages of some milliseconds
MATRIX = {"cpu": 256, "cuda": 2048}
LONGER = 2  # computing takes this many times as long as the message
SAMPLES, WARM_UP = 9, 2


def measure(device: torch.device, progress: Callable[[str], None]) -> float:
    """Return the loss, as a part of the time of messages."""
    progress("computing while messages travel")
    everyone = tuple(range(dist.get_world_size()))
    transport = ProcessGroupTransport({everyone: None})
    group = Group(everyone, transport.rank)
    message = torch.ones(NUM_BYTES[device.type] // 4, device=device)
    a = torch.randn(MATRIX[device.type], MATRIX[device.type], device=device)

    def talk() -> None:
        transport.all_reduce(message, "max", group).wait()

    def compute() -> None:
        for _ in range(number):
            torch.mm(a, a)

    def both() -> None:
        work = transport.all_reduce(message, "max", group)
        compute()
        work.wait()

    number = 16
    talking, computing = _seconds(talk, device), _seconds(compute, device)
    number = max(1, math.ceil(number * LONGER * talking / computing))
    alone = _seconds(compute, device)
    return min(1.0, max(0.0, (_seconds(both, device) - alone) / talking))


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the median time until the last rank is done."""
    samples = []
    for _ in range(WARM_UP + SAMPLES):
        meet()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - started)
    return largest(median(samples[WARM_UP:]), device)
