"""The predicted step of a model under an execution config: its time, its memory, and their parts.

An `Evaluator` remembers what the configs of one model share: the planner asks for thousands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from shardwise.cluster import Cluster, Device, Mesh
from shardwise.cost import OpTable, Signature
from shardwise.errors import PlanError
from shardwise.formatting import GIB, seconds
from shardwise.ir import Graph
from shardwise.messages.choice import Chooser, chosen
from shardwise.plans import Plan, Resolved, model_fingerprint, resolve, used_devices
from shardwise.plans.plan import block_constraints
from shardwise.program.microbatches import separate_means
from shardwise.program.pipeline import plan_schedule
from shardwise.program.stages import with_keys
from shardwise.schedules import Schedule, default_schedule, make
from shardwise.sharding.factors import analyze
from shardwise.simulation.costs import ClusterCosts, ExecutionConfig, Group, NodeTimes
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.gradient_traffic import Key, ParamClass
from shardwise.simulation.memory import MemoryUse, StageMemory, group_memory, peak_of, stage_memory
from shardwise.simulation.stages import Layers, StageCost, stage_cost, tied_bytes, with_offload
from shardwise.simulation.step import Timeline, lay_out, step_times
from shardwise.simulation.workload import WorkloadModel


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted step: never a bare number."""

    timeline: Timeline
    memory: tuple[MemoryUse, ...]  # of the fullest rank of every group
    stages: tuple[StageCost, ...] = ()  # not of a stored one
    rows: int  # of the batch
    num_ranks: int
    notes: tuple[str, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.timeline.step_time_s

    @property
    def peak(self) -> MemoryUse:
        """The group nearest to its limit."""
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
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Class:
    """Ranks of a group with the same device and share of the batch."""

    device: Device
    rows: float
    most: float  # rows of the largest micro-batch


_Ranks = tuple[_Class, Layers, Layers]  # a class, and what it does: typically, and at most


class Evaluator:
    """Estimates of one model on one cluster."""

    def __init__(
        self,
        fold: FoldedGraph,
        cluster: Cluster,
        table: OpTable | None = None,
        choose: Chooser | None = None,
    ) -> None:
        self.fold, self.cluster, self.costs = fold, cluster, ClusterCosts(cluster, table, choose)
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
        self._signatures: dict[int, tuple[Group, object]] = {}
        self._classed: dict[object, tuple[Group, list[_Class]]] = {}

    def estimate(
        self,
        works: Mapping[Mesh, WorkloadModel] | WorkloadModel,
        setting: ExecutionConfig,
        watched: Collection[int] | None = None,
    ) -> Estimate:
        """The predicted step; `works` by the mesh of a group where groups differ.

        Memory is worked out for the groups in `watched`, by default for all.
        """
        found = [self._group(works, setting, number) for number in range(len(setting.groups))]
        stages = [
            self._cost(stage, found[number], setting)
            for stage, number in enumerate(setting.placement)
        ]
        slowest = [max(mine, key=lambda c: c[0].rows / c[0].device.speed)[0] for mine in found]
        devices = [kind.device for kind in slowest]
        any_works = works if isinstance(works, WorkloadModel) else next(iter(works.values()))
        tied = tied_bytes([mine[0][1] for mine in found], setting)
        schedule = self._scheduled(setting)
        times = step_times(stages, setting, schedule, devices, self.costs, tied)
        return Estimate(
            timeline=lay_out(times, schedule),
            memory=self.memory(works, setting, watched),
            stages=tuple(stages),
            rows=any_works.rows,
            num_ranks=setting.num_ranks,
        )

    def memory(
        self,
        works: Mapping[Mesh, WorkloadModel] | WorkloadModel,
        setting: ExecutionConfig,
        watched: Collection[int] | None = None,
    ) -> tuple[MemoryUse, ...]:
        """What the fullest rank needs, of every group in `watched`, by default of all."""
        schedule, found = self._scheduled(setting), []
        for number in range(len(setting.groups)):
            if watched is None or number in watched:
                classes = self._group(works, setting, number)
                stages = {
                    stage: max(
                        self._memories(stage, classes, setting),
                        key=lambda m: m.need("B", "middle").total,
                    )
                    for stage, group in enumerate(setting.placement)
                    if group == number
                }
                tightest = min((kind.device for kind, _, _ in classes), key=_usable_bytes)
                found.append(group_memory(number, stages, schedule, tightest))
        return tuple(found)

    def _scheduled(self, setting: ExecutionConfig) -> Schedule:
        """The order of actions: as set, or the usual one."""
        groups, stages = len(setting.groups), len(setting.placement)
        name = default_schedule(stages, groups)
        return setting.schedule or self.schedule(name, groups, setting.num_microbatches, stages)

    def schedule(self, name: str, groups: int, num_microbatches: int, stages: int) -> Schedule:
        """A schedule by name, made once."""
        key = (name, groups, num_microbatches, stages)
        if key not in self._schedules:
            self._schedules[key] = make(
                name, num_groups=groups, num_microbatches=num_microbatches, num_stages=stages
            )
        return self._schedules[key]

    def _group(
        self,
        works: Mapping[Mesh, WorkloadModel] | WorkloadModel,
        setting: ExecutionConfig,
        number: int,
    ) -> list[_Ranks]:
        """What every class of ranks of a group does, per position: typical, and at most."""
        group = setting.groups[number]
        mine = works if isinstance(works, WorkloadModel) else works[group.mesh]
        found = []
        for kind in self._classes(group, mine, setting.num_microbatches):
            typical = self._layer(mine, kind.rows, kind.device, group, setting)
            most = typical
            if kind.most != kind.rows:
                most = self._layer(mine, kind.most, kind.device, group, setting)
            found.append((kind, typical, most))
        return found

    def group_layers(
        self,
        works: Mapping[Mesh, WorkloadModel] | WorkloadModel,
        setting: ExecutionConfig,
        number: int,
    ) -> list[Layers]:
        """What every class of ranks of a group does at every position."""
        return [layers for _, layers, _ in self._group(works, setting, number)]

    def _layer(
        self,
        works: WorkloadModel,
        rows: float,
        device: Device,
        group: Group,
        setting: ExecutionConfig,
    ) -> Layers:
        where = self._signature(group)
        key = (id(works), rows, device, where)
        if key in self._times and (key, setting.recompute) in self._layers:
            return self._layers[key, setting.recompute]
        work = works.at(rows, exact=self.costs.table is not None)
        if key not in self._times:
            self._times[key] = self.costs.node_times(work, device, group)
        if (key, setting.recompute) not in self._layers:
            self._layers[key, setting.recompute] = Layers(
                self.fold, work, self._times[key], setting, self._shared
            )
        return self._layers[key, setting.recompute]

    def calls(
        self, works: Mapping[Mesh, WorkloadModel] | WorkloadModel, setting: ExecutionConfig
    ) -> Iterator[tuple[Device, Signature]]:
        """Every call of every class of ranks, with the device that runs it."""
        for number, group in enumerate(setting.groups):
            mine = works if isinstance(works, WorkloadModel) else works[group.mesh]
            bounds = [*setting.cuts, self.fold.size]
            stages = [s for s, g in enumerate(setting.placement) if g == number]
            here = {n for s in stages for n in self.fold.order[bounds[s] : bounds[s + 1]]}
            for kind in self._classes(group, mine, setting.num_microbatches):
                for node, call, _ in mine.at(kind.rows, exact=True).calls:
                    if node in here:
                        yield kind.device, call

    def _signature(self, group: Group) -> object:
        """What the times of a group depend on: its devices, how it lies on nodes, and how these
        are connected.
        """
        known = self._signatures.get(id(group))
        if known is None or known[0] is not group:
            nodes = self.node[group.array]
            found: object = (
                group.mesh,
                self.kind[group.array].tobytes(),
                (nodes - nodes[0]).tobytes(),
                self.cluster.topology.figures(group.array),
            )
            known = self._signatures[id(group)] = (group, found)
        return known[1]

    def _classes(self, group: Group, works: WorkloadModel, num_microbatches: int) -> list[_Class]:
        """The distinct devices and shares among a group's ranks."""
        key = (id(group), *works.batch, works.rows, num_microbatches)
        known = self._classed.get(key)
        if known is None or known[0] is not group:
            known = self._classed[key] = (group, self._find_classes(group, works, num_microbatches))
        return known[1]

    def _find_classes(
        self, group: Group, works: WorkloadModel, num_microbatches: int
    ) -> list[_Class]:
        shares = _shares(group.mesh, works.batch)
        total = float(shares.sum()) or 1.0
        rows = works.rows / num_microbatches
        wide = np.broadcast_to(shares, group.mesh.shape).ravel() if group.mesh.axes else [1.0]
        pairs = np.stack([self.kind[group.array], wide], axis=1)
        found = [(int(kind), float(share)) for kind, share in np.unique(pairs, axis=0)]
        ranks = _batch_ranks(group.mesh, works.batch)
        even = len(set(shares.ravel().tolist())) == 1
        classes = []
        for kind, share in found:
            mine = rows * share / total if not even else rows / ranks
            typical = max(mine, 1.0) if works.batch else float(works.rows)
            most = float(-(-int(-(-works.rows // num_microbatches)) // ranks)) if even else mine
            if not works.batch:
                most = typical
            classes.append(_Class(self.devices[kind], typical, max(typical, most)))
        return classes

    def _cost(self, stage: int, classes: Sequence[_Ranks], setting: ExecutionConfig) -> StageCost:
        """The cost of a stage on its slowest rank."""
        first, end = self._positions(stage, setting)
        group = setting.groups[setting.placement[stage]]
        costs = [
            stage_cost(stage, first, end, layers, group, setting, self.costs)
            for _, layers, _ in classes
        ]
        at = max(range(len(costs)), key=lambda i: costs[i].forward + costs[i].backward)
        offloaded = self._memories(stage, classes, setting)[at].offloaded
        if not offloaded:
            return costs[at]
        return with_offload(costs[at], offloaded / classes[at][0].device.host_bytes_per_s)

    def _memories(
        self, stage: int, classes: Sequence[_Ranks], setting: ExecutionConfig
    ) -> list[StageMemory]:
        """The memory of a stage on a rank of every class."""
        first, end = self._positions(stage, setting)
        group = setting.groups[setting.placement[stage]]
        return [
            stage_memory(first, end, most, group, setting, cuda=kind.device.kind == "cuda")
            for kind, _, most in classes
        ]

    def _positions(self, stage: int, setting: ExecutionConfig) -> tuple[int, int]:
        last = stage + 1 == len(setting.cuts)
        return setting.cuts[stage], self.fold.size if last else setting.cuts[stage + 1]


def _usable_bytes(device: Device) -> float:
    return device.usable_bytes


def _shares(mesh: Mesh, batch: Sequence[str]) -> np.ndarray:
    """The share of the batch at every place of the mesh, along its batch axes."""
    shares = np.ones([1] * max(1, len(mesh.axes)))
    for at, (axis, size) in enumerate(mesh.axes):
        weights = getattr(size, "weights", None) or (1,) * int(size)
        if axis in batch:
            shape = [1] * len(mesh.axes)
            shape[at] = int(size)
            shares = shares * np.array(weights, dtype=np.float64).reshape(shape)
    return shares


def _batch_ranks(mesh: Mesh, batch: Sequence[str]) -> int:
    return int(np.prod([int(n) for a, n in mesh.axes if a in batch], dtype=np.int64))


# `simulate(graph, plan, cluster)`: the predicted step of a plan.
#
# Repeated layers are solved and lowered once, as the planner does: what is simulated is the program
# that would run.


BATCH_AXIS = "dp"


def simulate(
    graph: Graph, plan: Plan, cluster: Cluster, *, table: OpTable | None = None
) -> Estimate:
    """The predicted time and memory of a step of `plan` on `cluster`.

    `table` holds measured times of operators, which replace computed ones. Collectives take the
    times of the ways that the plan chooses for them.
    """
    cluster = check_plan(graph, plan, cluster)
    fold, works = works_of(graph, plan)
    evaluator = Evaluator(fold, cluster, table, chosen(plan.collectives))
    return evaluator.estimate(works, setting_of(plan, fold))


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
            hint="a cluster file of as many devices, or a new plan: shardwise plan",
        )
    return used


def plan_calls(graph: Graph, plan: Plan, cluster: Cluster) -> dict[Device, tuple[Signature, ...]]:
    """The local calls of a plan's program by device, each once: what could be measured."""
    fold, works = works_of(graph, plan)
    found: dict[Device, dict[Signature, None]] = {}
    for device, call in Evaluator(fold, cluster).calls(works, setting_of(plan, fold)):
        found.setdefault(device, {}).setdefault(call)
    return {device: tuple(calls) for device, calls in found.items()}


def works_of(graph: Graph, plan: Plan) -> tuple[FoldedGraph, dict[Mesh, WorkloadModel]]:
    """The folded graph, and the work of a rank of every mesh of the plan."""
    graph = as_run(graph, plan)
    fold = FoldedGraph.of(graph, constraint_key=block_constraints(plan, graph))
    small = fold_plan(fold, plan, plan.choices(graph))
    facts = analyze(fold.graph)
    works: dict[Mesh, WorkloadModel] = {}
    for stage in plan.all_stages:
        if stage.mesh not in works:
            divided = _on_mesh(small, stage.mesh, plan.num_microbatches)
            solved: Resolved = resolve(fold.graph, divided, facts)
            works[stage.mesh] = WorkloadModel(fold, facts, solved.assignments, dict(divided.roles))
    return fold, works


def as_run(graph: Graph, plan: Plan) -> Graph:
    """The graph as the plan's program computes it."""
    return in_parts(graph) if plan.splits_time else graph


def in_parts(graph: Graph) -> Graph:
    """With micro-batches a mean loss of 16 bits is a sum in 32 bits, as are the scores it is of."""
    if graph.loss is None or graph.values[graph.loss].dtype.itemsize > 2:
        return graph
    found = separate_means(with_keys(graph))
    return found if len(found.nodes) > len(graph.nodes) else graph


def _on_mesh(plan: Plan, mesh: Mesh, num_microbatches: int) -> Plan:
    """The plan on a mesh that has an axis of the batch wherever rows are cut.

    `WorkloadModel` has one axis for the ranks and the micro-batches that divide them.
    """
    found = plan.on_mesh(mesh)
    if num_microbatches == 1 or "batch" in found.roles.values():
        return found
    return found.with_(
        mesh=Mesh(axes=((BATCH_AXIS, num_microbatches), *mesh.axes)),
        roles={BATCH_AXIS: "batch", **found.roles},
    )


def fold_plan(fold: FoldedGraph, plan: Plan, choices: Mapping[str, Mapping[str, str]]) -> Plan:
    """The plan's decisions for the small graph; `choices` are those of the whole graph's nodes."""
    small = fold.graph
    names = [n for p in small.parameters for n in (p.name, *p.aliases)]
    nodes = {node.name for node in small.nodes}
    return plan.with_(
        fingerprint=model_fingerprint(small),
        parameters={
            g: e for g, e in plan.parameters.items() if any(fnmatchcase(n, g) for n in names)
        },
        nodes={n: c for n, c in choices.items() if n in nodes},
        stages=(),
        schedule="",
        num_microbatches=1,
        collectives=(),
    )


def setting_of(plan: Plan, fold: FoldedGraph) -> ExecutionConfig:
    """How a plan's step runs."""
    at = {place: index for index, place in enumerate(fold.places)}
    groups = [Group(mesh=_mesh(plan, ranks), ranks=ranks) for ranks in plan.groups]
    return ExecutionConfig(
        groups=tuple(groups),
        cuts=tuple(at[stage.first] if stage.first else 0 for stage in plan.all_stages),
        placement=tuple(plan.groups.index(stage.ranks) for stage in plan.all_stages),
        schedule=plan_schedule(plan),
        num_microbatches=plan.num_microbatches,
        zeros={g: e.zero for g, e in plan.parameters.items() if e.zero is not None},
        recompute=plan.recompute,
        offload=plan.offload,
        precision=plan.precision,
    )


def _mesh(plan: Plan, ranks: tuple[int, ...]) -> Mesh:
    return next(stage.mesh for stage in plan.all_stages if stage.ranks == ranks)
