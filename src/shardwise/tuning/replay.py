"""`sw.replay`: run one rank of a plan on this machine, however many ranks the plan has.

The rank's program, memory, optimizer and order of streams are real. Messages take the time that the
cost model gives them on the cluster's links, and overlap with computing as they would; tensors from
other stages arrive when the simulation says. What differs from the prediction is thus the rank's
own: its kernels, the host, and how much communication they hide. `Replay.calibrated` returns the
cluster with these differences, for the next prediction.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.api.compile import PipelineProgram, Program, compile
from shardwise.api.memory import SingleRank, rank_memory
from shardwise.api.parallelize import trace_labels
from shardwise.cluster import Cluster
from shardwise.collectives.messages.choice import chosen
from shardwise.cost import OpTable
from shardwise.errors import PlanError
from shardwise.formatting import Column, counted, seconds, size, table, wrapped
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.reports.measured import CAUSES, Cause, compared_causes, predicted_causes
from shardwise.reports.recorded import read_events
from shardwise.reports.steps import COMMUNICATING, COMPUTING, recorded_step
from shardwise.runtime.optimizer import optimizer
from shardwise.runtime.step import PipelineStep
from shardwise.runtime.tracing import Event, Recorder, Trace, merge
from shardwise.runtime.transport.replay import ReplayTransport, Seconds
from shardwise.simulation.costs import ClusterCosts, Group
from shardwise.simulation.estimate import Estimate, check_plan, simulate
from shardwise.tuning.compute_time import batch_of, fill

WARM_UPS, STEPS = 2, 5


class Communication(NamedTuple):
    """The collectives of one cause in a step: their seconds on links, waited for, and hidden."""

    cause: str
    messages: int
    link_s: float
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Measured steps of one rank next to the predicted one.

    Causes and communication are those of the step of median length.
    """

    plan: Plan
    rank: int
    device: str
    step_times_s: tuple[float, ...]
    predicted_step_time_s: float
    causes: tuple[Cause, ...]
    communication: tuple[Communication, ...]
    peak_bytes: float
    predicted_peak_bytes: float
    trace: Trace
    notes: tuple[str, ...] = ()

    @property
    def step_time_s(self) -> float:
        """The median of the measured steps."""
        return median(self.step_times_s)

    @property
    def residual(self) -> float:
        """The measured step relative to the predicted one, minus 1."""
        return self.step_time_s / self.predicted_step_time_s - 1

    def calibrated(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the measured times of this rank's kind of device.

        Predictions scale computing and the optimizer's step by two factors of the device, which are
        part of the cluster's file.
        """

        def ratio(*names: str) -> float:
            own = [(c.measured_s, c.predicted_s) for c in self.causes if c.name in names]
            measured, predicted = map(sum, zip(*own, strict=True)) if own else (0.0, 0.0)
            return measured / predicted if measured and predicted else 1.0

        device = cluster.device(self.rank)
        return cluster.with_device(
            device.name,
            compute_factor=device.compute_factor * ratio(*set(COMPUTING) - {"optimizer"}),
            update_factor=device.update_factor * ratio("optimizer"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the replay as data, without its trace."""
        names = ("rank", "device", "step_time_s", "step_times_s", "predicted_step_time_s")
        more = ("residual", "peak_bytes", "predicted_peak_bytes", "notes")
        return {
            "plan": self.plan.name,
            **{name: getattr(self, name) for name in (*names, *more)},
            "causes": [cause.to_json(self.step_time_s) for cause in self.causes],
            "communication": [item._asdict() for item in self.communication],
        }

    def text(self, width: int = 100) -> str:
        """Return a table of the measured and predicted step."""
        step, predicted = seconds(self.step_time_s), seconds(self.predicted_step_time_s)
        lines = [
            f"rank {self.rank} of {self.plan.num_ranks} of plan {self.plan.name!r}, on "
            f"{self.device}, {counted(len(self.step_times_s), 'step')}",
            f"  step    {step}, predicted {predicted} ({self.residual:+.1%})",
            f"  memory  {size(self.peak_bytes)}, predicted {size(self.predicted_peak_bytes)}",
        ]
        causes = [
            (seconds(c.measured_s), seconds(c.predicted_s), CAUSES[c.name]) for c in self.causes
        ]
        lines += ["", *table([Column("measured"), Column("predicted")], "cause", causes, width)]
        sent = [(str(c.messages), *map(seconds, c[2:]), c.cause) for c in self.communication]
        titles = [Column(name) for name in ("messages", "on links", "exposed", "hidden")]
        lines += ["", *table(titles, "collectives by cause", sent, width)] if sent else []
        return "\n".join([*lines, *(w for n in self.notes for w in wrapped(f"note: {n}", width))])

    __str__ = text


def replay(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    rank: int = 0,
    *,
    device: torch.device | str | None = None,
    steps: int = STEPS,
    table: OpTable | None = None,
) -> Replay:
    """Run steps of one rank of a plan here, with messages as slow as on the cluster's links.

    Parameters and the batch are random, with AdamW. `device` is by default that of the cluster's
    kind. A CPU computes in one thread, as ranks of a CPU do.
    """
    used = check_plan(graph, plan, cluster)
    if not 0 <= rank < plan.num_ranks or steps < 1:
        raise PlanError(
            f"rank={rank}, steps={steps} of a plan for {counted(plan.num_ranks, 'rank')}",
            hint=f"rank=0 to {plan.num_ranks - 1}, steps=1 or more",
        )
    planned, threads = used.device(rank), torch.get_num_threads()
    target = torch.device(device or (planned.kind if torch.cuda.is_available() else "cpu"))
    estimate, program = simulate(graph, plan, cluster, table=table), compile(graph, plan)
    group = next(number for number, ranks in enumerate(plan.groups) if rank in ranks)
    if target.type == "cpu":
        torch.set_num_threads(1)
    try:
        times = link_seconds(plan, used, rank)
        runs = list(_steps(program, rank, target, times, estimate, WARM_UPS + steps))[WARM_UPS:]
        memory = rank_memory(program, rank, "adamw", target, {}, prepare=_prepared)
    finally:
        torch.set_num_threads(threads)
    events, sent, _ = sorted(runs, key=lambda run: run[2])[(steps - 1) // 2]
    trace = merge([events], about=trace_labels(plan))
    recording = read_events(io.StringIO(json.dumps(trace)), f"replay of rank {rank}")
    actions = [str(action) for action in estimate.timeline.schedule.actions[group]]
    (step,) = recorded_step(recording, [actions], in_stages=len(plan.groups) > 1).ranks
    other = f"the plan is for {planned.name}, and computing on a {target.type} takes another time"
    return Replay(
        plan=plan,
        rank=rank,
        device=str(target),
        step_times_s=tuple(spent for _, _, spent in runs),
        predicted_step_time_s=estimate.step_time_s,
        causes=compared_causes(step, predicted_causes(estimate, group)),
        communication=tuple(_communication(events, sent, step.causes)),
        peak_bytes=memory.peak_bytes,
        predicted_peak_bytes=estimate.memory[group].peak_bytes,
        trace=trace,
        notes=() if target.type == planned.kind else (other,),
    )


def link_seconds(plan: Plan, cluster: Cluster, rank: int) -> Seconds:
    """Return the time of a rank's operations, while other ranks run theirs along the same axes."""
    costs = ClusterCosts(cluster, choose=chosen(plan.collectives))
    stage = next(stage for stage in plan.all_stages if rank in stage.ranks)
    group, concurrent = Group(mesh=stage.mesh, ranks=stage.ranks), {}
    for count in range(1, len(stage.mesh.axes) + 1):
        for axes in itertools.combinations(stage.mesh.names, count):
            rows = group.along(axes)
            concurrent[tuple(rows[(rows == rank).any(axis=1)][0].tolist())] = rows

    @cache
    def time(operation: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        alone = operation == "send" or ranks not in concurrent
        rows = np.array([ranks]) if alone else concurrent[ranks]
        return costs.collective(operation, rows).seconds(num_bytes)

    return time


def _steps(
    program: Program | PipelineProgram,
    rank: int,
    device: torch.device,
    link_seconds: Seconds,
    estimate: Estimate,
    count: int,
) -> Iterator[tuple[list[Event], list[float], float]]:
    """Run steps; yield their events, the seconds of their collectives, and their own."""
    recorder = Recorder(rank, device=device)
    transport = partial(ReplayTransport, seconds=link_seconds, device=device)
    run = SingleRank(program, rank, device, recorder=recorder, transport=transport)
    run.store.recorder = recorder
    batch, arrivals = _prepared(run), list(_arrivals(run, estimate))
    adamw = optimizer(run.module, torch.optim.AdamW, lr=0.0)
    assert isinstance(run.transport, ReplayTransport)
    for _ in range(count):
        run.transport.begin(arrivals)
        run.module.train_step(batch)
        adamw.step()
        adamw.zero_grad()
        events = recorder.take()  # waits for the device
        first, last = min(e.start_ns for e in events), max(e.end_ns for e in events)
        yield events, list(run.transport.sent), (last - first) * 1e-9


def _prepared(run: SingleRank) -> Mapping[str, torch.Tensor]:
    """Give a rank's parameters ordinary values; return a batch."""
    fill(run)
    return batch_of(run)


def _arrivals(run: SingleRank, estimate: Estimate) -> Iterator[float]:
    """Yield when each tensor from another stage arrives in a step, as simulated."""
    if not isinstance(run.step, PipelineStep):
        return
    timeline = estimate.timeline
    actions = itertools.chain.from_iterable(timeline.schedule.actions)
    ends = {a.result: end for a, end in zip(actions, timeline.ends.tolist(), strict=True)}
    for message in run.step.executor.received():
        before = min(message.result.stage, message.target)
        yield ends[message.result] + timeline.times.stages[before].send_s


def _communication(
    events: list[Event], sent: list[float], waits: Mapping[str, float]
) -> Iterator[Communication]:
    """Yield the collectives of a step by cause; `sent` has their seconds in order."""
    started = [e for e in events if e.lane == "communication" and "op" in e.details]
    started.sort(key=lambda event: event.start_ns)
    for cause in COMMUNICATING:
        own = [s for e, s in zip(started, sent, strict=True) if e.name == cause]
        if own:
            hidden = max(0.0, sum(own) - waits[cause])
            yield Communication(cause, len(own), sum(own), waits[cause], hidden)
