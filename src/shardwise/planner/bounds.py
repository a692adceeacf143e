"""Lower bounds of configurations: no simulated step is faster, no rank needs less memory.

They include communication of parameters and gradients that nothing can hide:

- With zero 3, a pass takes at least as long as gathering the parameters of its blocks; parameters
  outside of blocks are gathered before it.
- Gradient reductions start in the last backward of a stage, which hides at most its own length of
  them; with several stages per group, at most twice that.
- With zero 1 and 2, updated parameters are gathered after the optimizer step.

All messages of a kind count as a single message, because several messages take longer.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwise.arrays import Ints, before
from shardwise.cluster import Device
from shardwise.cost import adamw
from shardwise.cost.sync import level_groups
from shardwise.errors import ShardwiseError
from shardwise.planner.layout_cache import LayoutCache, Layouts
from shardwise.plans.search_result import ParallelConfig
from shardwise.schedules import schedule_kind
from shardwise.simulation.costs import ClusterCosts, ExecutionConfig, Group
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.memory import Budget
from shardwise.simulation.pass_memory import stage_memory
from shardwise.simulation.stages import PURPOSES, Layers, LocalStage
from shardwise.simulation.step import pairs

FEW_GROUPS = 16  # up to which bounds count the messages between stages


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A configuration with its lower bounds; memory that fits (at most 1) is exact."""

    config: ParallelConfig
    seconds: float
    memory: float  # of the fullest rank, as a fraction of its device's


@dataclass(frozen=True, kw_only=True)
class Core:
    """Bounds on when the work of each group ends, for any zero level and offload."""

    execution: ExecutionConfig
    layers: Sequence[Layers]
    ends: dict[int, float]  # lower bound on the end of each group's work
    paths: dict[int, float]  # another: the path of one micro-batch through all stages and back
    back: float  # lower bound on the end of the first stage's last backward
    watched: dict[int, list[LocalStage]]  # groups that may be the fullest, with their stages

    @property
    def seconds(self) -> float:
        return max(self.back, *self.ends.values(), *self.paths.values())


