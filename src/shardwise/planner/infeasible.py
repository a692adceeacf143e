"""Explain why no plan fits: by how much, what takes the memory, and which changes would help.

Every change that the `InfeasiblePlan` error names has been simulated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

from shardwise.cluster import Device
from shardwise.errors import InfeasiblePlan
from shardwise.formatting import GIB
from shardwise.planner.bounds import Bound
from shardwise.planner.device_groups import groupings
from shardwise.planner.layout_cache import WEIGHTS
from shardwise.planner.search import Candidate, Search, SearchOutcome
from shardwise.planner.search_space import RECOMPUTES, SearchLimits, UserOptions, configs
from shardwise.planner.what_if import Rerun, copy_cluster, gib_text
from shardwise.plans.search_result import ParallelConfig
from shardwise.schedules import DEFAULT_SCHEDULE, schedule_kind
from shardwise.simulation.memory import Budget, MemoryUse, peak_of

MAX_CHECKED = 2_000  # configurations with the lowest memory bounds whose memory is computed
MAX_SIMULATED = 32  # configurations with the lowest memory bounds that are tried with fewer rows
COPIES = (2, 4, 8)  # of all nodes


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A change with which a plan fits; `sizes` are its amounts, by their names in the report."""

    change: str
    kind: str
    hint: str
    candidate: Candidate
    sizes: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        estimate = self.candidate.estimate
        use = peak_of(estimate.memory)
        host = f" and {gib_text(use.host_bytes)} of the host" if use.host_bytes else ""
        return (
            f"{self.change}: {self.candidate.config} "
            f"({gib_text(use.peak_bytes)}{host}, step {estimate.step_time_s:.3g} s)"
        )

    def to_json(self) -> dict[str, Any]:
        use = peak_of(self.candidate.estimate.memory)
        return {
            "change": self.change,
            "kind": self.kind,
            "try": self.hint,
            "step_time_s": self.candidate.estimate.step_time_s,
            "peak_bytes": use.peak_bytes,
            "host_bytes": use.host_bytes,
            "what": str(self.candidate.config),
            **self.sizes,
        }


def infeasible(
    outcome: SearchOutcome, search: Search, options: UserOptions, limits: SearchLimits, rerun: Rerun
) -> InfeasiblePlan:
    """Return the error that explains why no configuration fits."""
    cluster = search.evaluator.cluster
    smallest = _smallest(outcome, search)
    if smallest is None:
        return _no_configuration(search, options, limits)
    use = peak_of(smallest.estimate.memory)
    needs, limit, where = use.peak_bytes, use.limit_bytes, "on a device"
    if use.is_host_bound:
        needs, limit, where = use.host_bytes, use.host_limit_bytes, "of host memory for a device"
    short = f"{gib_text(needs)} of {gib_text(limit)} ({gib_text(needs - limit)} too much) {where}"
    changes = [
        *_free_options(options, rerun),
        _more_memory(smallest, search),
        *_smaller_batch(outcome, search, options),
        *_more_devices(search, options, limits),
    ]
    lines = [
        f"no plan fits: the smallest needs {short} of {cluster.name}",
        f"  smallest: {smallest.config}",
        f"  it holds {_parts(use)}",
        *(f"  would fit: {change}" for change in changes),
    ]
    return InfeasiblePlan(
        "\n".join(lines),
        hint=changes[0].hint,
        report={
            "cluster": cluster.name,
            "num_ranks": cluster.num_ranks,
            "smallest": str(smallest.config),
            "memory": "host" if use.is_host_bound else "device",
            "needs_bytes": needs,
            "limit_bytes": limit,
            "excess_bytes": needs - limit,
            "parts": dict(use.host_parts if use.is_host_bound else use.parts),
            "when": use.when,
            "changes": [change.to_json() for change in changes],
        },
    )


