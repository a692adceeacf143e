"""The points that the search compares: how ranks are divided, and how a step runs.

Enters: a cluster, a model's rows and blocks, and what the user fixed. Leaves: `Point`s, all that
are possible, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from shardwise.errors import PlanError, did_you_mean
from shardwise.plans.execution import OFFLOADS
from shardwise.schedules import SCHEDULES, default_schedule, schedule_kind

RECOMPUTES = ("none", "selective", "full")
MOST_STAGES = 128
LAYOUTS = ("", "lean layouts", "mixed layouts", "leanest layouts", "polished layouts")  # and above
FAR = 3  # times as many micro-batches
MICROBATCH_COUNTS = 14  # of all divisors of a rank's rows, at most so many are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One way to run a step."""

    dp: int
    tp: int
    pp: int
    virtual: int = 1
    schedule: str = ""
    num_microbatches: int = 1
    zero: int = 0
    outer: int | None = None  # the zero level of parameters outside of blocks, where it differs
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    layout: int = 0  # which of the layouts that were solved for `tp`: see `Bank.get`
    grouping: int = 0  # which order of unequal devices
    cuts: tuple[int, ...] = ()  # where stages begin, if not where `Cutter` cuts

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    def __str__(self) -> str:
        parts = [f"dp={self.dp}", f"tp={self.tp}", f"pp={self.pp}"]
        if self.pp > 1:
            parts.append(self.schedule + (f" x{self.virtual}" if self.virtual > 1 else ""))
        if self.num_microbatches > 1:
            parts.append(f"{self.num_microbatches} micro-batches")
        if self.dp > 1 or self.zero:
            other = f" (outside of blocks {self.outer})" if self.outer is not None else ""
            parts.append(f"zero {self.zero}{other}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.offload:
            parts.append(f"offload {'+'.join(self.offload)}")
        if self.layout:
            parts.append(LAYOUTS[min(self.layout, len(LAYOUTS) - 1)])
        if self.cuts:
            parts.append(f"stages from nodes {', '.join(map(str, self.cuts))}")
        if self.grouping:
            parts.append(f"device order {self.grouping}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far the search goes: no more data-parallel ranks than rows, no more stages than modules,
    several for a group only of whole blocks, tensor parallelism inside of what is closely linked.
    """

    ranks: int
    rows: int  # 1 where the batch cannot be cut
    num_microbatches: int
    stages: int
    virtual_stages: int  # in all, where a group has several
    tensor_ranks: int
    least_tensor_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the user decided; None leaves it to the search."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    virtual_stages: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    zero: int | None = None
    recompute: str | None = None
    offload: tuple[str, ...] | None = None

    @staticmethod
    def of(options: dict[str, object]) -> Fixed:
        """Return the decisions that keyword arguments make."""
        offload = options.get("offload")
        if isinstance(offload, str):
            options = {**options, "offload": (offload,)}
        elif offload is not None:
            options = {**options, "offload": tuple(offload)}  # type: ignore[arg-type]
        made = Fixed(**options)  # type: ignore[arg-type]
        made.check()
        return made

    def check(self) -> None:
        """Raise where a value is none that the option can have."""
        for name in ("dp", "tp", "pp", "virtual_stages", "num_microbatches"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or value < 1):
                raise PlanError(f"{name}={value!r}", hint="a whole number of at least 1")
        if self.zero not in (None, 0, 1, 2, 3):
            raise PlanError(f"zero={self.zero!r}", hint="0, 1, 2 or 3")
        known = {"schedule": tuple(SCHEDULES), "recompute": RECOMPUTES}
        for name, values in known.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                near = did_you_mean(str(value), values)
                raise PlanError(f"{name}={value!r}{near}", hint=", ".join(values))
        for what in self.offload or ():
            if what not in OFFLOADS:
                raise PlanError(
                    f"offload {what!r}{did_you_mean(what, OFFLOADS)}", hint=", ".join(OFFLOADS)
                )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def points(limits: Limits, fixed: Fixed, *, offloads: bool = False) -> Iterator[Point]:
    """All points; `offloads` adds those that keep something in host memory."""
    for dp, tp, pp in meshes(limits, fixed):
        for virtual, schedule in _schedules(pp, limits.virtual_stages, fixed):
            for count in _microbatches(limits, dp, fixed):
                if virtual > 1 and schedule_kind(schedule).runs_in_rounds and count < pp:
                    continue
                yield from _savings(dp, tp, pp, virtual, schedule, count, fixed, offloads)


def meshes(limits: Limits, fixed: Fixed) -> Iterator[tuple[int, int, int]]:
    """All (dp, tp, pp) that use every rank."""
    num_ranks = limits.ranks
    for pp in divisors(num_ranks):
        if (fixed.pp or pp) != pp or pp > min(limits.stages, MOST_STAGES):
            continue
        for tp in divisors(num_ranks // pp):
            dp = num_ranks // pp // tp
            if (fixed.tp or tp) != tp or (fixed.dp or dp) != dp:
                continue
            if (fixed.tp is None and tp > limits.tensor_ranks) or tp < limits.least_tensor_ranks:
                continue
            if dp > 1 and dp > limits.rows:
                continue
            yield dp, tp, pp


def _schedules(pp: int, most_stages: int, fixed: Fixed) -> list[tuple[int, str]]:
    if pp == 1:
        return [(1, "")]
    found = [
        (virtual, kind.name)
        for kind in SCHEDULES.values()
        for virtual in kind.searched_stages_per_group
        if virtual == 1 or pp * virtual <= most_stages
    ]
    if fixed.schedule is not None:
        name = SCHEDULES[fixed.schedule].searched_as or fixed.schedule
        known = [pair for pair in found if pair[1] == name]
        found = known or [(fixed.virtual_stages or SCHEDULES[name].default_stages_per_group, name)]
    if fixed.virtual_stages is not None:
        found = [pair for pair in found if pair[0] == fixed.virtual_stages] or [
            (fixed.virtual_stages, default_schedule(fixed.virtual_stages, 1))
        ]
    return found


def _microbatches(limits: Limits, dp: int, fixed: Fixed) -> list[int]:
    """Counts that leave every rank whole rows; any count where that is impossible."""
    rows = limits.rows
    if fixed.num_microbatches is not None:
        return [fixed.num_microbatches] if fixed.num_microbatches * dp <= rows else []
    each = rows // dp
    if each < 1:
        return []
    counts = [c for c in divisors(each) if rows % (dp * c) == 0] or divisors(each)
    counts = sorted({*counts, *_between(counts, each)})
    if len(counts) > MICROBATCH_COUNTS:
        keep = len(counts) / MICROBATCH_COUNTS
        counts = sorted({counts[int(i * keep)] for i in range(MICROBATCH_COUNTS)} | {counts[-1]})
    return [count for count in counts if count <= limits.num_microbatches]


def _between(counts: list[int], rows: int) -> Iterator[int]:
    """Counts of uneven micro-batches, where the next even one is far: 2 and 4 of 7 rows.

    Of counts whose largest micro-batch is the same, the fewest.
    """
    for low, high in pairwise(counts):
        count = low
        while high > FAR * count:
            count = ceil(rows / ceil(rows / (2 * count)))
            yield count


def _savings(
    dp: int, tp: int, pp: int, virtual: int, schedule: str, count: int, fixed: Fixed, offloads: bool
) -> Iterator[Point]:
    shared = dp * tp > 1  # tensor-parallel ranks share parameters, too, that they have whole
    zeros = [fixed.zero] if fixed.zero is not None else ([0, 1, 2, 3] if shared else [0])
    recomputes = [fixed.recompute] if fixed.recompute is not None else list(RECOMPUTES)
    hosts: list[tuple[str, ...]] = [()]
    if fixed.offload is not None:
        hosts = [fixed.offload]
    elif offloads:
        hosts = [("optimizer",), ("optimizer", "activations")]
    for zero in zeros:
        for recompute in recomputes:
            for offload in hosts:
                yield Point(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    virtual=virtual,
                    schedule=schedule,
                    num_microbatches=count,
                    zero=zero,
                    recompute=recompute,
                    offload=offload,
                )
