"""Lower bounds of configurations: no simulated step is faster, no rank needs less memory.

What of parameters and gradients nothing can hide counts, too:

- With zero 3 a pass takes at least as long as the parameters of its blocks travel; those outside of
  blocks travel before.
- Gradients are reduced from the last backward of a stage on. What one of them hides of the
  reductions is at most its own length; with several stages a group's last backwards may hide as
  much twice.
- With zero 1 and 2 updated parameters travel after the optimizer.

Messages count as one: several take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Device
from shardwise.cost import CollectiveModel, adamw
from shardwise.errors import ShardwiseError
from shardwise.planner.layout_cache import LayoutCache, Layouts
from shardwise.plans.search_result import ParallelConfig
from shardwise.schedules import schedule_kind
from shardwise.simulation.costs import ClusterCosts, ExecutionConfig, Group
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.gradient_traffic import PURPOSES
from shardwise.simulation.memory import Budget, stage_memory
from shardwise.simulation.stages import Layers
from shardwise.simulation.step import pairs

Ints = NDArray[np.int64]

FEW_GROUPS = 16  # up to which bounds count the messages between stages


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A configuration with its bounds; a memory that fits is exact."""

    config: ParallelConfig
    seconds: float
    memory: float  # of the fullest rank, as a fraction of its device's


@dataclass(frozen=True, kw_only=True)
class Core:
    """When the work of each group ends: the same for any zero level and offload."""

    setting: ExecutionConfig
    bounds: Ints
    layers: Sequence[Layers]
    ends: dict[int, float]  # of each group's work, at least
    paths: dict[
        int, float
    ]  # when each group has had the last backward of one micro-batch, at least
    back: float  # when the first stage has its last backward, at least
    watched: dict[int, list[int]]  # groups that may be the fullest, with their stages

    @property
    def seconds(self) -> float:
        return max(self.back, *self.ends.values(), *self.paths.values())


