"""From times to figures of a cluster file.

Enters: what the ranks measured. Leaves: `Device`s, one per rank, and the `Link` between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from shardwise.cluster import Cluster, ClusterNode, Curve, Device, Factor, Link
from shardwise.cost.collectives import collective_model

DIGITS = 4  # figures are written with as many; measurements repeat to about 2
EQUAL = 0.12  # ranks whose rates differ by less are equal: on a quiet machine they differ by 0.1
QUICK = 0.8  # ranks above this part of the quickest one's rate say what full speed is
STARTS = 2  # sizes whose time is taken for the start alone
PART = 0.25  # of the start: what the bytes must take to be seen
SHARED, MESSAGE = "shared ", "message"  # what `other_ways` calls its measurements
CROWDED = 1.15  # pairs that all send at once are this much slower than one: they share a bus


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One operation on some groups of ranks at once, as it was measured."""

    operation: str
    groups: Groups
    num_bytes: int
    seconds: float


def timings(results: Sequence[Mapping[str, Any]]) -> tuple[Timing, ...]:
    """Return the measurements joined: the mean over ranks, and the better of several times.

    A broadcast was measured together with a small all-reduce, which is taken off again.
    """
    found: dict[tuple[str, Groups], dict[int, float]] = {}
    for same in zip(*(result["wires"] for result in results), strict=True):
        groups = tuple(tuple(group) for group in same[0]["groups"])
        seconds = mean(same[rank]["seconds"] for group in groups for rank in group)
        sizes = found.setdefault((same[0]["operation"], groups), {})
        sizes[same[0]["bytes"]] = min(seconds, sizes.get(same[0]["bytes"], math.inf))
    made: dict[tuple[str, Groups], list[tuple[int, float]]] = {}
    for (operation, groups), sizes in found.items():
        curve = list(zip(sizes, rising(list(sizes.values())), strict=True))
        if operation == "broadcast":
            small = made["all_reduce", groups][0][1]
            curve = [(size, max(seconds - small, seconds / 4)) for size, seconds in curve]
        made[operation, groups] = curve
    return tuple(
        Timing(operation=operation, groups=groups, num_bytes=size, seconds=seconds)
        for (operation, groups), curve in made.items()
        for size, seconds in curve
    )


def rising(seconds: Sequence[float]) -> list[float]:
    """Times by ascending size without spikes: less work never takes longer than more."""
    lowest = math.inf
    found = []
    for value in reversed(seconds):
        lowest = min(lowest, value)
        found.append(lowest)
    return found[::-1]


