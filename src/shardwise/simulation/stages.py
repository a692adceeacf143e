"""The cost of every stage: its units, each with the time of a pass and the messages it sends.

A unit is a run of positions in one block: what is gathered, recomputed and synchronized together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardwise.arrays import Bools, Floats, Ints, before, float_arrays
from shardwise.cost import sync
from shardwise.dtypes import itemsize as itemsize_of
from shardwise.plans import Sync
from shardwise.plans.search_result import SyncTraffic
from shardwise.runtime.parameters import BUCKET_BYTES
from shardwise.simulation.costs import ClusterCosts, ExecutionConfig, Group, NodeTimes, cached
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.workload import LocalParameter, Workload

# Mesh axes of the reduction, ZeRO level, item bytes, and those of sent gradients: 0 if `Sync` gives
# the messages.
Key = tuple[tuple[str, ...], int, int, int]
Run = tuple[str, int, int]  # a unit: its name, its first position and its end

# Purposes of messages: "reduce" gradients; "gather" the parameters of blocks for each pass, and
# "root", those outside of blocks, once a step (zero 3); "update" gathers new parameters (zero 1
# and 2).
PURPOSES = ("reduce", "gather", "root", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamClass:
    """Trained parameters of one kind, as sums before each position."""

    numel: Floats
    tensors: Floats
    arrives: Floats  # numel at the last use, where backward first makes a gradient
    squares: Floats  # of numel: their mean size weighs large parameters by their elements
    single: Floats  # parameters whose gradients are separate messages
    bucketed: Floats  # elements of all other parameters
    flat: Floats  # parameters that are separate flat groups
    joined: Floats  # elements of all other parameters
    itemsize: int


def shares(fold: FoldedGraph, work: Workload, execution: ExecutionConfig) -> dict[Key, ParamClass]:
    """Group the trained parameters by how their gradients are reduced and sharded."""
    count, single = len(fold.graph.nodes), execution.bucket_bytes or BUCKET_BYTES
    classes: dict[Key, dict[str, Floats]] = {}
    for parameter in work.parameters:
        if not parameter.requires_grad:
            continue
        form, item = execution.syncs.get(parameter.name, Sync()), parameter.itemsize
        size = itemsize_of(form.dtype, execution.reduced_item_bytes(item))
        reduced = 0 if sync.is_special(form) else size
        key = (parameter.sync, _level(parameter, form, execution), item, reduced)
        arrays = classes.setdefault(key, {n: np.zeros(count) for n in float_arrays(ParamClass)})
        node, numel = parameter.node, parameter.numel
        last = max((node, *parameter.others))
        arrays["numel"][node] += numel
        arrays["tensors"][node] += 1
        arrays["arrives"][last if fold.copies[last] == fold.copies[node] else node] += numel
        arrays["squares"][node] += float(numel) ** 2
        is_large = numel * size >= single
        is_flat = numel * parameter.itemsize >= single
        arrays["single" if is_large else "bucketed"][node] += 1 if is_large else numel
        arrays["flat" if is_flat else "joined"][node] += 1 if is_flat else numel
    return {
        key: ParamClass(itemsize=key[2], **{n: before(fold.spread(a)) for n, a in arrays.items()})
        for key, arrays in classes.items()
    }


def _level(parameter: LocalParameter, form: Sync, execution: ExecutionConfig) -> int:
    """Return the level by which ranks share a parameter; the fullest rank owns all of it."""
    if sync.is_special(form):
        return 2 if form.kind == "partitioned" else 0
    return execution.level(parameter.name) if parameter.sync else 0


def special_messages(
    fold: FoldedGraph, work: Workload, execution: ExecutionConfig
) -> Iterator[tuple[LocalParameter, Sync, sync.SyncMessage, float]]:
    """Yield parameters with a synchronization of their own, and its collectives.

    The last value is how many of these messages the parameter adds: others share them.
    """
    rows = sync.step_rows(fold.graph)
    syncs = {name: form for name, form in execution.syncs.items() if sync.is_special(form)}
    values = {p.name: p.value for p in fold.graph.parameters}
    special = [p for p in work.parameters if p.name in syncs and p.sync and p.requires_grad]
    joined: Counter[Sync] = Counter()  # parameters with the same synchronization
    for parameter in special:
        joined[syncs[parameter.name]] += int(fold.copies[parameter.node])
    for parameter in special:
        form, item = syncs[parameter.name], parameter.itemsize
        num = execution.num_along(parameter.sync)
        reduced = itemsize_of(form.dtype, execution.reduced_item_bytes(item))
        if form.compression is not None:
            item = itemsize_of(execution.precision.master, item)
        used = rows.get(values[parameter.name], 0)
        rates = execution.link_rates if len(execution.link_rates) == num else ()
        count = 1.0
        if form.inexact or (form.has_owners and form.dim is None and not form.sparse):
            filled = parameter.numel * reduced / (execution.bucket_bytes or BUCKET_BYTES)
            count = min(1.0, max(filled * (form.every == 1), form.fragments / joined[form]))
        for message in sync.sync_messages(form, parameter.shape, item, reduced, used, num, rates):
            yield parameter, form, message, count / message.steps


def special_traffic(
    fold: FoldedGraph, work: Workload, runs: Sequence[Run], execution: ExecutionConfig
) -> Iterator[Traffic]:
    """Yield the messages of parameters with a synchronization of their own."""
    count = len(fold.graph.nodes)
    arrays: dict[tuple[str, str, tuple[str, ...], int, float], tuple[Floats, Floats]] = {}
    for parameter, _, message, number in special_messages(fold, work, execution):
        slack = message.slack / message.steps
        key = (message.purpose, message.op, parameter.sync, message.level, slack)
        sizes, messages = arrays.setdefault(key, (np.zeros(count), np.zeros(count)))
        sizes[parameter.node] += message.busy_bytes / message.steps
        messages[parameter.node] += number
    edges = np.array([*(first for _, first, _ in runs), runs[-1][2]])
    for (purpose, op, axes, level, slack), both in arrays.items():
        sizes, messages = (np.diff(before(fold.spread(array))[edges]) for array in both)
        yield Traffic(purpose, op, axes, sizes, messages, level, slack)


def sync_traffic(
    fold: FoldedGraph, work: Workload, execution: ExecutionConfig
) -> tuple[SyncTraffic, ...]:
    """Return what each synchronization other than by buckets and ZeRO sends in a step."""
    sizes, messages = defaultdict[Sync, float](float), defaultdict[Sync, float](float)
    for parameter, form, message, number in special_messages(fold, work, execution):
        copies, num = int(fold.copies[parameter.node]), execution.num_along(parameter.sync)
        sizes[form] += copies * message.sent_bytes(num)
        messages[form] += copies * number
    return tuple(
        SyncTraffic(form=str(form), num_bytes=sizes[form], messages=messages[form])
        for form in sizes
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of one kind that each unit of a stage sends."""

    purpose: str  # one of PURPOSES
    op: str
    axes: tuple[str, ...]
    num_bytes: Floats  # of all messages of the unit
    messages: Floats
    level: int = 0  # of ranks in groups of that size, or across them if negative
    slack: float = 0.0  # steps whose computation hides them, besides the backward that sends them

    def groups(self, rows: Ints) -> Ints:
        """Return the groups of ranks that communicate, given those along the axes."""
        return sync.level_groups(rows, self.level)

    def seconds(self, time: Callable[[float], float]) -> list[float]:
        """Return the seconds of each unit, where a message takes `time(bytes)`."""
        seconds_of: dict[tuple[float, float], float] = {(0.0, 0.0): 0.0}
        pairs = list(zip(self.num_bytes.tolist(), self.messages.tolist(), strict=True))
        for size, count in pairs:
            if (size, count) not in seconds_of:
                seconds_of[size, count] = count * time(size / count)
        return [seconds_of[pair] for pair in pairs]


