"""Measured times of a plan's local calls and programs: `measure_plan`, `rehearsed`.

Enters: a graph and the cluster it is for, on one of its machines. Leaves: an `OpTable` for `plan`
and `simulate`.

Ranks of a CPU share its caches and memory, so as many processes measure the same calls at the
same time as ranks would run here. A GPU is measured by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from shardwise.api.proving import MEASURING_S, ProvingGround
from shardwise.cluster import Cluster, Device
from shardwise.cost import OpTable, Signature, cost_of, kernels_seconds
from shardwise.cost.calls import UPDATES, encode
from shardwise.cost.table import UPDATE, missing
from shardwise.cost.timing import BUDGET_S
from shardwise.errors import RankError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.processes import run_workers
from shardwise.simulation.simulate import plan_calls, simulate


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
                results = run_workers("shardwise.cost.calls", [job] * ranks, MEASURING_S)
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
