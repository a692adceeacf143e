"""Details of a simulated step for reports: traffic on every link, and memory over time.

All details are derived from a `SimulatedStep`. Equal links are one row, with the bytes of the
busiest; bytes follow from the algorithm that the cost model selects for each message. Groups with
few actions, for which one value per action is too coarse, have a memory curve: it reaches the
simulated peak of each action, and within an action activations and gradients appear and disappear
unit by unit.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.arrays import Floats, Ints
from shardwise.cluster.topology import ResourceKind
from shardwise.cost.collectives import PHASES, crossing_bytes
from shardwise.ir import Graph
from shardwise.plans.search_result import LinkTraffic, MemoryCurve
from shardwise.schedules.levels import levels_of
from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.stages import Layers, StageCost
from shardwise.simulation.step import pairs
from shardwise.simulation.workload import FORWARD, WorkloadModel, Workloads, workload_on

TIMES = ("forward", "backward", "forward_comm", "backward_comm", "recompute")
PURPOSES = {
    "gather": "parameters",
    "root": "parameters",
    "reduce": "gradients",
    "update": "new parameters",
}
FEW_ACTIONS = 8  # of a group; with more, one value per action is enough
MAX_MOMENTS = 64  # of an action
DIGITS = 8

Moments = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)  # no slots: columns are computed on first use
class SimulatedStep:
    """One simulated step; `graph` has a node at every position of the evaluator's fold."""

    graph: Graph
    workloads: Workloads
    execution: ExecutionConfig
    evaluator: Evaluator
    estimate: Estimate

    @property
    def fold(self) -> FoldedGraph:
        return self.evaluator.fold

    @property
    def bounds(self) -> tuple[int, ...]:
        """The positions at which stages begin, and the end."""
        return (*self.execution.cuts, self.fold.size)

    def workload_of(self, group: int) -> WorkloadModel:
        """Return the workload of a group's ranks."""
        return workload_on(self.workloads, self.execution.groups[group].mesh)

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """The layers of the slowest kind of rank of every stage, as `Evaluator` chooses it."""
        slowest = []
        for stage in self.estimate.stages:
            first, end = self.span(stage)
            classes = self.evaluator.group_layers(self.workloads, self.execution, stage.group)
            slowest.append(
                max(
                    classes,
                    key=lambda c: c.total("forward", first, end) + c.total("backward", first, end),
                )
            )
        return tuple(slowest)

    def span(self, stage: StageCost) -> tuple[int, int]:
        """Return the positions of a stage."""
        return self.bounds[stage.index], self.bounds[stage.index + 1]

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """Seconds of a micro-batch and saved bytes at every position, on a rank of its stage."""
        columns = {name: np.zeros(self.fold.size) for name in (*TIMES, "saved")}
        saved = "saved" + self.execution.recompute_suffix
        for stage, layers in zip(self.estimate.stages, self.layers, strict=True):
            first, end = self.span(stage)
            for name in TIMES:
                columns[name][first:end] = np.diff(layers.sums[name])[first:end]
            columns["saved"][first:end] = layers.at_positions(saved)[first:end]
        return columns

    @cached_property
    def stage_of(self) -> np.ndarray:
        """The stage of every position."""
        sizes = np.diff(np.array(self.bounds))
        return np.repeat(np.arange(len(sizes)), sizes)


# ------------------------------------------------------------ traffic
@dataclass(frozen=True, slots=True)
class Message:
    """Equal collectives of a step."""

    purpose: str
    op: str
    rows: Ints  # ranks, a row per group
    num_bytes: float
    count: float