def sent(
    classes: Mapping[Key, ParamClass], runs: Sequence[Run], execution: ExecutionConfig
) -> Iterator[Traffic]:
    """Yield the messages of a stage with these units."""
    inside = np.array([bool(name) or execution.whole_units for name, _, _ in runs])
    summed: dict[tuple[tuple[str, ...], int], list[ParamClass]] = {}
    for (axes, zero, itemsize, size), share in classes.items():
        if not size:
            continue
        if zero < 2:
            summed.setdefault((axes, size), []).append(share)
        if zero == 0:
            continue
        numel, count = _groups(share, runs, execution, by_unit=zero == 3)
        gathered = numel * itemsize
        if zero == 3:
            yield Traffic("gather", "all_gather", axes, gathered * inside, count * inside)
            yield Traffic("root", "all_gather", axes, gathered * ~inside, count * ~inside)
        else:
            yield Traffic("update", "all_gather", axes, gathered, count)
        if zero >= 2:
            yield Traffic("reduce", "reduce_scatter", axes, numel * size, count)
    for (axes, size), together in summed.items():
        numel, single, small = (
            np.sum([_inside(getattr(share, name), runs) for share in together], axis=0)
            for name in ("numel", "single", "bucketed")
        )
        limit = (execution.bucket_bytes or BUCKET_BYTES) / size
        numel, count = _bucketed(numel, single, small, runs, [(range(len(runs)), limit)])
        yield Traffic("reduce", "all_reduce", axes, numel * size, count)


