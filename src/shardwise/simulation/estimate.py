"""The predicted step of a model under an execution config: its time, its memory, and their parts.

An `Evaluator` caches what the configs of one model share, since the planner evaluates thousands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np

from shardwise.cluster import Cluster, Device, Mesh
from shardwise.collectives.messages.choice import Chooser, chosen
from shardwise.cost import OpTable, Signature
from shardwise.cost.sync import link_rates, special_syncs
from shardwise.errors import PlanError
from shardwise.formatting import GIB, seconds
from shardwise.ir import Graph
from shardwise.plans import Plan, Resolved, resolve, used_devices
from shardwise.plans.plan import block_constraints
from shardwise.plans.search_result import MemoryFigures
from shardwise.program.microbatches import separate_means
from shardwise.program.pipeline import plan_schedule
from shardwise.program.stages import with_keys
from shardwise.schedules import Schedule, default_schedule, make
from shardwise.schedules.levels import KINDS, levels_of
from shardwise.sharding.factors import analyze
from shardwise.shares import Shares
from shardwise.simulation.costs import ClusterCosts, ExecutionConfig, Group, NodeTimes, cached
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.memory import STORED, MemoryUse, group_memory, peak_of
from shardwise.simulation.pass_memory import StageMemory, stage_memory
from shardwise.simulation.stages import (
    Key,
    Layers,
    LocalStage,
    ParamClass,
    StageCost,
    stage_cost,
    sync_traffic,
    tied_bytes,
    with_offload,
)
from shardwise.simulation.step import Timeline, lay_out, step_times
from shardwise.simulation.workload import WorkloadModel, Workloads, workload_on


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted step: its timeline and the memory of every group."""

    timeline: Timeline
    memory: tuple[MemoryUse, ...]  # of the fullest rank of every group
    stages: tuple[StageCost, ...] = ()  # empty in a stored estimate
    rows: int  # of the batch
    num_ranks: int
    notes: tuple[str, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.timeline.step_time_s

    @property
    def peak(self) -> MemoryUse:
        """The memory of the group that is closest to its limit."""
        return peak_of(self.memory)

    @property
    def fits(self) -> bool:
        return all(use.fits for use in self.memory)

    def to_json(self) -> dict[str, object]:
        return {
            "step_time_s": self.step_time_s,
            "rows_per_s": self.rows / self.step_time_s if self.step_time_s else 0.0,
            "num_ranks": self.num_ranks,
            "timeline": self.timeline.to_json(),
            "memory": [use.to_json() for use in self.memory],
            "fits": self.fits,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        peak = self.peak
        lines = [
            f"step {seconds(self.step_time_s)}, {self.rows / self.step_time_s:,.1f} samples/s, "
            f"bubble {self.timeline.bubble_fraction:.1%}",
            f"memory {peak.peak_bytes / GIB:.1f} of {peak.limit_bytes / GIB:.1f} GiB in "
            f"{peak.when} of group {peak.group}" + ("" if self.fits else ": does not fit"),
        ]
        shown = {k: v for k, v in self.timeline.causes.items() if v > 0.0005 * self.step_time_s}
        lines += [f"  {k:12} {seconds(v):>10}" for k, v in shown.items()]
        lines += [f"  {traffic}" for traffic in self.timeline.times.syncs]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Class:
    """Ranks of a group with the same device and share of the batch."""

    device: Device
    rows: float
    max_rows: float  # of the largest micro-batch


_Ranks = tuple[_Class, Layers, Layers]  # of a typical and of the largest micro-batch


class Evaluator:
    """Estimates of one model on one cluster."""

    def __init__(
        self,
        fold: FoldedGraph,
        cluster: Cluster,
        table: OpTable | None = None,
        choose: Chooser | None = None,
        memory_limit: float = inf,
    ) -> None:
        self.fold, self.cluster, self.costs = fold, cluster, ClusterCosts(cluster, table, choose)
        self.memory_limit = memory_limit  # bytes of tensors on a device, in addition to its own
        kinds: dict[Device, int] = {}
        of_nodes = [
            np.tile([kinds.setdefault(d, len(kinds)) for d in node.devices], node.copies)
            for node in cluster.nodes
        ]
        self.kind = np.concatenate(of_nodes)
        self.devices = list(kinds)
        counts = np.repeat([n.count for n in cluster.nodes], [n.copies for n in cluster.nodes])
        self.node = np.repeat(np.arange(len(counts)), counts)
        self._times: dict[object, NodeTimes] = {}
        self._layers: dict[object, Layers] = {}
        self._shared: dict[object, dict[Key, ParamClass]] = {}
        self._schedules: dict[object, Schedule] = {}

    def estimate(
        self,
        workloads: Workloads,
        execution: ExecutionConfig,
        watched: Collection[int] | None = None,
    ) -> Estimate:
        """Return the predicted step; `workloads` are by mesh where groups differ.

        Memory is predicted for the groups in `watched`, by default for all.
        """
        by_group = [
            self._group(workloads, execution, number) for number in range(len(execution.groups))
        ]
        stages = [
            self._cost(stage, by_group[number], execution)
            for stage, number in enumerate(execution.placement)
        ]
        devices = [
            max((ranks for ranks, _, _ in classes), key=lambda r: r.rows / r.device.speed).device
            for classes in by_group
        ]
        tied = tied_bytes([classes[0][1] for classes in by_group], execution)
        notes = [n for classes in by_group for _, typical, _ in classes for n in typical.work.notes]
        schedule = self._scheduled(execution)
        times = step_times(stages, execution, schedule, devices, self.costs, tied)
        if execution.syncs:
            traffic = sync_traffic(self.fold, by_group[0][0][1].work, execution)
            times = replace(times, syncs=traffic)
        return Estimate(
            timeline=lay_out(times, schedule),
            memory=self.memory(workloads, execution, watched),
            stages=tuple(stages),
            rows=workload_on(workloads, execution.groups[0].mesh).rows,
            num_ranks=execution.num_ranks,
            notes=tuple(dict.fromkeys((*notes, *map(str, times.syncs)))),
        )

    def memory(
        self,
        workloads: Workloads,
        execution: ExecutionConfig,
        watched: Collection[int] | None = None,
    ) -> tuple[MemoryUse, ...]:
        """Return the memory of the fullest rank of every group in `watched`, by default of all."""
        schedule, uses = self._scheduled(execution), []
        for number in range(len(execution.groups)):
            if watched is None or number in watched:
                classes = self._group(workloads, execution, number)
                stages = {
                    stage: max(
                        self._memories(stage, classes, execution),
                        key=lambda m: m.peak("B", "middle").total,
                    )
                    for stage, group in enumerate(execution.placement)
                    if group == number
                }
                devices = [ranks.device for ranks, _, _ in classes]
                tightest = min(devices, key=lambda device: device.usable_bytes)
                use = group_memory(number, stages, schedule, tightest)
                uses.append(replace(use, limit_bytes=min(use.limit_bytes, self.memory_limit)))
        return tuple(uses)

    def on(self, cluster: Cluster) -> Evaluator:
        """Return the evaluator for another cluster, with the library's collectives."""
        table, limit = self.costs.table, self.memory_limit
        return Evaluator(self.fold, cluster, table, memory_limit=limit)

    def _scheduled(self, execution: ExecutionConfig) -> Schedule:
        """Return the order of actions: the config's own, or the default for its stages."""
        groups, stages = len(execution.groups), len(execution.placement)
        name = default_schedule(stages, groups)
        return execution.schedule or self.schedule(name, groups, execution.num_microbatches, stages)

    def schedule(self, name: str, groups: int, num_microbatches: int, stages: int) -> Schedule:
        """Return a named schedule, made once."""
        sizes = {"num_groups": groups, "num_microbatches": num_microbatches, "num_stages": stages}
        key = (name, *sizes.values())
        return cached(self._schedules, key, lambda: make(name, **sizes))

    def _group(self, workloads: Workloads, execution: ExecutionConfig, number: int) -> list[_Ranks]:
        """Return every class of ranks of a group, with its typical and its largest micro-batch."""
        group = execution.groups[number]
        workload = workload_on(workloads, group.mesh)
        classes = []
        for ranks in self._classes(group, workload, execution.num_microbatches):
            typical, largest = (
                self._layer(workload, rows, ranks.device, group, execution)
                for rows in (ranks.rows, ranks.max_rows)
            )
            classes.append((ranks, typical, largest))
        return classes

    def group_layers(
        self, workloads: Workloads, execution: ExecutionConfig, number: int
    ) -> list[Layers]:
        """Return the costs of a typical micro-batch for every class of ranks of a group."""
        return [layers for _, layers, _ in self._group(workloads, execution, number)]

    def _layer(
        self,
        workloads: WorkloadModel,
        rows: float,
        device: Device,
        group: Group,
        execution: ExecutionConfig,
    ) -> Layers:
        key = (id(workloads), rows, device, self._signature(group))

        def layers() -> Layers:
            work = workloads.at(rows, exact=self.costs.table is not None)
            times = cached(self._times, key, lambda: self.costs.node_times(work, device, group))
            return Layers(self.fold, work, times, execution, self._shared)

        return cached(self._layers, (key, execution.recompute), layers)

    def calls(
        self, workloads: Workloads, execution: ExecutionConfig
    ) -> Iterator[tuple[Device, Signature]]:
        """Yield every call of every class of ranks, with the device that runs it."""
        for number, group in enumerate(execution.groups):
            workload = workload_on(workloads, group.mesh)
            bounds = [*execution.cuts, self.fold.size]
            stages = [s for s, g in enumerate(execution.placement) if g == number]
            local = {n for s in stages for n in self.fold.order[bounds[s] : bounds[s + 1]]}
            for ranks in self._classes(group, workload, execution.num_microbatches):
                for node, call, _ in workload.at(ranks.rows, exact=True).calls:
                    if node in local:
                        yield ranks.device, call

    def _signature(self, group: Group) -> object:
        """Return a key of what a group's times depend on: its devices, nodes and their links."""

        def signature() -> object:
            nodes = self.node[group.array]
            return (
                group.mesh,
                self.kind[group.array].tobytes(),
                (nodes - nodes[0]).tobytes(),
                self.cluster.topology.figures(group.array),
            )

        return cached(group.cache, self, signature)

    def _classes(
        self, group: Group, workloads: WorkloadModel, num_microbatches: int
    ) -> list[_Class]:
        """Return the distinct devices and shares among a group's ranks."""
        key = (self, *workloads.batch, workloads.rows, num_microbatches)
        return cached(
            group.cache, key, lambda: self._find_classes(group, workloads, num_microbatches)
        )

    def _find_classes(
        self, group: Group, workloads: WorkloadModel, num_microbatches: int
    ) -> list[_Class]:
        mesh, batch = group.mesh, workloads.batch
        shares = _shares(mesh, batch)
        of_ranks = np.broadcast_to(shares, mesh.shape).ravel() if mesh.axes else [1.0]
        pairs = np.stack([self.kind[group.array], of_ranks], axis=1)
        num_ranks = prod(mesh.axis_size(axis) for axis in mesh.names if axis in batch)
        is_even = len(set(shares.ravel().tolist())) == 1
        rows = workloads.rows / num_microbatches
        largest = -(-workloads.rows // num_microbatches)
        classes = []
        for kind, share in np.unique(pairs, axis=0).tolist():
            if not batch:
                typical = max_rows = float(workloads.rows)
            elif is_even:
                typical, max_rows = rows / num_ranks, float(-(-largest // num_ranks))
            else:
                typical = max_rows = rows * share / (float(shares.sum()) or 1.0)
            typical = max(typical, 1.0) if batch else typical
            classes.append(_Class(self.devices[int(kind)], typical, max(typical, max_rows)))
        return classes

    def _cost(self, stage: int, classes: Sequence[_Ranks], execution: ExecutionConfig) -> StageCost:
        """Return the cost of a stage on its slowest rank."""
        local = [self._stage(stage, layers, execution) for _, layers, _ in classes]
        costs = [stage_cost(stage, of_class, self.costs) for of_class in local]
        at = max(range(len(costs)), key=lambda i: costs[i].forward + costs[i].backward)
        offloaded = self._memories(stage, classes, execution)[at].offloaded
        if not offloaded:
            return costs[at]
        device = classes[at][0].device
        return with_offload(costs[at], offloaded / device.host_bytes_per_s)

    def _memories(
        self, stage: int, classes: Sequence[_Ranks], execution: ExecutionConfig
    ) -> list[StageMemory]:
        """Return the memory of a stage on a rank of every class."""
        return [stage_memory(self._stage(stage, largest, execution)) for _, _, largest in classes]

    def _stage(self, stage: int, layers: Layers, execution: ExecutionConfig) -> LocalStage:
        last = stage + 1 == len(execution.cuts)
        end = self.fold.size if last else execution.cuts[stage + 1]
        group = execution.groups[execution.placement[stage]]
        return LocalStage(execution.cuts[stage], end, layers, group, execution)


def _shares(mesh: Mesh, batch: Sequence[str]) -> np.ndarray:
    """Return the share of the batch at every coordinate of the mesh, along its batch axes."""
    shares = np.ones([1] * max(1, len(mesh.axes)))
    for index, (axis, size) in enumerate(mesh.axes):
        if axis in batch:
            weights = size.weights if isinstance(size, Shares) else (1,) * size
            shape = [1] * len(mesh.axes)
            shape[index] = len(weights)
            shares = shares * np.array(weights, dtype=np.float64).reshape(shape)
    return shares


# ------------------------------------------------------------ plans
BATCH_AXIS = "dp"


def simulate(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    expert_load: float = 1.0,
) -> Estimate:
    """Return the predicted time and memory of a step of `plan` on `cluster`.

    `table` holds measured times of operators, which replace computed ones. Collectives use the
    implementations that the plan chooses. Where experts are divided over ranks, the most loaded
    rank gets `expert_load` times the mean number of rows.
    """
    if not expert_load >= 1:
        raise PlanError(f"expert_load={expert_load}", hint="1.0, evenly used experts, or more")
    cluster = check_plan(graph, plan, cluster)
    if expert_load > 1 and any(plan.roles.get(a) == "batch" for a in _sharding_axes(plan)):
        plan, graph = plan.with_(fingerprint=""), _with_load(graph, expert_load)
    fold, workloads = workloads_of(graph, plan)
    evaluator = Evaluator(fold, cluster, table, chosen(plan.collectives))
    execution = execution_of(plan, fold)
    rates = link_rates(evaluator.cluster, execution.groups[0].ranks) if execution.syncs else ()
    return evaluator.estimate(workloads, replace(execution, link_rates=rates))


def _sharding_axes(plan: Plan) -> set[str]:
    """Return the mesh axes that shard parameters."""
    return {axis for entry in plan.parameters.values() for axis in entry.layout}


def _with_load(graph: Graph, load: float) -> Graph:
    """Return the graph with `load` times as many rows of experts, at most all."""
    values = {
        name: kind if kind.ragged == 1 else replace(kind, ragged=max(kind.ragged / load, 1 + 1e-9))
        for name, kind in graph.values.items()
    }
    return replace(graph, values=values)


def check_plan(graph: Graph, plan: Plan, cluster: Cluster) -> Cluster:
    """Return the devices that the plan uses; raise unless it is for this model and cluster."""
    plan.check(graph)
    return check_cluster(plan, cluster)


def check_cluster(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the devices that the plan uses; raise unless there is one for each of its ranks."""
    used = used_devices(plan, cluster)
    if plan.num_ranks != used.num_ranks:
        raise PlanError(
            f"the plan {plan.name!r} is for {plan.num_ranks} ranks, {cluster.name} has "
            f"{cluster.num_ranks}",
            hint=f"a cluster file with {plan.num_ranks} devices, or a new plan: shardwise plan",
        )
    return used


def plan_calls(graph: Graph, plan: Plan, cluster: Cluster) -> dict[Device, tuple[Signature, ...]]:
    """Return the distinct local calls of a plan's program, by device."""
    fold, workloads = workloads_of(graph, plan)
    calls_by_device: dict[Device, dict[Signature, None]] = {}
    for device, call in Evaluator(fold, cluster).calls(workloads, execution_of(plan, fold)):
        calls_by_device.setdefault(device, {}).setdefault(call)
    return {device: tuple(calls) for device, calls in calls_by_device.items()}


def workloads_of(graph: Graph, plan: Plan) -> tuple[FoldedGraph, dict[Mesh, WorkloadModel]]:
    """Return the folded graph, and the workload of a rank of every mesh of the plan."""
    graph = as_run(graph, plan)
    fold = FoldedGraph.of(graph, constraint_key=block_constraints(plan, graph))
    small = plan.for_part(fold.graph, plan.choices(graph))
    small = small.with_(stages=(), schedule="", num_microbatches=1, collectives=())
    facts = analyze(fold.graph)
    workloads: dict[Mesh, WorkloadModel] = {}
    for stage in plan.all_stages:
        if stage.mesh not in workloads:
            divided = _on_mesh(small, stage.mesh, plan.num_microbatches)
            solved: Resolved = resolve(fold.graph, divided, facts)
            workloads[stage.mesh] = WorkloadModel(
                fold, facts, solved.assignments, dict(divided.roles)
            )
    return fold, workloads


def as_run(graph: Graph, plan: Plan) -> Graph:
    """Return the graph as the plan's program computes it."""
    return in_parts(graph) if plan.splits_time else graph


def in_parts(graph: Graph) -> Graph:
    """Return the graph that micro-batches run: a 16-bit mean loss is summed in 32 bits."""
    if graph.loss is None or graph.values[graph.loss].dtype.itemsize > 2:
        return graph
    separated = separate_means(with_keys(graph))
    return separated if len(separated.nodes) > len(graph.nodes) else graph


def _on_mesh(plan: Plan, mesh: Mesh, num_microbatches: int) -> Plan:
    """Return the plan on a mesh that has a batch axis wherever rows are sharded.

    `WorkloadModel` uses one axis for data-parallel ranks and micro-batches together.
    """
    restricted = plan.on_mesh(mesh)
    experts = _sharding_axes(plan)
    batch = {axis for axis, role in restricted.roles.items() if role == "batch"}
    if num_microbatches == 1 or batch - experts:
        return restricted
    return restricted.with_(
        mesh=Mesh(axes=((BATCH_AXIS, num_microbatches), *mesh.axes)),
        roles={BATCH_AXIS: "batch", **restricted.roles},
    )


def execution_of(plan: Plan, fold: FoldedGraph) -> ExecutionConfig:
    """Return the execution config of a plan."""
    position = {place: index for index, place in enumerate(fold.places)}
    meshes = {stage.ranks: stage.mesh for stage in plan.all_stages}
    return ExecutionConfig(
        groups=tuple(Group(mesh=mesh, ranks=ranks) for ranks, mesh in meshes.items()),
        cuts=tuple(position[stage.first] if stage.first else 0 for stage in plan.all_stages),
        placement=tuple(plan.groups.index(stage.ranks) for stage in plan.all_stages),
        schedule=plan_schedule(plan),
        num_microbatches=plan.num_microbatches,
        zeros={g: e.zero for g, e in plan.parameters.items() if e.zero is not None},
        syncs=special_syncs(fold.graph, plan),
        recompute=plan.recompute,
        offload=plan.offload,
        precision=plan.precision,
        bucket_bytes=plan.bucket_mib << 20,
    )


# ------------------------------------------------------------ stored estimates
MAX_MOMENTS = 64  # samples of memory over time


def memory_figures(use: MemoryUse, *, over_time: bool = False) -> MemoryFigures:
    """Return a group's memory as a plan stores it."""
    sampled = _sampled([size for _, size in use.over_time]) if over_time else ()
    over_time_gib = " ".join(f"{size / 2**30:.4g}" for size in sampled)
    return MemoryFigures(**use.to_json(), over_time_gib=over_time_gib)


def memory_over_time(use: MemoryUse) -> list[float]:
    """Return the peak bytes of each interval, then the optimizer's if that is the highest."""
    sizes = [size for _, size in use.over_time]
    return [*_sampled(sizes), *([use.peak_bytes] if use.when == "optimizer" else [])]


def _sampled(sizes: Sequence[float]) -> list[float]:
    step = -(-len(sizes) // MAX_MOMENTS) or 1
    return [max(sizes[at : at + step]) for at in range(0, len(sizes), step)]


def stored_estimate(plan: Plan) -> Estimate:
    """Return the step that was simulated when the plan was made.

    Raises `PlanError` where the plan has no figures, or where they belong to other decisions.
    """
    figures = plan.figures
    if plan.is_edited:
        raise PlanError(
            f"the plan {plan.name!r} was changed after it was made, so its figures do not apply",
            hint="shardwise simulate plan.json model.py:build --cluster c.yaml",
        )
    figures.verify(len(plan.all_stages), len(plan.groups))
    schedule = plan_schedule(plan)
    levels = levels_of(schedule)
    timed = {(KINDS.index(p.kind), p.stage, p.last) for p in figures.step.passes if p.kind in KINDS}
    if not timed.issuperset(zip(levels.kind, levels.stage, levels.last, strict=True)):
        raise PlanError(
            "the figures of the plan are damaged: the times of some actions are missing",
            where="search.step.passes",
        )
    return Estimate(
        timeline=lay_out(figures.step, schedule),
        memory=tuple(map(_memory_use, figures.memory)),
        rows=figures.best.rows,
        num_ranks=plan.num_ranks,
        notes=tuple(map(str, figures.step.syncs)),
    )


def _memory_use(figures: MemoryFigures) -> MemoryUse:
    over_time = tuple(("", float(size) * 2**30) for size in figures.over_time_gib.split())
    return MemoryUse(**{name: getattr(figures, name) for name in STORED}, over_time=over_time)
