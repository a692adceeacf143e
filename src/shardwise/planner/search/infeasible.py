"""Nothing fits: by how much, what takes the memory, and the nearest changes with which it would.

Enters: the search's bounds. Leaves: an `InfeasiblePlan` with figures, in words and as data. Every
change that it names has been simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from shardwise.cluster import Device
from shardwise.errors import InfeasiblePlan
from shardwise.planner.search.bank import WEIGHTS
from shardwise.planner.search.found import Bound, Candidate, Found
from shardwise.planner.search.grouping import groupings
from shardwise.planner.search.larger import Fewer, copied
from shardwise.planner.search.relax import Again
from shardwise.planner.search.search import Search
from shardwise.planner.search.space import RECOMPUTES, Fixed, Limits, Point, points
from shardwise.schedules import DEFAULT_SCHEDULE, schedule_kind
from shardwise.simulation.budget import Budget
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.memory import MemoryUse, peak_of

LOOKED = 2_000  # points whose memory is worked out, those with the least bounds
TRIED = 32  # points with the least memory that are simulated for a smaller batch
COPIES = (2, 4, 8)  # of all nodes
GIB = 2**30


def infeasible(
    found: Found, search: Search, fixed: Fixed, limits: Limits, again: Again | None = None
) -> InfeasiblePlan:
    """The error that says why no point fits; `again` searches with less fixed."""
    cluster = search.evaluator.cluster
    nearest = _nearest(found, search)
    if nearest is None:
        return _nothing(search, fixed, limits)
    use = peak_of(nearest.estimate.memory)
    needs, limit = _needs(use)
    changes = list(_changes(found, nearest, search, fixed, limits, again))
    lines = [
        f"no plan fits: the smallest needs {_too_much(use)} of {cluster.name}",
        f"  smallest: {nearest.point}",
        f"  it holds {_parts(use)}",
        *(f"  would fit: {_told(change)}" for change in changes),
    ]
    return InfeasiblePlan(
        "\n".join(lines),
        hint=changes[0]["try"],
        report={
            "cluster": cluster.name,
            "num_ranks": cluster.num_ranks,
            "smallest": str(nearest.point),
            "memory": "host" if use.is_host_bound else "device",
            "needs_bytes": needs,
            "limit_bytes": limit,
            "excess_bytes": needs - limit,
            "parts": dict(use.host_parts if use.is_host_bound else use.parts),
            "when": use.when,
            "changes": changes,
        },
    )


def _nothing(search: Search, fixed: Fixed, limits: Limits) -> InfeasiblePlan:
    given = {n: v for n in Fixed.__slots__ if (v := getattr(fixed, n)) is not None}
    said = ", ".join(f"{name}={value}" for name, value in given.items()) or "nothing fixed"
    freed = f"leave {next(iter(given))} to the planner" if given else "a cluster of fewer devices"
    return InfeasiblePlan(
        f"no plan of {search.graph.name} for {limits.ranks} ranks is possible with {said}: "
        f"the batch has {limits.rows} rows to cut, the model places for {limits.stages} stages",
        hint=freed,
        report={"num_ranks": limits.ranks, "fixed": given, "changes": []},
    )


def _nearest(found: Found, search: Search) -> Candidate | None:
    """The point whose fullest rank needs least."""
    best, least = None, float("inf")
    for bound in sorted(found.bounds, key=_lean)[:LOOKED]:
        if bound.memory >= least:
            break
        full = search.fullness(bound.point)
        if full < least:
            best, least = bound.point, full
    return None if best is None else search.simulate(best, whole=True)


def _leanest(found: Found) -> list[Bound]:
    """Of every mesh the point with the least bound, and that with the smallest micro-batches.

    A bound knows what is there all the time, not what an action needs beside it.
    """
    chosen: dict[object, Bound] = {}
    for kind, order in (("bound", _lean), ("parts", _smallest)):
        for bound in sorted(found.bounds, key=order, reverse=True):
            mesh = (bound.point.dp, bound.point.tp, bound.point.pp, bound.point.offload)
            chosen[kind, mesh] = bound
    distinct = {bound.point: bound for bound in chosen.values()}
    return sorted(distinct.values(), key=_lean)[:TRIED]


def _lean(bound: Bound) -> tuple[float, ...]:
    return (bound.memory, *_smallest(bound))


def _smallest(bound: Bound) -> tuple[float, ...]:
    point = bound.point
    kept = RECOMPUTES[::-1].index(point.recompute)
    return (
        -point.num_microbatches,
        kept,
        -WEIGHTS.get(point.layout, 0.0),
        bound.memory,
        bound.seconds,
    )


def _needs(use: MemoryUse) -> tuple[float, float]:
    """What is needed and what there is, of the memory that is nearer to its end."""
    if use.is_host_bound:
        return use.host_bytes, use.host_limit_bytes
    return use.peak_bytes, use.limit_bytes


def _too_much(use: MemoryUse) -> str:
    needs, limit = _needs(use)
    where = "of host memory for a device" if use.is_host_bound else "on a device"
    return f"{gib(needs)} of {gib(limit)} ({gib(needs - limit)} too much) {where}"


def _changes(
    found: Found,
    nearest: Candidate,
    search: Search,
    fixed: Fixed,
    limits: Limits,
    again: Again | None,
) -> Iterator[dict[str, Any]]:
    """What would fit, simulated: options, memory, a smaller batch, more devices."""
    if again is not None:
        yield from _options(fixed, again)
    yield _more_memory(nearest, search)
    yield from _smaller_batch(found, search, fixed)
    yield from _more_devices(search, fixed, limits)


def _more_memory(nearest: Candidate, search: Search) -> dict[str, Any]:
    """The memory with which the nearest point fits: of devices, of their hosts, or of both."""
    uses = nearest.estimate.memory
    short = [use for use in uses if use.peak_bytes > use.limit_bytes]
    said, hints, more = [], [], {}
    if short:
        needed = _rounded_up(max(use.peak_bytes for use in short))
        if all(needed * GIB <= _most(use, nearest, search) for use in short):
            said.append(f"{needed:.2f} GiB of memory per device")
            hints.append(f"memory_gib={needed:.2f}")
            more["memory_gib"] = needed
        else:
            whole = _rounded_up(max(_device_bytes(use, nearest, search) for use in short))
            said.append(f"devices of {whole:.2f} GiB, {needed:.2f} for the program")
            hints.append(f"devices with memory_gib: {whole:.2f}")
            more |= {"memory_gib": whole, "program_gib": needed}
    hosts = [use.host_bytes for use in uses if use.host_bytes > use.host_limit_bytes]
    if hosts:
        needed = _rounded_up(max(hosts))
        said.append(f"{needed:.2f} GiB of host memory for each device")
        hints.append(f"nodes with host_memory_gib: {needed:.2f} for each device")
        more["host_memory_gib"] = needed
    kind = "memory" if short else "host_memory"
    return _change(" and ".join(said), kind, ", ".join(hints), nearest, **more)


def _rounded_up(num_bytes: float) -> float:
    return ceil(num_bytes / GIB * 100) / 100


def _most(use: MemoryUse, nearest: Candidate, search: Search) -> float:
    """What tensors may take of a group's smallest device, were no less allowed."""
    return _smallest_device(use, nearest, search).memory_bytes - sum(use.others.values())


