"""`race_plans`: run plans against each other on this machine, with all their communication.

Predictions that differ by a few percent do not say which plan is faster. If all ranks of the
cluster fit on this machine, they are forked from this process and connected by gloo. Every rank
loads all plans, without weights, and runs one step of each in turn, in another order every round,
so that other load on the machine affects all plans equally. After each heat, plans that are behind
drop out, and the few that remain run longest.
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

from shardwise.api.compile import PipelineProgram, Program, compile
from shardwise.api.memory import SingleRank
from shardwise.api.parallelize import process_mesh
from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.processes import TIMEOUT_S, fork_ranks
from shardwise.runtime.optimizer import optimizer
from shardwise.tuning.compute_time import batch_of, fill

WARM_UPS = 2  # rounds
HEATS = ((3, inf), (12, 1.15), (25, 1.06))  # rounds, and the slowest step relative to the fastest
RACE_S = 90.0  # no round begins later, once every plan has run
TRIAL_S = 300.0  # limit for the ranks, from their start to their last round
SHARE = 0.5  # of the machine's memory that all ranks of all plans may take


def can_race(cluster: Cluster) -> bool:
    """Return whether all ranks can run here: CPUs of one machine, and no process group yet."""
    one_node = len(cluster.nodes) == 1 and cluster.nodes[0].copies == 1
    cpus = all(cluster.device(rank).kind == "cpu" for rank in range(cluster.num_ranks))
    return one_node and cpus and cluster.num_ranks > 1 and not dist.is_initialized()


def plans_that_fit(plans: Sequence[Plan], cluster: Cluster) -> list[Plan]:
    """Return the first plans that fit into memory together, on every rank."""
    fitting, used = [], 0.0
    device = cluster.device(0)
    limit = SHARE * (device.host_memory_bytes or device.memory_bytes)  # of one rank's share
    for plan in plans:
        used += plan.figures.best.memory.peak_bytes
        if used > limit:
            break
        fitting.append(plan)
    return fitting


def race_plans(graph: Graph, plans: Sequence[Plan], cluster: Cluster) -> list[float]:
    """Return the median seconds of a step of every plan, including the optimizer step."""
    programs = [compile(graph, plan) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:

        def race(rank: int, barrier: Callable[[], object]) -> list[float]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=cluster.num_ranks,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            barrier()
            return _race([_Runner(program, rank) for program in programs])

        return fork_ranks(race, cluster.num_ranks, timeout_s=TRIAL_S)[0]


def _race(runners: Sequence[_Runner]) -> list[float]:
    """Return the seconds of a step of every plan.

    A plan that dropped out takes its last ratio to the fastest plan times the fastest step.
    """
    order = random.Random(0)  # the same on every rank
    running = list(range(len(runners)))
    times: list[list[float]] = [[] for _ in runners]
    ratios, fastest = [1.0] * len(runners), 0.0
    deadline = time.monotonic() + RACE_S
    for warm_up in range(WARM_UPS):
        if warm_up and _is_late(deadline):
            break
        for number in running:
            runners[number].seconds()
    for rounds, slowest in HEATS:
        running = [number for number in running if ratios[number] <= slowest]
        for _ in range(rounds):
            if times[running[0]] and _is_late(deadline):
                break
            for number in order.sample(running, len(running)):
                times[number].append(runners[number].seconds())
        medians = _as_rank_0([median(times[number]) for number in running])
        fastest = min(medians)
        for number, seconds in zip(running, medians, strict=True):
            ratios[number] = seconds / fastest
    return [fastest * ratio for ratio in ratios]


def _is_late(deadline: float) -> bool:
    return _as_rank_0([float(time.monotonic() > deadline)]) == [1.0]


def _as_rank_0(numbers: Sequence[float]) -> list[float]:
    """Return the numbers of rank 0, so that all ranks decide the same."""
    values = torch.tensor(numbers, dtype=torch.float64)
    dist.broadcast(values, 0)
    broadcast: list[float] = values.tolist()
    return broadcast


class _Runner:
    """Run steps of one plan on this rank."""

    def __init__(self, program: Program | PipelineProgram, rank: int) -> None:
        mesh = process_mesh(program.plan, TIMEOUT_S)
        self.single_rank = SingleRank(program, rank, torch.device("cpu"), mesh=mesh)
        fill(self.single_rank)
        self.batch = batch_of(self.single_rank)
        self.adamw = optimizer(self.single_rank.module, torch.optim.AdamW, lr=0.0)

    def seconds(self) -> float:
        """Time a step with its optimizer; barriers make it the time of all ranks."""
        dist.barrier()
        began = time.perf_counter()
        self.single_rank.module.train_step(self.batch)
        self.adamw.step()
        self.adamw.zero_grad()
        dist.barrier()
        return time.perf_counter() - began