class Bounds:
    """Bounds of one model's configurations on one cluster, each worked out once."""

    def __init__(
        self,
        cache: LayoutCache,
        evaluator: Evaluator,
        setting: Callable[[ParallelConfig, Layouts], ExecutionConfig],
        memory_limit: float | None,
    ) -> None:
        self.cache, self.evaluator, self.setting = cache, evaluator, setting
        self.memory_limit, self.fold = memory_limit, evaluator.fold
        self._bounds: dict[ParallelConfig, Bound] = {}
        self._cores: dict[ParallelConfig, Core | None] = {}
        self._links: dict[tuple[int, int], tuple[Group, Group, CollectiveModel]] = {}

    def bound(self, config: ParallelConfig) -> Bound:
        if config in self._bounds:
            return self._bounds[config]
        core = self.core(replace(config, zero=0, offload=()))
        assert core is not None
        setting = replace(core.setting, zero=config.zero, offload=config.offload)
        seconds, fullest = core.seconds, 0.0
        for group, stages in core.watched.items():
            layers, members = core.layers[group], setting.groups[group]
            ranges = [(int(core.bounds[s]), int(core.bounds[s + 1])) for s in stages]
            traffic = communication_lower_bound(
                ranges, layers, members, setting, self.evaluator.costs
            )
            end = reduced_at_least(
                core.ends[group], ranges, layers, config.num_microbatches, traffic
            )
            tail = self._tail(stages, core.bounds, layers, setting) + traffic.update
            seconds = max(seconds, end + tail, core.paths[group] + tail)
            if group == setting.placement[0]:
                seconds = max(seconds, core.back + tail)
            full = self._fullest(config, group, stages, core.bounds, core.layers[group], setting)
            fullest = max(fullest, full)
        self._bounds[config] = Bound(config=config, seconds=seconds, memory=fullest)
        return self._bounds[config]

    def core(self, config: ParallelConfig) -> Core | None:
        """Return what any zero level and offload share; None for an impossible configuration."""
        if config not in self._cores:
            try:
                self._cores[config] = self._find_core(config)
            except ShardwiseError:  # too few places for so many stages, or nothing to cut
                self._cores[config] = None
        return self._cores[config]

    def shares(self, config: ParallelConfig) -> bool:
        """Whether ranks share any parameters, of which zero levels could keep parts."""
        core = self.core(config)
        assert core is not None
        return any(
            core.setting.groups[group].along(axes).shape[-1] > 1
            for group in core.watched
            for axes, _, _ in core.layers[group].parameters(core.setting)
        )

    def _find_core(self, config: ParallelConfig) -> Core:
        layouts = self.cache.get(config.tp, config.layout)
        setting = self.setting(config, layouts)
        bounds = np.array([*setting.cuts, self.fold.size])
        alike = len(self.evaluator.devices) == 1
        first = self.layers(layouts, setting, 0)
        layers = [first if alike else self.layers(layouts, setting, g) for g in range(config.pp)]
        times = self._times(layers, bounds, setting.placement, alike)
        stages: dict[int, list[int]] = {}
        for stage, group in enumerate(setting.placement):
            stages.setdefault(group, []).append(stage)
        sends = self._sends(setting, bounds, layers[0]) if alike else np.zeros(len(times))
        forward = self._times(layers, bounds, setting.placement, alike, ("forward",))
        before = np.concatenate([[0.0], np.cumsum(forward + sends)])
        around, waits = before, np.zeros(len(times))
        # Input gradients travel on without waiting for weight gradients that come later.
        if schedule_kind(config.schedule).splits_backward:
            waits = self._times(layers, bounds, setting.placement, alike, ("weight",))
        else:
            around = np.concatenate([[0.0], np.cumsum(times + 2 * sends)])
        # One micro-batch goes through all stages, and back to each, which then has its weights.
        back = np.cumsum((times - forward - waits + sends)[::-1])[::-1]
        path = (forward + sends).sum() + back + waits
        alone = {g: config.num_microbatches * times[mine].sum() for g, mine in stages.items()}
        few = {0, 1, config.pp - 1} if alike else set(stages)
        return Core(
            setting=setting,
            bounds=bounds,
            layers=layers,
            ends={g: float(before[mine[0]] + alone[g]) for g, mine in stages.items()},
            paths={g: float(path[mine].max()) for g, mine in stages.items()},
            back=max(float(around[mine[0]] + alone[g]) for g, mine in stages.items()),
            watched={g: mine for g, mine in stages.items() if g in few},
        )

    def _sends(self, setting: ExecutionConfig, bounds: Ints, layers: Layers) -> np.ndarray:
        """Seconds of every stage's message to the next one; nothing where stages are many."""
        found = np.zeros(len(setting.cuts))
        if len(setting.groups) > FEW_GROUPS:
            return found
        crossing = self.fold.spread(layers.work.crossing)
        groups = [setting.groups[g] for g in setting.placement]
        for stage, (here, there) in enumerate(pairwise(groups)):
            size = float(crossing[bounds[stage + 1]])
            if here is not there and size:
                found[stage] = self._link(here, there).seconds(size)
        return found

    def _link(self, here: Group, there: Group) -> CollectiveModel:
        """What a message to the next stage takes."""
        key = (id(here), id(there))
        if key not in self._links:
            model = self.evaluator.costs.collective("send", pairs(here.array, there.array))
            self._links[key] = (here, there, model)  # the groups, too: their ids stay theirs
        return self._links[key][2]

    def _times(
        self,
        layers: Sequence[Layers],
        bounds: Ints,
        placement: Sequence[int],
        alike: bool,
        names: Sequence[str] = ("forward", "backward"),
    ) -> np.ndarray:
        """Forward and backward of one micro-batch, of every stage."""
        if alike:
            return np.diff(np.sum([layers[0].sums[name][bounds] for name in names], axis=0))
        return np.array(
            [
                sum(layers[group].total(name, bounds[s], bounds[s + 1]) for name in names)
                for s, group in enumerate(placement)
            ]
        )

    def _tail(
        self, stages: Sequence[int], bounds: Ints, layers: Layers, setting: ExecutionConfig
    ) -> float:
        """The optimizer's reading and writing, at least."""
        device = self._device(setting.groups[setting.placement[stages[0]]])
        numel = 0.0
        for (axes, zero, _), share in layers.parameters(setting).items():
            ranks = setting.groups[setting.placement[stages[0]]].along(axes).shape[-1]
            mine = sum(float(share.numel[bounds[s + 1]] - share.numel[bounds[s]]) for s in stages)
            numel += mine / (ranks if zero else 1)
        return _update_lower_bound(numel, device)

    def _fullest(
        self,
        config: ParallelConfig,
        group: int,
        stages: Sequence[int],
        bounds: Ints,
        layers: Layers,
        setting: ExecutionConfig,
    ) -> float:
        """The least memory that a group's rank needs, as a part of its device's."""
        members = setting.groups[group]
        waiting = min(config.num_microbatches, max(1, config.pp - group))
        again = config.num_microbatches > (waiting if len(stages) == 1 else config.pp)
        total = 0.0
        for stage in stages:
            first, end = bounds[stage], bounds[stage + 1]
            memory = stage_memory(first, end, layers, members, setting)
            total += memory.least(waiting / len(stages), again)
        return total / self.limit(members)

    def limit(self, group: Group) -> float:
        """The bytes that tensors may take on the smallest device of a group, at most."""
        limit = Budget.of(self._device(group)).limit_bytes
        return min(limit, self.memory_limit) if self.memory_limit is not None else limit

    def update_lower_bound(self, numel: float, group: Group) -> float:
        """Seconds of the optimizer's reading and writing of so many elements, at least."""
        return _update_lower_bound(numel, self._device(group))

    def _device(self, group: Group) -> Device:
        kinds: list[int] = np.unique(self.evaluator.kind[group.array]).tolist()
        found: list[Device] = [self.evaluator.devices[kind] for kind in kinds]
        return min(found, key=lambda device: device.usable_bytes)

    def layers(self, layouts: Layouts, setting: ExecutionConfig, group: int) -> Layers:
        found = self.evaluator.group_layers(layouts.works, setting, group)
        return max(found, key=lambda layers: layers.sums["backward"][-1])


