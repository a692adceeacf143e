"""Measured times of a plan's local calls and programs: `measure_plan`, `rehearsed`, and plans
made with them: `tune`.

Enters: a graph and the cluster it is for, on one of its machines. Leaves: an `OpTable` for `plan`
and `simulate`, or the plan that is best by such a table.

Ranks of a CPU share its caches and memory, so as many processes measure the same calls at the
same time as ranks would run here. A GPU is measured by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwise.api.rehearsal import rehearse
from shardwise.cluster import Cluster, Device
from shardwise.cost import OpTable, Signature, cost_of, kernels_seconds
from shardwise.cost.calls import UPDATES, encode
from shardwise.cost.table import UPDATE, missing
from shardwise.cost.timing import BUDGET_S
from shardwise.errors import RankError
from shardwise.ir import Graph
from shardwise.planner.search import plan
from shardwise.plans import Plan
from shardwise.simulation.simulate import plan_calls, simulate

TIMEOUT_S = 600.0
KINDS: tuple[dict[str, int], ...] = ({"pp": 1, "tp": 1}, {"pp": 1}, {})
MARGIN = 0.03  # of the step: predictions of two kinds of plans agree no better
_TAIL = 6  # lines of a failed process's last words


def measure_plan(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    budget_s: float = BUDGET_S,
) -> OpTable:
    """`table` with the calls of the plan's program that it lacked, measured on this machine.

    AdamW's step for parameters of some sizes is measured, too. Devices of one name are measured
    once; a device's own speed scales what was measured.
    """
    found = OpTable()
    found.merge(table or OpTable())
    for device, calls in plan_calls(graph, plan, cluster).items():
        wanted = missing(calls, device, found)
        updates = [n for n in UPDATES if (UPDATE.format(n), device.name) not in found.entries]
        if wanted or updates:
            found.merge(_measured(wanted, updates, device, _beside(cluster, device), budget_s))
    return found


def tune(
    graph: Graph,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    report: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> tuple[Plan, OpTable]:
    """The best plan by what its programs take on this machine, with the table that says so.

    Plans, measures what the plan calls, plans again with these times, and rehearses the result:
    for every kind of plan (`KINDS`), because what a program takes beyond its calls differs between
    kinds. One of more kinds of parallelism must be quicker by `MARGIN`. Options are `plan`'s.
    """
    found = OpTable()
    found.merge(table or OpTable())
    best: _Candidate | None = None
    for kind in KINDS:
        if any(options.get(name, value) != value for name, value in kind.items()):
            continue
        made, found = _measured_plan(graph, cluster, found, {**options, **kind})
        if best is not None and _same(made, best.plan):
            continue
        programs = rehearsed(graph, made, cluster, found)
        own = simulate(graph, made, cluster, table=found.with_programs(programs))
        report(f"{_what(made)}: {own.step_time_s * 1e3:.3g} ms")
        if best is None or own.step_time_s < (1 - MARGIN) * best.seconds:
            best = _Candidate(kind=kind, plan=made, seconds=own.step_time_s, programs=programs)
    assert best is not None
    table = found.with_programs(best.programs)
    return plan(graph, cluster, table=table, **{**options, **best.kind}), table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    kind: dict[str, int]
    plan: Plan
    seconds: float
    programs: list[tuple[str, float, float]]


def _same(one: Plan, other: Plan) -> bool:
    return one.with_(search={}) == other.with_(search={})


def _what(made: Plan) -> str:
    searched: Any = made.search
    return str(searched["best"]["what"])


def _measured_plan(
    graph: Graph, cluster: Cluster, table: OpTable, options: dict[str, Any]
) -> tuple[Plan, OpTable]:
    """The best plan by measured times of the calls of a first one."""
    first = plan(graph, cluster, table=table, **options)
    measured = measure_plan(graph, first, cluster, table=table)
    if len(measured.entries) == len(table.entries):
        return first, measured
    return plan(graph, cluster, table=measured, **options), measured


def rehearsed(
    graph: Graph, plan: Plan, cluster: Cluster, table: OpTable
) -> list[tuple[str, float, float]]:
    """What the plan's programs take over the sum of their calls; noted where they cannot run."""
    try:
        run = rehearse(graph, plan, cluster)
    except RankError as error:
        table.notes.append(f"plan {plan.name} was not rehearsed: {error.message}")
        return []
    estimate = simulate(graph, plan, cluster, table=table.with_programs([]))
    computing, updating = 0.0, 0.0
    for stage in estimate.stages:
        if stage.group in run.training_s:
            computing += plan.microbatches * stage.computing
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


def _measured(
    calls: Sequence[Signature],
    updates: Sequence[int],
    device: Device,
    processes: int,
    budget_s: float,
) -> OpTable:
    written = {call: data for call in calls if (data := encode(call)) is not None}
    job = {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.usable_bytes,
        "calls": list(written.values()),
        "updates": list(updates),
        "budget_s": budget_s,
    }
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(job)) for _ in range(processes)]
        tables = [_answer(worker, rank) for rank, worker in enumerate(workers)]
    joined = _joined(tables)
    for call in written:
        cost = cost_of(call)
        joined.compare(
            str(call),
            device.name,
            kernels_seconds(cost.forward, device) * device.speed,
            kernels_seconds(cost.backward, device) * device.speed,
        )
    joined.notes += [f"{call}: cannot travel to a process" for call in calls if call not in written]
    return joined


@contextlib.contextmanager
def _worker(job: dict[str, Any]) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise.cost.calls"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _answer(process: subprocess.Popen[str], rank: int) -> OpTable:
    try:
        said, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RankError(f"process {rank} measured no calls within {TIMEOUT_S:g} s") from None
    if process.returncode:
        words = "\n    ".join(errors.splitlines()[-_TAIL:])
        raise RankError(
            f"process {rank} ended with code {process.returncode} while it measured calls: {words}",
            hint="shardwise doctor",
        )
    answer = json.loads(said.splitlines()[-1])
    table = OpTable.from_json(answer["table"])
    table.notes += answer["notes"]
    return table


def _joined(tables: Sequence[OpTable]) -> OpTable:
    """The median over processes of every call."""
    joined = OpTable()
    for call, device in tables[0].entries:
        each = [t.entries[call, device] for t in tables if (call, device) in t.entries]
        joined.add(call, device, median(f for f, _ in each), median(b for _, b in each))
    joined.notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return joined
