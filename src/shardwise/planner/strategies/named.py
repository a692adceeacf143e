"""The named strategies: data parallelism, ZeRO, tensor and pipeline parallelism, and all combined.

Parameter servers are data parallelism with another synchronization (`Sync`).

`make_plan` explains the options that a signature takes from `PlanOptions`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.sync import link_rates, link_time
from shardwise.errors import InfeasiblePlan
from shardwise.inexact import OuterOptimizer
from shardwise.ir import Graph, Parameter
from shardwise.planner.options import CommonOptions, PlanOptions, StageOptions, known_options
from shardwise.planner.strategies.make import joined, make_plan, read_schedule, stages_per_group
from shardwise.plans import Plan, Sync
from shardwise.plans.sync import applied_sync, operator_uses
from shardwise.schedules import Schedule

MICROBATCHES = 8


@known_options("sw.strategies.ddp", make_plan)
def ddp(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Shard the batch over all ranks, and all-reduce the gradients in buckets."""
    return make_plan("ddp", graph, cluster, dp=cluster.num_ranks, **options)


@known_options("sw.strategies.zero1", make_plan)
def zero1(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Shard the optimizer state, in addition to `ddp`."""
    return make_plan("zero1", graph, cluster, dp=cluster.num_ranks, zero=1, **options)


@known_options("sw.strategies.zero2", make_plan)
def zero2(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Shard the gradients, in addition to `zero1`."""
    return make_plan("zero2", graph, cluster, dp=cluster.num_ranks, zero=2, **options)


@known_options("sw.strategies.fsdp", make_plan)
def fsdp(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Shard the parameters, in addition to `zero2`, and gather them block by block for use."""
    return make_plan("fsdp", graph, cluster, dp=cluster.num_ranks, zero=3, **options)


@known_options("sw.strategies.local_sgd", make_plan)
def local_sgd(
    graph: Graph, cluster: Cluster, *, every: int = 10, **options: Unpack[PlanOptions]
) -> Plan:
    """Train a replica on each rank, and replace replicas by their mean after `every` updates.

    It differs from synchronous training: see the guide of synchronization.
    """
    return _synchronized("local_sgd", graph, cluster, {"*": Sync(every=every)}, options)


@known_options("sw.strategies.diloco", make_plan)
def diloco(
    graph: Graph,
    cluster: Cluster,
    *,
    every: int = 50,
    fragments: int = 1,
    overlap: int = 0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Train a replica on each rank, combined by SGD with Nesterov momentum on their mean change.

    Rounds of `fragments` are spread over `every` updates, and take effect `overlap` updates later.
    It differs from synchronous training: see the guide of synchronization.
    """
    outer = OuterOptimizer(lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    sync = Sync(every=every, outer=outer, fragments=fragments, overlap=overlap)
    return _synchronized("diloco", graph, cluster, {"*": sync}, options)


@known_options("sw.strategies.tensor", make_plan)
def tensor(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Shard the parameters, and the work on them, over all ranks.

    With `sequence_parallel`, norms, dropout and residuals are computed on shards of the sequence.
    """
    return make_plan("tensor", graph, cluster, tp=cluster.num_ranks, **options)


@known_options("sw.strategies.context", make_plan)
def context(
    graph: Graph, cluster: Cluster, *, zero: int = 0, **options: Unpack[PlanOptions]
) -> Plan:
    """Shard the sequence, and the `attention` over it, over all ranks."""
    return make_plan("context", graph, cluster, dp=1, cp=cluster.num_ranks, zero=zero, **options)


@known_options("sw.strategies.hybrid", make_plan)
def hybrid(
    graph: Graph,
    cluster: Cluster,
    *,
    dp: int | None = None,
    ep: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    **options: Unpack[StageOptions],
) -> Plan:
    """Divide layers over `pp` groups, the batch over `dp`, sequences over `cp`, weights over `tp`.

    Experts are divided over `ep`, and so is the batch for all other layers. `dp` defaults to all
    remaining ranks.
    """
    return make_plan(
        "hybrid", graph, cluster, dp=dp, ep=ep, cp=cp, tp=tp, pp=pp, zero=zero, **options
    )


@known_options("sw.strategies.expert", make_plan)
def expert(
    graph: Graph, cluster: Cluster, *, ep: int | None = None, **options: Unpack[PlanOptions]
) -> Plan:
    """Divide the experts over `ep` ranks, by default all, and the batch over all ranks."""
    ranks = cluster.num_ranks if ep is None else ep
    return make_plan("expert", graph, cluster, ep=ranks, **options)


# ---------------------------------------------------------------- synchronization
@known_options("sw.strategies.parameter_server", make_plan)
def parameter_server(
    graph: Graph,
    cluster: Cluster,
    *,
    owner: int = 0,
    host: bool = False,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Let one rank update all parameters; with `host`, it keeps them in host memory."""
    syncs = {"*": Sync(kind="owner", owner=owner, host=host)}
    return _synchronized("parameter_server", graph, cluster, syncs, options)


@known_options("sw.strategies.balanced_parameter_server", make_plan)
def balanced_parameter_server(
    graph: Graph, cluster: Cluster, *, host: bool = False, **options: Unpack[PlanOptions]
) -> Plan:
    """Let each rank update some parameters, so that the busiest link is least busy."""
    ranks = range(cluster.num_ranks)
    rates = link_rates(cluster, ranks) or (1.0,) * cluster.num_ranks
    load = [0.0] * cluster.num_ranks
    sizes = {p.name: graph.values[p.value].num_bytes for p in _trained(graph)}

    def busy(rank: int, size: int) -> tuple[float, float, int]:
        after = [owned + size * (r == rank) for r, owned in enumerate(load)]
        return link_time(after, rates), after[rank] / rates[rank], rank

    syncs = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = min(ranks, key=lambda rank: busy(rank, sizes[name]))
        load[owner] += sizes[name]
        syncs[name] = Sync(kind="owner", owner=owner, host=host)
    return _synchronized("balanced_parameter_server", graph, cluster, syncs, options)


@known_options("sw.strategies.partitioned_parameter_server", make_plan)
def partitioned_parameter_server(
    graph: Graph,
    cluster: Cluster,
    *,
    dim: int = 0,
    owners: Sequence[int] | None = None,
    host: bool = False,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Divide each parameter along `dim` over all ranks, which update their parts.

    `owners` are the ranks' weights, by default equal.
    """
    sync = Sync(kind="partitioned", dim=dim, owners=tuple(owners or ()), host=host)
    return _synchronized("partitioned_parameter_server", graph, cluster, {"*": sync}, options)


@known_options("sw.strategies.partitioned_all_reduce", make_plan)
def partitioned_all_reduce(
    graph: Graph, cluster: Cluster, *, dim: int | None = None, **options: Unpack[PlanOptions]
) -> Plan:
    """Sum and update equal parts of the parameters on each rank, then gather them.

    Parts are ranges of elements, or of the indices of `dim`.
    """
    syncs = {"*": Sync(kind="partitioned", dim=dim)}
    return _synchronized("partitioned_all_reduce", graph, cluster, syncs, options)


@known_options("sw.strategies.parallax", make_plan)
def parallax(graph: Graph, cluster: Cluster, **options: Unpack[PlanOptions]) -> Plan:
    """Send the gradient rows of embeddings to the owners of the rows; all-reduce the others."""
    uses, form = operator_uses(graph), Sync(kind="partitioned", dim=0, sparse="rows")
    tables = [p.name for p in _trained(graph) if applied_sync(graph, p, form, uses).sparse]
    return _synchronized("parallax", graph, cluster, dict.fromkeys(tables, form), options)


def _trained(graph: Graph) -> Iterator[Parameter]:
    return (parameter for parameter in graph.parameters if parameter.requires_grad)


def _synchronized(
    name: str, graph: Graph, cluster: Cluster, syncs: Mapping[str, Sync], options: PlanOptions
) -> Plan:
    """Return a data-parallel plan with these synchronizations, before the user's constraints."""
    options["constraints"] = joined(syncs, options.get("constraints"))
    return make_plan(name, graph, cluster, dp=cluster.num_ranks, **options)


# ---------------------------------------------------------------- pipeline stages
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
    `(Mesh(), Mesh.of(tp=2), Mesh())`. `pp` defaults to the number that these, the schedule or
    `cuts` imply, or else to one group per rank; `num_microbatches` to the schedule's number, or
    else to 8. Other options are those of `make_plan`.
    """
    order = read_schedule(schedule)
    listed = order if isinstance(order, Schedule) else None
    per_group = virtual_stages or stages_per_group(order)
    if pp is None:
        pp = _num_groups(listed, per_group, cuts, stage_ranks or stage_meshes, cluster)
    if pp < 1:
        raise InfeasiblePlan(f"pipeline: pp={pp}", hint="1 or more")
    if listed and listed.num_groups != pp:
        raise InfeasiblePlan(
            f"pipeline: pp={pp}, schedule {listed.name!r} is for {listed.num_groups} groups of "
            "ranks",
            hint=f"pp={listed.num_groups}",
        )
    if num_microbatches is None:
        num_microbatches = listed.num_microbatches if listed else MICROBATCHES
    return make_plan(
        "pipeline",
        graph,
        cluster,
        meshes=_meshes(cluster, pp, stage_ranks, stage_meshes),
        schedule=order,
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
    """Return the mesh of every group."""
    if stage_meshes is None and stage_ranks is None:
        size, remainder = divmod(cluster.num_ranks, groups)
        if remainder or not size:
            even = [size + (group < remainder) for group in range(groups)]
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
