"""Run a solved program and the library's collective by turns, on the ranks of a process group.

    python -m shardwise.collectives.bench.compare TASK.json RANK

A round is one collective of each kind. Its time is measured from a barrier until the last rank is
done. Every result is checked.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.program import SUMMING
from shardwise.errors import RankError
from shardwise.runtime.collectives.messenger import Messenger

RTOL = 1e-3  # of a sum in a dtype of low precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of processes that were started for a benchmark: files of programs and of the result.

    If `solved` is false, the library runs on both sides, which shows how much its own times vary.
    """

    programs: tuple[str, ...]
    solved: tuple[bool, ...]
    dtype: str
    rounds: int
    rendezvous: str
    num_ranks: int
    timeout_s: float
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The seconds of each round: the library's, and ours."""

    library_s: Sequence[float]
    ours_s: Sequence[float]


class _Sides:
    """The data of this rank, and both implementations of the operation on them."""

    def __init__(self, program: MessageProgram, messenger: Messenger, dtype: torch.dtype) -> None:
        self.program, self.messenger = program, messenger
        self.group, self.rank = messenger.group, messenger.rank
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        self.data = torch.empty(program.numel, dtype=dtype, device=device)
        counts = program.counts or (0,) * program.num_ranks
        first = program.offsets[self.rank] if program.counts else 0
        self.local = self.data[first : first + counts[self.rank]]
        self.base = torch.arange(program.numel, device=device) % 7

    def fill(self) -> None:
        """Fill the input with small integers that differ by rank, so that sums are exact."""
        self.data.copy_(self.base).add_(self.rank)

    def solved(self) -> None:
        self.messenger.run(self.program, self.data)

    def library(self) -> None:
        program, group, root = self.program, self.group, self.program.root
        if group is not None and root >= 0:
            root = dist.get_global_rank(group, root)
        counts = list(program.counts)
        if program.operation == "all_reduce":
            dist.all_reduce(self.data, group=group)
        elif program.operation == "broadcast":
            dist.broadcast(self.data, root, group=group)
        elif program.operation == "reduce":
            dist.reduce(self.data, root, group=group)
        elif program.operation == "reduce_scatter":
            summed = torch.empty_like(self.local)
            dist.reduce_scatter(summed, list(torch.split(self.data, counts)), group=group)
            self.local.copy_(summed)
        else:
            dist.all_gather(list(torch.split(self.data, counts)), self.local.clone(), group=group)

    def check(self, implementation: str) -> None:
        """Raise unless the result is correct."""
        program, ranks = self.program, range(self.program.num_ranks)
        actual, expected = self.data, self.base + program.root
        if program.operation in SUMMING:
            expected = self.base * len(ranks) + sum(ranks)
        if program.operation == "reduce" and self.rank != program.root:
            return
        if program.operation == "reduce_scatter":
            first = program.offsets[self.rank]
            actual, expected = self.local, expected[first : first + len(self.local)]
        elif program.operation == "all_gather":
            parts = torch.split(self.base, list(program.counts))
            expected = torch.cat([part + rank for rank, part in enumerate(parts)])
        if not torch.allclose(actual.double(), expected.double(), rtol=RTOL):
            raise RankError(
                f"{program.operation} of {implementation} gives a wrong result on rank {self.rank}"
            )


def compare(
    program: MessageProgram,
    messenger: Messenger,
    *,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    solved: bool = True,
    warm: bool = False,
) -> Times:
    """Return the times of `rounds` rounds; unless processes are `warm`, discard one round first."""
    sides = _Sides(program, messenger, dtype)
    library_s: list[float] = []
    ours_s: list[float] = []
    skipped = 0 if warm else 1
    for _ in range(rounds + skipped):
        library_s.append(_timed(sides, sides.library, "the library"))
        ours = sides.solved if solved else sides.library
        ours_s.append(_timed(sides, ours, "the solved program"))
    return Times(library_s=tuple(library_s[skipped:]), ours_s=tuple(ours_s[skipped:]))


def _timed(sides: _Sides, run: Callable[[], None], implementation: str) -> float:
    synchronize: Callable[[], None] = torch.cuda.synchronize if sides.data.is_cuda else lambda: None
    sides.fill()
    synchronize()
    dist.barrier(group=sides.group)
    start = time.perf_counter()
    run()
    synchronize()
    elapsed = torch.tensor([time.perf_counter() - start], device=sides.data.device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=sides.group)
    sides.check(implementation)
    return float(elapsed)


def main(arguments: list[str]) -> None:
    """Run one rank of a task."""
    task = Task(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    rank = int(arguments[1])
    torch.set_num_threads(1)
    limit, world = timedelta(seconds=task.timeout_s), task.num_ranks
    dist.init_process_group(
        "gloo", init_method=task.rendezvous, rank=rank, world_size=world, timeout=limit
    )
    messenger = Messenger(timeout_s=task.timeout_s)
    dtype: Any = getattr(torch, task.dtype)
    results: list[dict[str, Any]] = []
    for file, solved in zip(task.programs, task.solved, strict=True):
        program, warm = MessageProgram.load(file), bool(results)  # the first opens connections
        times = compare(
            program, messenger, rounds=task.rounds, dtype=dtype, solved=solved, warm=warm
        )
        results.append(asdict(times))
    if rank == 0:
        Path(task.result).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    messenger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
