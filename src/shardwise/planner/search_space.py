"""The search space: parallel configurations, the user's options and constraints, and its limits.

`configs` enumerates all configurations that use every rank, in a fixed order. Constraints on
parameters become placements by value and mesh axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise, product
from math import ceil
from typing import Any

from shardwise.cost.sync import is_special
from shardwise.errors import InfeasiblePlan, PlanError, RuleError, did_you_mean
from shardwise.ir import Graph
from shardwise.planner.options import Constraints, constrained_entries
from shardwise.plans import ParameterEntry, Plan, Sync
from shardwise.plans.execution import OFFLOADS
from shardwise.plans.search_result import ParallelConfig
from shardwise.plans.sync import applied_sync, operator_uses
from shardwise.schedules import SCHEDULES, default_schedule, schedule_kind
from shardwise.sharding.placements import REPLICATE, Placement, parse_placement

RECOMPUTES = ("none", "selective", "full")
ZERO_LEVELS = (0, 1, 2, 3)
MAX_STAGES = 128
MAX_STEP = 3  # ratio of neighbouring micro-batch counts; if it is larger, more are tried between
MAX_MICROBATCH_COUNTS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Upper bounds on the sizes of configurations, from the batch, the model and the cluster."""

    ranks: int
    rows: int  # 1 where the batch cannot be sharded
    num_microbatches: int
    stages: int
    virtual_stages: int  # in total, where a group has several
    tensor_ranks: int
    min_tensor_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOptions:
    """The user's decisions; None leaves one to the planner."""

    dp: int | None = None
    ep: int | None = None
    cp: int | None = None
    tp: int | None = None
    pp: int | None = None
    virtual_stages: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    zero: int | None = None
    recompute: str | None = None
    offload: tuple[str, ...] | None = None

    @staticmethod
    def of(options: dict[str, object]) -> UserOptions:
        """Return the checked options of keyword arguments."""
        offload: Any = options.get("offload")
        if offload is not None:
            offload = (offload,) if isinstance(offload, str) else tuple(offload)
        checked = UserOptions(**{**options, "offload": offload})
        checked.check()
        return checked

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not left to the planner."""
        return {n: v for n in self.__slots__ if (v := getattr(self, n)) is not None}

    def check(self) -> None:
        """Raise `PlanError` for an invalid value."""
        for name in ("dp", "ep", "cp", "tp", "pp", "virtual_stages", "num_microbatches"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not is_int or value < 1):
                raise PlanError(f"{name}={value!r}", hint="an integer of at least 1")
        if self.zero not in (None, *ZERO_LEVELS):
            raise PlanError(f"zero={self.zero!r}", hint="0, 1, 2 or 3")
        for name, value, known in (
            ("schedule=", self.schedule, tuple(SCHEDULES)),
            ("recompute=", self.recompute, RECOMPUTES),
            *(("offload ", value, OFFLOADS) for value in self.offload or ()),
        ):
            if value is not None and value not in known:
                near = did_you_mean(str(value), known)
                raise PlanError(f"{name}{value!r}{near}", hint=", ".join(known))


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def configs(
    limits: SearchLimits, options: UserOptions, *, offloads: bool = False
) -> Iterator[ParallelConfig]:
    """Yield all configurations; with `offloads`, those that use host memory."""
    for dp, tp, pp in meshes(limits, options):
        for virtual, schedule in _schedules(pp, limits.virtual_stages, options):
            for count in _microbatches(limits, dp, options):
                if virtual > 1 and schedule_kind(schedule).runs_in_rounds and count < pp:
                    continue
                config = ParallelConfig(dp=dp, tp=tp, pp=pp, virtual=virtual, schedule=schedule)
                config = replace(config, num_microbatches=count)
                yield from _savings(config, options, offloads)


def meshes(limits: SearchLimits, options: UserOptions) -> Iterator[tuple[int, int, int]]:
    """Yield all (dp, tp, pp) that use every rank."""
    num_ranks = limits.ranks
    for pp in divisors(num_ranks):
        if (options.pp or pp) != pp or pp > min(limits.stages, MAX_STAGES):
            continue
        for tp in divisors(num_ranks // pp):
            dp = num_ranks // pp // tp
            if (options.tp or tp) != tp or (options.dp or dp) != dp:
                continue
            if (options.tp is None and tp > limits.tensor_ranks) or tp < limits.min_tensor_ranks:
                continue
            if dp > 1 and dp > limits.rows:
                continue
            yield dp, tp, pp


def _schedules(pp: int, max_stages: int, options: UserOptions) -> list[tuple[int, str]]:
    if pp == 1:
        return [(1, "")]
    pairs = [
        (virtual, kind.name)
        for kind in SCHEDULES.values()
        for virtual in kind.searched_stages_per_group
        if virtual == 1 or pp * virtual <= max_stages
    ]
    if options.schedule is not None:
        name = SCHEDULES[options.schedule].searched_as or options.schedule
        named = [pair for pair in pairs if pair[1] == name]
        default = SCHEDULES[name].default_stages_per_group
        pairs = named or [(options.virtual_stages or default, name)]
    if options.virtual_stages is not None:
        pairs = [pair for pair in pairs if pair[0] == options.virtual_stages] or [
            (options.virtual_stages, default_schedule(options.virtual_stages, 1))
        ]
    return pairs


def _microbatches(limits: SearchLimits, dp: int, options: UserOptions) -> list[int]:
    """Return counts that give every rank the same number of rows, or any if there is none."""
    rows = limits.rows
    if options.num_microbatches is not None:
        return [options.num_microbatches] if options.num_microbatches * dp <= rows else []
    per_rank = rows // dp
    if per_rank < 1:
        return []
    counts = [c for c in divisors(per_rank) if rows % (dp * c) == 0] or divisors(per_rank)
    counts = sorted({*counts, *_between(counts, per_rank)})
    if len(counts) > MAX_MICROBATCH_COUNTS:
        step = len(counts) / MAX_MICROBATCH_COUNTS
        sampled = {counts[int(i * step)] for i in range(MAX_MICROBATCH_COUNTS)}
        counts = sorted(sampled | {counts[-1]})
    return [count for count in counts if count <= limits.num_microbatches]


def _between(counts: list[int], rows: int) -> Iterator[int]:
    """Yield counts of uneven micro-batches between even ones that are far apart: 2 and 4 of 7 rows.

    Of all counts with the same largest micro-batch, the smallest is used.
    """
    for low, high in pairwise(counts):
        count = low
        while high > MAX_STEP * count:
            count = ceil(rows / ceil(rows / (2 * count)))
            yield count


def _savings(
    config: ParallelConfig, options: UserOptions, offloads: bool
) -> Iterator[ParallelConfig]:
    """Yield the configuration with every combination of memory savings."""
    # Tensor-parallel ranks also share parameters: those that they replicate.
    shared = config.dp * config.tp > 1
    zeros = (options.zero,) if options.zero is not None else ZERO_LEVELS if shared else (0,)
    recomputes = (options.recompute,) if options.recompute is not None else RECOMPUTES
    hosts: list[tuple[str, ...]] = [()]
    if options.offload is not None:
        hosts = [options.offload]
    elif offloads:
        hosts = [("optimizer",), ("optimizer", "activations")]
    for zero, recompute, offload in product(zeros, recomputes, hosts):
        yield replace(config, zero=zero, recompute=recompute, offload=offload)


TENSOR_AXES = ("tp", "tp1")
SHOWN = 3  # names of parameters in a hint

FixedPlacements = dict[str, dict[str, Placement]]  # by value and mesh axis


def fixed_parameters(graph: Graph, constraints: Constraints | None) -> FixedPlacements:
    """Return the placements that the user's constraints require, by value and mesh axis."""
    placements: FixedPlacements = {}
    for glob, entry in constrained_entries(constraints).items():
        if entry.zero is not None:
            raise PlanError(
                f"constraint {glob!r}: zero={entry.zero} is chosen for all parameters together",
                hint=f"sw.plan(…, zero={entry.zero}), or a named strategy",
            )
        for axis in entry.layout:
            if axis not in TENSOR_AXES:
                near = did_you_mean(str(axis), TENSOR_AXES)
                raise PlanError(
                    f"constraint {glob!r}: no mesh axis {axis!r} shards parameters{near}",
                    hint='{"tp": "0"}, or "0" alone',
                )
        for name, value in matched(graph, glob):
            for axis, text in entry.layout.items():
                try:
                    placement = parse_placement(text, graph.values[value].shape)
                except RuleError as error:
                    raise PlanError(
                        f"constraint {glob!r} on {name}: {error.message}",
                        hint=error.hint or '"0" shards the first dim, "replicate" none',
                    ) from None
                placements.setdefault(value, {})[axis] = placement
    return placements


