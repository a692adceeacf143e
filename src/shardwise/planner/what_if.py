"""What-if analysis: change the cluster, its size or the user's options, and simulate again.

`relaxations` returns the changes from which a searched plan would gain; `sensitivity` adds the
effect of other clusters on its step. All rows are simulated.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, log10
from typing import Any

from shardwise.cluster import Cluster, Mesh
from shardwise.cluster.cluster import ClusterNode
from shardwise.cluster.links import Network
from shardwise.errors import ClusterError
from shardwise.formatting import GIB
from shardwise.planner.search import Candidate, Search, SearchOutcome
from shardwise.planner.search_space import UserOptions
from shardwise.planner.step_details import SimulatedStep
from shardwise.plans.search_result import WhatIf
from shardwise.shares import Shares
from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.estimate import Estimate
from shardwise.simulation.memory import peak_of
from shardwise.simulation.workload import WorkloadModel, Workloads

MORE_MEMORY = (0.05, 0.1, 0.25, 0.5, 1.0)  # fractions of a device's memory
LESS_MEMORY = (0.75, 0.5)
MAX_FITTING = 4  # faster configurations that are compared, for each amount of memory
MAX_SIMULATED = 12  # configurations that the search did not simulate
MIN_GAIN = 0.001  # fraction of the step below which a gain is not reported
LINK_SPEEDS = {0.5: "links half as fast", 2.0: "links twice as fast"}
DEVICE_SPEEDS = {1.1: "devices that compute 10% faster", 2.0: "devices that compute twice as fast"}
CLUSTER_SIZES = {Fraction(1, 2): "half", Fraction(2): "twice"}
BATCH_AXIS = "dp"
REPLAN = "another plan is needed: shardwise plan with that cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The same search with fewer restrictions."""

    options: Callable[[UserOptions], SearchOutcome]
    constraints: Callable[[], SearchOutcome] | None  # None if the user gave no constraints


# ------------------------------------------------------------ rows
def relaxations(
    outcome: SearchOutcome, search: Search, step: SimulatedStep, options: UserOptions, rerun: Rerun
) -> tuple[WhatIf, ...]:
    """Return the gains from more memory, free options, faster links and faster devices."""
    time = outcome.best.estimate.step_time_s
    fixed = ", ".join(options.given)
    freed = [(fixed, "options", rerun.options(UserOptions()))] if fixed else []
    if rerun.constraints is not None:
        freed.append(("constraints", "constraints", rerun.constraints()))
    return (
        *_more_memory(outcome, search),
        *(
            _faster(f"{name} left to the planner", kind, other.best, time)
            for name, kind, other in freed
            if other.feasible and other.best.estimate.step_time_s < time * (1 - MIN_GAIN)
        ),
        *_other_speeds(step, time, links=(2.0,), devices=(1.1,)),
    )


def sensitivity(step: SimulatedStep, relaxed: Sequence[WhatIf]) -> tuple[WhatIf, ...]:
    """Return the step on other clusters, including those of `relaxed`."""
    time = _library_time(step)
    clusters = [row for row in relaxed if row.kind not in ("options", "constraints")]
    links = tuple(LINK_SPEEDS) if step.evaluator.cluster.num_ranks > 1 else ()
    simulated = {(row.kind, row.value) for row in clusters}
    links = tuple(f for f in links if ("bandwidth", f) not in simulated)
    devices = tuple(f for f in DEVICE_SPEEDS if ("compute", f) not in simulated)
    return (
        *(row for row in clusters if row.kind == "memory"),
        *_less_memory(step.estimate),
        *(row for row in clusters if row.kind != "memory"),
        *_other_speeds(step, time, links, devices),
        *_other_sizes(step, time),
    )


def _faster(
    change: str, kind: str, candidate: Candidate, time: float, value: float | None = None
) -> WhatIf:
    seconds = candidate.estimate.step_time_s
    return WhatIf(
        kind=kind,
        change=change,
        value=value,
        step_time_s=seconds,
        ratio=seconds / time,
        note=f"with the plan {candidate.config}",
        plan=str(candidate.config),
    )