def speeds(results: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Each rank's speed, 1 for the quick ones; measurements repeat no better than `EQUAL`."""
    pace = np.array([result["pace"] for result in results])
    full = np.median(pace[pace > QUICK * pace.max()])
    return tuple(1.0 if p > (1 - EQUAL) * full else round(float(p / full), 2) for p in pace)


def device_of(
    results: Sequence[Mapping[str, Any]], speed: Sequence[float], kind: str, **given: Any
) -> Device:
    """Return the device at its full speed: the median over ranks of what each reaches for its
    speed.
    """

    def curve(points: Sequence[Sequence[Sequence[float]]], power: int) -> Curve:
        """`power` of the size is the work."""
        sizes = [float(size) for size, _ in min(points, key=len)]
        rates = [
            median(each[i][1] / s for each, s in zip(points, speed, strict=True))
            for i in range(len(sizes))
        ]
        seconds = rising([size**power / rate for size, rate in zip(sizes, rates, strict=True)])
        return Curve(tuple((x, rounded(x**power / s)) for x, s in zip(sizes, seconds, strict=True)))

    def by_dtype(name: str, power: int) -> tuple[tuple[str, Curve], ...]:
        dtypes = results[0][name]
        return tuple((dtype, curve([r[name][dtype] for r in results], power)) for dtype in dtypes)

    overheads = [r["overhead_s"] * s for r, s in zip(results, speed, strict=True)]
    hosts = [r["host_bytes_per_s"] / s for r, s in zip(results, speed, strict=True)]
    return Device(
        name=results[0]["name"],
        kind=kind,
        matmul_flops_per_s=by_dtype("matmul", power=3),
        attention_flops_per_s=by_dtype("attention", power=2),
        memory_bytes_per_s=curve([r["memory"] for r in results], power=1),
        overhead_s=rounded(median(overheads)),
        host_bytes_per_s=rounded(median(hosts)),
        overlap_loss=round(median(r.get("overlap_loss", 0.0) for r in results), 2),
        **given,
    )


def link_of(node: ClusterNode, measured: Sequence[Timing]) -> Link:
    """Return the link between the node's devices: from sends, and factors for the collectives."""
    sends = [t for t in measured if t.operation == "send"]
    alone = [t for t in sends if len(t.groups) == 1]
    latency_s, s_per_byte = fit_line(alone)
    link = Link(
        bandwidth_bytes_per_s=rounded(1 / s_per_byte), latency_s=rounded(latency_s, digits=3)
    )
    crowd = [t for t in sends if len(t.groups) > 1]
    if crowd:
        _, together = fit_line(crowd)
        if together > CROWDED * s_per_byte:  # one pair alone is not slowed by it
            bus = max(len(crowd[0].groups) / together, 1 / s_per_byte)
            link = replace(link, bus_bytes_per_s=rounded(bus))
    cluster = Cluster(name="measured", nodes=(replace(node, link=link),))
    small = [t.seconds for t in measured if t.operation == MESSAGE]
    library = [t for t in measured if t.operation != MESSAGE and not t.operation.startswith(SHARED)]
    shared = [
        replace(t, operation=t.operation.removeprefix(SHARED))
        for t in measured
        if t.operation.startswith(SHARED)
    ]
    return replace(
        link,
        collectives=tuple(_factors(cluster, library)),
        shared=tuple(_factors(cluster, shared)),
        message_s=rounded(min(small), digits=3) if small else 0.0,
    )


def _factors(
    cluster: Cluster, measured: Sequence[Timing]
) -> Iterator[tuple[str, tuple[Factor, ...]]]:
    """For each operation, a factor for every size of groups."""
    for operation in dict.fromkeys(t.operation for t in measured):
        mine = [t for t in measured if t.operation == operation]
        if operation == "send":
            mine = [t for t in mine if len(t.groups) == 1]
        sizes = sorted({len(t.groups[0]) for t in mine})
        yield (
            operation,
            tuple(_factor(cluster, [t for t in mine if len(t.groups[0]) == n]) for n in sizes),
        )


def fit_line(points: Sequence[Timing]) -> tuple[float, float]:
    """`(latency, seconds per byte)`, both above 0, of the least relative error."""
    seconds = np.array([t.seconds for t in points])
    sizes = np.array([t.num_bytes for t in points], dtype=float)
    (latency_s, s_per_byte), _ = nnls(
        np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(points))
    )
    if s_per_byte <= 0:
        s_per_byte = seconds[-1] / sizes[-1]
    return max(float(latency_s), 1e-9), float(s_per_byte)


def _factor(cluster: Cluster, measured: Sequence[Timing]) -> Factor:
    """What the operation takes beyond its wires: of its start, and of each byte by size.

    The smallest messages show the start. A size shows the factor of its bytes where they take a
    good part of the time; smaller ones take the nearest.
    """
    measured = sorted(measured, key=lambda timing: timing.num_bytes)
    model = collective_model(cluster, measured[0].operation, measured[0].groups)
    start_s = median(timing.seconds for timing in measured[:STARTS])
    points = []
    for timing in measured:
        wires_s = model.seconds(timing.num_bytes) - model.seconds(0)
        beyond_s = timing.seconds - start_s
        if beyond_s > PART * start_s:
            points.append((float(timing.num_bytes), rounded(beyond_s / wires_s, digits=3)))
    return Factor(
        ranks=model.group_size,
        latency=rounded(start_s / model.seconds(0), digits=3),
        bytes=Curve(tuple(points)) if points else Curve.constant(1.0),
    )


def errors(cluster: Cluster, measured: Sequence[Timing]) -> tuple[float, ...]:
    """How far the cluster's model is from each measurement, relatively."""
    found = []
    for timing in measured:
        if timing.operation == MESSAGE or timing.operation.startswith(SHARED):
            continue
        model = collective_model(cluster, timing.operation, timing.groups)
        found.append(model.seconds(timing.num_bytes) / timing.seconds - 1)
    return tuple(found)


def rounded(value: float, digits: int = DIGITS) -> float:
    """`value` with as many digits as a measurement has."""
    if value == 0 or not math.isfinite(value):
        return value
    return float(f"{value:.{digits - 1}e}")
