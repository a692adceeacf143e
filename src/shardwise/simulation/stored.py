"""Estimates in plan files: memory as figures, and the stored step as an `Estimate` again.

A plan stores the durations of its simulated step (`StepTimes`); with its schedule they give the
same timeline, without the model and the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import PlanError
from shardwise.plans import Plan
from shardwise.plans.search_result import MemoryFigures
from shardwise.program.pipeline import plan_schedule
from shardwise.schedules.levels import KINDS, levels_of
from shardwise.simulation.estimate import Estimate
from shardwise.simulation.memory import MemoryUse
from shardwise.simulation.step import lay_out

__all__ = ["memory_figures", "memory_over_time", "stored_estimate"]

MAX_MOMENTS = 64  # samples of memory over time


def memory_figures(use: MemoryUse, *, over_time: bool = False) -> MemoryFigures:
    """Return a group's memory as a plan stores it."""
    sampled = _sampled([size for _, size in use.over_time]) if over_time else ()
    return MemoryFigures(
        group=use.group,
        peak_bytes=use.peak_bytes,
        limit_bytes=use.limit_bytes,
        parts=dict(use.parts),
        when=use.when,
        others=dict(use.others),
        host_bytes=use.host_bytes,
        over_time_gib=" ".join(f"{size / 2**30:.4g}" for size in sampled),
    )


def memory_over_time(use: MemoryUse) -> list[float]:
    """Return bytes over time: the peak of each interval; the optimizer's last, if highest."""
    sizes = [size for _, size in use.over_time]
    return [*_sampled(sizes), *([use.peak_bytes] if use.when == "optimizer" else [])]


def _sampled(sizes: Sequence[float]) -> list[float]:
    step = -(-len(sizes) // MAX_MOMENTS) or 1
    return [max(sizes[at : at + step]) for at in range(0, len(sizes), step)]


def stored_estimate(plan: Plan) -> Estimate:
    """Return the step that was simulated when the plan was made.

    Raises `PlanError` where the plan has no figures, or where they belong to other decisions.
    """
    found = plan.figures
    if plan.is_edited:
        raise PlanError(
            f"the plan {plan.name!r} was changed after it was made: its figures are another plan's",
            hint="shardwise simulate plan.json model.py:build --cluster c.yaml",
        )
    found.verify(len(plan.all_stages), len(plan.groups))
    schedule = plan_schedule(plan)
    levels = levels_of(schedule)
    known = {(KINDS.index(p.kind), p.stage, p.last) for p in found.step.passes if p.kind in KINDS}
    if not known.issuperset(zip(levels.kind, levels.stage, levels.last, strict=True)):
        raise PlanError(
            "the figures of the plan are damaged: the times of some actions are missing",
            where="search.step.passes",
        )
    return Estimate(
        timeline=lay_out(found.step, schedule),
        memory=tuple(map(_memory_use, found.memory)),
        rows=found.best.rows,
        num_ranks=plan.num_ranks,
    )


def _memory_use(found: MemoryFigures) -> MemoryUse:
    return MemoryUse(
        group=found.group,
        peak_bytes=found.peak_bytes,
        limit_bytes=found.limit_bytes,
        parts=found.parts,
        when=found.when,
        over_time=tuple(("", float(size) * 2**30) for size in found.over_time_gib.split()),
        others=found.others,
        host_bytes=found.host_bytes,
    )