def _no_configuration(search: Search, options: UserOptions, limits: SearchLimits) -> InfeasiblePlan:
    fixed = options.given
    text = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any options"
    hint = f"leave {next(iter(fixed))} to the planner" if fixed else "a cluster of fewer devices"
    return InfeasiblePlan(
        f"no plan of {search.graph.name} for {limits.ranks} ranks is possible with {text}: "
        f"the batch has {limits.rows} rows, the model can be divided into {limits.stages} stages",
        hint=hint,
        report={"num_ranks": limits.ranks, "fixed": fixed, "changes": []},
    )


def _smallest(outcome: SearchOutcome, search: Search) -> Candidate | None:
    """Return the configuration whose fullest rank needs the least memory."""
    best, lowest = None, float("inf")
    for bound in sorted(outcome.bounds, key=_memory_key)[:MAX_CHECKED]:
        if bound.memory >= lowest:
            break
        fullness = search.fullness(bound.config)
        if fullness < lowest:
            best, lowest = bound.config, fullness
    return None if best is None else search.simulate(best, all_groups=True)


def _smallest_bounds(outcome: SearchOutcome) -> list[Bound]:
    """Return the configurations of each mesh with the lowest bound and the smallest micro-batches.

    A bound covers what is always in memory, not the additional memory of an action.
    """
    chosen: dict[object, Bound] = {}
    for kind, key in (("bound", _memory_key), ("parts", _size_key)):
        for bound in sorted(outcome.bounds, key=key, reverse=True):
            mesh = (bound.config.dp, bound.config.tp, bound.config.pp, bound.config.offload)
            chosen[kind, mesh] = bound
    distinct = {bound.config: bound for bound in chosen.values()}
    return sorted(distinct.values(), key=_memory_key)[:MAX_SIMULATED]


def _memory_key(bound: Bound) -> tuple[float, ...]:
    return (bound.memory, *_size_key(bound))


def _size_key(bound: Bound) -> tuple[float, ...]:
    config = bound.config
    return (
        -config.num_microbatches,
        RECOMPUTES[::-1].index(config.recompute),
        -WEIGHTS.get(config.layout, 0.0),
        bound.memory,
        bound.seconds,
    )


