"""Plans run against each other on this machine, communication and all: `try_plans`.

Two plans whose predictions are a few percent apart cannot be told apart by predictions. Where all
ranks of the cluster fit on the machine that plans, they are forks of this process, connected by
gloo; they hold all plans at once, without weights, and take turns step by step, in another order
every round, so that whatever else the machine does meets all plans alike. They race in heats:
after each of them those that are behind are left out, and the few that are left run longest.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from statistics import median

import torch
import torch.distributed as dist

from shardwise import runtime as rt
from shardwise.api.compile import PipelineProgram, Program, compile
from shardwise.api.memory import SingleRank
from shardwise.api.parallelize import derive_for
from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.processes import TIMEOUT_S, fork_ranks
from shardwise.runtime.optimizer import optimizer
from shardwise.tuning.compute_time import batch_of, fill

WARM_UPS = 2  # rounds
HEATS = ((3, inf), (12, 1.15), (25, 1.06))  # rounds, and what of the quickest's step is admitted
RACE_S = 90.0  # after these no round begins, once every plan has run
TRIAL_S = 300.0  # the most that ranks may take, from their start to their last round
SHARE = 0.5  # of the machine's memory that all ranks of all plans may take


def can_try(cluster: Cluster) -> bool:
    """Whether all ranks of the cluster can run here: processors of one machine, no group yet."""
    alone = len(cluster.nodes) == 1 and cluster.nodes[0].copies == 1
    cpus = all(cluster.device(rank).kind == "cpu" for rank in range(cluster.num_ranks))
    return alone and cpus and cluster.num_ranks > 1 and not dist.is_initialized()


def fitting(plans: Sequence[Plan], cluster: Cluster) -> list[Plan]:
    """The first plans that have room beside each other, on every rank."""
    found, used = [], 0.0
    device = cluster.device(0)
    most = SHARE * (device.host_memory_bytes or device.memory_bytes)  # of one rank's share
    for plan in plans:
        used += plan.figures.best.memory.peak_bytes
        if used > most:
            break
        found.append(plan)
    return found


def try_plans(graph: Graph, plans: Sequence[Plan], cluster: Cluster) -> list[float]:
    """The median seconds of a step of every plan, with its optimizer."""
    programs = [compile(graph, plan) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:

        def race(rank: int, meet: Callable[[], object]) -> list[float]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=cluster.num_ranks,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            meet()
            return _race([_Tried(program, rank) for program in programs])

        return fork_ranks(race, cluster.num_ranks, timeout_s=TRIAL_S)[0]


_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def _race(tried: Sequence[_Tried]) -> list[float]:
    """Seconds of a step of every plan; of one left out, as far behind the quickest as it was."""
    order = random.Random(0)  # the same on every rank
    running = list(range(len(tried)))
    times: list[list[float]] = [[] for _ in tried]
    behind, least = [1.0] * len(tried), 0.0
    until = time.monotonic() + RACE_S
    for at in range(WARM_UPS):
        if at and _is_late(until):
            break
        for number in running:
            tried[number].seconds()
    for rounds, admitted in HEATS:
        running = [number for number in running if behind[number] <= admitted]
        for _ in range(rounds):
            if times[running[0]] and _is_late(until):
                break
            for number in order.sample(running, len(running)):
                times[number].append(tried[number].seconds())
        medians = _as_rank_0([median(times[number]) for number in running])
        least = min(medians)
        for number, seconds in zip(running, medians, strict=True):
            behind[number] = seconds / least
    return [least * by for by in behind]


def _is_late(until: float) -> bool:
    return _as_rank_0([float(time.monotonic() > until)]) == [1.0]


def _as_rank_0(numbers: Sequence[float]) -> list[float]:
    """What rank 0 has in their place: all ranks decide alike."""
    told = torch.tensor(numbers, dtype=torch.float64)
    dist.broadcast(told, 0)
    found: list[float] = told.tolist()
    return found


class _Tried:
    """One plan on this rank."""

    def __init__(self, program: Program | PipelineProgram, rank: int) -> None:
        self.alone = SingleRank(program, rank, torch.device("cpu"), mesh=_mesh(program.plan))
        fill(self.alone)
        self.batch = batch_of(self.alone)
        self.adamw = optimizer(self.alone.module, torch.optim.AdamW, lr=0.0)

    def seconds(self) -> float:
        """Of a step with its optimizer; barriers make them those of all ranks."""
        dist.barrier()
        began = time.perf_counter()
        self.alone.module.train_step(self.batch)
        self.adamw.step()
        self.adamw.zero_grad()
        dist.barrier()
        return time.perf_counter() - began


def _mesh(plan: Plan) -> rt.ProcessMesh:
    stages = {stage.ranks: dict(stage.mesh.axes) for stage in plan.all_stages}
    return rt.process_meshes(
        list(stages.items()),
        timeout_s=TIMEOUT_S,
        num_microbatches=plan.num_microbatches,
        timed=plan.splits_time,
        choices=plan.collectives,
        derive=derive_for(plan),
    )