Unit = tuple[Sequence[int], float]  # runs that share buckets, and the elements of a bucket


def _groups(
    share: ParamClass, runs: Sequence[Run], execution: ExecutionConfig, *, by_unit: bool
) -> tuple[Floats, Floats]:
    """Return elements and messages of every run in flat groups.

    All runs of a unit share groups; parameters outside of blocks have runs before and after them.
    A block that is gathered for each pass is one group.
    """
    numel, single, small = (_inside(a, runs) for a in (share.numel, share.flat, share.joined))
    members: dict[str, list[int]] = {}
    for at, (name, _, _) in enumerate(runs):
        members.setdefault(name if by_unit or execution.whole_units else "", []).append(at)
    units = []
    for name, own in members.items():
        is_whole = execution.whole_units or (by_unit and bool(name))
        limit = (execution.bucket_bytes or BUCKET_BYTES) / share.itemsize
        units.append((own, np.inf if is_whole else limit))
        for run in own if is_whole else ():
            inside = slice(runs[run][1] - runs[0][1], runs[run][2] - runs[0][1])
            single[inside], small[inside] = 0.0, numel[inside]
    return _bucketed(numel, single, small, runs, units)


def _inside(sums: Floats, runs: Sequence[Run]) -> Floats:
    """Return the values at every position of the stage, given their sums."""
    return np.diff(sums[runs[0][1] : runs[-1][2] + 1])


def _bucketed(
    numel: Floats, single: Floats, small: Floats, runs: Sequence[Run], units: Sequence[Unit]
) -> tuple[Floats, Floats]:
    """Return elements and messages of every run, where small tensors of a unit share buckets.

    The run that completes a bucket in backward sends it.
    """
    edges = np.array([*(first for _, first, _ in runs), runs[-1][2]]) - runs[0][1]
    messages = np.diff(before(single)[edges])  # whole numbers: differences of sums are exact
    sizes = np.diff(before(numel - small)[edges])
    for own, limit in units:
        last, filled = 0, 0.0
        for run in reversed(own):
            inside = small[edges[run] : edges[run + 1]]
            for size in inside[np.flatnonzero(inside)][::-1].tolist():
                last, filled = run, filled + size
                if filled >= limit:
                    messages[run] += 1
                    sizes[run] += filled
                    filled = 0.0
        messages[last] += filled > 0
        sizes[last] += filled
    return sizes, messages