def fixed_syncs(graph: Graph, constraints: Constraints | None) -> dict[str, Sync]:
    """Return the synchronization that the user's constraints require, by parameter."""
    syncs: dict[str, Sync] = {}
    uses = operator_uses(graph)
    for glob, entry in constrained_entries(constraints).items():
        for parameter in graph.parameters if entry.sync is not None else ():
            if any(fnmatchcase(name, glob) for name in (parameter.name, *parameter.aliases)):
                sync = syncs.get(parameter.name, Sync()).updated(entry.sync)
                syncs[parameter.name] = applied_sync(graph, parameter, sync, uses)
    return {name: sync for name, sync in syncs.items() if is_special(sync) or sync.dtype}


def with_user_syncs(plan: Plan, constraints: Constraints | None) -> Plan:
    """Return the plan with the synchronization that the user's constraints require."""
    entries = dict(plan.parameters)
    for glob, entry in constrained_entries(constraints).items():
        if entry.sync is not None:
            own = entries.pop(glob, ParameterEntry())
            entries[glob] = replace(own, sync=entry.sync)
    return plan.with_(parameters=entries)


def matched(graph: Graph, glob: str) -> list[tuple[str, str]]:
    """Return the names and values of the parameters with a name that matches."""
    pairs = [
        (p.name, p.value)
        for p in graph.parameters
        if any(fnmatchcase(name, glob) for name in (p.name, *p.aliases))
    ]
    if not pairs:
        names = [name for p in graph.parameters for name in (p.name, *p.aliases)]
        near = get_close_matches(glob.replace("*", ""), names, n=SHOWN, cutoff=0.0)
        raise PlanError(
            f"constraint {glob!r} matches none of the {len(names)} parameters", hint=", ".join(near)
        )
    return pairs


