"""What the ranks exchange: sends and collectives through the transport that programs use.

Enters: the number of ranks. Leaves: seconds by size, for pairs of ranks and for all of them; of
processes on a host also those of shared memory, and what a message of a solved program costs.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.profiling.other_ways import other_ways
from shardwise.profiling.timing import FEWEST_SAMPLES, largest, timed
from shardwise.runtime.transport.base import Group
from shardwise.runtime.transport.process_group import ProcessGroupTransport

SIZES = tuple(4**n for n in range(5, 14))  # 1 KiB to 64 MiB
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
GROUP_SIZES = (2, 4, 16)  # and all ranks
MOST_CALLS = 50
BUSY_BYTES = 1 << 22  # of memory that a rank writes before it sends: what a core's cache holds
WARM_UP = 3


def measure(
    device: torch.device, progress: Callable[[str], None], budget_s: float, quick: bool
) -> list[dict[str, Any]]:
    """`{"operation", "groups", "bytes", "seconds"}` for every measurement."""
    world = dist.get_world_size()
    everyone = [list(range(world))]
    pairs = _blocks(world, 2)
    shapes = [everyone, *(_blocks(world, n) for n in GROUP_SIZES if 2 * n <= world)]
    named = [tuple(group) for groups in (*shapes, pairs) for group in groups]
    transport = ProcessGroupTransport(dict.fromkeys(named))
    found: list[dict[str, Any]] = []
    sizes = SIZES[::2] if quick else SIZES[1:]
    plan = [("send", [[0, 1]])] + ([("send", pairs)] if world >= 4 else [])
    plan += [(operation, groups) for operation in COLLECTIVES for groups in shapes]
    for operation, groups in plan:
        progress(f"{operation} of {len(groups)} x {len(groups[0])} ranks")
        for num_bytes in sizes:
            seconds = _measure(transport, device, operation, groups, num_bytes, budget_s)
            found.append(
                {"operation": operation, "groups": groups, "bytes": num_bytes, "seconds": seconds}
            )
    if device.type == "cpu":
        found += other_ways(shapes, sizes, progress, budget_s)
    return found


def _blocks(world: int, size: int) -> list[list[int]]:
    """Neighbouring ranks in groups of `size`; those that remain are idle."""
    return [list(range(i, i + size)) for i in range(0, world - size + 1, size)]


def _measure(
    transport: ProcessGroupTransport,
    device: torch.device,
    operation: str,
    groups: list[list[int]],
    num_bytes: int,
    budget_s: float,
) -> float:
    """Seconds of one operation; ranks outside the groups wait, and answer 0."""
    mine = next((group for group in groups if transport.rank in group), None)
    call: Callable[[], object] = lambda: None  # noqa: E731
    if mine is not None:
        call = _call(transport, device, operation, mine, num_bytes)
    for _ in range(WARM_UP - 1):
        call()
    work = torch.ones(BUSY_BYTES // 4, device=device)
    once_s = max(largest(timed(call, work), device), 1e-6)
    number = max(FEWEST_SAMPLES, min(MOST_CALLS, int(budget_s / once_s)))
    samples = [timed(call, work) for _ in range(number)]
    seconds = median(samples) if mine is not None else 0.0
    return seconds / 2 if operation == "send" else seconds  # there and back


def _call(
    transport: ProcessGroupTransport,
    device: torch.device,
    operation: str,
    ranks: list[int],
    num_bytes: int,
) -> Callable[[], object]:
    size = len(ranks)
    count = max(1, num_bytes // 4 // size)
    sizes = [count] * size
    whole = torch.ones(count * size, device=device)
    part, out = torch.ones(count, device=device), torch.empty(count * size, device=device)
    group = Group(tuple(ranks), ranks.index(transport.rank))
    if operation == "send":
        return lambda: _there_and_back(transport, group, whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: transport.all_reduce(whole, "max", group).wait(),
        "all_gather": lambda: transport.all_gather(part, sizes, group, out).wait(),
        "reduce_scatter": lambda: transport.reduce_scatter(whole, sizes, group).wait(),
        "all_to_all": lambda: transport.all_to_all(whole, sizes, sizes, group).wait(),
        "broadcast": lambda: _around(transport, group, whole),
    }
    return calls[operation]


def _there_and_back(transport: ProcessGroupTransport, group: Group, flat: torch.Tensor) -> None:
    other = group.ranks[1 - group.index]
    moves = (transport.send, transport.receive)
    for move in moves if group.index == 0 else moves[::-1]:
        move(flat, other, 0).wait()


def _around(transport: ProcessGroupTransport, group: Group, flat: torch.Tensor) -> None:
    """A broadcast after which its root waits for the others, so that none runs ahead."""
    transport.broadcast(flat, 0, group).wait()
    token = torch.zeros(1, device=flat.device)
    transport.all_reduce(token, "max", group).wait()
