"""Where plans of one model are rehearsed and tried: `proving_ground`."""

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
from shardwise.tuning.compute_time import Rehearsal, rehearse
from shardwise.tuning.race import try_plans

MEASURING_S = 600.0  # the most that the calls of one plan may take


class ProvingGround:
    """Runs plans of one model on this machine, and calls of their programs."""

    def __init__(self, graph: Graph, cluster: Cluster, ask: Ask | None = None) -> None:
        self.graph, self.cluster, self._ask = graph, cluster, ask

    def rehearse(self, plan: Plan) -> Rehearsal:
        """The plan's programs without communication."""
        if self._ask is None:
            return rehearse(self.graph, plan, self.cluster)
        found = self._ask({"rehearse": _written(plan)})
        return Rehearsal(
            **{name: {int(g): s for g, s in times.items()} for name, times in found.items()}
        )

    def try_plans(self, plans: Sequence[Plan]) -> list[float]:
        """Seconds of a step of each plan, with all communication."""
        if self._ask is None:
            return try_plans(self.graph, plans, self.cluster)
        found: list[float] = self._ask({"try": [_written(plan) for plan in plans]})
        return found

    def measure(self, job: dict[str, Any], ranks: int) -> list[OpTable]:
        """What each of some processors' ranks takes for the same calls at the same time."""
        if self._ask is None:
            return _measured(job, ranks)
        found = self._ask({"measure": job, "ranks": ranks})
        return [OpTable.from_json(table) for table in found]

    def serve(self, question: dict[str, Any]) -> Any:
        """What the fork that stands by answers."""
        if "try" in question:
            plans = [Plan.from_json(data) for data in question["try"]]
            return try_plans(self.graph, plans, self.cluster)
        if "measure" in question:
            return [t.to_json() for t in _measured(question["measure"], question["ranks"])]
        return asdict(rehearse(self.graph, Plan.from_json(question["rehearse"]), self.cluster))


@contextlib.contextmanager
def proving_ground(graph: Graph, cluster: Cluster) -> Iterator[ProvingGround]:
    """For plans of one model; GPUs are used by this process itself."""
    if cluster.device(0).kind != "cpu":
        yield ProvingGround(graph, cluster)
        return
    serve = ProvingGround(graph, cluster).serve
    with fork_server(serve, timeout_s=MEASURING_S + TIMEOUT_S) as ask:
        yield ProvingGround(graph, cluster, ask)


def _measured(job: dict[str, Any], ranks: int) -> list[OpTable]:
    found = fork_ranks(lambda *_: measure_job(job).to_json(), ranks, timeout_s=MEASURING_S)
    return [OpTable.from_json(table) for table in found]


def _written(plan: Plan) -> dict[str, Any]:
    return plan.with_(search=None).to_json()


# Measured times of a plan's local calls and programs: `measure_plan`, `rehearsed`.
#
# Ranks of a CPU share its caches and memory, so as many processes measure the same calls at the
# same time as ranks would run here. A GPU is measured by one.


def measure_plan(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    budget_s: float = BUDGET_S,
    ground: ProvingGround | None = None,
) -> OpTable:
    """`table` with the calls of the plan's program that it lacked, measured on this machine.

    AdamW's step for parameters of some sizes is measured, too. Devices of one name are measured
    once; a device's own speed scales what was measured. Processors are measured on a `ground` that
    stands by, where there is one: its ranks are there at once.
    """
    found = OpTable()
    found.merge(table or OpTable())
    for device, calls in plan_calls(graph, plan, cluster).items():
        wanted = missing(calls, device, found)
        updates = [n for n in UPDATES if (UPDATE.format(n), device.name) not in found.entries]
        if wanted or updates:
            job = _job(wanted, updates, device, budget_s)
            ranks = _beside(cluster, device)
            if ground is not None and device.kind == "cpu":
                tables = ground.measure(job, ranks)
            else:
                results = run_workers("shardwise.cost.timing", [job] * ranks, MEASURING_S)
                tables = [OpTable.from_json(text) for text in results]
            found.merge(_compared(_joined(tables), wanted, device))
    return found


def rehearsed(ground: ProvingGround, plan: Plan, table: OpTable) -> list[tuple[str, float, float]]:
    """What the plan's programs take over the sum of their calls; noted where they cannot run."""
    graph, cluster = ground.graph, ground.cluster
    try:
        run = ground.rehearse(plan)
    except RankError as error:
        table.notes.append(f"plan {plan.name} was not rehearsed: {error.message}")
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
    """How many ranks share a node with this device."""
    if device.kind != "cpu":
        return 1
    return max(len(node.devices) for node in cluster.nodes if device in node.devices)


def _job(
    calls: Sequence[Signature], updates: Sequence[int], device: Device, budget_s: float
) -> dict[str, Any]:
    """What a process measures, as JSON."""
    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.usable_bytes,
        "calls": [data for call in calls if (data := encode(call)) is not None],
        "updates": list(updates),
        "budget_s": budget_s,
    }


def _compared(joined: OpTable, calls: Sequence[Signature], device: Device) -> OpTable:
    """With what is computed for the same calls, and notes on those that were not measured."""
    for call in calls:
        if encode(call) is None:
            joined.notes.append(f"{call}: cannot travel to a process")
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
    """The median over processes of every call."""
    joined = OpTable()
    for call, device in tables[0].entries:
        each = [t.entries[call, device] for t in tables if (call, device) in t.entries]
        joined.add(call, device, median(f for f, _ in each), median(b for _, b in each))
    joined.notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return joined
