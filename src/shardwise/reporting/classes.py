"""Ranks that are shown once: groups that run the same stages, and what of them is joined.

Enters: a plan and its estimate. Leaves: `RankGroup`s and at most 32 `RankClass`es. All ranks of a
group run the same program in the same time, so a group is a class; where there are more groups,
first and last ones, the slowest and the fullest stay, and the slowest of the rest stands for them.
"""

from __future__ import annotations

from shardwise.messages.ranks import format_ranks
from shardwise.plans import Plan
from shardwise.reporting.document import RankClass, RankGroup
from shardwise.simulation import Estimate

MOST_CLASSES = 32
EDGES = 8  # groups at either end that are always shown


def classes_of(plan: Plan, estimate: Estimate) -> tuple[RankClass, ...]:
    """Return the classes of a plan's ranks."""
    groups = plan.groups
    if len(groups) <= MOST_CLASSES:
        return tuple(_class(number, (number,), number, plan) for number in range(len(groups)))
    kept = _kept(estimate, len(groups))
    rest = tuple(number for number in range(len(groups)) if number not in kept)
    busy = estimate.timeline.busy
    slowest = max(rest, key=lambda number: busy[number])
    found = [_class(at, (number,), number, plan) for at, number in enumerate(sorted(kept))]
    return (*found, _class(len(found), rest, slowest, plan))


def _kept(estimate: Estimate, count: int) -> set[int]:
    """Return the groups that are classes of their own: all but one of those that may be."""
    busy, memory = estimate.timeline.busy, estimate.memory
    order = [*range(EDGES), *range(count - EDGES, count)]
    slow = sorted(range(count), key=lambda number: -busy[number])
    full = sorted(range(count), key=lambda number: -memory[number].fullness)
    order += [number for pair in zip(slow, full, strict=True) for number in pair]
    return set(list(dict.fromkeys(order))[: MOST_CLASSES - 1])


def _class(at: int, groups: tuple[int, ...], shown: int, plan: Plan) -> RankClass:
    ranks = tuple(sorted(rank for number in groups for rank in plan.groups[number]))
    more = len(groups) - 1
    label = ranks_label(plan.groups[shown])
    return RankClass(
        id=at,
        label=f"{label}, the slowest of {more + 1} groups" if more else label,
        groups=groups,
        num_ranks=len(ranks),
        shown=shown,
        more=more,
    )


def ranks_label(ranks: tuple[int, ...]) -> str:
    """`ranks 0-7`, or `rank 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def groups_of(plan: Plan, classes: tuple[RankClass, ...]) -> tuple[RankGroup, ...]:
    """Return the groups with their stages and meshes."""
    home = {number: found.id for found in classes for number in found.groups}
    stages = plan.all_stages
    found = []
    for number, ranks in enumerate(plan.groups):
        mine = tuple(at for at, stage in enumerate(stages) if stage.ranks == ranks)
        mesh = stages[mine[0]].mesh
        found.append(
            RankGroup(
                id=number,
                ranks=format_ranks(ranks),
                num_ranks=len(ranks),
                stages=mine,
                mesh=", ".join(f"{axis}={int(size)}" for axis, size in mesh.axes),
                class_=home[number],
            )
        )
    return tuple(found)
