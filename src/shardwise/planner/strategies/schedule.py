"""The order of work of a plan, from a name, a file or a `Schedule`.

Enters: what was asked for, and the numbers of groups, stages and micro-batches. Leaves: `Order`,
which is checked: complete, and without a deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import InfeasiblePlan
from shardwise.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    default_schedule,
    make,
    schedule_kind,
)

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan's `schedule`, and the group that runs each stage."""

    schedule: str | Rows
    placement: tuple[int, ...]


def read(schedule: str | Path | Schedule | None) -> str | Schedule | None:
    """A name, or the schedule itself; a text that is no name may be the path of a file."""
    if isinstance(schedule, Path):
        return Schedule.load(schedule)
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        path = Path(schedule)
        return Schedule.load(path) if path.suffix or path.is_file() else schedule
    return schedule


def num_stages(schedule: str | Schedule | None, groups: int, virtual_stages: int | None) -> int:
    """The stages of all groups."""
    if virtual_stages is None and isinstance(schedule, Schedule):
        return schedule.num_stages
    if virtual_stages is not None and virtual_stages < 1:
        raise InfeasiblePlan(f"virtual_stages={virtual_stages}", hint="1 or more per group")
    return groups * (virtual_stages or default_stages(schedule))


def default_stages(schedule: str | Schedule | None) -> int:
    """The stages of each group where nothing else is asked for."""
    if isinstance(schedule, Schedule):
        return max(1, schedule.num_stages // schedule.num_groups)
    return schedule_kind(schedule or "").default_stages_per_group


def order(
    schedule: str | Schedule | None, *, groups: int, stages: int, num_microbatches: int
) -> Order:
    """The checked order of work of so many groups, stages and micro-batches."""
    if isinstance(schedule, Schedule):
        _check_counts(schedule, groups, stages, num_microbatches)
        schedule = _by_first_stage(schedule)
        check(schedule)
        rows = tuple(tuple(str(action) for action in mine) for mine in schedule.actions)
        return Order(schedule=rows, placement=schedule.placement)
    name = schedule or default_schedule(stages, groups)
    made = make(name, num_groups=groups, num_microbatches=num_microbatches, num_stages=stages)
    check(made)
    return Order(schedule=name, placement=made.placement)


def _check_counts(schedule: Schedule, groups: int, stages: int, num_microbatches: int) -> None:
    has = (schedule.num_stages, schedule.num_groups, schedule.num_microbatches)
    if has != (stages, groups, num_microbatches):
        words = "{} stages on {} groups of ranks with {} micro-batches"
        asked = words.format(stages, groups, num_microbatches)
        raise InfeasiblePlan(
            f"schedule {schedule.name!r} has {words.format(*has)}, asked for are {asked}",
            hint=f"pp={has[1]}, num_microbatches={has[2]}, and {has[0]} stages",
        )


def _by_first_stage(schedule: Schedule) -> Schedule:
    """The same schedule with groups numbered as a plan does: by the first stage of each."""
    groups = list(dict.fromkeys(schedule.placement))
    return replace(
        schedule,
        placement=tuple(groups.index(group) for group in schedule.placement),
        actions=tuple[tuple[Action, ...], ...](schedule.actions[group] for group in groups),
    )
