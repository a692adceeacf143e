"""What the ranks exchange: sends and collectives through the transport that programs use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.collectives.messages import Chunk, Instruction, MessageProgram
from shardwise.profiling.compute import FEWEST_SAMPLES, largest, meet, timed
from shardwise.runtime.collectives.messenger import Messenger
from shardwise.runtime.collectives.shared_memory import SharedBuckets
from shardwise.runtime.transport import Group
from shardwise.runtime.transport.process_group import ProcessGroupTransport

# What computing and communicating cost each other when they happen at once.


NUM_BYTES = {"cpu": 1 << 23, "cuda": 1 << 27}  # messages of some milliseconds
MATRIX = {"cpu": 256, "cuda": 2048}
LONGER = 2  # computing takes this many times as long as the message
SAMPLES, OVERLAP_WARM_UP = 9, 2


def measure_overlap(device: torch.device, progress: Callable[[str], None]) -> float:
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
    for _ in range(OVERLAP_WARM_UP + SAMPLES):
        meet()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - started)
    return largest(median(samples[OVERLAP_WARM_UP:]), device)


# What the other ways of collectives take on one host: shared memory, and messages.


SHARED = ("all_reduce", "reduce_scatter", "all_gather")
BUSY_BYTES = 1 << 22  # as in `wires`
MESSAGES, MESSAGE_BYTES = 512, 1024
MOST_CALLS = 50
TIMEOUT_S = 60.0


def other_ways(
    shapes: Sequence[list[list[int]]],
    sizes: Sequence[int],
    progress: Callable[[str], None],
    budget_s: float,
) -> list[dict[str, Any]]:
    """As `wires.measure`; nothing of shared memory where there is none."""
    found: list[dict[str, Any]] = []
    for groups in shapes:
        mine, members = None, None
        for ranks in groups:
            made = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine, members = made, ranks
        memory = None if mine is None else SharedBuckets.open(mine, timeout_s=TIMEOUT_S)
        lacking = mine is not None and memory is None
        if largest(float(lacking), torch.device("cpu")):
            break
        for operation in SHARED:
            progress(f"{operation} of {len(groups)} x {len(groups[0])} ranks in shared memory")
            for num_bytes in sizes:
                call = _shared_call(memory, operation, members, num_bytes)
                seconds = _median_s(call, budget_s)  # all ranks meet, those of no group, too
                found.append(
                    {
                        "operation": f"shared {operation}",
                        "groups": groups,
                        "bytes": num_bytes,
                        "seconds": seconds if members else 0.0,
                    }
                )
        if memory is not None:
            memory.close()
    seconds = _median_s(_messages(), budget_s) / MESSAGES
    row = {"operation": "message", "groups": [[0, 1]], "bytes": MESSAGE_BYTES, "seconds": seconds}
    return [*found, row]


def _shared_call(
    memory: SharedBuckets | None, operation: str, ranks: list[int] | None, num_bytes: int
) -> Callable[[], object]:
    if memory is None or ranks is None:
        return lambda: None
    count = max(1, num_bytes // 4 // len(ranks))
    whole, counts = torch.ones(count * len(ranks)), [count] * len(ranks)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: memory.all_reduce(whole, "max").wait(),
        "reduce_scatter": lambda: memory.reduce_scatter(whole, counts, "max").wait(),
        "all_gather": lambda: memory.all_gather(whole, counts).wait(),
    }
    return calls[operation]


def _messages() -> Callable[[], object]:
    """Many small messages from rank 0 to rank 1."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return lambda: None
    each = MESSAGE_BYTES // 4
    program = MessageProgram(
        operation="broadcast",
        num_ranks=2,
        numel=MESSAGES * each,
        chunks=tuple(Chunk(i * each, (i + 1) * each) for i in range(MESSAGES)),
        instructions=(
            tuple(Instruction("send", 1, i, i + 1) for i in range(MESSAGES)),
            tuple(Instruction("receive", 0, i, i + 1) for i in range(MESSAGES)),
        ),
        root=0,
        window=4,
    )
    messenger, data = Messenger(pair, timeout_s=TIMEOUT_S), torch.zeros(program.numel)
    return lambda: messenger.run(program, data)


def _median_s(call: Callable[[], object], budget_s: float) -> float:
    work = torch.ones(BUSY_BYTES // 4)
    for _ in range(2):
        call()
    once_s = max(largest(timed(call, work), torch.device("cpu")), 1e-6)
    number = max(FEWEST_SAMPLES, min(MOST_CALLS, int(budget_s / once_s)))
    return median(timed(call, work) for _ in range(number))


SIZES = tuple(4**n for n in range(5, 14))  # 1 KiB to 64 MiB
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
GROUP_SIZES = (2, 4, 16)  # and all ranks
WARM_UP = 3


def measure_links(
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
