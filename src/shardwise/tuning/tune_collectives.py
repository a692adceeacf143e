"""`sw.collectives.tune`: measure the collectives of a plan on the ranks that will run them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from shardwise.collectives.messages import CollectiveChoice
from shardwise.collectives.messages.choice import REFERENCE_BYTES
from shardwise.cost.selection import saves_enough
from shardwise.errors import ProgramError
from shardwise.plans import Plan
from shardwise.runtime.rendezvous import require_ranks, starting
from shardwise.runtime.transport import Group
from shardwise.runtime.transport.process_group import ProcessGroupTransport

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the chunks that the model chose
ROUNDS = 3
ITEM_BYTES = 4


def tune(
    plan: Plan, *, num_bytes: int = REFERENCE_BYTES, rounds: int = ROUNDS, timeout_s: float = 60.0
) -> Plan:
    """Return the plan with measured chunk sizes; all ranks of the plan call this together.

    Each collective runs with several chunk sizes on `num_bytes` of data, in turns with the
    library, `rounds` times; the medians decide. Where no size saves a tenth of the library's time,
    the library is used.
    """
    if num_bytes < 1 or rounds < 1 or not 0 < timeout_s < math.inf:
        raise ProgramError(
            f"{num_bytes} bytes, {rounds} rounds and {timeout_s:g} s cannot be measured",
            hint="sw.collectives.tune(plan, num_bytes=2**24, rounds=3, timeout_s=60.0)",
        )
    trials = [list(_trials(choice)) for choice in plan.collectives]
    if all(len(variants) < 2 for variants in trials):
        return plan
    with starting(timeout_s) as agree:
        require_ranks(plan.num_ranks)
        agree(f"tune {num_bytes} {rounds} {plan.collectives}")
    tuner = _Tuner(plan, num_bytes, rounds, timeout_s)
    choices = [_best(v, tuner.seconds(v)) if len(v) > 1 else v[0] for v in trials]
    return plan.with_(collectives=tuple(choices))


def _trials(choice: CollectiveChoice) -> Iterator[CollectiveChoice]:
    """Yield the choice with several chunk sizes, and the library last."""
    if choice.is_library:
        yield choice
        return
    for factor in FACTORS if choice.has_trees else (1.0,):
        yield replace(choice, chunk_bytes=round(choice.chunk_bytes * factor))
    yield replace(
        choice, uses="library", forests=(), chunk_bytes=0, min_bytes=0, latency_s=0, s_per_byte=0
    )


def _best(trials: Sequence[CollectiveChoice], seconds: Sequence[float]) -> CollectiveChoice:
    """Return the fastest trial with the measured times, or the library if that saves too little."""
    *solved, (library, library_s) = zip(trials, seconds, strict=True)
    fastest, fastest_s = min(solved, key=lambda pair: pair[1])
    best = fastest if saves_enough(library_s, fastest_s) else library
    measured = {"library measured": library_s, f"{fastest.uses} measured": fastest_s}
    return replace(best, predicted_s={**fastest.predicted_s, **measured})


class _Tuner:
    """Measure choices on the processes of a plan."""

    def __init__(self, plan: Plan, num_bytes: int, rounds: int, timeout_s: float) -> None:
        self.numel, self.rounds = max(1, num_bytes // ITEM_BYTES), rounds
        groups = dict.fromkeys(ranks for choice in plan.collectives for ranks in choice.groups)
        self.transport = ProcessGroupTransport(groups, timeout_s)

    def seconds(self, trials: Sequence[CollectiveChoice]) -> list[float]:
        """Return per trial the median over rounds of the slowest rank's time, on all ranks."""
        from shardwise.collectives.solver.derive import derive

        rank, groups = dist.get_rank(), trials[0].groups
        local = next((ranks for ranks in groups if rank in ranks), None)
        backends = []
        for trial in trials:
            self.transport.use([replace(trial, min_bytes=0)], derive)
            backends.append(self.transport.backends)
        samples = torch.zeros(self.rounds + 1, len(trials), dtype=torch.float64)
        for turn in range(self.rounds + 1):  # the first makes programs and connections
            for number, backend in enumerate(backends):
                self.transport.backends = backend
                dist.barrier()
                if local is not None:
                    call = self._call(trials[0].operation, Group(local, local.index(rank)))
                    began = time.perf_counter()
                    call()
                    samples[turn, number] = time.perf_counter() - began
        dist.all_reduce(samples, dist.ReduceOp.MAX)
        return [median(column) for column in samples[1:].T.tolist()]

    def _call(self, operation: str, group: Group) -> Callable[[], object]:
        full = torch.ones(self.numel)
        ends = [self.numel * i // group.size for i in range(group.size + 1)]
        sizes = [b - a for a, b in pairwise(ends)]
        if operation == "all_reduce":
            return lambda: self.transport.all_reduce(full, "sum", group).wait()
        if operation == "reduce_scatter":
            return lambda: self.transport.reduce_scatter(full, sizes, group).wait()
        part = torch.ones(sizes[group.index])
        return lambda: self.transport.all_gather(part, sizes, group, full).wait()