class Bounds:
    """Bounds of one model's configurations on one cluster, each computed once."""

    def __init__(
        self,
        cache: LayoutCache,
        evaluator: Evaluator,
        execution: Callable[[ParallelConfig, Layouts], ExecutionConfig],
    ) -> None:
        self.cache, self.evaluator, self.execution = cache, evaluator, execution
        self.fold = evaluator.fold
        self._bounds: dict[ParallelConfig, Bound] = {}
        self._cores: dict[ParallelConfig, Core | None] = {}

    def bound(self, config: ParallelConfig) -> Bound:
        if config in self._bounds:
            return self._bounds[config]
        core = self.core(replace(config, zero=0, offload=()))
        assert core is not None
        execution = replace(core.execution, zero=config.zero, offload=config.offload)
        seconds, fullest = core.seconds, 0.0
        for group, watched in core.watched.items():
            stages = [stage._replace(execution=execution) for stage in watched]
            traffic = communication_lower_bound(stages, self.evaluator.costs)
            end = reduced_at_least(core.ends[group], stages, traffic)
            tail = self._tail(stages) + traffic.update
            seconds = max(seconds, end + tail, core.paths[group] + tail)
            if group == execution.placement[0]:
                seconds = max(seconds, core.back + tail)
            fullest = max(fullest, self._fullest(group, stages))
        self._bounds[config] = Bound(config=config, seconds=seconds, memory=fullest)
        return self._bounds[config]

    def core(self, config: ParallelConfig) -> Core | None:
        """Return the bounds for any zero level and offload, or None if the config is impossible."""
        if config not in self._cores:
            try:
                self._cores[config] = self._find_core(config)
            except ShardwiseError:  # there are too few places for the stages, or nothing to shard
                self._cores[config] = None
        return self._cores[config]

    def shares(self, config: ParallelConfig) -> bool:
        """Return whether ranks share parameters, so that zero levels make a difference."""
        core = self.core(config)
        assert core is not None
        return any(
            stage.group.along(axes).shape[-1] > 1
            for stage, *_ in core.watched.values()
            for axes, *_ in stage.layers.parameters(core.execution)
        )

    def _find_core(self, config: ParallelConfig) -> Core:
        layouts = self.cache.get(config.tp, config.layout)
        execution = self.execution(config, layouts)
        bounds = np.array([*execution.cuts, self.fold.size])
        uniform = len(self.evaluator.devices) == 1
        layers = [self.layers(layouts, execution, 0)] * config.pp
        if not uniform:
            layers = [self.layers(layouts, execution, group) for group in range(config.pp)]
        times = self._times(layers, bounds, execution.placement, uniform)
        stages: dict[int, list[int]] = {}
        for stage, group in enumerate(execution.placement):
            stages.setdefault(group, []).append(stage)
        sends = self._sends(execution, bounds, layers[0]) if uniform else np.zeros(len(times))
        forward = self._times(layers, bounds, execution.placement, uniform, ("forward",))
        started = before(forward + sends)
        around, waits = started, np.zeros(len(times))
        # Input gradients are sent on without waiting for weight gradients that come later.
        if schedule_kind(config.schedule).splits_backward:
            waits = self._times(layers, bounds, execution.placement, uniform, ("weight",))
        else:
            around = before(times + 2 * sends)
        # One micro-batch passes all stages and returns to each, which then computes its weights.
        back = np.cumsum((times - forward - waits + sends)[::-1])[::-1]
        path = (forward + sends).sum() + back + waits
        busy = {g: config.num_microbatches * times[members].sum() for g, members in stages.items()}
        ranges = list(pairwise(bounds.tolist()))
        watched = {0, 1, config.pp - 1} if uniform else set(stages)
        return Core(
            execution=execution,
            layers=layers,
            ends={g: float(started[members[0]] + busy[g]) for g, members in stages.items()},
            paths={g: float(path[members].max()) for g, members in stages.items()},
            back=max(float(around[members[0]] + busy[g]) for g, members in stages.items()),
            watched={
                g: [LocalStage(*ranges[s], layers[g], execution.groups[g], execution) for s in own]
                for g, own in stages.items()
                if g in watched
            },
        )

    def _sends(self, execution: ExecutionConfig, bounds: Ints, layers: Layers) -> np.ndarray:
        """Return the seconds of each stage's message to the next, or zeros for many groups."""
        seconds = np.zeros(len(execution.cuts))
        if len(execution.groups) > FEW_GROUPS:
            return seconds
        crossing = self.fold.spread(layers.work.crossing)
        groups = [execution.groups[g] for g in execution.placement]
        for stage, (sender, receiver) in enumerate(pairwise(groups)):
            size = float(crossing[bounds[stage + 1]])
            if sender is not receiver and size:
                ranks = pairs(sender.array, receiver.array)
                seconds[stage] = self.evaluator.costs.collective("send", ranks).seconds(size)
        return seconds

    def _times(
        self,
        layers: Sequence[Layers],
        bounds: Ints,
        placement: Sequence[int],
        uniform: bool,
        names: Sequence[str] = ("forward", "backward"),
    ) -> np.ndarray:
        """Return the seconds of one micro-batch in every stage, summed over these kinds of work."""
        if uniform:
            return np.diff(np.sum([layers[0].sums[name][bounds] for name in names], axis=0))
        return np.array(
            [
                sum(layers[group].total(name, bounds[s], bounds[s + 1]) for name in names)
                for s, group in enumerate(placement)
            ]
        )

    def _tail(self, stages: Sequence[LocalStage]) -> float:
        """Return a lower bound on the optimizer's time."""
        numel, local = 0.0, stages[0]
        for (axes, zero, _, _), share in local.layers.parameters(local.execution).items():
            stored = sum(float(share.numel[s.end] - share.numel[s.first]) for s in stages)
            numel += stored / local.num_sharing(axes, zero)
        return self.update_lower_bound(numel, local.group)

    def _fullest(self, group: int, stages: Sequence[LocalStage]) -> float:
        """Return a lower bound on a rank's memory, as a fraction of its device's."""
        execution = stages[0].execution
        pp, count = len(execution.groups), execution.num_microbatches
        in_flight = min(count, max(1, pp - group))
        # A forward after the first backward finds gradients of parameters in memory.
        has_gradients = count > (in_flight if len(stages) == 1 else pp)
        flying = in_flight / len(stages)
        total = sum(stage_memory(s).lower_bound(flying, has_gradients) for s in stages)
        return total / self.limit(stages[0].group)

    def limit(self, group: Group) -> float:
        """Return the maximum bytes of tensors on the smallest device of a group."""
        return min(Budget.of(self._device(group)).limit_bytes, self.evaluator.memory_limit)

    def update_lower_bound(self, numel: float, group: Group) -> float:
        """Return a lower bound on the optimizer's time for this many elements."""
        if not numel:
            return 0.0
        device = self._device(group)
        # A CPU makes more calls, but reads and writes at least as much as a GPU.
        calls = 0 if device.kind == "cpu" else adamw.FUSED_CALLS
        return adamw.fused_seconds(numel, device, calls=calls)

    def _device(self, group: Group) -> Device:
        kinds: list[int] = np.unique(self.evaluator.kind[group.array]).tolist()
        devices: list[Device] = [self.evaluator.devices[kind] for kind in kinds]
        return min(devices, key=lambda device: device.usable_bytes)

    def layers(self, layouts: Layouts, execution: ExecutionConfig, group: int) -> Layers:
        classes = self.evaluator.group_layers(layouts.workloads, execution, group)
        return max(classes, key=lambda layers: layers.sums["backward"][-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTraffic:
    """Seconds of sending the parameters and gradients of a group's stages once."""

    gather: float = 0.0  # blocks before a pass (zero 3)
    reduce: float = 0.0
    update: float = 0.0  # after the optimizer (zero 1 and 2)
    root: float = 0.0  # before the step (zero 3)


def communication_lower_bound(
    stages: Sequence[LocalStage], costs: ClusterCosts
) -> ParameterTraffic:
    """Return a lower bound on the parameter traffic of a group's stages."""
    totals: dict[tuple[str, str, tuple[str, ...], int], float] = defaultdict(float)
    for kind in (kind for stage in stages for kind in stage.sent):
        totals[kind.purpose, kind.op, kind.axes, kind.level] += float(kind.num_bytes.sum())
    seconds = dict.fromkeys(PURPOSES, 0.0)
    for (purpose, op, axes, level), num_bytes in totals.items():
        rows = level_groups(stages[0].group.along(axes), level)
        if rows.shape[-1] > 1 and num_bytes > 0:
            seconds[purpose] += costs.collective(op, rows).seconds(num_bytes)
    if stages[0].execution.prefetch:
        seconds["update"] = 0.0
    return ParameterTraffic(**seconds)


def reduced_at_least(
    computed: float, stages: Sequence[LocalStage], traffic: ParameterTraffic
) -> float:
    """Return a lower bound on when gradients are reduced, if compute alone ends at `computed`."""
    forward, backward = (sum(s.total(name) for s in stages) for name in ("forward", "backward"))
    slower = max(0.0, traffic.gather - forward) + max(0.0, traffic.gather - backward)
    root = traffic.root if stages[0].first == 0 else 0.0  # later stages gather while they wait
    end = root + computed + stages[0].execution.num_microbatches * slower
    hidden = max(backward, traffic.gather) * (1 if len(stages) == 1 else 2)
    return max(end, end - hidden + traffic.gather + traffic.reduce)