# ------------------------------------------------------------ stages
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """Seconds of one unit for one micro-batch; `reduce` happens once a step."""

    name: str
    first: int
    end: int
    forward: float
    backward: float
    weight: float = 0.0
    forward_comm: float = 0.0  # waiting for collectives between nodes
    backward_comm: float = 0.0
    recompute: float = 0.0  # part of backward
    gather: float = 0.0  # of a block's parameters, before forward and before backward (zero 3)
    reduce: float = 0.0  # of gradients, in the last backward


def _total(name: str) -> property:
    """Return a property of a stage that adds up a field of its units."""
    return property(lambda stage: sum(getattr(unit, name) for unit in stage.units))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The units of a stage on its group's slowest rank, and the bytes that it sends."""

    index: int
    group: int
    units: tuple[UnitCost, ...]
    send_bytes: float  # to the next stage, for one micro-batch; a gradient comes back
    numel: float  # elements that the optimizer of a rank updates
    tensors: int  # that hold these elements
    update_gather: float  # seconds to gather updated parameters (zero 1 and 2)
    root_gather: float = 0.0  # seconds for parameters outside of blocks, before a step (zero 3)
    update_s: float | None = None  # seconds of the optimizer, where `numel` alone does not tell

    forward = _total("forward")
    backward = _total("backward")
    weight = _total("weight")
    forward_comm = _total("forward_comm")
    backward_comm = _total("backward_comm")
    recompute = _total("recompute")

    @property
    def computing(self) -> float:
        """Seconds of a micro-batch without communication."""
        seconds: float = self.forward + self.backward - self.forward_comm - self.backward_comm
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A rank's part of a parameter that several positions use."""

    numel: float
    num_bytes: float
    users: Ints  # positions, ascending


class Layers:
    """The costs of every position of a model on one rank, as sums of which ranges are differences.

    `shared` caches what all layers with the same parameters have in common.
    """

    def __init__(
        self,
        fold: FoldedGraph,
        work: Workload,
        times: NodeTimes,
        execution: ExecutionConfig,
        shared: dict[object, Any] | None = None,
    ) -> None:
        self.fold, self.work, self.device = fold, work, times.device
        recompute = _recompute_seconds(fold, work, times, execution)
        spread = fold.spread
        self.sums = {
            "forward": before(spread(times.forward + times.forward_comm)),
            "backward": before(spread(times.backward + times.backward_comm) + recompute),
            "weight": before(spread(times.weight)),
            "forward_comm": before(spread(times.forward_comm)),
            "backward_comm": before(spread(times.backward_comm)),
            "recompute": before(recompute),
        }
        self._shared = {} if shared is None else shared
        self.cache: dict[object, Any] = {}  # arrays and stages, also those of `pass_memory`

    def parameters(self, execution: ExecutionConfig) -> dict[Key, ParamClass]:
        """Return the trained parameters, grouped by how their gradients are reduced and sharded."""
        key = (id(self.work.parameters), execution.message_key)
        return cached(self._shared, key, lambda: shares(self.fold, self.work, execution))

    def num_trained(self, first: int, end: int, execution: ExecutionConfig) -> float:
        """Return the trained elements on a rank of positions `first:end`."""
        classes = self.parameters(execution).values()
        return sum(float(share.numel[end] - share.numel[first]) for share in classes)

    def sent(self, first: int, end: int, execution: ExecutionConfig) -> tuple[Traffic, ...]:
        """Return the messages of parameters and gradients of the units of positions `first:end`."""

        def messages() -> tuple[Traffic, ...]:
            runs = self.fold.runs(first, end)
            special = special_traffic(self.fold, self.work, runs, execution)
            return (*sent(self.parameters(execution), runs, execution), *special)

        key = (id(self.work.parameters), execution.message_key, first, end)
        return cached(self._shared, key, messages)

    def at_positions(self, name: str) -> Floats:
        """Return an array of the workload, spread over the positions of the model."""
        key = ("positions", name)
        return cached(self.cache, key, lambda: self.fold.spread(getattr(self.work, name)))

    @cached_property
    def tied(self) -> list[Tied]:
        """The trained parameters that several positions use."""
        return [
            Tied(
                numel=float(p.numel),
                num_bytes=float(p.numel * p.itemsize),
                users=np.flatnonzero(np.isin(self.fold.index, (p.node, *p.others))),
            )
            for p in self.work.parameters
            if p.others and p.requires_grad and self.fold.copies[p.node] == 1
        ]

    @cached_property
    def frozen_bytes(self) -> Floats:
        """Bytes of parameters that are not trained, before every position."""
        sizes = np.zeros(len(self.fold.graph.nodes))
        for parameter in self.work.parameters:
            if not parameter.requires_grad:
                sizes[parameter.node] += parameter.numel * parameter.itemsize
        return before(self.fold.spread(sizes))

    def total(self, name: str, first: int, end: int) -> float:
        """Return the sum over positions `first:end`."""
        sums = self.sums[name]
        return float(sums[end] - sums[first])