def _device_bytes(use: MemoryUse, nearest: Candidate, search: Search) -> float:
    """The memory of a device on which a group's tensors just fit."""
    taken = Budget.of(_smallest_device(use, nearest, search)).taken(use.peak_bytes)
    return taken + use.others.get("process", 0.0) + use.others.get("communicators", 0.0)


def _smallest_device(use: MemoryUse, nearest: Candidate, search: Search) -> Device:
    ranks = nearest.setting.groups[use.group].ranks
    return min(map(search.evaluator.cluster.device, ranks), key=lambda d: d.usable_bytes)


def _change(change: str, kind: str, hint: str, candidate: Candidate, **more: Any) -> dict[str, Any]:
    use = peak_of(candidate.estimate.memory)
    return {
        "change": change,
        "kind": kind,
        "try": hint,
        "step_time_s": candidate.estimate.step_time_s,
        "peak_bytes": use.peak_bytes,
        "host_bytes": use.host_bytes,
        "what": str(candidate.point),
        **more,
    }


def _told(change: Mapping[str, Any]) -> str:
    host = f" and {gib(change['host_bytes'])} of the host" if change["host_bytes"] else ""
    return (
        f"{change['change']}: {change['what']} "
        f"({gib(change['peak_bytes'])}{host}, step {change['step_time_s']:.3g} s)"
    )


