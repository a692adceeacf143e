"""The messages that carry parameters and gradients: how many, how large, and in which unit.

A `ParamClass` has the parameters that are synchronized alike, and `Traffic` their messages in every
unit of a stage. As in the runtime:

- a large tensor is a message of its own; small ones share buckets, filled from the last position on
  (`runtime.parameters.buckets`);
- gradients of zero 0 and 1 are summed in buckets. Flat groups (`runtime.store`) are formed like
  buckets, with zero 3 from the parameters of one unit: zero 2 and 3 scatter gradients, and zero 1
  to 3 gather parameters by group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.runtime.parameters import ALONE_BYTES, BUCKET_BYTES, FIRST_BUCKET_BYTES
from shardwise.simulation.costs import ExecutionConfig
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.workload import Floats, Workload

Key = tuple[tuple[str, ...], int, int]  # mesh axes of the gradient's sum, zero level, item bytes
Run = tuple[str, int, int]  # a unit: its name, and the positions that it has
Parcel = tuple[int, int, float]  # the number of a run, a position in the stage, elements there

# Why messages are sent: gradients are summed; blocks are gathered for each pass, parameters outside
# of blocks once a step (zero 3); new parameters go to all ranks (zero 1 and 2).
PURPOSES = ("reduce", "gather", "root", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamClass:
    """Trained parameters of one kind, as sums before each position."""

    numel: Floats
    tensors: Floats
    arrives: Floats  # as numel, where a gradient first appears: at the last use
    squares: Floats  # of the elements of each: a large parameter counts by its own size
    alone: Floats  # parameters whose gradients are messages of their own
    bucketed: Floats  # elements of the others
    flat: Floats  # parameters that are flat groups of their own
    joined: Floats  # elements of the others
    itemsize: int

    ARRAYS = (
        "numel", "tensors", "arrives", "squares", "alone", "bucketed", "flat", "joined",
    )  # fmt: skip


def shares(fold: FoldedGraph, work: Workload, setting: ExecutionConfig) -> dict[Key, ParamClass]:
    """The trained parameters by how their gradients are summed and shared."""
    count = len(fold.graph.nodes)
    found: dict[Key, dict[str, Floats]] = {}
    for held in work.parameters:
        if not held.requires_grad:
            continue
        key = (held.sync, setting.level(held.name) if held.sync else 0, held.itemsize)
        own = found.setdefault(key, {name: np.zeros(count) for name in ParamClass.ARRAYS})
        last = max((held.node, *held.others))
        seen = last if fold.copies[last] == fold.copies[held.node] else held.node
        own["numel"][held.node] += held.numel
        own["tensors"][held.node] += 1
        own["arrives"][seen] += held.numel
        own["squares"][held.node] += float(held.numel) ** 2
        is_large = held.numel * setting.wire_size(held.itemsize) >= ALONE_BYTES
        is_flat = not setting.whole_units and held.numel * held.itemsize >= ALONE_BYTES
        for large, counted, others in (
            (is_large, "alone", "bucketed"),
            (is_flat, "flat", "joined"),
        ):
            own[counted if large else others][held.node] += 1 if large else held.numel
    return {
        key: ParamClass(itemsize=key[2], **{n: before(fold.spread(a)) for n, a in own.items()})
        for key, own in found.items()
    }


def before(values: Floats) -> Floats:
    """The sum before each position, and that of all."""
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of message: what of it each unit of a stage sends."""

    purpose: str  # of PURPOSES
    op: str
    axes: tuple[str, ...]
    num_bytes: Floats  # of all messages of the unit
    messages: Floats

    def seconds(self, time: Callable[[float], float]) -> list[float]:
        """For each unit, where a message of so many bytes takes `time(bytes)`."""
        known: dict[tuple[float, float], float] = {(0.0, 0.0): 0.0}
        pairs = list(zip(self.num_bytes.tolist(), self.messages.tolist(), strict=True))
        for size, count in pairs:
            if (size, count) not in known:
                known[size, count] = count * time(size / count)
        return [known[pair] for pair in pairs]


