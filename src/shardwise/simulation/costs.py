"""The time that every node's workload takes on a rank of a cluster, for one micro-batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from shardwise.arrays import Floats, Ints, float_arrays
from shardwise.cluster import Cluster, Device, Mesh
from shardwise.collectives.messages.choice import Chooser
from shardwise.cost import OpTable, adamw, call_seconds, kernel_seconds
from shardwise.cost.collectives import CollectiveModel, collective_model
from shardwise.dtypes import itemsize
from shardwise.ir import Graph
from shardwise.plans import Precision, Sync
from shardwise.schedules import Schedule
from shardwise.shares import num_ranks
from shardwise.simulation.workload import BACKWARD, FORWARD, WEIGHT, Workload

T = TypeVar("T")


def cached(cache: dict[Any, Any], key: object, compute: Callable[[], T]) -> T:
    """Return the value of a key, computed once."""
    if key not in cache:
        cache[key] = compute()
    value: T = cache[key]
    return value


@dataclass(frozen=True, kw_only=True)
class NodeTimes:
    """Seconds that every node computes, and that it waits for collectives (`…_comm`)."""

    forward: Floats
    backward: Floats  # includes `weight`
    weight: Floats
    forward_comm: Floats
    backward_comm: Floats
    recompute: Floats  # forward without products, which selective recomputation repeats
    device: Device


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of the cluster arranged as a mesh: those that run the same stages.

    `cache` is for values that depend on the ranks; hashing many ranks takes long.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def array(self) -> Ints:
        """The ranks as an array."""
        return np.array(self.ranks, dtype=np.int64)

    def along(self, axes: Sequence[str]) -> np.ndarray:
        """Return the groups of ranks that communicate along these axes, one per row."""
        key = tuple(axes)
        if key not in self.cache:
            names = list(self.mesh.names)
            along = [a for a in key if a in names]
            grid = self.array.reshape(self.mesh.shape or (1,))
            order = [names.index(a) for a in (*(n for n in names if n not in along), *along)]
            size = int(np.prod([self.mesh.axis_size(a) for a in along], dtype=np.int64))
            rows = grid.transpose(order).reshape(-1, size) if names else grid.reshape(-1, 1)
            self.cache[key] = rows
        rows_along: np.ndarray = self.cache[key]
        return rows_along


class ClusterCosts:
    """Times on one cluster; the cost model of a collective is cached for every set of groups.

    `choose` selects the implementation of each collective; with None, the library's is used.
    """

    def __init__(
        self, cluster: Cluster, table: OpTable | None = None, choose: Chooser | None = None
    ) -> None:
        self.cluster, self.table, self.choose = cluster, table, choose
        self._collectives: dict[tuple[str, bytes, int], CollectiveModel] = {}

    def collective(self, op: str, groups: np.ndarray) -> CollectiveModel:
        """Return the cost model of a collective that all rows of `groups` run at the same time."""
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

    def bucket_mib(
        self, graph: Graph, precision: Precision, group: Group, axes: Sequence[str], parts: int
    ) -> int:
        """Return the size of messages of gradients that are summed along mesh axes of a group.

        A rank has one of `parts` of the model. The result is 0 where nothing is summed.
        """
        rows = group.along(axes)
        if rows.shape[-1] < 2:
            return 0
        summed = precision.reduce or precision.gradients or precision.master
        trained = (graph.values[p.value] for p in graph.parameters if p.requires_grad)
        num_bytes = sum(kind.numel * itemsize(summed, kind.dtype.itemsize) for kind in trained)
        return self.collective("all_reduce", rows).bucket_mib(num_bytes / parts)

    def update(self, device: Device, numel: float, piece: float, tensors: float) -> float | None:
        """Return the seconds of AdamW for `numel` elements in parameters of about `piece` each.

        A CPU runs a sequence of operators for each parameter. A GPU updates all parameters at once,
        for which the result is None unless it was measured.
        """
        if not numel:
            return 0.0
        if self.table is not None:
            seconds = self.table.update_seconds(device.name, numel, piece)
            if seconds is not None:
                return seconds / device.speed
        if device.kind != "cpu":
            return None
        seconds = adamw.operator_seconds(numel, device, piece=piece, tensors=tensors)
        return seconds * device.update_factor

    def node_times(self, work: Workload, device: Device, group: Group) -> NodeTimes:
        """Return the times of a rank with this device, in this group."""
        times = {name: np.zeros(len(work.saved)) for name in float_arrays(NodeTimes)}
        if self.table is None:
            self._compute(work, device, times)
            for seconds in times.values():
                seconds *= device.compute_factor
        else:
            self._look_up(work, device, self.table, times)
        names: Mapping[int, str] = {FORWARD: "forward_comm", BACKWARD: "backward_comm"}
        for collective in work.collectives:
            times[names[collective.phase]][collective.node] += self.collective_seconds(
                collective.op, group, collective.axes, collective.num_bytes
            )
        return NodeTimes(**times, device=device)

    def _compute(self, work: Workload, device: Device, times: Mapping[str, Floats]) -> None:
        for launch in work.launches:
            seconds = kernel_seconds(launch.kernel, device)
            if launch.phase == FORWARD:
                times["forward"][launch.node] += seconds
                times["recompute"][launch.node] += 0.0 if launch.product else seconds
            else:
                times["backward"][launch.node] += seconds
                times["weight"][launch.node] += seconds if launch.phase == WEIGHT else 0.0

    def _look_up(
        self, work: Workload, device: Device, table: OpTable, times: Mapping[str, Floats]
    ) -> None:
        for node, call, product in work.calls:
            seconds = call_seconds(call, device, table)
            times["forward"][node] += seconds.forward_s
            times["recompute"][node] += 0.0 if product else seconds.forward_s
            times["backward"][node] += seconds.backward_s
            times["weight"][node] += seconds.weight_s


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How a step runs: groups of ranks, the stages that they run, and memory savings.

    `cuts` are the positions at which stages begin, the first at 0; `placement` is the group that
    runs each stage. `zero` is the ZeRO level of all parameters; `zeros` overrides it for parameters
    that match a glob, and the last match wins; `syncs` are the parameters that are synchronized
    otherwise than by buckets or ZeRO, by name, and `link_rates` those of the ranks if they differ.
    Buckets have `bucket_bytes` (0: the default); a unit of zero 3 is one message of any size.
    With `prefetch`, updated parameters (zero 1 and 2) are gathered while the next forward already
    runs; with `whole_units`, every unit is one message, also with zero 1 and 2. Other frameworks do
    both; `published` predicts their times.
    """

    groups: tuple[Group, ...]
    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: Schedule | None = None
    num_microbatches: int = 1
    zero: int = 0
    zeros: Mapping[str, int] = field(default_factory=dict)
    syncs: Mapping[str, Sync] = field(default_factory=dict)
    link_rates: tuple[float, ...] = ()
    recompute: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    bucket_bytes: int = 0
    prefetch: bool = False
    whole_units: bool = False

    @property
    def recompute_suffix(self) -> str:
        """The suffix of a `Workload`'s arrays for this kind of recomputation."""
        suffixes = {"none": "", "selective": "_selective"}
        return suffixes.get(self.recompute, "_full") if isinstance(self.recompute, str) else "_full"

    def level(self, parameter: str) -> int:
        """Return the zero level of a parameter."""
        zero = self.zero
        for glob, level in self.zeros.items():
            if fnmatchcase(parameter, glob):
                zero = level
        return zero

    def num_along(self, axes: Sequence[str]) -> int:
        """Return the number of ranks along mesh axes."""
        sizes = dict(self.groups[0].mesh.axes)
        return math.prod(num_ranks(sizes.get(axis, 1)) for axis in axes)

    def reduced_item_bytes(self, item_bytes: int) -> int:
        """Return the bytes of a gradient's element while it is reduced, given its parameter's."""
        precision = self.precision
        return itemsize(precision.reduce or precision.gradients or precision.master, item_bytes)

    @property
    def message_key(self) -> object:
        """The part of the config that determines how parameters and gradients are sent."""
        item_bytes = self.reduced_item_bytes(0)
        levels = (self.zero, tuple(self.zeros.items()), tuple(self.syncs.items()))
        return (*levels, item_bytes, self.bucket_bytes, self.whole_units)

    @property
    def num_ranks(self) -> int:
        return sum(len(group.ranks) for group in self.groups)
