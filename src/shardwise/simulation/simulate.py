"""`simulate(graph, plan, cluster)`: the predicted step of a plan.

Enters: a `Graph`, a `Plan` and a `Cluster`. Leaves: `Estimate`. Repeated layers are solved and
lowered once, as the planner does: what is simulated is the program that would run.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from shardwise.cluster import Cluster, Device, Mesh
from shardwise.cost import OpTable, Signature
from shardwise.errors import PlanError
from shardwise.ir import Graph
from shardwise.messages.choice import chosen
from shardwise.plans import Plan, Resolved, model_fingerprint, resolve, used_devices
from shardwise.plans.choices import block_constraints
from shardwise.program.means import separate_means
from shardwise.program.pipeline import plan_schedule
from shardwise.program.stages import with_keys
from shardwise.sharding.factors import analyze
from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.fold import FoldedGraph
from shardwise.simulation.setting import ExecutionConfig
from shardwise.simulation.times import Group
from shardwise.simulation.works import WorkloadModel

BATCH_AXIS = "dp"


def simulate(
    graph: Graph, plan: Plan, cluster: Cluster, *, table: OpTable | None = None
) -> Estimate:
    """The predicted time and memory of a step of `plan` on `cluster`.

    `table` holds measured times of operators, which replace computed ones. Collectives take the
    times of the ways that the plan chooses for them.
    """
    cluster = check_plan(graph, plan, cluster)
    fold, works = works_of(graph, plan)
    evaluator = Evaluator(fold, cluster, table, chosen(plan.collectives))
    return evaluator.estimate(works, setting_of(plan, fold))


def check_plan(graph: Graph, plan: Plan, cluster: Cluster) -> Cluster:
    """Return the devices that the plan uses; raise unless it is for this model and cluster."""
    plan.check(graph)
    return check_cluster(plan, cluster)


def check_cluster(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the devices that the plan uses; raise unless there is one for each of its ranks."""
    used = used_devices(plan, cluster)
    if plan.num_ranks != used.num_ranks:
        raise PlanError(
            f"the plan {plan.name!r} is for {plan.num_ranks} ranks, {cluster.name} has "
            f"{cluster.num_ranks}",
            hint="a cluster file of as many devices, or a new plan: shardwise plan",
        )
    return used


def plan_calls(graph: Graph, plan: Plan, cluster: Cluster) -> dict[Device, tuple[Signature, ...]]:
    """The local calls of a plan's program by device, each once: what could be measured."""
    fold, works = works_of(graph, plan)
    found: dict[Device, dict[Signature, None]] = {}
    for device, call in Evaluator(fold, cluster).calls(works, setting_of(plan, fold)):
        found.setdefault(device, {}).setdefault(call)
    return {device: tuple(calls) for device, calls in found.items()}


def works_of(graph: Graph, plan: Plan) -> tuple[FoldedGraph, dict[Mesh, WorkloadModel]]:
    """The folded graph, and the work of a rank of every mesh of the plan."""
    graph = as_run(graph, plan)
    fold = FoldedGraph.of(graph, constraint_key=block_constraints(plan, graph))
    small = fold_plan(fold, plan, plan.choices(graph))
    facts = analyze(fold.graph)
    works: dict[Mesh, WorkloadModel] = {}
    for stage in plan.all_stages:
        if stage.mesh not in works:
            divided = _on_mesh(small, stage.mesh, plan.num_microbatches)
            solved: Resolved = resolve(fold.graph, divided, facts)
            works[stage.mesh] = WorkloadModel(fold, facts, solved.assignments, dict(divided.roles))
    return fold, works


def as_run(graph: Graph, plan: Plan) -> Graph:
    """The graph as the plan's program computes it."""
    return in_parts(graph) if plan.splits_time else graph


def in_parts(graph: Graph) -> Graph:
    """With micro-batches a mean loss of 16 bits is a sum in 32 bits, as are the scores it is of."""
    if graph.loss is None or graph.values[graph.loss].dtype.itemsize > 2:
        return graph
    found = separate_means(with_keys(graph))
    return found if len(found.nodes) > len(graph.nodes) else graph


def _on_mesh(plan: Plan, mesh: Mesh, num_microbatches: int) -> Plan:
    """The plan on a mesh that has an axis of the batch wherever rows are cut.

    `WorkloadModel` has one axis for the ranks and the micro-batches that divide them.
    """
    found = plan.on_mesh(mesh)
    if num_microbatches == 1 or "batch" in found.roles.values():
        return found
    return found.with_(
        mesh=Mesh(axes=((BATCH_AXIS, num_microbatches), *mesh.axes)),
        roles={BATCH_AXIS: "batch", **found.roles},
    )


def fold_plan(fold: FoldedGraph, plan: Plan, choices: Mapping[str, Mapping[str, str]]) -> Plan:
    """The plan's decisions for the small graph; `choices` are those of the whole graph's nodes."""
    small = fold.graph
    names = [n for p in small.parameters for n in (p.name, *p.aliases)]
    nodes = {node.name for node in small.nodes}
    return plan.with_(
        fingerprint=model_fingerprint(small),
        parameters={
            g: e for g, e in plan.parameters.items() if any(fnmatchcase(n, g) for n in names)
        },
        nodes={n: c for n, c in choices.items() if n in nodes},
        stages=(),
        schedule="",
        num_microbatches=1,
        collectives=(),
    )


def setting_of(plan: Plan, fold: FoldedGraph) -> ExecutionConfig:
    """How a plan's step runs."""
    at = {place: index for index, place in enumerate(fold.places)}
    groups = [Group(mesh=_mesh(plan, ranks), ranks=ranks) for ranks in plan.groups]
    return ExecutionConfig(
        groups=tuple(groups),
        cuts=tuple(at[stage.first] if stage.first else 0 for stage in plan.all_stages),
        placement=tuple(plan.groups.index(stage.ranks) for stage in plan.all_stages),
        schedule=plan_schedule(plan),
        num_microbatches=plan.num_microbatches,
        zeros={g: e.zero for g, e in plan.parameters.items() if e.zero is not None},
        recompute=plan.recompute,
        offload=plan.offload,
        precision=plan.precision,
    )


def _mesh(plan: Plan, ranks: tuple[int, ...]) -> Mesh:
    return next(stage.mesh for stage in plan.all_stages if stage.ranks == ranks)
