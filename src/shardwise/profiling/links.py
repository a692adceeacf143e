"""Measure sends and collectives between ranks, through the transport that programs use.

Every rank runs the same measurements in the same order; ranks outside the groups of a measurement
only take part in its barriers.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.collectives.messages import Chunk, Instruction, MessageProgram
from shardwise.profiling.compute import MIN_SAMPLES, max_over_ranks
from shardwise.runtime.collectives.messenger import Messenger
from shardwise.runtime.collectives.shared_memory import SharedBuckets
from shardwise.runtime.devices import barrier, synchronize
from shardwise.runtime.transport import Group
from shardwise.runtime.transport.process_group import ProcessGroupTransport

SIZES = tuple(4**n for n in range(5, 14))  # 1 KiB to 64 MiB
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
GROUP_SIZES = (2, 4, 16)  # and all ranks
MAX_CALLS, WARM_UP = 50, 2
SCRATCH_BYTES = 1 << 22

Row = dict[str, Any]  # operation, groups, bytes, seconds
Call = Callable[[], object]


def measure_links(
    device: torch.device, progress: Callable[[str], None], budget_s: float, quick: bool
) -> list[Row]:
    """Return the time of every operation on groups of ranks, by size."""
    world = dist.get_world_size()
    pairs = _blocks(world, 2)
    shapes = [[list(range(world))], *(_blocks(world, n) for n in GROUP_SIZES if 2 * n <= world)]
    members = [tuple(group) for groups in (*shapes, pairs) for group in groups]
    transport = ProcessGroupTransport(dict.fromkeys(members))
    _broadcast(  # NCCL creates a communicator when all of its ranks use it, a send has only two
        transport, Group(tuple(range(world)), transport.rank), torch.zeros(1, device=device)
    )
    sizes = SIZES[::2] if quick else SIZES[1:]
    operations = [("send", [[0, 1]])] + ([("send", pairs)] if world >= 4 else [])
    operations += [(operation, groups) for operation in COLLECTIVES for groups in shapes]
    rows: list[Row] = []
    for operation, groups in operations:
        progress(f"{operation} of {len(groups)} x {len(groups[0])} ranks")
        ranks = next((group for group in groups if transport.rank in group), None)
        for num_bytes in sizes:
            call = _library_call(transport, device, operation, ranks, num_bytes)
            seconds = _median_s(call, device, budget_s) if ranks else _idle(device, budget_s)
            seconds = seconds / 2 if operation == "send" else seconds  # there and back
            rows.append(_row(operation, groups, num_bytes, seconds))
    if device.type == "cpu":
        rows += measure_shared_memory(shapes, sizes, progress, budget_s)
        rows.append(_row("message", [[0, 1]], MESSAGE_BYTES, _message_s(budget_s)))
    return rows


def _row(operation: str, groups: list[list[int]], num_bytes: int, seconds: float) -> Row:
    return {"operation": operation, "groups": groups, "bytes": num_bytes, "seconds": seconds}


def _blocks(world: int, size: int) -> list[list[int]]:
    """Return groups of `size` neighbouring ranks; remaining ranks are in no group."""
    return [list(range(i, i + size)) for i in range(0, world - size + 1, size)]


def _median_s(call: Call, device: torch.device, budget_s: float) -> float:
    for _ in range(WARM_UP):
        call()
    scratch = torch.ones(SCRATCH_BYTES // 4, device=device)
    once_s = max(max_over_ranks(_timed(call, scratch), device), 1e-6)
    number = max(MIN_SAMPLES, min(MAX_CALLS, int(budget_s / once_s)))
    return median(_timed(call, scratch) for _ in range(number))


def _idle(device: torch.device, budget_s: float) -> float:
    """Take part in the barriers of a measurement; return 0."""
    _median_s(lambda: None, device, budget_s)
    return 0.0


def _timed(call: Call, scratch: torch.Tensor) -> float:
    """Return the seconds of a message between ranks that have computed until then.

    In training, the data of a message have left the caches, or have just been written.
    """
    _ = scratch + 1.0
    synchronize(scratch.device)
    barrier()
    start = time.perf_counter()
    call()
    synchronize(scratch.device)
    return time.perf_counter() - start


def _library_call(
    transport: ProcessGroupTransport,
    device: torch.device,
    operation: str,
    ranks: list[int] | None,
    num_bytes: int,
) -> Call:
    if ranks is None:
        return lambda: None
    size = len(ranks)
    count = max(1, num_bytes // 4 // size)
    counts = [count] * size
    full = torch.ones(count * size, device=device)
    part, out = torch.ones(count, device=device), torch.empty(count * size, device=device)
    group = Group(tuple(ranks), ranks.index(transport.rank))
    calls: dict[str, Call] = {
        "send": lambda: _there_and_back(transport, group, full),
        "all_reduce": lambda: transport.all_reduce(full, "max", group).wait(),
        "all_gather": lambda: transport.all_gather(part, counts, group, out).wait(),
        "reduce_scatter": lambda: transport.reduce_scatter(full, counts, group).wait(),
        "all_to_all": lambda: transport.all_to_all(full, counts, counts, group).wait(),
        "broadcast": lambda: _broadcast(transport, group, full),
    }
    return calls[operation]


def _there_and_back(transport: ProcessGroupTransport, group: Group, flat: torch.Tensor) -> None:
    message = [(flat, group.ranks[1 - group.index])]
    for sends in (group.index == 0, group.index == 1):
        sent, received = transport.exchange(*((message, []) if sends else ([], message)))
        for pending in (*sent, *received):
            pending.wait()


def _broadcast(transport: ProcessGroupTransport, group: Group, flat: torch.Tensor) -> None:
    """Broadcast, then let the root wait for the others, so that it does not run ahead."""
    transport.broadcast(flat, 0, group).wait()
    token = torch.zeros(1, device=flat.device)
    transport.all_reduce(token, "max", group).wait()


# ------------------------------------------------------------ shared memory and messages
SHARED = ("all_reduce", "reduce_scatter", "all_gather")
MESSAGES, MESSAGE_BYTES = 512, 1024
TIMEOUT_S = 60.0
CPU = torch.device("cpu")


def measure_shared_memory(
    shapes: Sequence[list[list[int]]],
    sizes: Sequence[int],
    progress: Callable[[str], None],
    budget_s: float,
) -> list[Row]:
    """Return the times of collectives through shared memory; none if ranks do not share any."""
    rows: list[Row] = []
    for groups in shapes:
        process_group, members = None, None
        for ranks in groups:
            new_group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                process_group, members = new_group, ranks
        memory = None
        if process_group is not None:
            memory = SharedBuckets.open(process_group, timeout_s=TIMEOUT_S)
        if max_over_ranks(float(members is not None and memory is None), CPU):
            break
        for operation in SHARED:
            progress(f"{operation} of {len(groups)} x {len(groups[0])} ranks in shared memory")
            for num_bytes in sizes:
                if memory is None or members is None:
                    seconds = _idle(CPU, budget_s)
                else:
                    call = _shared_call(memory, operation, len(members), num_bytes)
                    seconds = _median_s(call, CPU, budget_s)
                rows.append(_row(f"shared {operation}", groups, num_bytes, seconds))
        if memory is not None:
            memory.close()
    return rows


def _shared_call(memory: SharedBuckets, operation: str, num_ranks: int, num_bytes: int) -> Call:
    count = max(1, num_bytes // 4 // num_ranks)
    full, counts = torch.ones(count * num_ranks), [count] * num_ranks
    calls: dict[str, Call] = {
        "all_reduce": lambda: memory.all_reduce(full, "max").wait(),
        "reduce_scatter": lambda: memory.reduce_scatter(full, counts, "max").wait(),
        "all_gather": lambda: memory.all_gather(full, counts).wait(),
    }
    return calls[operation]


def _message_s(budget_s: float) -> float:
    """Return the time of one of many small messages from rank 0 to rank 1."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return _idle(CPU, budget_s)
    numel = MESSAGE_BYTES // 4
    program = MessageProgram(
        operation="broadcast",
        num_ranks=2,
        numel=MESSAGES * numel,
        chunks=tuple(Chunk(i * numel, (i + 1) * numel) for i in range(MESSAGES)),
        instructions=(
            tuple(Instruction("send", 1, i, i + 1) for i in range(MESSAGES)),
            tuple(Instruction("receive", 0, i, i + 1) for i in range(MESSAGES)),
        ),
        root=0,
        window=4,
    )
    messenger, data = Messenger(pair, timeout_s=TIMEOUT_S), torch.zeros(program.numel)
    return _median_s(lambda: messenger.run(program, data), CPU, budget_s) / MESSAGES