def link_traffic(step: SimulatedStep) -> tuple[LinkTraffic, ...]:
    """Return the bytes over every kind of link, by purpose."""
    cluster, costs = step.evaluator.cluster, step.evaluator.costs
    traffic: dict[str, Floats] = {}
    crossing: dict[object, Floats] = {}  # of one byte
    for message in messages(step):
        if message.rows.shape[-1] < 2 or not message.num_bytes * message.count:
            continue
        # The library's fastest algorithm: solved trees send about as many bytes.
        lines = costs.collective(message.op, message.rows).lines
        known = [line for line in lines if line.algorithm in PHASES]
        algorithm = min(known, key=lambda line: line.seconds(message.num_bytes)).algorithm
        key = (message.op, message.rows.tobytes(), message.rows.shape, algorithm)
        if key not in crossing:
            crossing[key] = crossing_bytes(cluster, message.op, message.rows, algorithm)
        total = traffic.setdefault(message.purpose, np.zeros_like(cluster.topology.capacity))
        total += crossing[key] * (message.num_bytes * message.count)
    return tuple(_link_rows(step, traffic))


def messages(step: SimulatedStep) -> Iterator[Message]:
    """Yield all messages of a step."""
    groups, stages = step.execution.groups, step.estimate.stages
    for stage, layers in zip(stages, step.layers, strict=True):
        group = groups[stage.group]
        yield from _between_nodes(step, stage, layers, group)
        yield from _of_parameters(step, stage, layers, group)
        if stage.index + 1 < len(stages) and stage.send_bytes:
            there = groups[stages[stage.index + 1].group]
            if there is not group:
                rows = pairs(group.array, there.array)
                count = float(step.execution.num_microbatches)
                for ends in (rows, rows[:, ::-1]):
                    yield Message("between stages", "send", ends, stage.send_bytes, count)


def _between_nodes(
    step: SimulatedStep, stage: StageCost, layers: Layers, group: Group
) -> Iterator[Message]:
    """Yield collectives that nodes wait for; those of a recomputed forward run twice."""
    first, end = step.span(stage)
    index = step.fold.index[first:end]
    counts = np.bincount(index, minlength=len(step.fold.graph.nodes) + 1)
    recomputed = step.columns["recompute"][first:end] > 0
    forward_counts = counts + np.bincount(index[recomputed], minlength=len(counts))
    totals: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for collective in layers.work.collectives:
        runs = (forward_counts if collective.phase == FORWARD else counts)[collective.node]
        totals[collective.op, collective.axes, collective.num_bytes] += float(runs)
    for (op, axes, num_bytes), total in totals.items():
        rows = group.along(axes)
        yield Message("activations", op, rows, num_bytes, total * step.execution.num_microbatches)


def _of_parameters(
    step: SimulatedStep, stage: StageCost, layers: Layers, group: Group
) -> Iterator[Message]:
    """Yield messages of parameters, which zero 3 gathers for every forward and backward."""
    for kind in layers.sent(*step.span(stage), step.execution):
        repeats = 2.0 * step.execution.num_microbatches if kind.purpose == "gather" else 1.0
        rows = kind.groups(group.along(kind.axes))
        by_size: dict[float, float] = defaultdict(float)
        for size, count in zip(kind.num_bytes.tolist(), kind.messages.tolist(), strict=True):
            if count:
                by_size[size / count] += count
        for size, count in by_size.items():
            yield Message(PURPOSES[kind.purpose], kind.op, rows, size, count * repeats)


def _link_rows(step: SimulatedStep, traffic: dict[str, Floats]) -> Iterator[LinkTraffic]:
    """Yield one row for all equal links."""
    topology = step.evaluator.cluster.topology
    total = sum(traffic.values(), np.zeros_like(topology.capacity))
    busy = total / topology.capacity
    time = step.estimate.step_time_s
    equal: dict[ResourceKind, list[int]] = {}
    for resource in range(len(topology.capacity)):
        equal.setdefault(topology.kind(resource), []).append(resource)
    for (kind, name, nodes), members in equal.items():
        worst = max(members, key=lambda r: busy[r])
        capacity = float(topology.capacity[worst])
        yield LinkTraffic(
            name=name,
            kind=kind,
            nodes=nodes,
            count=len(members),
            busiest=topology.label(worst),
            bytes_per_s=capacity if np.isfinite(capacity) else None,
            traffic_bytes=float(total[worst]),
            total_bytes=float(total[members].sum()),
            busy_s=float(busy[worst]),
            share=float(busy[worst]) / time if time else 0.0,
            what={k: float(v[worst]) for k, v in traffic.items() if v[worst]},
        )


