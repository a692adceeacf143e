"""What parameters and gradients travel in: how many messages, how large, in which unit.

Enters: the parameters that a rank holds and a `Setting`. Leaves: `Share`, the parameters that are
summed in the same way, and `Sent`, their messages in every unit of a stage, as the runtime's are:

- gradients of zero 0 and 1 are summed alone or in buckets, which fill from the last position on
  (`runtime.reducer`);
- with zero 2 and 3 gradients are scattered, with zero 1 to 3 parameters gathered, by flat groups:
  a large parameter, or the small ones of a unit together (`runtime.store`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.runtime.reducer import ALONE_BYTES, BUCKET_BYTES, FIRST_BUCKET_BYTES
from shardwise.runtime.store import FLAT_BYTES
from shardwise.simulation.fold import Fold
from shardwise.simulation.setting import Setting
from shardwise.simulation.work import Floats, Work

Key = tuple[tuple[str, ...], int]  # mesh axes of the gradient's sum, zero level
Run = tuple[str, int, int]  # a unit: its name, and the positions that it has

# Why messages are sent: gradients are summed; blocks are gathered for each pass, parameters outside
# of blocks once a step (zero 3); new parameters go to all ranks (zero 1 and 2).
PURPOSES = ("reduce", "gather", "root", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
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


def shares(fold: Fold, work: Work, setting: Setting) -> dict[Key, Share]:
    """The trained parameters by how their gradients are summed and shared."""
    count = len(fold.graph.nodes)
    found: dict[Key, dict[str, Floats]] = {}
    sizes: dict[Key, int] = {}
    for held in work.parameters:
        if not held.requires_grad:
            continue
        key = (held.sync, setting.level(held.name) if held.sync else 0)
        own = found.setdefault(key, {name: np.zeros(count) for name in Share.ARRAYS})
        sizes[key] = held.itemsize
        last = max((held.node, *held.others))
        seen = last if fold.copies[last] == fold.copies[held.node] else held.node
        own["numel"][held.node] += held.numel
        own["tensors"][held.node] += 1
        own["arrives"][seen] += held.numel
        own["squares"][held.node] += float(held.numel) ** 2
        is_large = held.numel * setting.wire_size(held.itemsize) >= ALONE_BYTES
        is_flat = not setting.whole_units and held.numel * held.itemsize >= FLAT_BYTES
        for large, counted, others in (
            (is_large, "alone", "bucketed"),
            (is_flat, "flat", "joined"),
        ):
            own[counted if large else others][held.node] += 1 if large else held.numel
    return {
        key: Share(itemsize=sizes[key], **{n: before(fold.spread(a)) for n, a in own.items()})
        for key, own in found.items()
    }


def before(values: Floats) -> Floats:
    """The sum before each position, and that of all."""
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True, slots=True)
class Sent:
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


def sent(found: Mapping[Key, Share], runs: Sequence[Run], setting: Setting) -> Iterator[Sent]:
    """The messages of a stage with these units."""
    bounds = [first for _, first, _ in runs] + [runs[-1][2]]
    inside = np.array([bool(name) or setting.whole_units for name, _, _ in runs])
    summed: dict[tuple[str, ...], list[Share]] = {}
    for (axes, zero), share in found.items():
        if zero < 2:
            summed.setdefault(axes, []).append(share)
        if zero == 0:
            continue
        numel, count = _groups(share, runs, bounds)
        gathered, size = numel * share.itemsize, setting.wire_size(share.itemsize)
        if zero == 3:
            yield Sent("gather", "all_gather", axes, gathered * inside, count * inside)
            yield Sent("root", "all_gather", axes, gathered * ~inside, count * ~inside)
        else:
            yield Sent("update", "all_gather", axes, gathered, count)
        if zero >= 2:
            yield Sent("reduce", "reduce_scatter", axes, numel * size, count)
    for axes, together in summed.items():
        size = setting.wire_size(together[0].itemsize)
        numel, count = _buckets(together, bounds, size)
        yield Sent("reduce", "all_reduce", axes, numel * size, count)


def _groups(share: Share, runs: Sequence[Run], bounds: Sequence[int]) -> tuple[Floats, Floats]:
    """Elements and messages of every unit in flat groups.

    The small parameters of a unit are one group, also where the unit has several runs: those
    outside of blocks lie before and behind them. It is complete at the first.
    """
    numel, messages, joined = (np.diff(a[bounds]) for a in (share.numel, share.flat, share.joined))
    numel = numel - joined
    first: dict[str, int] = {}
    for at in np.flatnonzero(joined).tolist():
        home = first.setdefault(runs[at][0], at)
        messages[home] += home == at
        numel[home] += joined[at]
    return numel, messages


def _buckets(found: Sequence[Share], bounds: Sequence[int], wire: int) -> tuple[Floats, Floats]:
    """Elements and messages of every unit, where small gradients wait for each other."""
    begin, end = bounds[0], bounds[-1]
    numel, alone, small = (
        sum(np.diff(getattr(share, name)[begin : end + 1]) for share in found)
        for name in ("numel", "alone", "bucketed")
    )
    messages, large = _by_run(alone, bounds), _by_run(numel - small, bounds)
    for at, size in _filled(small, alone, wire):
        unit = int(np.searchsorted(bounds, begin + at, side="right")) - 1
        messages[unit] += 1
        large[unit] += size
    return large, messages


def _by_run(values: Floats, bounds: Sequence[int]) -> Floats:
    return np.diff(before(values)[np.array(bounds) - bounds[0]])


def _filled(small: Floats, alone: Floats, wire: int) -> Iterator[tuple[int, float]]:
    """Buckets in the order of backward: the position that completes each, and its elements."""
    arrived = before(small[::-1])
    large = np.flatnonzero(alone[::-1])
    early = np.searchsorted(arrived, FIRST_BUCKET_BYTES / wire)
    is_first = not large.size or early <= large[0]  # nothing is on its way before
    limit = (FIRST_BUCKET_BYTES if is_first else BUCKET_BYTES) / wire
    taken, total = 0.0, float(arrived[-1])
    while taken < total:
        at = int(np.searchsorted(arrived, min(taken + limit, total)))
        yield len(small) - at, float(arrived[at]) - taken
        taken, limit = float(arrived[at]), BUCKET_BYTES / wire
