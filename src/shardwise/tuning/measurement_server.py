"""`measurement_server`: runs plans of one model and calls of their programs, to measure them.

On CPUs they run in forks of this process as it was before anything was computed, since CUDA builds
of torch refuse autograd in forks of a process that has used it (`processes.fork_server`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from shardwise.cluster import Cluster, Device
from shardwise.cost import OpTable, Signature, cost_of, kernels_seconds
from shardwise.cost.table import UPDATE, missing
from shardwise.cost.timing import BUDGET_S, UPDATES, encode, measure_job
from shardwise.errors import RankError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.processes import TIMEOUT_S, Ask, fork_ranks, fork_server, run_workers
from shardwise.simulation.estimate import plan_calls, simulate
from shardwise.tuning.compute_time import ComputeTimes, time_compute
from shardwise.tuning.race import race_plans

MEASURING_S = 600.0  # limit for the calls of one plan


class MeasurementServer:
    """Run plans of one model on this machine, and calls of their programs."""

    def __init__(self, graph: Graph, cluster: Cluster, ask: Ask | None = None) -> None:
        self.graph, self.cluster, self._ask = graph, cluster, ask

    def time_compute(self, plan: Plan) -> ComputeTimes:
        """Time the plan's programs without communication."""
        if self._ask is None:
            return time_compute(self.graph, plan, self.cluster)
        found = self._ask({"compute": _written(plan)})
        return ComputeTimes(
            **{name: {int(g): s for g, s in times.items()} for name, times in found.items()}
        )

    def race_plans(self, plans: Sequence[Plan]) -> list[float]:
        """Return the seconds of a step of each plan, with all communication."""
        if self._ask is None:
            return race_plans(self.graph, plans, self.cluster)
        found: list[float] = self._ask({"race": [_written(plan) for plan in plans]})
        return found

    def measure(self, job: dict[str, Any], ranks: int) -> list[OpTable]:
        """Time the same calls on several ranks of a CPU at the same time; one table per rank."""
        if self._ask is None:
            return _measured(job, ranks)
        found = self._ask({"measure": job, "ranks": ranks})
        return [OpTable.from_json(table) for table in found]

    def serve(self, question: dict[str, Any]) -> Any:
        """Answer a question in the forked process."""
        if "race" in question:
            plans = [Plan.from_json(data) for data in question["race"]]
            return race_plans(self.graph, plans, self.cluster)
        if "measure" in question:
            return [t.to_json() for t in _measured(question["measure"], question["ranks"])]
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


def _measured(job: dict[str, Any], ranks: int) -> list[OpTable]:
    found = fork_ranks(lambda *_: measure_job(job).to_json(), ranks, timeout_s=MEASURING_S)
    return [OpTable.from_json(table) for table in found]


def _written(plan: Plan) -> dict[str, Any]:
    return plan.with_(search=None).to_json()


# Measure the calls and programs of a plan: `measure_plan` and `compute_factors`.
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
    found = OpTable()
    found.merge(table or OpTable())
    for device, calls in plan_calls(graph, plan, cluster).items():
        wanted = missing(calls, device, found)
        updates = [n for n in UPDATES if (UPDATE.format(n), device.name) not in found.entries]
        if wanted or updates:
            job = _job(wanted, updates, device, budget_s)
            ranks = _beside(cluster, device)
            if server is not None and device.kind == "cpu":
                tables = server.measure(job, ranks)
            else:
                results = run_workers("shardwise.cost.timing", [job] * ranks, MEASURING_S)
                tables = [OpTable.from_json(text) for text in results]
            found.merge(_compared(_joined(tables), wanted, device))
    return found


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
    computing, updating = 0.0, 0.0
    for stage in estimate.stages:
        if stage.group in run.training_s:
            computing += plan.num_microbatches * stage.computing
    for span in estimate.timeline.after:
        if span.kind == "optimizer" and span.group in run.update_s:
            updating += span.end - span.start
    training, update = sum(run.training_s.values()), sum(run.update_s.values())
    if not computing or not updating:
        return []
    return [(cluster.device(0).name, training / computing, update / updating)]


def _beside(cluster: Cluster, device: Device) -> int:
    """Return how many ranks share a node with this device."""
    if device.kind != "cpu":
        return 1
    return max(len(node.devices) for node in cluster.nodes if device in node.devices)


def _job(
    calls: Sequence[Signature], updates: Sequence[int], device: Device, budget_s: float
) -> dict[str, Any]:
    """Return what a process measures, as JSON."""
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.usable_bytes,
        "calls": [data for call in calls if (data := encode(call)) is not None],
        "updates": list(updates),
        "budget_s": budget_s,
    }


def _compared(joined: OpTable, calls: Sequence[Signature], device: Device) -> OpTable:
    """Add the computed times of the same calls, and notes on those that were not measured."""
    for call in calls:
        if encode(call) is None:
            joined.notes.append(f"{call}: cannot be sent to a process")
            continue
        cost = cost_of(call)
        joined.compare(
            str(call),
            device.name,
            kernels_seconds(cost.forward, device) * device.speed,
            kernels_seconds(cost.backward, device) * device.speed,
        )
    return joined


def _joined(tables: Sequence[OpTable]) -> OpTable:
    """Return the median over processes of every call."""
    joined = OpTable()
    for call, device in tables[0].entries:
        each = [t.entries[call, device] for t in tables if (call, device) in t.entries]
        joined.add(call, device, median(f for f, _ in each), median(b for _, b in each))
    joined.notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return joined
