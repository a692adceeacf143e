"""Measured times of a plan's local calls: `measure_plan(graph, plan, cluster)`.

Enters: a graph, a plan and the cluster it is for, on one of its machines. Leaves: an `OpTable` for
`plan` and `simulate`.

Ranks of a CPU share its caches and memory, so as many processes measure the same calls at the
same time as ranks would run here. A GPU is measured by this process alone.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median

import torch

from shardwise.cluster import Cluster, Device
from shardwise.cost import OpTable, Signature, measure
from shardwise.cost.table import missing
from shardwise.cost.timing import BUDGET_S
from shardwise.errors import RankError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.simulation.simulate import plan_calls

TIMEOUT_S = 600.0


def measure_plan(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    budget_s: float = BUDGET_S,
) -> OpTable:
    """`table` with the calls of the plan's program that it lacked, measured on this machine.

    Devices of one name are measured once, at full speed; a device's own speed scales them.
    """
    found = OpTable(table.entries if table is not None else None)
    for device, calls in plan_calls(graph, plan, cluster).items():
        wanted = missing(calls, device, found)
        if wanted:
            found.merge(_measured(wanted, device, _beside(cluster, device), budget_s))
    return found


def _beside(cluster: Cluster, device: Device) -> int:
    """How many ranks share a node with this device."""
    if device.kind != "cpu":
        return 1
    return max(len(node.devices) for node in cluster.nodes if device in node.devices)


def _measured(
    calls: Sequence[Signature], device: Device, processes: int, budget_s: float
) -> OpTable:
    if processes == 1:
        return measure(calls, device, budget_s=budget_s)
    context = multiprocessing.get_context("fork")  # calls hold functions, which do not travel
    pipes, workers = [], []
    for _ in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(theirs, calls, device, budget_s), daemon=True)
        worker.start()
        theirs.close()
        pipes.append(ours)
        workers.append(worker)
    try:
        answers = [_answer(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return _joined(answers)


def _work(pipe: Connection, calls: Sequence[Signature], device: Device, budget_s: float) -> None:
    torch.set_num_threads(1)
    table = measure(calls, device, budget_s=budget_s)
    pipe.send_bytes(json.dumps({"table": table.to_json(), "notes": table.notes}).encode())


def _answer(pipe: Connection, rank: int) -> OpTable:
    if not pipe.poll(TIMEOUT_S):
        raise RankError(f"process {rank} measured no calls within {TIMEOUT_S:g} s")
    try:
        said = json.loads(pipe.recv_bytes())
    except EOFError:
        raise RankError(
            f"process {rank} ended while it measured calls", hint="shardwise doctor"
        ) from None
    table = OpTable.from_json(said["table"])
    table.notes += said["notes"]
    return table


def _joined(tables: Sequence[OpTable]) -> OpTable:
    """The median over processes of every call."""
    joined = OpTable()
    for call, device in tables[0].entries:
        both = [t.entries[call, device] for t in tables if (call, device) in t.entries]
        joined.add(call, device, median(f for f, _ in both), median(b for _, b in both))
    joined.notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return joined