def _more_memory(outcome: SearchOutcome, search: Search) -> Iterator[WhatIf]:
    best = outcome.best.estimate
    time, limit = best.step_time_s, peak_of(best.memory).limit_bytes
    shortest = time * (1 - MIN_GAIN)
    for share in MORE_MEMORY:
        candidate = _fastest_with_memory(outcome, search, 1 + share, shortest)
        if candidate is not None:
            shortest = candidate.estimate.step_time_s
            extra = rounded_up((peak_of(candidate.estimate.memory).peak_bytes - limit) / GIB)
            yield _faster(f"{extra:g} GiB more per device", "memory", candidate, time, extra)


def rounded_up(gib: float) -> float:
    """Round up to one or two significant decimals.

    >>> rounded_up(10.72), rounded_up(0.1403), rounded_up(0.0031)
    (10.8, 0.15, 0.0031)
    """
    places: int = 1 if gib >= 1 else 1 - floor(log10(gib))
    return round(ceil(gib * 10.0**places - 1e-9) / 10.0**places, places)


def _fastest_with_memory(
    outcome: SearchOutcome, search: Search, memory: float, shortest: float
) -> Candidate | None:
    """Return the fastest configuration below `shortest` with `memory` times a device's memory."""
    fitting = simulated = 0
    best: Candidate | None = None
    for bound in outcome.bounds:
        if bound.seconds >= shortest or fitting >= MAX_FITTING or simulated >= MAX_SIMULATED:
            break
        if bound.memory > memory:
            continue
        simulated += not search.knows(bound.config)
        candidate = search.simulate(bound.config)
        if not 1.0 < _fullness(candidate) <= memory:
            continue
        candidate = search.simulate(bound.config, all_groups=True)
        if _fullness(candidate) > memory:
            continue
        fitting += 1
        if candidate.estimate.step_time_s < shortest:
            best, shortest = candidate, candidate.estimate.step_time_s
    return best


def _fullness(candidate: Candidate) -> float:
    """Return the memory of the fullest rank as a fraction of its device's."""
    peak = peak_of(candidate.estimate.memory)
    return peak.peak_bytes / peak.limit_bytes


def _less_memory(estimate: Estimate) -> Iterator[WhatIf]:
    """Yield whether the plan still fits in less memory, which needs no simulation."""
    peak = peak_of(estimate.memory)
    for part in LESS_MEMORY:
        limit = peak.limit_bytes * part
        fits = peak.peak_bytes <= limit
        needs = f"{gib_text(peak.peak_bytes)} of {gib_text(limit)}"
        yield WhatIf(
            kind="memory",
            change=f"{part:.0%} of the memory per device",
            value=part,
            step_time_s=estimate.step_time_s if fits else None,
            ratio=1.0 if fits else None,
            feasible=fits,
            note=f"takes {needs}" if fits else f"needs {needs}; {REPLAN}",
        )


def _library_time(step: SimulatedStep) -> float:
    """Return the step time with the library's collectives, which changed clusters use as well."""
    costs = step.evaluator.costs
    if costs.choose is None:
        return step.estimate.step_time_s
    evaluator = step.evaluator.on(costs.cluster)
    return evaluator.estimate(step.workloads, step.execution, {0}).step_time_s


def _other_speeds(
    step: SimulatedStep, time: float, links: Sequence[float], devices: Sequence[float]
) -> Iterator[WhatIf]:
    """Yield the plan with links and devices of other speeds; ratios are relative to `time`."""
    cluster, table = step.evaluator.cluster, step.evaluator.costs.table
    changes = [("bandwidth", LINK_SPEEDS[f], f, faster_links(cluster, f)) for f in links]
    if table is None:  # measured times do not follow the speed of another device
        changes += [("compute", DEVICE_SPEEDS[f], f, faster_devices(cluster, f)) for f in devices]
    for kind, change, factor, other in changes:
        estimate = step.evaluator.on(other).estimate(step.workloads, step.execution, {0})
        yield WhatIf(
            kind=kind,
            change=change,
            value=factor,
            step_time_s=estimate.step_time_s,
            ratio=estimate.step_time_s / time,
        )


