"""What the other ways of collectives take on one host: shared memory, and messages.

Enters: groups of ranks and sizes. Leaves: seconds by size of `shared all_reduce` and its like, and
of one small `message` of a program, which is what it costs beside the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.messages import Chunk, Instruction, MessageProgram
from shardwise.profiling.timing import FEWEST_SAMPLES, largest, timed
from shardwise.runtime.collectives.messenger import Messenger
from shardwise.runtime.collectives.shared_memory import SharedBuckets

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