def sent(
    found: Mapping[Key, ParamClass], runs: Sequence[Run], setting: ExecutionConfig
) -> Iterator[Traffic]:
    """The messages of a stage with these units."""
    inside = np.array([bool(name) or setting.whole_units for name, _, _ in runs])
    summed: dict[tuple[tuple[str, ...], int], list[ParamClass]] = {}
    for (axes, zero, itemsize), share in found.items():
        size = setting.wire_size(itemsize)
        if zero < 2:
            summed.setdefault((axes, size), []).append(share)
        if zero == 0:
            continue
        numel, count = _groups(share, runs, setting, by_unit=zero == 3)
        gathered = numel * itemsize
        if zero == 3:
            yield Traffic("gather", "all_gather", axes, gathered * inside, count * inside)
            yield Traffic("root", "all_gather", axes, gathered * ~inside, count * ~inside)
        else:
            yield Traffic("update", "all_gather", axes, gathered, count)
        if zero >= 2:
            yield Traffic("reduce", "reduce_scatter", axes, numel * size, count)
    for (axes, size), together in summed.items():
        numel, alone, small = (
            np.sum([_inside(getattr(share, name), runs) for share in together], axis=0)
            for name in ("numel", "alone", "bucketed")
        )
        numel, count = _bucketed(numel, alone, small, runs, size, [range(len(runs))])
        yield Traffic("reduce", "all_reduce", axes, numel * size, count)


def _groups(
    share: ParamClass, runs: Sequence[Run], setting: ExecutionConfig, *, by_unit: bool
) -> tuple[Floats, Floats]:
    """Elements and messages of every run in flat groups.

    The runs of a unit have groups together: what is outside of blocks lies before and behind them.
    """
    numel, alone, small = (_inside(a, runs) for a in (share.numel, share.flat, share.joined))
    units: dict[str, list[int]] = {}
    for at, (name, _, _) in enumerate(runs):
        units.setdefault(name if by_unit or setting.whole_units else "", []).append(at)
    size = 0 if setting.whole_units else share.itemsize
    return _bucketed(numel, alone, small, runs, size, list(units.values()))


def _inside(sums: Floats, runs: Sequence[Run]) -> Floats:
    """What every position of the stage has."""
    return np.diff(sums[runs[0][1] : runs[-1][2] + 1])


def _bucketed(
    numel: Floats,
    alone: Floats,
    small: Floats,
    runs: Sequence[Run],
    itemsize: int,
    units: Sequence[Sequence[int]],
) -> tuple[Floats, Floats]:
    """Elements and messages of every run, where small tensors of a unit wait for each other.

    A message is sent by the run that completes it. Elements of no bytes wait for all.
    """
    edges = np.array([*(first for _, first, _ in runs), runs[-1][2]]) - runs[0][1]
    messages = np.diff(before(alone)[edges])  # whole numbers: differences of sums are exact
    sizes = np.diff(before(numel - small)[edges])
    large = np.flatnonzero(alone)
    formed = int(large[-1]) if large.size else -1  # the position from which something has left
    waiting: list[list[Parcel]] = [[] for _ in runs]
    places = np.flatnonzero(small)
    homes = np.searchsorted(edges, places, side="right") - 1
    for parcel in zip(homes.tolist(), places.tolist(), small[places].tolist(), strict=True):
        waiting[parcel[0]].append(parcel)
    for unit in sorted(units, key=lambda unit: -unit[-1]):
        parcels = [parcel for run in reversed(unit) for parcel in reversed(waiting[run])]
        for run, place, size in _filled(parcels, formed, itemsize):
            messages[run] += 1
            sizes[run] += size
            formed = max(formed, place)
    return sizes, messages


def _filled(parcels: Sequence[Parcel], formed: int, itemsize: int) -> Iterator[Parcel]:
    """Buckets in the order of backward: the parcel that completes each, with all its elements."""
    most, first = (b / itemsize if itemsize else np.inf for b in (BUCKET_BYTES, FIRST_BUCKET_BYTES))
    limit, filled = first, 0.0
    for run, place, size in parcels:
        filled += size
        if limit == first <= filled and place <= formed:
            limit = most  # something is on its way before
        if filled >= limit:
            yield run, place, filled
            limit, filled = most, 0.0
    if filled:
        yield run, place, filled
