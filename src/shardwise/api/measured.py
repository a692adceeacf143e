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
from shardwise.errors import InfeasiblePlan, RankError
from shardwise.ir import Graph
from shardwise.planner.search import plan
from shardwise.plans import Plan
from shardwise.simulation.simulate import plan_calls, simulate

TIMEOUT_S = 600.0
KINDS: tuple[dict[str, int], ...] = (  # from the simplest
    {"pp": 1, "tp": 1, "microbatches": 1},
    {"pp": 1, "tp": 1},
    {"pp": 1},
    {},
)
ROUNDS = 3  # of rehearsing a plan and planning with what that took
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

    For every kind of plan (`KINDS`): plans, measures what the plan calls, plans again with these
    times, rehearses the result, and goes on with what that took until a plan comes out again. The
    quickest of all that were rehearsed is taken; one of more kinds of parallelism must be
    quicker by `MARGIN`. Options are `plan`'s.
    """
    found = OpTable()
    found.merge(table or OpTable())
    tried: list[_Rehearsed] = []
    for kind in KINDS:
        if not all(options.get(name, value) == value for name, value in kind.items()):
            continue
        try:
            found = _rounds(graph, cluster, found, {**options, **kind}, tried, report)
        except InfeasiblePlan:
            if kind:  # more kinds of parallelism may fit
                continue
            raise
    best = tried[0]
    for candidate in tried[1:]:
        least = best.seconds if candidate.kind == best.kind else (1 - MARGIN) * best.seconds
        best = candidate if candidate.seconds < least else best
    table = found.with_programs(best.programs)
    return _reported(graph, cluster, best.plan, table, options), table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rehearsed:
    """A plan, its predicted step, and what its programs took over the sum of their calls."""

    plan: Plan
    kind: tuple[int, ...]  # ranks of stages and of tensors, micro-batches
    seconds: float
    programs: list[tuple[str, float, float]]


def _rounds(
    graph: Graph,
    cluster: Cluster,
    table: OpTable,
    options: dict[str, Any],
    tried: list[_Rehearsed],
    report: Callable[[str], None],
) -> OpTable:
    """Adds to `tried` plans of one kind, each the best by what the one before it took."""
    programs = table.programs
    for _ in range(ROUNDS):
        made, table = _measured_plan(graph, cluster, table.with_programs(programs), options)
        if any(_same(made, candidate.plan) for candidate in tried):
            break
        programs = rehearsed(graph, made, cluster, table)
        own = simulate(graph, made, cluster, table=table.with_programs(programs)).step_time_s
        report(f"{_best(made)['what']}: {own * 1e3:.3g} ms")
        kind = tuple(_best(made)["point"][name] for name in KINDS[0])
        tried.append(_Rehearsed(plan=made, kind=kind, seconds=own, programs=programs))
    return table


def _measured_plan(
    graph: Graph, cluster: Cluster, table: OpTable, options: dict[str, Any]
) -> tuple[Plan, OpTable]:
    """The best plan by measured times of the calls of a first one."""
    first = plan(graph, cluster, table=table, **options)
    measured = measure_plan(graph, first, cluster, table=table)
    if len(measured.entries) == len(table.entries):
        return first, measured
    return plan(graph, cluster, table=measured, **options), measured


def _reported(
    graph: Graph, cluster: Cluster, best: Plan, table: OpTable, options: dict[str, Any]
) -> Plan:
    """The same plan with the figures of its own rehearsal, where its settings lead to it again."""
    point = _best(best)["point"]
    names = ("dp", "tp", "pp", "schedule", "microbatches", "recompute", "offload")
    fixed = {name: point[name] for name in names if point[name] not in (None, "")}
    again = plan(graph, cluster, table=table, **{**options, **fixed})
    return again if _same(again, best) else best


def _same(one: Plan, other: Plan) -> bool:
    return one.with_(search={}) == other.with_(search={})


def _best(made: Plan) -> Any:
    return made.search["best"]


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