def _update_lower_bound(numel: float, device: Device) -> float:
    """Return a lower bound on the optimizer's time; a CPU reads and writes no less than a GPU."""
    if not numel:
        return 0.0
    calls = 0 if device.kind == "cpu" else adamw.FUSED_CALLS
    return adamw.fused_seconds(numel, device, calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTraffic:
    """Seconds that parameters and gradients of a group's stages travel, once each."""

    gather: float = 0.0  # blocks before a pass (zero 3)
    reduce: float = 0.0
    update: float = 0.0  # after the optimizer (zero 1 and 2)
    root: float = 0.0  # before the step (zero 3)


def communication_lower_bound(
    ranges: Sequence[tuple[int, int]],
    layers: Layers,
    group: Group,
    setting: ExecutionConfig,
    costs: ClusterCosts,
) -> ParameterTraffic:
    """The messages of the stages of positions `ranges`."""
    found: dict[tuple[str, str, tuple[str, ...]], float] = {}
    for first, end in ranges:
        for kind in layers.sent(first, end, setting):
            key = (kind.purpose, kind.op, kind.axes)
            found[key] = found.get(key, 0.0) + float(kind.num_bytes.sum())
    seconds = dict.fromkeys(PURPOSES, 0.0)
    for (purpose, op, axes), num_bytes in found.items():
        seconds[purpose] += costs.collective_seconds(op, group, axes, num_bytes)
    return ParameterTraffic(
        gather=seconds["gather"],
        reduce=seconds["reduce"],
        update=0.0 if setting.prefetch else seconds["update"],
        root=seconds["root"],
    )


def reduced_at_least(
    computed: float,
    ranges: Sequence[tuple[int, int]],
    layers: Layers,
    num_microbatches: int,
    traffic: ParameterTraffic,
) -> float:
    """When gradients are summed, if computing alone would end at `computed`."""
    forward, backward = (
        sum(layers.total(name, *mine) for mine in ranges) for name in ("forward", "backward")
    )
    slower = max(0.0, traffic.gather - forward) + max(0.0, traffic.gather - backward)
    waits = traffic.root if ranges[0][0] == 0 else 0.0  # later stages do it while they wait
    end = waits + computed + num_microbatches * slower
    hidden = max(backward, traffic.gather) * (1 if len(ranges) == 1 else 2)
    return max(end, end - hidden + traffic.gather + traffic.reduce)
