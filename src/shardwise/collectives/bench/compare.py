"""A solved program next to the library's collective, by turns, on the ranks of a process group.

    python -m shardwise.collectives.bench.compare TASK.json RANK

A round is one collective of each kind; its time is from a
barrier until the last rank is done. Every result is compared with what it must be.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.collectives.messages import MessageProgram
from shardwise.errors import RankError
from shardwise.runtime.collectives.messenger import Messenger

CLOSE = 1e-3  # of a sum: what floating point of little precision may lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What processes that were started for it do: programs' files, where to meet, and to write.

    Where `solved` is false, the library is ours, too: that is what its own times differ by.
    """

    programs: tuple[str, ...]
    solved: tuple[bool, ...]
    dtype: str
    rounds: int
    meeting: str
    num_ranks: int
    timeout_s: float
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each round: the library's, and ours."""

    library_s: tuple[float, ...]
    ours_s: tuple[float, ...]

    @property
    def library(self) -> float:
        return statistics.median(self.library_s)

    @property
    def ours(self) -> float:
        return statistics.median(self.ours_s)


class _Sides:
    """The data of this rank, and both ways to do the operation on them."""

    def __init__(self, program: MessageProgram, messenger: Messenger, dtype: torch.dtype) -> None:
        self.program, self.messenger = program, messenger
        self.group, self.rank = messenger.group, messenger.rank
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        self.data = torch.empty(program.numel, dtype=dtype, device=device)
        counts = program.counts or (0,) * program.num_ranks
        first = program.offsets[self.rank] if program.counts else 0
        self.mine = self.data[first : first + counts[self.rank]]
        self.out = self.data.new_empty(counts[self.rank] * program.num_ranks)
        self.place = torch.arange(program.numel, device=device) % 7

    def fill(self) -> None:
        """Small whole numbers, other ones on each rank: sums are exact."""
        self.data.copy_(self.place).add_(self.rank)
        self.out.zero_()

    def solved(self) -> None:
        out = self.out if self.program.operation == "all_to_all" else None
        self.messenger.run(self.program, self.data, out)

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
            kept = torch.empty_like(self.mine)
            dist.reduce_scatter(kept, list(torch.split(self.data, counts)), group=group)
            self.mine.copy_(kept)
        elif program.operation == "all_gather":
            dist.all_gather(list(torch.split(self.data, counts)), self.mine.clone(), group=group)
        else:
            shares = [counts[self.rank]] * program.num_ranks
            dist.all_to_all_single(self.out, self.data, shares, counts, group=group)

    def check(self, who: str) -> None:
        """That the result is the operation's."""
        program, ranks = self.program, range(self.program.num_ranks)
        found, wanted = self.data, self.place + program.root
        if program.operation in ("all_reduce", "reduce", "reduce_scatter"):
            wanted = self.place * len(ranks) + sum(ranks)
        if program.operation == "reduce" and self.rank != program.root:
            return
        if program.operation == "reduce_scatter":
            first = program.offsets[self.rank]
            found, wanted = self.mine, wanted[first : first + len(self.mine)]
        elif program.operation == "all_gather":
            parts = torch.split(self.place, list(program.counts))
            wanted = torch.cat([part + rank for rank, part in enumerate(parts)])
        elif program.operation == "all_to_all":
            first = program.offsets[self.rank]
            part = self.place[first : first + program.counts[self.rank]]
            found, wanted = self.out, torch.cat([part + rank for rank in ranks])
        if not torch.allclose(found.double(), wanted.double(), rtol=CLOSE):
            raise RankError(
                f"{program.operation} of {who} gives a wrong result on rank {self.rank}"
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
    """Return the times of `rounds` rounds, after one that does not count unless processes are
    `warm`; `solved` is as of a `Task`.
    """
    sides = _Sides(program, messenger, dtype)
    library_s: list[float] = []
    ours_s: list[float] = []
    skipped = 0 if warm else 1
    for _ in range(rounds + skipped):
        library_s.append(_timed(sides, sides.library, "the library"))
        ours = sides.solved if solved else sides.library
        ours_s.append(_timed(sides, ours, "the solved program"))
    return Times(library_s=tuple(library_s[skipped:]), ours_s=tuple(ours_s[skipped:]))


def _timed(sides: _Sides, run: Callable[[], None], who: str) -> float:
    sides.fill()
    _finish(sides)
    dist.barrier(group=sides.group)
    began = time.perf_counter()
    run()
    _finish(sides)
    took = torch.tensor([time.perf_counter() - began], device=sides.data.device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=sides.group)
    sides.check(who)
    return float(took)


def _finish(sides: _Sides) -> None:
    if sides.data.is_cuda:
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """One rank of a task."""
    task = Task(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    rank = int(arguments[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=task.meeting,
        rank=rank,
        world_size=task.num_ranks,
        timeout=timedelta(seconds=task.timeout_s),
    )
    messenger = Messenger(timeout_s=task.timeout_s)
    dtype: Any = getattr(torch, task.dtype)
    found: list[dict[str, Any]] = []
    for file, solved in zip(task.programs, task.solved, strict=True):
        program = MessageProgram.load(file)
        times = compare(
            program,
            messenger,
            rounds=task.rounds,
            dtype=dtype,
            solved=solved,
            warm=bool(found),  # connections are made by the first
        )
        found.append(asdict(times))
    if rank == 0:
        Path(task.result).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    messenger.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
