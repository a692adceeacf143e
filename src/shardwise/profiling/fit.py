"""Fit the figures of a cluster file, devices and the link between them, to measured times."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from shardwise.cluster import Cluster, ClusterNode, Curve, Device, Factor, Link
from shardwise.cost.collectives import collective_model

DIGITS = 4  # of figures; measurements repeat to about 2
EQUAL = 0.12  # ranks whose rates differ by less are equal: on a quiet machine they differ by 0.1
FAST = 0.8  # full speed is the median of ranks above this fraction of the fastest rank's rate
NUM_STARTS = 2  # smallest sizes, whose time is assumed to be latency
VISIBLE = 0.25  # fraction of the latency that bytes must add for a factor to be derived
SHARED, MESSAGE = "shared ", "message"  # operations of `links` that are not the library's
CROWDED = 1.15  # if concurrent pairs are slower than one pair by this factor, they share a bus


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One operation on some groups of ranks at once, as it was measured."""

    operation: str
    groups: Groups
    num_bytes: int
    seconds: float


def timings(results: Sequence[Mapping[str, Any]]) -> tuple[Timing, ...]:
    """Return the mean over ranks of each measurement, and the minimum of repeated ones.

    A broadcast was measured together with a small all-reduce, whose time is subtracted.
    """
    measured: dict[tuple[str, Groups], dict[int, float]] = {}
    for rows in zip(*(result["links"] for result in results), strict=True):
        groups = tuple(tuple(group) for group in rows[0]["groups"])
        seconds = mean(rows[rank]["seconds"] for group in groups for rank in group)
        sizes = measured.setdefault((rows[0]["operation"], groups), {})
        sizes[rows[0]["bytes"]] = min(seconds, sizes.get(rows[0]["bytes"], math.inf))
    curves: dict[tuple[str, Groups], list[tuple[int, float]]] = {}
    for (operation, groups), sizes in measured.items():
        curve = list(zip(sizes, nondecreasing(list(sizes.values())), strict=True))
        if operation == "broadcast":
            small = curves["all_reduce", groups][0][1]
            curve = [(size, max(seconds - small, seconds / 4)) for size, seconds in curve]
        curves[operation, groups] = curve
    return tuple(
        Timing(operation=operation, groups=groups, num_bytes=size, seconds=seconds)
        for (operation, groups), curve in curves.items()
        for size, seconds in curve
    )


def nondecreasing(seconds: Sequence[float]) -> list[float]:
    """Remove spikes from times by ascending size: less work never takes longer than more."""
    return list(accumulate(reversed(seconds), min))[::-1]


def speeds(results: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return each rank's speed, 1 for fast ones; measurements repeat no better than `EQUAL`."""
    pace = np.array([result["pace"] for result in results])
    full = np.median(pace[pace > FAST * pace.max()])
    return tuple(1.0 if p > (1 - EQUAL) * full else round(float(p / full), 2) for p in pace)


def device_of(
    results: Sequence[Mapping[str, Any]], speed: Sequence[float], kind: str, **memory: int
) -> Device:
    """Return the device at full speed: the median over ranks of their rates over their speeds."""

    def curve(points: Sequence[Sequence[Sequence[float]]], power: int) -> Curve:
        """Return the curve of rates; the work is the size to a `power`."""
        sizes = [float(size) for size, _ in min(points, key=len)]
        rates = [
            median(of_rank[i][1] / s for of_rank, s in zip(points, speed, strict=True))
            for i in range(len(sizes))
        ]
        work = [size**power / rate for size, rate in zip(sizes, rates, strict=True)]
        seconds = nondecreasing(work)
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
        **memory,
    )