def _other_sizes(step: SimulatedStep, time: float) -> Iterator[WhatIf]:
    """Yield the same batch on more or fewer devices, by changing the data-parallel ranks."""
    ranks = step.evaluator.cluster.num_ranks
    for factor, word in CLUSTER_SIZES.items():
        if (ranks * factor).denominator == 1:
            row = WhatIf(
                kind="devices",
                change=f"{word} the devices, {int(ranks * factor):,}",
                value=float(factor),
                feasible=False,
                note=REPLAN,
            )
            yield _scaled(row, step, factor, time)


def _scaled(row: WhatIf, step: SimulatedStep, factor: Fraction, time: float) -> WhatIf:
    """Return the row with the step of the scaled plan, or with the reason why it cannot run."""
    cluster = scale_cluster(step.evaluator.cluster, factor)
    scaled = _scale_data_parallel(step, factor)
    if cluster is None or scaled is None:
        return row
    execution, workloads = scaled
    dp = max(group.mesh.axis_size(BATCH_AXIS) for group in execution.groups)
    count, rows = execution.num_microbatches, step.estimate.rows
    if dp * count > rows:
        note = f"{rows} rows are too few for dp={dp} x {count} micro-batches"
        return replace(row, note=f"{note}; {REPLAN}")
    watched = {0, 1, len(execution.groups) - 1}
    estimate = step.evaluator.on(cluster).estimate(workloads, execution, watched)
    peak = peak_of(estimate.memory)
    if peak.peak_bytes > peak.limit_bytes:
        needs = f"needs {gib_text(peak.peak_bytes)} of {gib_text(peak.limit_bytes)}"
        return replace(row, note=f"{needs}; {REPLAN}")
    return replace(
        row,
        step_time_s=estimate.step_time_s,
        ratio=estimate.step_time_s / time,
        feasible=True,
        note=f"the same batch with dp={dp}, {gib_text(peak.peak_bytes)} per device",
    )


def gib_text(size: float) -> str:
    """Return the bytes in GiB, with three significant digits below 1 GiB.

    >>> gib_text(3 * 2**20), gib_text(80 * 2**30)
    ('0.00293 GiB', '80.0 GiB')
    """
    amount = size / GIB
    return f"{amount:.1f} GiB" if abs(amount) >= 1 else f"{amount:.3g} GiB"


