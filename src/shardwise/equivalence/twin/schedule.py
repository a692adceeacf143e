"""Fewer stages, ranks and micro-batches, in the same order of work.

Enters: a `Plan` with stages or micro-batches. Leaves: smaller ones, and what was made smaller. A
listed schedule keeps its list, without the micro-batches that are left out; a schedule by name is
made again for the new counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.cluster import Mesh
from shardwise.plans import Plan, Stage
from shardwise.schedules import Action, default_schedule, make

KEPT_MICROBATCHES = 4
MOST_STAGES = 16


def fewer_stages(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with about `MOST_STAGES` stages at most: some are part of the one before
    them.
    """
    stages, groups = plan.all_stages, len(plan.groups)
    each = max(1, len(stages) // groups)
    most = max(2, MOST_STAGES // each)
    if groups <= most:
        return plan, ()
    count = each * most
    kept = [stages[index * len(stages) // count] for index in range(count)]
    name = plan.schedule if isinstance(plan.schedule, str) else ""
    name = name or default_schedule(count, most)
    made = make(name, num_groups=most, num_microbatches=plan.num_microbatches, num_stages=count)
    owners = [kept[made.placement.index(group)].mesh for group in range(most)]
    ranks = _numbered([mesh.size for mesh in owners])
    fewer = tuple(
        Stage(first=stage.first, ranks=ranks[group], mesh=owners[group])
        for stage, group in zip(kept, made.placement, strict=True)
    )
    notes = [f"stages: {len(stages)} -> {count}, on {groups} -> {most} groups of ranks"]
    if not isinstance(plan.schedule, str):
        notes.append(f"schedule: the list of actions -> {name}")
    return plan.with_(stages=fewer, schedule=name, mesh=fewer[0].mesh), tuple(notes)


def few_microbatches(plan: Plan) -> int:
    """As many micro-batches as still bring every group to forwards and backwards in turn."""
    groups = len(plan.groups)
    if plan.num_microbatches <= KEPT_MICROBATCHES:
        return plan.num_microbatches
    rounds = len(plan.all_stages) > groups > 1  # stages of one group take turns
    enough = groups + 1
    if rounds:
        enough = 2 * groups + (plan.num_microbatches % groups != 0)
    return min(plan.num_microbatches, max(enough, KEPT_MICROBATCHES))


def on_meshes(plan: Plan, meshes: Mapping[Mesh, Mesh], count: int) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan on smaller meshes, in `count` micro-batches, and what that changed."""
    notes = []
    for old, new in meshes.items():
        for (axis, before), (_, after) in zip(old.axes, new.axes, strict=True):
            if before != after:
                notes.append(f"mesh axis {axis}: {before} ranks -> {after}")
    schedule = plan.schedule
    if count != plan.num_microbatches:
        notes.append(f"micro-batches: {plan.num_microbatches} -> {count}")
        if not isinstance(schedule, str):
            schedule = tuple(
                tuple(text for text in row if Action.parse(text).microbatch < count)
                for row in schedule
            )
            notes.append(f"schedule: the listed actions of micro-batches 0 to {count - 1}")
    groups = sorted(plan.groups)
    sizes = {stage.ranks: meshes[stage.mesh].size for stage in plan.stages}
    ranks = dict(zip(groups, _numbered([sizes.get(g, 0) for g in groups]), strict=True))
    stages = tuple(
        Stage(first=stage.first, ranks=ranks[stage.ranks], mesh=meshes[stage.mesh])
        for stage in plan.stages
    )
    smaller = plan.with_(
        mesh=meshes[plan.mesh], stages=stages, num_microbatches=count, schedule=schedule
    )
    return smaller, tuple(dict.fromkeys(notes))


def begin_at(plan: Plan, place: Callable[[str], str]) -> Plan:
    """Return the plan whose stages begin where `place` says."""
    stages = (
        Stage(first=stage.first and place(stage.first), ranks=stage.ranks, mesh=stage.mesh)
        for stage in plan.stages
    )
    return plan.with_(stages=tuple(stages))


def _numbered(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Ranks in order, for groups of these sizes."""
    found, start = [], 0
    for size in sizes:
        found.append(tuple(range(start, start + size)))
        start += size
    return found
