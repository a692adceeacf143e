"""The time that the workload of every node takes on a rank of a cluster, for one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Cluster, Device, Mesh
from shardwise.cost import OpTable, adamw, call_seconds, kernel_seconds
from shardwise.cost.collectives import CollectiveModel, collective_model
from shardwise.dtypes import itemsize
from shardwise.messages.choice import Chooser
from shardwise.plans import Precision
from shardwise.schedules import Schedule
from shardwise.simulation.workload import BACKWARD, FORWARD, WEIGHT, Floats, Workload


@dataclass(frozen=True, kw_only=True)
class NodeTimes:
    """Seconds of every node: of computing, and of waiting for collectives (`…_talk`)."""

    forward: Floats
    backward: Floats  # with `weight`
    weight: Floats
    forward_talk: Floats
    backward_talk: Floats
    again: Floats  # of forward without products: what selective recomputation repeats
    device: Device

    NAMES = ("forward", "backward", "weight", "forward_talk", "backward_talk", "again")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of the cluster arranged as a mesh: those that run the same stages."""

    mesh: Mesh
    ranks: tuple[int, ...]
    _along: dict[tuple[str, ...], np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The ranks as an array."""
        return np.array(self.ranks, dtype=np.int64)

    def along(self, axes: Sequence[str]) -> np.ndarray:
        """Return the groups of ranks that communicate along these axes, one per row."""
        key = tuple(axes)
        if key not in self._along:
            self._along[key] = self._find(key)
        return self._along[key]

    def _find(self, axes: tuple[str, ...]) -> np.ndarray:
        wanted = [a for a in axes if a in self.mesh.names]
        grid = self.array.reshape(self.mesh.shape or (1,))
        names = list(self.mesh.names)
        order = [names.index(a) for a in names if a not in wanted]
        order += [names.index(a) for a in wanted]
        size = int(np.prod([dict(self.mesh.axes)[a] for a in wanted], dtype=np.int64))
        return grid.transpose(order).reshape(-1, size) if names else grid.reshape(-1, 1)


class ClusterCosts:
    """Times on one cluster; collectives are worked out once for every set of groups.

    `choose` names the implementation of each; None stands for the library's.
    """

    def __init__(
        self, cluster: Cluster, table: OpTable | None = None, choose: Chooser | None = None
    ) -> None:
        self.cluster, self.table, self.choose = cluster, table, choose
        self._collectives: dict[tuple[str, bytes, int], CollectiveModel] = {}

    def collective(self, op: str, groups: np.ndarray) -> CollectiveModel:
        """Return the model of a collective that all rows of `groups` run at the same time."""
        key = (op, groups.tobytes(), groups.shape[-1])
        if key not in self._collectives:
            model = collective_model(self.cluster, op, groups)
            choice = self.choose(op, groups) if self.choose is not None else None
            self._collectives[key] = model.with_choice(choice)
        return self._collectives[key]

    def collective_seconds(
        self, op: str, group: Group, axes: Sequence[str], num_bytes: float
    ) -> float:
        """Return the seconds of a collective along mesh axes of a group."""
        rows = group.along(axes)
        if rows.shape[-1] < 2 or num_bytes <= 0:
            return 0.0
        return self.collective(op, rows).seconds(num_bytes)

    def update(self, device: Device, numel: float, piece: float, tensors: float) -> float | None:
        """Seconds of AdamW for `numel` elements in parameters of about `piece`, if more is known.

        On a CPU it is a sequence of operators for each parameter; a GPU takes all at once.
        """
        if not numel:
            return 0.0
        if self.table is not None:
            found = self.table.update_seconds(device.name, numel, piece)
            if found is not None:
                return found / device.speed
        if device.kind != "cpu":
            return None
        return adamw.operator_seconds(numel, device, piece=piece, tensors=tensors)

    def node_times(self, work: Workload, device: Device, group: Group) -> NodeTimes:
        """Return the times of a rank with this device, in this group."""
        count = len(work.saved)
        found = {name: np.zeros(count) for name in NodeTimes.NAMES}
        if self.table is None:
            self._compute(work, device, found)
        else:
            self._look_up(work, device, self.table, found)
        names: Mapping[int, str] = {FORWARD: "forward_talk", BACKWARD: "backward_talk"}
        for talk in work.collectives:
            found[names[talk.phase]][talk.node] += self.collective_seconds(
                talk.op, group, talk.axes, talk.num_bytes
            )
        return NodeTimes(**found, device=device)

    def _compute(self, work: Workload, device: Device, found: Mapping[str, Floats]) -> None:
        for launch in work.launches:
            seconds = kernel_seconds(launch.kernel, device)
            if launch.phase == FORWARD:
                found["forward"][launch.node] += seconds
                found["again"][launch.node] += 0.0 if launch.product else seconds
            else:
                found["backward"][launch.node] += seconds
                found["weight"][launch.node] += seconds if launch.phase == WEIGHT else 0.0

    def _look_up(
        self, work: Workload, device: Device, table: OpTable, found: Mapping[str, Floats]
    ) -> None:
        for node, call, product in work.calls:
            seconds = call_seconds(call, device, table)
            found["forward"][node] += seconds.forward_s
            found["again"][node] += 0.0 if product else seconds.forward_s
            found["backward"][node] += seconds.backward_s
            found["weight"][node] += seconds.weight_s


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that takes time on one lane of one group of ranks."""

    group: int
    lane: str  # "compute" or "communication"
    name: str
    start: float
    end: float
    kind: str  # "forward", "backward", "weight", "sync", "gather", "optimizer"
    detail: Mapping[str, float] = field(default_factory=dict)


# How a step runs, beside the layouts of its nodes.


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Groups of ranks, the stages that they run, and what is done to save memory.

    `cuts` are the positions at which stages begin, the first at 0; `placement` says which group
    runs each. `zero` is the level of all parameters, `zeros` that of those that match a glob; the
    last match wins. `prefetch` says whether new parameters are gathered (zero 1 and 2) while the
    next forward already runs, `whole_units` that a unit's parameters travel in one message whatever
    their size; both are of other stacks than ours.
    """

    groups: tuple[Group, ...]
    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: Schedule | None = None
    num_microbatches: int = 1
    zero: int = 0
    zeros: Mapping[str, int] = field(default_factory=dict)
    recompute: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    prefetch: bool = False
    whole_units: bool = False

    def level(self, parameter: str) -> int:
        """The zero level of a parameter."""
        found = self.zero
        for glob, level in self.zeros.items():
            if fnmatchcase(parameter, glob):
                found = level
        return found

    def wire_size(self, item_bytes: int) -> int:
        """Return the bytes of a gradient's element while it is summed, given its parameter's."""
        precision = self.precision
        return itemsize(precision.reduce or precision.gradients or precision.master, item_bytes)

    @property
    def sums(self) -> object:
        """The part of the config that decides how parameters and gradients are sent."""
        return (self.zero, tuple(self.zeros.items()), self.wire_size(0), self.whole_units)

    @property
    def num_ranks(self) -> int:
        return sum(len(group.ranks) for group in self.groups)