def _recompute_seconds(
    fold: FoldedGraph, work: Workload, times: NodeTimes, execution: ExecutionConfig
) -> Floats:
    """Return the seconds that backward spends on recomputing forward, at every position."""
    if execution.recompute == "none":
        return np.zeros(fold.size)
    inside = _repeated(fold, work)
    if execution.recompute == "selective":
        return fold.spread(times.recompute + times.forward_comm) * inside
    if not isinstance(execution.recompute, str):
        modules = [place.rpartition(".")[0] for place in fold.places]
        globs = execution.recompute
        inside &= np.array([any(_under(m, g) for g in globs) for m in modules])
    return fold.spread(times.forward + times.forward_comm) * inside


def _repeated(fold: FoldedGraph, work: Workload) -> Bools:
    """Mark the positions of each block up to the last result that its own backward needs.

    The second forward ends there (torch's checkpoint stops early): the last product of a block,
    and the collective after it, are not repeated.
    """
    repeated = np.zeros(fold.size, dtype=bool)
    needed = fold.spread(work.saved - work.saved_full) > 0
    for name, first, end in fold.runs(0, fold.size):
        needed_here = np.flatnonzero(needed[first:end])
        if name and needed_here.size:
            repeated[first : first + int(needed_here[-1]) + 1] = True
    return repeated


def _under(module: str, glob: str) -> bool:
    """Return whether a module or a module that contains it matches."""
    pieces = module.split(".")
    return any(fnmatchcase(".".join(pieces[: i + 1]), glob) for i in range(len(pieces)))


class LocalStage(NamedTuple):
    """The stage of positions `first:end`, as a rank of a group runs it."""

    first: int
    end: int
    layers: Layers
    group: Group
    execution: ExecutionConfig

    @property
    def sent(self) -> tuple[Traffic, ...]:
        """The messages of its parameters and gradients."""
        return self.layers.sent(self.first, self.end, self.execution)

    def total(self, name: str) -> float:
        """Return the seconds of one kind of work on a micro-batch."""
        return self.layers.total(name, self.first, self.end)

    def num_sharing(self, axes: tuple[str, ...], zero: int) -> int:
        """Return the number of ranks that share what parameters of a ZeRO level need."""
        return int(self.group.along(axes).shape[-1]) if zero else 1