# ------------------------------------------------------------ memory over time
def memory_curves(step: SimulatedStep) -> Iterator[MemoryCurve]:
    """Yield the memory over time of every group with few actions."""
    actions = step.estimate.timeline.schedule.actions
    for use in step.estimate.memory:
        if 0 < len(actions[use.group]) <= FEW_ACTIONS:
            moments = list(_Curve(step, use).moments())
            yield MemoryCurve(
                group=use.group,
                times=tuple(float(f"{time:.{DIGITS}g}") for time, _ in moments),
                bytes=tuple(float(round(size)) for _, size in moments),
            )


class _Curve:
    """One group's memory while it runs its actions."""

    def __init__(self, step: SimulatedStep, use: MemoryUse) -> None:
        self.step, self.use = step, use
        self.timeline = step.estimate.timeline
        self.stages = {s.index: s for s in step.estimate.stages if s.group == use.group}
        self.saved, self.gradients = 0.0, 0.0
        self.done: set[int] = set()  # stages with gradients of parameters
        self.numel = {s: self._numel(stage) for s, stage in self.stages.items()}
        self.total = sum(float(n.sum()) for n in self.numel.values()) or 1.0

    def moments(self) -> Iterator[tuple[float, float]]:
        actions = np.flatnonzero(levels_of(self.timeline.schedule).group == self.use.group).tolist()
        peaks = [size for _, size in self.use.over_time]
        for at, action, peak in zip(
            actions, self.timeline.schedule.actions[self.use.group], peaks, strict=True
        ):
            start, end = float(self.timeline.starts[at]), float(self.timeline.ends[at])
            shape = list(self._shape(action.kind, self.stages[action.stage], start, end))
            above = peak - max(size for _, size in shape)
            yield from ((time, max(0.0, size + above)) for time, size in _downsampled(shape))
        if self.use.when == "optimizer":
            yield float(self.timeline.ends[actions].max()), self.use.peak_bytes

    def _shape(self, kind: str, stage: StageCost, start: float, end: float) -> Iterator[Any]:
        """Yield the start of each unit and the bytes at that time, up to a constant."""
        units = [u for u in stage.units if u.end > u.first]
        saved = [float(self.step.columns["saved"][u.first : u.end].sum()) for u in units]
        spent = [u.forward if kind == "F" else u.backward for u in units]
        order = range(len(units)) if kind == "F" else reversed(range(len(units)))
        scale = (end - start) / (sum(spent) or 1.0)
        now, total = start, self.use.parts["gradients"]
        first = stage.index not in self.done
        for at in order:
            if kind == "F":
                self.saved += saved[at]
            elif kind in "BI":
                yield now, self.saved + self.gradients  # before the unit frees its activations
                self.saved -= saved[at]
            if kind in "BW" and first:
                self.gradients += total * self.numel[stage.index][at] / self.total
            yield now, self.saved + self.gradients
            now += spent[at] * scale
        if kind in "BW":
            self.done.add(stage.index)
        yield now, self.saved + self.gradients

    def _numel(self, stage: StageCost) -> Any:
        """Return the trained elements of every unit."""
        layers = self.step.layers[stage.index]
        units = [u for u in stage.units if u.end > u.first]
        return np.array([layers.num_trained(u.first, u.end, self.step.execution) for u in units])


def _downsampled(moments: Moments) -> Moments:
    """Return at most `MAX_MOMENTS` moments, each the highest of several."""
    step = -(-len(moments) // MAX_MOMENTS)
    parts = [moments[at : at + step] for at in range(0, len(moments), step)]
    return [(part[0][0], max(size for _, size in part)) for part in parts]