# ------------------------------------------------------------ overlap
OVERLAP_BYTES = {"cpu": 1 << 23, "cuda": 1 << 27}  # messages of some milliseconds
MATRIX_SIZE = {"cpu": 256, "cuda": 2048}
COMPUTE_RATIO = 2  # time of computing over that of the message
OVERLAP_SAMPLES, OVERLAP_WARM_UP = 9, 2


def measure_overlap(device: torch.device, progress: Callable[[str], None]) -> float:
    """Return the slowdown of computing during a message, as a fraction of the message's time."""
    progress("computing during messages")
    ranks = tuple(range(dist.get_world_size()))
    transport = ProcessGroupTransport({ranks: None})
    group = Group(ranks, transport.rank)
    message = torch.ones(OVERLAP_BYTES[device.type] // 4, device=device)
    a = torch.randn(MATRIX_SIZE[device.type], MATRIX_SIZE[device.type], device=device)

    def communicate() -> None:
        transport.all_reduce(message, "max", group).wait()

    def compute() -> None:
        for _ in range(number):
            torch.mm(a, a)

    def both() -> None:
        pending = transport.all_reduce(message, "max", group)
        compute()
        pending.wait()

    number = 16
    message_s, compute_s = _slowest_s(communicate, device), _slowest_s(compute, device)
    number = max(1, math.ceil(number * COMPUTE_RATIO * message_s / compute_s))
    compute_s = _slowest_s(compute, device)
    return min(1.0, max(0.0, (_slowest_s(both, device) - compute_s) / message_s))


def _slowest_s(call: Call, device: torch.device) -> float:
    """Return the median time of the slowest rank."""
    samples = []
    for _ in range(OVERLAP_WARM_UP + OVERLAP_SAMPLES):
        barrier()
        start = time.perf_counter()
        call()
        synchronize(device)
        samples.append(time.perf_counter() - start)
    return max_over_ranks(median(samples[OVERLAP_WARM_UP:]), device)
