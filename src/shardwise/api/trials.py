"""Plans run against each other on this machine, communication and all: `try_plans`.

Enters: a graph, some plans and a cluster of one machine, on that machine. Leaves: the seconds of a
step of every plan.

Two plans whose predictions are a few percent apart cannot be told apart by predictions. Where all
ranks of the cluster fit on the machine that plans, they are forks of this process, connected by
gloo; they hold all plans at once, without weights, and take turns step by step, in another order
every round, so that whatever else the machine does meets all plans alike. After some rounds those
that are far behind are left out.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from shardwise import runtime as rt
from shardwise.api.alone import Alone
from shardwise.api.compiled import PipelineProgram, Program, compile
from shardwise.api.forks import TIMEOUT_S, together
from shardwise.api.parallel import derive_for
from shardwise.api.rehearsal import batch_of, fill
from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.runtime.optimizer import optimizer

WARM_UPS, SCREENED, ROUNDS = 2, 3, 16
BEHIND = 1.1  # of the quickest: those slower than this after the first rounds run no more
SHARE = 0.5  # of the machine's memory that all ranks of all plans may take


def can_try(cluster: Cluster) -> bool:
    """Whether all ranks of the cluster can run here: processors of one machine, no group yet."""
    alone = len(cluster.nodes) == 1 and cluster.nodes[0].copies == 1
    cpus = all(cluster.device(rank).kind == "cpu" for rank in range(cluster.num_ranks))
    return alone and cpus and cluster.num_ranks > 1 and not dist.is_initialized()


def fitting(plans: Sequence[Plan], cluster: Cluster) -> list[Plan]:
    """The first plans that have room beside each other."""
    found, used = [], 0.0
    device = cluster.device(0)
    most = SHARE * (device.host_memory_bytes or device.memory_bytes)
    for plan in plans:
        used += cluster.num_ranks * plan.search["best"]["memory"]["peak_bytes"]
        if used > most:
            break
        found.append(plan)
    return found


def try_plans(graph: Graph, plans: Sequence[Plan], cluster: Cluster) -> list[float]:
    """The median seconds of a step of every plan, with its optimizer."""
    programs = [compile(graph, plan) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:

        def rounds(rank: int, meet: Callable[[], object]) -> list[list[float]]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=cluster.num_ranks,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            meet()
            return _rounds([_Tried(program, rank) for program in programs])

        found = together(rounds, cluster.num_ranks)
    return [median(times) for times in found[0]]


_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def _rounds(tried: Sequence[_Tried]) -> list[list[float]]:
    """Seconds of every step of every plan; barriers make them those of all ranks."""
    found: list[list[float]] = [[] for _ in tried]
    order = random.Random(0)  # the same on every rank
    numbers = list(range(len(tried)))
    for at in range(WARM_UPS + SCREENED + ROUNDS):
        if at == WARM_UPS + SCREENED:
            numbers = _near(found)
        for number in order.sample(numbers, len(numbers)):
            dist.barrier()
            began = time.perf_counter()
            tried[number].step()
            dist.barrier()
            if at >= WARM_UPS:
                found[number].append(time.perf_counter() - began)
    return found


def _near(found: Sequence[Sequence[float]]) -> list[int]:
    """The plans that are not far behind, as rank 0 sees it."""
    seconds = torch.tensor([median(times) for times in found], dtype=torch.float64)
    dist.broadcast(seconds, 0)
    return [int(number) for number in (seconds <= BEHIND * seconds.min()).nonzero()]


class _Tried:
    """One plan on this rank."""

    def __init__(self, program: Program | PipelineProgram, rank: int) -> None:
        self.alone = Alone(program, rank, torch.device("cpu"), mesh=_mesh(program.plan))
        fill(self.alone)
        self.batch = batch_of(self.alone)
        self.adamw = optimizer(self.alone.module, torch.optim.AdamW, lr=0.0)

    def step(self) -> None:
        self.alone.module.train_step(self.batch)
        self.adamw.step()
        self.adamw.zero_grad()


def _mesh(plan: Plan) -> rt.ProcessMesh:
    stages = {stage.ranks: dict(stage.mesh.axes) for stage in plan.all_stages}
    return rt.process_meshes(
        list(stages.items()),
        timeout=TIMEOUT_S,
        microbatches=plan.microbatches,
        timed=plan.splits_time,
        choices=plan.collectives,
        derive=derive_for(plan),
    )
