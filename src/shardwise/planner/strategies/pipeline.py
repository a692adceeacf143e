"""Pipeline parallelism: the layers are divided into stages, each run by a group of ranks."""

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
    pp: int | None = None,
    schedule: str | Path | Schedule = "1f1b",
    num_microbatches: int | None = None,
    virtual_stages: int | None = None,
    cuts: Sequence[str] | None = None,
    stage_ranks: Sequence[int] | None = None,
    stage_meshes: Sequence[Mesh] | None = None,
    **options: Unpack[CommonOptions],
) -> Plan:
    """Divide the layers into stages, run by `pp` groups of ranks.

    Each group shards the batch over its ranks and runs `virtual_stages` stages: 1, or 2 for
    "interleaved" and "zb_v". Groups have equal numbers of ranks unless `stage_ranks` gives the
    number for each, or `stage_meshes` the arrangement: `(1, 2, 1)` or
    `(Mesh(), Mesh.of(tp=2), Mesh())`. `pp` defaults to what these, the schedule or `cuts` imply,
    else to one group per rank; `num_microbatches` to the schedule's number, else to 8. Other
    options are those of `make_plan`.
    """
    wanted = read(schedule)
    given = wanted if isinstance(wanted, Schedule) else None
    per_group = virtual_stages or default_stages(wanted)
    if pp is None:
        pp = _num_groups(given, per_group, cuts, stage_ranks or stage_meshes, cluster)
    if pp < 1:
        raise InfeasiblePlan(f"pipeline: pp={pp}", hint="1 or more")
    if given and given.num_groups != pp:
        raise InfeasiblePlan(
            f"pipeline: pp={pp}, schedule {given.name!r} is for {given.num_groups} groups of ranks",
            hint=f"pp={given.num_groups}",
        )
    if num_microbatches is None:
        num_microbatches = given.num_microbatches if given else MICROBATCHES
    return make_plan(
        "pipeline",
        graph,
        cluster,
        meshes=_meshes(cluster, pp, stage_ranks, stage_meshes),
        schedule=wanted,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        cuts=cuts,
        **options,
    )


def _num_groups(
    schedule: Schedule | None,
    per_group: int,
    cuts: Sequence[str] | None,
    groups: Sequence[Any] | None,
    cluster: Cluster,
) -> int:
    """Return the number of groups of ranks that the other arguments imply."""
    if schedule is not None:
        return schedule.num_groups
    if groups is not None:
        return len(groups)
    if cuts is None:
        return cluster.num_ranks
    stages = len(cuts) + 1
    if stages % per_group:
        raise InfeasiblePlan(
            f"pipeline: {len(cuts)} cuts make {stages} stages, with {per_group} on each group of "
            "ranks",
            hint=f"{-(-stages // per_group) * per_group - 1} cuts, or virtual_stages=1",
        )
    return stages // per_group


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
                hint=f"stage_ranks={even}" if size else f"pp={cluster.num_ranks}",
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