def restrictions(
    options: UserOptions, memory_gib: float | None, constraints: Constraints | None
) -> dict[str, Any]:
    """Return all decisions of the user, as plan files write them."""
    decisions = {"memory_gib": memory_gib, "constraints": _as_texts(constraints) or None}
    return options.given | {name: v for name, v in decisions.items() if v is not None}


def _as_texts(constraints: Constraints | None) -> dict[str, Any]:
    entries = constrained_entries(constraints)
    texts: dict[str, Any] = {}
    for glob, value in (constraints or {}).items():
        entry = entries[str(glob)]
        layout = dict(entry.layout) if isinstance(value, Mapping | ParameterEntry) else str(value)
        texts[str(glob)] = layout if entry.sync is None else str(entry.sync)
    return texts


def min_tensor_ranks(constraints: FixedPlacements, options: UserOptions, num_ranks: int) -> int:
    """Return 2 if constraints shard parameters, else 1; raise if there is only one rank."""
    if all(p == REPLICATE for axes in constraints.values() for p in axes.values()):
        return 1
    used = (options.dp or 1) * (options.pp or 1)
    if options.tp == 1 or used >= num_ranks:
        fixed = {name: n for name in ("dp", "tp", "pp") if (n := getattr(options, name))}
        sizes = ", ".join(f"{name}={n}" for name, n in fixed.items()) or "one rank"
        free = f"leave {', '.join(fixed)} to the planner" if num_ranks > 1 else "more ranks"
        raise InfeasiblePlan(
            f"constraints shard parameters over tensor-parallel ranks; {sizes} of {num_ranks} "
            "leaves none to shard them over",
            hint=f"{free}, or no constraints",
        )
    return 2