# ------------------------------------------------------------ changed clusters
def faster_devices(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with every device's rates multiplied."""
    nodes = []
    for node in cluster.nodes:
        faster = (replace(device, speed=device.speed * factor) for device in node.devices)
        nodes.append(replace(node, devices=tuple(faster)))
    return replace(cluster, nodes=tuple(nodes))


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of every link, NIC, switch and trunk multiplied."""
    names = ("bandwidth_bytes_per_s", "bus_bytes_per_s", "uplink_bytes_per_s")

    def faster(part: Any) -> Any:
        rates = {name: getattr(part, name, None) for name in names}
        higher = {name: rate * factor for name, rate in rates.items() if rate is not None}
        return replace(part, **higher) if higher else part

    nodes = (replace(n, link=faster(n.link), nic=faster(n.nic)) for n in cluster.nodes)
    network = replace(
        cluster.network,
        domains=tuple(replace(d, link=faster(d.link)) for d in cluster.network.domains),
        switches=tuple(map(faster, cluster.network.switches)),
        trunks=tuple(map(faster, cluster.network.trunks)),
    )
    return replace(cluster, nodes=tuple(nodes), network=network)


def scale_cluster(cluster: Cluster, factor: Fraction) -> Cluster | None:
    """Return a cluster with `factor` times the nodes, or devices if there is no network.

    The result is None if the nodes differ, or if the network between more nodes is unknown.
    """
    if len(cluster.nodes) != 1 or cluster.network.trunks:
        return None
    (node,) = cluster.nodes
    copies, devices = node.copies * factor, node.count * factor
    try:
        if copies.denominator == 1 and node.nic is not None:
            stem = re.sub(r"\[.*\]", "", node.name) or "node"
            name = node.name if copies == 1 and node.copies == 1 else f"{stem}[0-{int(copies) - 1}]"
            return _rename_node(cluster, node, name)
        if devices.denominator == 1 and node.copies == 1 and devices >= 1:
            kinds = node.devices * -(-int(devices) // node.count)
            return replace(cluster, nodes=(replace(node, devices=kinds[: int(devices)]),))
    except ClusterError:
        return None
    return None


def _rename_node(cluster: Cluster, node: ClusterNode, name: str) -> Cluster | None:
    network = cluster.network
    named = [domain.nodes for domain in network.domains] + [s.nodes for s in network.switches]
    if any(nodes != (node.name,) for nodes in named):
        return None
    return replace(
        cluster,
        nodes=(replace(node, name=name, address="", ssh=None),),
        network=network.with_nodes(lambda nodes, every: (name,)),
    )


def copy_cluster(cluster: Cluster, factor: int) -> Cluster | None:
    """Return the cluster with `factor` copies of all its nodes and of their network.

    A single node without a network has `factor` times the devices instead.
    """
    name = f"{factor} x {cluster.name}"
    if any(node.nic is None for node in cluster.nodes):
        if cluster.num_nodes > 1 or cluster.nodes[0].link is None:
            return None
        (node,) = cluster.nodes
        return replace(cluster, name=name, nodes=(replace(node, devices=node.devices * factor),))
    nodes, network = list(cluster.nodes), cluster.network
    for number in range(1, factor):
        nodes += [
            replace(node, name=f"copy{number}-{node.name}", address="", ssh=None)
            for node in cluster.nodes
        ]
        network = _join_network(network, cluster.network, f"copy{number}-")
    return replace(cluster, name=name, nodes=tuple(nodes), network=network)


def _join_network(network: Network, original: Network, prefix: str) -> Network:
    """Return the network with a copy of the original's domains, switches and trunks."""
    copy = original.with_nodes(lambda nodes, every: tuple(prefix + n for n in nodes), prefix)
    return replace(
        network,
        domains=(*network.domains, *copy.domains),
        switches=(*network.switches, *copy.switches),
        trunks=(*network.trunks, *copy.trunks),
    )


def _scale_data_parallel(
    step: SimulatedStep, factor: Fraction
) -> tuple[ExecutionConfig, Workloads] | None:
    """Return the config with `factor` times the data-parallel ranks, and its workloads."""
    groups: list[Group] = []
    workloads, offset = {}, 0
    for number, group in enumerate(step.execution.groups):
        mesh = _scale_mesh(group.mesh, factor)
        first = group.ranks[0]
        consecutive = group.ranks == tuple(range(first, first + len(group.ranks)))
        if mesh is None or not consecutive or BATCH_AXIS not in step.workload_of(number).batch:
            return None
        groups.append(Group(mesh=mesh, ranks=tuple(range(offset, offset + mesh.size))))
        offset += mesh.size
        workloads[mesh] = step.workload_of(number)
    execution = replace(step.execution, groups=tuple(groups))
    return execution, step.workloads if isinstance(step.workloads, WorkloadModel) else workloads


def _scale_mesh(mesh: Mesh, factor: Fraction) -> Mesh | None:
    size = dict(mesh.axes).get(BATCH_AXIS, 1)
    if isinstance(size, Shares) or (size * factor).denominator != 1:
        return None
    others = tuple((axis, n) for axis, n in mesh.axes if axis != BATCH_AXIS)
    return Mesh(axes=((BATCH_AXIS, int(size * factor)), *others))
