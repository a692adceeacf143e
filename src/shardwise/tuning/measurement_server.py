"""Measure plans of one model, and the calls of their programs, on this machine.

On CPUs they run in forks of this process as it was before anything was computed, since CUDA builds
of torch refuse autograd in forks of a process that has used it (`processes.fork_server`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from shardwise.cluster import Cluster, Device
from shardwise.cost import OpTable, Signature, cost_of, kernels_seconds
from shardwise.cost.table import UPDATE, missing
from shardwise.cost.timing import BUDGET_S, UPDATES, TimingJob, encode_call, measure_job
from shardwise.errors import RankError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.processes import TIMEOUT_S, Ask, fork_ranks, fork_server, run_workers
from shardwise.simulation.estimate import plan_calls, simulate
from shardwise.tuning.compute_time import ComputeTimes, time_compute
from shardwise.tuning.race import race_plans

MEASURING_S = 600.0  # limit for the calls of one plan


class MeasurementServer:
    """Run plans of one model on this machine, and calls of their programs.

    `ask` passes questions on to a forked server, as JSON; without it this process answers itself.
    """

    def __init__(self, graph: Graph, cluster: Cluster, ask: Ask | None = None) -> None:
        self.graph, self.cluster, self._ask = graph, cluster, ask or self.serve

    def time_compute(self, plan: Plan) -> ComputeTimes:
        """Time the plan's programs without communication."""
        times = self._ask({"compute": _decisions(plan)})
        return ComputeTimes(
            **{name: {int(g): s for g, s in by_group.items()} for name, by_group in times.items()}
        )

    def race_plans(self, plans: Sequence[Plan]) -> list[float]:
        """Return the seconds of a step of each plan, with all communication."""
        seconds: list[float] = self._ask({"race": [_decisions(plan) for plan in plans]})
        return seconds

    def measure(self, job: TimingJob, ranks: int) -> list[OpTable]:
        """Time the same calls on several ranks of a CPU at the same time; one table per rank."""
        return [OpTable.from_json(t) for t in self._ask({"measure": job, "ranks": ranks})]

    def serve(self, question: Any) -> Any:
        """Answer a question."""
        if "race" in question:
            plans = [Plan.from_json(data) for data in question["race"]]
            return race_plans(self.graph, plans, self.cluster)
        if "measure" in question:
            measure = lambda *_: measure_job(question["measure"]).to_json()  # noqa: E731
            return fork_ranks(measure, question["ranks"], timeout_s=MEASURING_S)
        return asdict(time_compute(self.graph, Plan.from_json(question["compute"]), self.cluster))


@contextlib.contextmanager
def measurement_server(graph: Graph, cluster: Cluster) -> Iterator[MeasurementServer]:
    """Open a server for plans of one model; GPUs are used by this process itself."""
    if cluster.device(0).kind != "cpu":
        yield MeasurementServer(graph, cluster)
        return
    serve = MeasurementServer(graph, cluster).serve
    with fork_server(serve, timeout_s=MEASURING_S + TIMEOUT_S) as ask:
        yield MeasurementServer(graph, cluster, ask)


def _decisions(plan: Plan) -> dict[str, Any]:
    return plan.with_(search=None).to_json()


# ------------------------------------------------------------ the calls and programs of a plan
#
# Ranks of a CPU share its caches and memory bandwidth, so as many processes measure the same calls
# at the same time as ranks would run here. A GPU is measured by one process.


def measure_plan(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    budget_s: float = BUDGET_S,
    server: MeasurementServer | None = None,
) -> OpTable:
    """Return `table` with the calls of the plan's programs that it lacked, measured here.

    AdamW's step is measured too, for parameters of some sizes. Devices of one name are measured
    once; a device's own speed scales the result. CPUs are measured by the `server` if there is
    one, which forks its ranks faster than new processes start.
    """
    measured = OpTable()
    measured.merge(table or OpTable())
    for device, calls in plan_calls(graph, plan, cluster).items():
        unknown = missing(calls, device, measured)
        updates = [n for n in UPDATES if (UPDATE.format(n), device.name) not in measured.entries]
        if not (unknown or updates):
            continue
        job = TimingJob(
            name=device.name,
            kind=device.kind,
            memory_bytes=device.usable_bytes,
            calls=[data for call in unknown if (data := encode_call(call)) is not None],
            updates=updates,
            budget_s=budget_s,
        )
        ranks = 1
        if device.kind == "cpu":
            ranks = max(len(node.devices) for node in cluster.nodes if device in node.devices)
        if server is not None and device.kind == "cpu":
            tables = server.measure(job, ranks)
        else:
            results = run_workers("shardwise.cost.timing", [job] * ranks, MEASURING_S)
            tables = [OpTable.from_json(text) for text in results]
        joined = _median(tables)
        _compare(joined, unknown, device)
        measured.merge(joined)
    return measured


def compute_factors(
    server: MeasurementServer, plan: Plan, table: OpTable
) -> list[tuple[str, float, float]]:
    """Return the programs' times relative to the sum of their calls; none if they fail here."""
    graph, cluster = server.graph, server.cluster
    try:
        run = server.time_compute(plan)
    except RankError as error:
        table.notes.append(f"the compute of plan {plan.name} was not timed: {error.message}")
        return []
    estimate = simulate(graph, plan, cluster, table=table.with_programs([]))
    computing = plan.num_microbatches * sum(
        stage.computing for stage in estimate.stages if stage.group in run.training_s
    )
    updating = sum(
        span.end - span.start
        for span in estimate.timeline.after
        if span.kind == "optimizer" and span.group in run.update_s
    )
    if not computing or not updating:
        return []
    training, update = sum(run.training_s.values()), sum(run.update_s.values())
    return [(cluster.device(0).name, training / computing, update / updating)]


def _median(tables: Sequence[OpTable]) -> OpTable:
    """Return the median over processes of every call."""
    joined = OpTable()
    for call, device in tables[0].entries:
        times = [t.entries[call, device] for t in tables if (call, device) in t.entries]
        joined.add(call, device, median(f for f, _ in times), median(b for _, b in times))
    joined.notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return joined


def _compare(joined: OpTable, calls: Sequence[Signature], device: Device) -> None:
    """Add the computed times of the same calls, and notes on those that were not measured."""
    for call in calls:
        if encode_call(call) is None:
            joined.notes.append(f"{call}: cannot be sent to a process")
            continue
        cost = cost_of(call)
        joined.compare(
            str(call),
            device.name,
            kernels_seconds(cost.forward, device) * device.speed,
            kernels_seconds(cost.backward, device) * device.speed,
        )
