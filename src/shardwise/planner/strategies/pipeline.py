"""Pipeline parallelism: the layers are cut into stages, each on a group of ranks.

Enters: a `Graph` and a `Cluster`. Leaves: a `Plan` with stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from shardwise.cluster import Cluster, Mesh
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.planner.options import CommonOptions, known_options
from shardwise.planner.strategies.make import make_plan
from shardwise.planner.strategies.schedule import default_stages, read
from shardwise.plans import Plan
from shardwise.schedules import Schedule

MICROBATCHES = 8


@known_options("sw.strategies.pipeline", make_plan)
def pipeline(
    graph: Graph,
    cluster: Cluster,
    *,
    stages: int | None = None,
    schedule: str | Path | Schedule = "1f1b",
    num_microbatches: int | None = None,
    virtual_stages: int | None = None,
    cuts: Sequence[str] | None = None,
    stage_ranks: Sequence[int] | None = None,
    stage_meshes: Sequence[Mesh] | None = None,
    **options: Unpack[CommonOptions],
) -> Plan:
    """The layers in `stages`, each on a group of ranks that cut the batch among them.

    A group runs `virtual_stages` of them: 1, or 2 for "interleaved" and "zb_v". All groups have
    as many ranks, unless `stage_ranks` counts those of each, or `stage_meshes` arranges them:
    `(1, 2, 1)` or `(Mesh(), Mesh.of(tp=2), Mesh())`. What is not given follows from the rest:
    `stages` from these, the schedule or `cuts`, else one group of stages for each rank;
    `num_microbatches` from the schedule, else 8. Other options are those of `make_plan`.
    """
    wanted = read(schedule)
    given = wanted if isinstance(wanted, Schedule) else None
    each = virtual_stages or default_stages(wanted)
    if stages is None:
        stages = _count(given, each, cuts, stage_ranks or stage_meshes, cluster)
    groups = given.num_groups if given else stages // each
    if not given and (stages < 1 or stages % each):
        raise InfeasiblePlan(
            f"pipeline: stages={stages} with {each} of them on each group of ranks",
            hint=f"stages={max(1, -(-stages // each)) * each}, or virtual_stages=1",
        )
    if given and given.num_stages != stages:
        raise InfeasiblePlan(
            f"pipeline: stages={stages}, schedule {given.name!r} has {given.num_stages}",
            hint=f"stages={given.num_stages}",
        )
    if num_microbatches is None:
        num_microbatches = given.num_microbatches if given else MICROBATCHES
    return make_plan(
        "pipeline",
        graph,
        cluster,
        meshes=_meshes(cluster, groups, stage_ranks, stage_meshes),
        schedule=wanted,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        cuts=cuts,
        **options,
    )


def _count(
    schedule: Schedule | None,
    each: int,
    cuts: Sequence[str] | None,
    groups: Sequence[Any] | None,
    cluster: Cluster,
) -> int:
    """Return the number of stages that the other arguments make."""
    if schedule is not None:
        return schedule.num_stages
    if groups is not None:
        return len(groups) * each
    return len(cuts) + 1 if cuts is not None else cluster.num_ranks * each


def _meshes(
    cluster: Cluster,
    groups: int,
    stage_ranks: Sequence[int] | None,
    stage_meshes: Sequence[Mesh] | None,
) -> list[Mesh]:
    """The mesh of every group."""
    if stage_meshes is None and stage_ranks is None:
        size, rest = divmod(cluster.num_ranks, groups)
        if rest or not size:
            even = [size + (group < rest) for group in range(groups)]
            raise InfeasiblePlan(
                f"pipeline: {cluster.num_ranks} ranks cannot be divided over {groups} groups of "
                "stages",
                hint=f"stage_ranks={even}" if size else f"stages={cluster.num_ranks}",
            )
        stage_ranks = [size] * groups
    if stage_meshes is None:
        assert stage_ranks is not None
        if any(count < 1 for count in stage_ranks):
            raise InfeasiblePlan(f"pipeline: stage_ranks={[*stage_ranks]}", hint="1 or more each")
        stage_meshes = [Mesh.of(dp=count) if count > 1 else Mesh() for count in stage_ranks]
    sizes = [mesh.size for mesh in stage_meshes]
    if stage_ranks is not None and sizes != [*stage_ranks]:
        raise InfeasiblePlan(f"pipeline: stage_ranks={[*stage_ranks]}, the meshes have {sizes}")
    if len(stage_meshes) != groups:
        raise InfeasiblePlan(
            f"pipeline: ranks for {len(stage_meshes)} groups, the stages need {groups}",
            hint=f"stage_ranks with {groups} counts, one for each group of stages",
        )
    return list(stage_meshes)