def stage_cost(index: int, stage: LocalStage, costs: ClusterCosts) -> StageCost:
    """Return the cost of a stage."""
    first, end, layers, _, execution = stage
    runs = layers.fold.runs(first, end)
    seconds = _messages(stage, costs)
    units = []
    for (name, a, b), gather, reduce in zip(
        runs, seconds["gather"], seconds["reduce"], strict=True
    ):
        sums = {n: layers.total(n, a, b) for n in layers.sums}
        units.append(UnitCost(name=name, first=a, end=b, **sums, gather=gather, reduce=reduce))
    numel, tensors, squares = 0.0, 0.0, 0.0
    for (axes, zero, _, _), share in layers.parameters(execution).items():
        ranks = stage.num_sharing(axes, zero)
        numel += float(share.numel[end] - share.numel[first]) / ranks
        tensors += float(share.tensors[end] - share.tensors[first])
        squares += float(share.squares[end] - share.squares[first]) / ranks**2
    is_last = index + 1 == len(execution.cuts)
    return StageCost(
        index=index,
        group=execution.placement[index],
        units=tuple(units),
        send_bytes=0.0 if is_last else float(layers.at_positions("crossing")[end]),
        numel=numel,
        tensors=round(tensors),
        update_gather=sum(seconds["update"]),
        root_gather=sum(seconds["root"]),
        update_s=costs.update(layers.device, numel, squares / numel if numel else 0.0, tensors),
    )


def tied_bytes(
    layers: Sequence[Layers], execution: ExecutionConfig
) -> dict[tuple[int, int], float]:
    """Return the bytes of tied parameters by owner and replica, given the layers of every group.

    The owner is the group whose stage uses a parameter first.
    """
    totals: dict[tuple[int, int], float] = {}
    for number, tied in enumerate(layers[0].tied if len(layers) > 1 else ()):
        stages = np.searchsorted(execution.cuts, tied.users, side="right") - 1
        owner, *replicas = dict.fromkeys(execution.placement[stage] for stage in stages.tolist())
        for replica in replicas:
            num_bytes = layers[owner].tied[number].num_bytes
            totals[owner, replica] = totals.get((owner, replica), 0.0) + num_bytes
    return totals


def with_offload(cost: StageCost, seconds: float) -> StageCost:
    """Return the stage with the exposed time of moving its activations to host memory and back.

    Forward hides the transfer to the host as far as it lasts; nothing hides the transfer back.
    """
    unit = UnitCost(
        name="",
        first=cost.units[-1].end,
        end=cost.units[-1].end,
        forward=max(0.0, seconds - cost.forward),
        backward=seconds,
    )
    return replace(cost, units=(*cost.units, unit))


def _messages(stage: LocalStage, costs: ClusterCosts) -> dict[str, list[float]]:
    """Return the seconds of every unit's messages, by purpose."""
    layers, execution = stage.layers, stage.execution
    num_units = len(layers.fold.runs(stage.first, stage.end))
    seconds = {purpose: [0.0] * num_units for purpose in PURPOSES}
    for kind in stage.sent:
        rows = kind.groups(stage.group.along(kind.axes))
        if rows.shape[-1] < 2:
            continue
        spent = kind.seconds(costs.collective(kind.op, rows).seconds)
        if kind.slack:
            computing = stage.total("forward") + stage.total("backward")
            hidden = kind.slack * execution.num_microbatches * computing
            spent = [max(0.0, sum(spent) - hidden), *(0.0 for _ in spent[1:])]
        seconds[kind.purpose] = [a + b for a, b in zip(seconds[kind.purpose], spent, strict=True)]
    for parameter in layers.work.parameters if execution.syncs else ():
        form = execution.syncs.get(parameter.name, Sync())
        if parameter.requires_grad and execution.num_along(parameter.sync) > 1:
            numel = float(layers.fold.copies[parameter.node] * parameter.numel)
            item = itemsize_of(execution.precision.master, parameter.itemsize)
            purpose = "update" if form.every > 1 else "reduce"  # of the first unit: after the rest
            seconds[purpose][0] += sync.encoding_seconds(form, numel, item, layers.device)
    return seconds
