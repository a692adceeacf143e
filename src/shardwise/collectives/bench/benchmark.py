"""Time solved collectives next to the library's."""

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster
from shardwise.collectives import Network, Solution, solve
from shardwise.collectives.bench.compare import Task, Times, compare
from shardwise.collectives.bench.emulation import emulated, run_on_hosts
from shardwise.collectives.messages.program import SHARDED
from shardwise.cost.selection import select
from shardwise.dtypes import DTYPES
from shardwise.errors import ClusterError, RankError
from shardwise.processes import is_abandoned, owned, run_commands, terminated_as_interrupt

PREFIX = "shardwise-bench-"  # of folders
TIMEOUT_S = 300.0
SOLVED, LIBRARY = "solved", "library"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # of each process


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The times of one size, as medians; `uses` is the implementation that `ours_s` is of."""

    operation: str
    num_bytes: int
    uses: str
    library_s: float
    ours_s: float
    predicted_s: float
    bound_s: float
    times: Times

    @property
    def faster(self) -> float:
        return self.library_s / self.ours_s

    @property
    def of_bound(self) -> float:
        return self.ours_s / self.bound_s if self.bound_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "faster": self.faster, "of_bound": self.of_bound}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A benchmark; `uses` returns the implementation to time for a number of bytes."""

    network: Network
    operation: str
    sizes: Sequence[int]
    item_bytes: int = 4
    dtype: str = "float32"
    root: int | None = None
    rounds: int = 5
    timeout_s: float = TIMEOUT_S
    uses: Callable[[int], str] = lambda num_bytes: SOLVED

    def __post_init__(self) -> None:
        if self.network.num_ranks < 2:
            raise ClusterError(
                "collectives need at least 2 ranks, got 1", hint="a cluster of 2 ranks or more"
            )
        supported = [dtype.name for dtype in DTYPES.values() if dtype.can_reduce]
        if self.dtype not in supported:
            raise ClusterError(
                f"the library does not support collectives of {self.dtype}",
                hint=", ".join(supported),
            )

    def solutions(self) -> list[Solution]:
        """Solve for every size; the library requires equal parts of sharded operations."""
        multiple = self.network.num_ranks if self.operation in SHARDED else 1
        counts = [num_bytes // self.item_bytes // multiple * multiple for num_bytes in self.sizes]
        return [
            solve(self.network, self.operation, numel, item_bytes=self.item_bytes, root=self.root)
            for numel in counts
        ]

    def rows(self, solutions: Sequence[Solution], times: Sequence[Times]) -> list[Row]:
        """Return the times of each solution with its prediction and bound."""
        return [
            Row(
                operation=self.operation,
                num_bytes=solution.num_bytes,
                uses=self.uses(solution.num_bytes),
                library_s=statistics.median(times_of_size.library_s),
                ours_s=statistics.median(times_of_size.ours_s),
                predicted_s=solution.predicted_s,
                bound_s=max(solution.cut_bound_s, solution.lp_bound_s),
                times=times_of_size,
            )
            for solution, times_of_size in zip(solutions, times, strict=True)
        ]


def chosen(cluster: Cluster, operation: str, ranks: Sequence[int]) -> Callable[[int], str]:
    """Return the implementation that a plan uses on these ranks, as a function of the bytes.

    Operations that plans always leave to the library are solved here for comparison.
    """
    choice = select(cluster, operation, [ranks], max_ranks=len(ranks))

    def uses(num_bytes: int) -> str:
        if choice is None:
            return SOLVED
        return LIBRARY if choice.is_library or num_bytes < choice.min_bytes else SOLVED

    return uses


def on_emulated_hosts(bench: Bench) -> list[Row]:
    """Run the benchmark in network namespaces that have the network's rates."""
    with emulated(bench.network) as layout:
        return _in_processes(bench, partial(run_on_hosts, layout))


def on_this_machine(bench: Bench) -> list[Row]:
    """Run the benchmark in processes of this machine, without the network's rates."""
    return _in_processes(bench, partial(run_commands, what="this machine"))


def in_this_group(bench: Bench) -> list[Row] | None:
    """Run the benchmark on the ranks that torchrun started; return rows on rank 0 only."""
    import torch
    import torch.distributed as dist

    from shardwise.runtime.collectives.messenger import Messenger
    from shardwise.runtime.rendezvous import init_process_group

    limit = timedelta(seconds=bench.timeout_s)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    init_process_group("nccl" if cuda else "gloo", limit)
    try:
        if dist.get_world_size() != bench.network.num_ranks:
            raise RankError(
                f"{dist.get_world_size()} processes for a cluster of {bench.network.num_ranks} "
                "ranks",
                hint=f"torchrun --nproc-per-node …, {bench.network.num_ranks} in all, or --ranks",
            )
        messenger = Messenger(timeout_s=bench.timeout_s)
        solutions = bench.solutions()  # the same on all ranks
        dtype: Any = getattr(torch, bench.dtype)
        times = [
            compare(
                solution.program,
                messenger,
                rounds=bench.rounds,
                dtype=dtype,
                solved=bench.uses(solution.num_bytes) != LIBRARY,
            )
            for solution in solutions
        ]
        messenger.close()
        return bench.rows(solutions, times) if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _in_processes(bench: Bench, run: Callable[..., None]) -> list[Row]:
    """Run the benchmark in processes whose commands `run` starts and waits for."""
    solutions = bench.solutions()
    _remove_abandoned()
    temporary = tempfile.TemporaryDirectory(prefix=owned(PREFIX))
    with terminated_as_interrupt(), temporary as name:
        folder = Path(name)
        files = [folder / f"program{i}.json" for i in range(len(solutions))]
        for file, solution in zip(files, solutions, strict=True):
            solution.program.save(file)
        task = Task(
            programs=tuple(map(str, files)),
            solved=tuple(bench.uses(s.num_bytes) != LIBRARY for s in solutions),
            dtype=bench.dtype,
            rounds=bench.rounds,
            rendezvous=f"file://{folder / 'rendezvous'}",
            num_ranks=bench.network.num_ranks,
            timeout_s=bench.timeout_s,
            result=str(folder / "result.json"),
        )
        task_file = folder / "task.json"
        task_file.write_text(json.dumps(asdict(task)), encoding="utf-8")
        command = [sys.executable, "-m", compare.__module__, str(task_file)]
        commands = [[*command, str(rank)] for rank in range(bench.network.num_ranks)]
        run(commands, timeout_s=bench.timeout_s, environment=ENVIRONMENT)
        results = json.loads(Path(task.result).read_text(encoding="utf-8"))
    return bench.rows(solutions, [Times(**result) for result in results])


def _remove_abandoned() -> None:
    """Remove the folders of runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_abandoned(folder.name, PREFIX):
            shutil.rmtree(folder, ignore_errors=True)


def table(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines of text."""
    lines = [
        f"{'bytes':>12}  {'library':>11}  {'ours':>11}  {'faster':>7}  {'predicted':>11}  "
        f"{'bound':>11}  {'of bound':>8}  uses"
    ]
    for row in rows:
        lines.append(
            f"{row.num_bytes:>12,}  {_ms(row.library_s)}  {_ms(row.ours_s)}  {row.faster:>6.2f}x  "
            f"{_ms(row.predicted_s)}  {_ms(row.bound_s)}  {row.of_bound:>8.3f}  {row.uses}"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>8.1f} ms"