def _parts(use: MemoryUse) -> str:
    parts = use.host_parts if use.is_host_bound else use.parts
    largest = sorted(parts.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {gib_text(size)}" for name, size in largest if size > 0)
    when = "the optimizer step" if use.when == "optimizer" else f"action {use.when}"
    return f"{text} there" if use.is_host_bound else f"{text}, highest in {when}"


# ------------------------------------------------------------ changes
def _free_options(options: UserOptions, rerun: Rerun) -> Iterator[FittingChange]:
    """Yield options that help when the planner may choose them, one by one, then all together."""
    fixed, fits = options.given, False
    texts = {n: "+".join(v) or "none" if isinstance(v, tuple) else v for n, v in fixed.items()}
    for name in fixed:
        freed = rerun.options(replace(options, **{name: None}))
        if freed.feasible:
            fits = True
            hint = f"leave {name} to the planner"
            yield FittingChange(f"{name} other than {texts[name]}", "options", hint, freed.best)
    if len(fixed) > 1 and not fits:
        freed = rerun.options(UserOptions())
        if freed.feasible:
            change = "other than " + ", ".join(f"{name}={text}" for name, text in texts.items())
            yield FittingChange(change, "options", "leave all to the planner", freed.best)
    if rerun.constraints is not None and (freed := rerun.constraints()).feasible:
        change, hint = "no constraints on parameters", "leave constraints to the planner"
        yield FittingChange(change, "constraints", hint, freed.best)


def _more_memory(smallest: Candidate, search: Search) -> FittingChange:
    """Return the memory of devices, hosts or both with which the smallest configuration fits."""
    uses = smallest.estimate.memory
    short = [use for use in uses if use.peak_bytes > use.limit_bytes]
    changes, hints, sizes = [], [], {}
    if short:
        groups, device_of = smallest.execution.groups, search.evaluator.cluster.device
        tightest = [
            (use, min(map(device_of, groups[use.group].ranks), key=lambda d: d.usable_bytes))
            for use in short
        ]
        needed = _rounded_up(max(use.peak_bytes for use in short))
        if all(needed * GIB <= d.memory_bytes - sum(use.others.values()) for use, d in tightest):
            changes.append(f"{needed:.2f} GiB of memory per device")
            hints.append(f"memory_gib={needed:.2f}")
            sizes["memory_gib"] = needed
        else:
            total = _rounded_up(max(_device_bytes(use, device) for use, device in tightest))
            changes.append(f"devices of {total:.2f} GiB, {needed:.2f} for the program")
            hints.append(f"devices with memory_gib: {total:.2f}")
            sizes |= {"memory_gib": total, "program_gib": needed}
    hosts = [use.host_bytes for use in uses if use.host_bytes > use.host_limit_bytes]
    if hosts:
        needed = _rounded_up(max(hosts))
        changes.append(f"{needed:.2f} GiB of host memory for each device")
        hints.append(f"nodes with host_memory_gib: {needed:.2f} for each device")
        sizes["host_memory_gib"] = needed
    kind = "memory" if short else "host_memory"
    return FittingChange(" and ".join(changes), kind, ", ".join(hints), smallest, sizes)


def _rounded_up(num_bytes: float) -> float:
    return ceil(num_bytes / GIB * 100) / 100


def _device_bytes(use: MemoryUse, device: Device) -> float:
    """Return the memory of a device on which a group's tensors just fit."""
    reserved = use.others.get("process", 0.0) + use.others.get("communicators", 0.0)
    return Budget.of(device).taken(use.peak_bytes) + reserved


def _smaller_batch(
    outcome: SearchOutcome, search: Search, options: UserOptions
) -> Iterator[FittingChange]:
    """Yield the largest half, quarter, … of the batch with which a configuration fits."""
    rows = search.cache.rows
    while rows > 1:
        rows //= 2
        smaller = replace(search, cache=search.cache.with_rows(rows))
        for bound in _smallest_bounds(outcome):
            config = _with_rows(bound.config, rows, options)
            candidate = None if config is None else smaller.simulate(config)
            if candidate is not None and candidate.estimate.fits:
                hint = f"a batch of {rows} rows"
                change = f"{hint} instead of {search.cache.rows}"
                yield FittingChange(change, "batch", hint, candidate, {"rows": rows})
                return


def _with_rows(config: ParallelConfig, rows: int, options: UserOptions) -> ParallelConfig | None:
    """Return the configuration for a batch of `rows`, with as many micro-batches as that allows."""
    count = min(config.num_microbatches, rows // config.dp)
    if count < max(1, options.num_microbatches or 1):
        return None
    if schedule_kind(config.schedule).runs_in_rounds and count < config.pp:
        return None
    return replace(config, num_microbatches=count)


def _more_devices(
    search: Search, options: UserOptions, limits: SearchLimits
) -> Iterator[FittingChange]:
    """Yield the smallest number of copies of all nodes on which a lean configuration fits."""
    lean = replace(
        options,
        zero=3 if options.zero is None else options.zero,
        recompute=options.recompute or "full",
        schedule=options.schedule or DEFAULT_SCHEDULE,
    )
    for factor in COPIES:
        larger = copy_cluster(search.evaluator.cluster, factor)
        if larger is None:
            return
        evaluator = search.evaluator.on(larger)
        rates = [rate for group in search.groupings(1)[0].rates for rate in group] * factor
        kinds = [int(kind) for kind in evaluator.kind]
        grouped = partial(groupings, larger.num_ranks, rates, kinds)
        other = replace(search, evaluator=evaluator, groupings=grouped)
        for offloads in (False, True) if options.offload is None else (False,):
            more = replace(limits, ranks=larger.num_ranks)
            outcome = other.run(configs(more, lean, offloads=offloads))
            if outcome.feasible:
                change = f"{larger.num_ranks} devices instead of {limits.ranks}"
                hint = f"a cluster of {larger.num_ranks} devices of these kinds"
                sizes = {"num_ranks": larger.num_ranks}
                yield FittingChange(change, "devices", hint, outcome.best, sizes)
                return