def _options(fixed: Fixed, again: Again) -> Iterator[dict[str, Any]]:
    """Single options that are given up; all, where no single one is enough; the constraints."""
    given = [name for name in Fixed.__slots__ if getattr(fixed, name) is not None]
    fits = False
    for name in given:
        freed = again.options(replace(fixed, **{name: None}))
        if freed.feasible:
            fits = True
            yield _change(
                f"{name} other than {_value(fixed, name)}",
                "options",
                f"leave {name} to the planner",
                freed.best,
            )
    if len(given) > 1 and not fits:
        freed = again.options(Fixed())
        if freed.feasible:
            said = ", ".join(f"{name}={_value(fixed, name)}" for name in given)
            yield _change(f"not {said}", "options", "leave all to the planner", freed.best)
    if again.constraints is not None and (freed := again.constraints()).feasible:
        change = "no constraints on parameters"
        yield _change(change, "constraints", "leave constraints to the planner", freed.best)


def _value(fixed: Fixed, name: str) -> str:
    value = getattr(fixed, name)
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def _smaller_batch(found: Found, search: Search, fixed: Fixed) -> Iterator[dict[str, Any]]:
    """The largest part of the batch, by halves, with which one of the leanest points fits."""
    rows = search.bank.rows
    while rows > 1:
        rows //= 2
        smaller = _with_bank(search, Fewer(search.bank, rows))
        for bound in _leanest(found):
            point = _fewer_microbatches(bound.point, rows, fixed)
            candidate = None if point is None else smaller.simulate(point)
            if candidate is not None and candidate.estimate.fits:
                yield _change(
                    f"a batch of {rows} rows instead of {search.bank.rows}",
                    "batch",
                    f"a batch of {rows} rows",
                    candidate,
                    rows=rows,
                )
                return


def _fewer_microbatches(point: Point, rows: int, fixed: Fixed) -> Point | None:
    """The point for a batch of so many rows, with as many micro-batches as it may and can have."""
    count = min(point.num_microbatches, rows // point.dp)
    if count < max(1, fixed.num_microbatches or 1):
        return None
    if schedule_kind(point.schedule).runs_in_rounds and count < point.pp:
        return None
    return replace(point, num_microbatches=count)


def _more_devices(search: Search, fixed: Fixed, limits: Limits) -> Iterator[dict[str, Any]]:
    """The fewest copies of all nodes on which a lean point fits; the step is at most its own."""
    lean = replace(
        fixed,
        zero=3 if fixed.zero is None else fixed.zero,
        recompute=fixed.recompute or "full",
        schedule=fixed.schedule or DEFAULT_SCHEDULE,
    )
    for factor in COPIES:
        larger = copied(search.evaluator.cluster, factor)
        if larger is None:
            return
        more = replace(limits, ranks=larger.num_ranks)
        other = _on_cluster(search, larger, factor)
        for offloads in (False, True):
            if offloads and fixed.offload is not None:
                continue
            found = other.run(points(more, lean, offloads=offloads))
            if found.feasible:
                yield _change(
                    f"{larger.num_ranks} devices instead of {limits.ranks}",
                    "devices",
                    f"a cluster of {larger.num_ranks} devices of these kinds",
                    found.best,
                    num_ranks=larger.num_ranks,
                )
                return


def _on_cluster(search: Search, cluster: Any, factor: int) -> Search:
    evaluator = Evaluator(search.fold, cluster, search.evaluator.clock.table)
    rates = [rate for mine in search.groupings(1)[0].rates for rate in mine] * factor
    kinds = [int(kind) for kind in evaluator.kind]
    return Search(
        search.graph,
        search.bank,
        evaluator,
        lambda pp: groupings(cluster.num_ranks, rates, kinds, pp),
        search.precision,
        search.memory_limit,
        search.report,
    )


def _with_bank(search: Search, bank: Any) -> Search:
    return Search(
        search.graph,
        bank,
        search.evaluator,
        search.groupings,
        search.precision,
        search.memory_limit,
        search.report,
    )


def _parts(use: MemoryUse) -> str:
    parts = use.host_parts if use.is_host_bound else use.parts
    shown = sorted(parts.items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {gib(size)}" for name, size in shown if size > 0)
    return f"{said} there" if use.is_host_bound else f"{said}, highest in {_moment(use.when)}"


def _moment(when: str) -> str:
    return "the optimizer's step" if when == "optimizer" else f"action {when}"


def gib(size: float) -> str:
    """Bytes in GiB, with a digit that shows.

    >>> gib(3 * 2**20), gib(80 * 2**30)
    ('0.00293 GiB', '80.0 GiB')
    """
    amount = size / GIB
    return f"{amount:.1f} GiB" if abs(amount) >= 1 else f"{amount:.3g} GiB"
