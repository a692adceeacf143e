"""Bounds of points: no simulated step is quicker, no rank needs less memory.

Enters: a point, with its layouts and its setting. Leaves: `Core` and `Bound`. `least` says what of
parameters and gradients nothing hides.
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
from shardwise.planner.search.bank import Bank, Layouts
from shardwise.planner.search.found import Bound
from shardwise.planner.search.least import least_end, least_wire
from shardwise.planner.search.space import Point
from shardwise.schedules import schedule_kind
from shardwise.simulation.budget import Budget
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.memory import stage_memory
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import Layers
from shardwise.simulation.step import pairs
from shardwise.simulation.times import Group

Ints = NDArray[np.int64]

FEW_GROUPS = 16  # of ranks, up to which bounds count the messages between stages


@dataclass(frozen=True, kw_only=True)
class Core:
    """What points that differ in zero and offload share: when the work of each group ends."""

    setting: Setting
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
    """Bounds of one model's points on one cluster, each worked out once."""

    def __init__(
        self,
        bank: Bank,
        evaluator: Evaluator,
        setting: Callable[[Point, Layouts], Setting],
        memory_limit: float | None,
    ) -> None:
        self.bank, self.evaluator, self.setting = bank, evaluator, setting
        self.memory_limit, self.fold = memory_limit, evaluator.fold
        self._bounds: dict[Point, Bound] = {}
        self._cores: dict[Point, Core | None] = {}
        self._links: dict[tuple[int, int], tuple[Group, Group, CollectiveModel]] = {}

    def bound(self, point: Point) -> Bound:
        if point in self._bounds:
            return self._bounds[point]
        core = self.core(replace(point, zero=0, offload=()))
        assert core is not None
        setting = replace(core.setting, zero=point.zero, offload=point.offload)
        seconds, fullest = core.seconds, 0.0
        for group, stages in core.watched.items():
            layers, members = core.layers[group], setting.groups[group]
            ranges = [(int(core.bounds[s]), int(core.bounds[s + 1])) for s in stages]
            wire = least_wire(ranges, layers, members, setting, self.evaluator.clock)
            end = least_end(core.ends[group], ranges, layers, point.num_microbatches, wire)
            tail = self._tail(stages, core.bounds, layers, setting) + wire.update
            seconds = max(seconds, end + tail, core.paths[group] + tail)
            if group == setting.placement[0]:
                seconds = max(seconds, core.back + tail)
            full = self._fullest(point, group, stages, core.bounds, core.layers[group], setting)
            fullest = max(fullest, full)
        self._bounds[point] = Bound(point=point, seconds=seconds, memory=fullest)
        return self._bounds[point]

    def core(self, point: Point) -> Core | None:
        """What points that differ in zero and offload share; None where they are impossible."""
        if point not in self._cores:
            try:
                self._cores[point] = self._find_core(point)
            except ShardwiseError:  # too few places for so many stages, or nothing to cut
                self._cores[point] = None
        return self._cores[point]

    def shares(self, point: Point) -> bool:
        """Whether ranks share any parameters, of which zero levels could keep parts."""
        core = self.core(point)
        assert core is not None
        return any(
            core.setting.groups[group].along(axes).shape[-1] > 1
            for group in core.watched
            for axes, _, _ in core.layers[group].parameters(core.setting)
        )

    def _find_core(self, point: Point) -> Core:
        layouts = self.bank.get(point.tp, point.layout)
        setting = self.setting(point, layouts)
        bounds = np.array([*setting.cuts, self.fold.size])
        alike = len(self.evaluator.devices) == 1
        first = self.layers(layouts, setting, 0)
        layers = [first if alike else self.layers(layouts, setting, g) for g in range(point.pp)]
        times = self._times(layers, bounds, setting.placement, alike)
        stages: dict[int, list[int]] = {}
        for stage, group in enumerate(setting.placement):
            stages.setdefault(group, []).append(stage)
        sends = self._sends(setting, bounds, layers[0]) if alike else np.zeros(len(times))
        forward = self._times(layers, bounds, setting.placement, alike, ("forward",))
        before = np.concatenate([[0.0], np.cumsum(forward + sends)])
        around, waits = before, np.zeros(len(times))
        # Input gradients travel on without waiting for weight gradients that come later.
        if schedule_kind(point.schedule).splits_backward:
            waits = self._times(layers, bounds, setting.placement, alike, ("weight",))
        else:
            around = np.concatenate([[0.0], np.cumsum(times + 2 * sends)])
        # One micro-batch goes through all stages, and back to each, which then has its weights.
        back = np.cumsum((times - forward - waits + sends)[::-1])[::-1]
        path = (forward + sends).sum() + back + waits
        alone = {g: point.num_microbatches * times[mine].sum() for g, mine in stages.items()}
        few = {0, 1, point.pp - 1} if alike else set(stages)
        return Core(
            setting=setting,
            bounds=bounds,
            layers=layers,
            ends={g: float(before[mine[0]] + alone[g]) for g, mine in stages.items()},
            paths={g: float(path[mine].max()) for g, mine in stages.items()},
            back=max(float(around[mine[0]] + alone[g]) for g, mine in stages.items()),
            watched={g: mine for g, mine in stages.items() if g in few},
        )

    def _sends(self, setting: Setting, bounds: Ints, layers: Layers) -> np.ndarray:
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
            model = self.evaluator.clock.collective("send", pairs(here.array, there.array))
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

    def _tail(self, stages: Sequence[int], bounds: Ints, layers: Layers, setting: Setting) -> float:
        """The optimizer's reading and writing, at least."""
        device = self._device(setting.groups[setting.placement[stages[0]]])
        numel = 0.0
        for (axes, zero, _), share in layers.parameters(setting).items():
            ranks = setting.groups[setting.placement[stages[0]]].along(axes).shape[-1]
            mine = sum(float(share.numel[bounds[s + 1]] - share.numel[bounds[s]]) for s in stages)
            numel += mine / (ranks if zero else 1)
        return _least_update(numel, device)

    def _fullest(
        self,
        point: Point,
        group: int,
        stages: Sequence[int],
        bounds: Ints,
        layers: Layers,
        setting: Setting,
    ) -> float:
        """The least memory that a group's rank needs, as a part of its device's."""
        members = setting.groups[group]
        waiting = min(point.num_microbatches, max(1, point.pp - group))
        again = point.num_microbatches > (waiting if len(stages) == 1 else point.pp)
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

    def least_update(self, numel: float, group: Group) -> float:
        """Seconds of the optimizer's reading and writing of so many elements, at least."""
        return _least_update(numel, self._device(group))

    def _device(self, group: Group) -> Device:
        kinds: list[int] = np.unique(self.evaluator.kind[group.array]).tolist()
        found: list[Device] = [self.evaluator.devices[kind] for kind in kinds]
        return min(found, key=lambda device: device.usable_bytes)

    def layers(self, layouts: Layouts, setting: Setting, group: int) -> Layers:
        found = self.evaluator.group_layers(layouts.works, setting, group)
        return max(found, key=lambda layers: layers.sums["backward"][-1])


def _least_update(numel: float, device: Device) -> float:
    """Return a lower bound on the optimizer's time; a CPU reads and writes no less than a GPU."""
    if not numel:
        return 0.0
    calls = 0 if device.kind == "cpu" else adamw.FUSED_CALLS
    return adamw.fused_seconds(numel, device, calls=calls)