def link_of(node: ClusterNode, measured: Sequence[Timing]) -> Link:
    """Return the link between the node's devices: a line from sends, factors from collectives."""
    sends = [t for t in measured if t.operation == "send"]
    latency_s, s_per_byte = fit_line([t for t in sends if len(t.groups) == 1])
    link = Link(
        bandwidth_bytes_per_s=rounded(1 / s_per_byte), latency_s=rounded(latency_s, digits=3)
    )
    concurrent = [t for t in sends if len(t.groups) > 1]
    if concurrent:
        _, concurrent_s_per_byte = fit_line(concurrent)
        if concurrent_s_per_byte > CROWDED * s_per_byte:
            # The bus must not slow a single pair.
            bus = max(len(concurrent[0].groups) / concurrent_s_per_byte, 1 / s_per_byte)
            link = replace(link, bus_bytes_per_s=rounded(bus))
    cluster = Cluster(name="measured", nodes=(replace(node, link=link),))
    message_times = [t.seconds for t in measured if t.operation == MESSAGE]
    shared = [
        replace(t, operation=t.operation.removeprefix(SHARED))
        for t in measured
        if t.operation.startswith(SHARED)
    ]
    return replace(
        link,
        collectives=tuple(_factors(cluster, _of_library(measured))),
        shared=tuple(_factors(cluster, shared)),
        message_s=rounded(min(message_times), digits=3) if message_times else 0.0,
    )


def _of_library(measured: Sequence[Timing]) -> list[Timing]:
    return [t for t in measured if t.operation != MESSAGE and not t.operation.startswith(SHARED)]


def _factors(
    cluster: Cluster, measured: Sequence[Timing]
) -> Iterator[tuple[str, tuple[Factor, ...]]]:
    """Yield the factors of each operation, one for every size of groups."""
    for operation in dict.fromkeys(t.operation for t in measured):
        by_ranks: dict[int, list[Timing]] = {}
        for timing in measured:
            is_concurrent_send = operation == "send" and len(timing.groups) > 1
            if timing.operation == operation and not is_concurrent_send:
                by_ranks.setdefault(len(timing.groups[0]), []).append(timing)
        yield operation, tuple(_factor(cluster, by_ranks[n]) for n in sorted(by_ranks))


def fit_line(points: Sequence[Timing]) -> tuple[float, float]:
    """Return latency and seconds per byte, both above 0, with the smallest relative error."""
    seconds = np.array([t.seconds for t in points])
    sizes = np.array([t.num_bytes for t in points], dtype=float)
    (latency_s, s_per_byte), _ = nnls(
        np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(points))
    )
    if s_per_byte <= 0:
        s_per_byte = seconds[-1] / sizes[-1]
    return max(float(latency_s), 1e-9), float(s_per_byte)


def _factor(cluster: Cluster, measured: Sequence[Timing]) -> Factor:
    """Return the ratios of measured to modelled time, of the latency and of each byte by size.

    The smallest messages determine the latency. A size determines the factor of its bytes if they
    take a good part of its time; smaller sizes use the nearest factor.
    """
    measured = sorted(measured, key=lambda timing: timing.num_bytes)
    model = collective_model(cluster, measured[0].operation, measured[0].groups)
    latency_s = median(timing.seconds for timing in measured[:NUM_STARTS])
    points = []
    for timing in measured:
        link_s = model.seconds(timing.num_bytes) - model.seconds(0)
        bytes_s = timing.seconds - latency_s
        if bytes_s > VISIBLE * latency_s:
            points.append((float(timing.num_bytes), rounded(bytes_s / link_s, digits=3)))
    return Factor(
        ranks=model.group_size,
        latency=rounded(latency_s / model.seconds(0), digits=3),
        bytes=Curve(tuple(points)) if points else Curve.constant(1.0),
    )


def errors(cluster: Cluster, measured: Sequence[Timing]) -> tuple[float, ...]:
    """Return the relative error of the cluster's model for each measurement of the library."""
    return tuple(
        collective_model(cluster, t.operation, t.groups).seconds(t.num_bytes) / t.seconds - 1
        for t in _of_library(measured)
    )


def rounded(value: float, digits: int = DIGITS) -> float:
    """Return `value` with the significant digits of a measurement."""
    return float(f"{value:.{digits - 1}e}")
