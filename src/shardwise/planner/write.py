"""Write a simulated configuration as a plan.

Layouts of the folded graph apply to all layers that it represents; equal entries of numbered
modules become one glob.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from shardwise.cluster import Cluster
from shardwise.collectives.messages.choice import (
    IMPLEMENTATIONS,
    OPERATIONS,
    Chooser,
    CollectiveChoice,
)
from shardwise.cost.selection import chooser
from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import large_blocks
from shardwise.planner.search import Candidate
from shardwise.planner.strategies.make import batch_inputs
from shardwise.plans import ParameterEntry, Plan, Precision, Stage, model_fingerprint
from shardwise.plans.plan import fold_entries, known_choices
from shardwise.schedules import DEFAULT_SCHEDULE
from shardwise.sharding.placements import REPLICATED
from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.estimate import check_cluster
from shardwise.simulation.folded_graph import FoldedGraph

Choices = dict[str, dict[str, str]]


def write_plan(graph: Graph, fold: FoldedGraph, candidate: Candidate, precision: Precision) -> Plan:
    """Return the plan of a candidate for the full graph."""
    config, execution = candidate.config, candidate.execution
    nodes, parameters = candidate.layouts.solution.as_choices()
    meshes = [group.mesh for group in execution.groups]
    roles = {
        axis: "batch" if axis == "dp" else "parameters" for mesh in meshes for axis in mesh.names
    }
    stages = tuple(
        Stage(
            first=fold.places[first] if first else "",
            ranks=execution.groups[group].ranks,
            mesh=meshes[group],
        )
        for first, group in zip(execution.cuts, execution.placement, strict=True)
    )
    scheduled = len(stages) > 1 or config.num_microbatches > 1
    splits = config.dp > 1 or config.num_microbatches > 1 or any("dp" in m.names for m in meshes)
    return Plan(
        name="auto",
        model=graph.name,
        fingerprint=model_fingerprint(graph),
        mesh=meshes[0],
        roles=roles or {},
        inputs=batch_inputs(graph, None) if splits else {},
        parameters=_parameters(graph, fold, parameters, roles, execution),
        nodes=_nodes(graph, fold, nodes, roles),
        units=large_blocks(graph),
        stages=stages if len(stages) > 1 else (),
        schedule=(config.schedule or DEFAULT_SCHEDULE) if scheduled else "",
        num_microbatches=config.num_microbatches,
        recompute=config.recompute,
        precision=precision,
        offload=config.offload,
        bucket_mib=execution.bucket_bytes >> 20,
    )


def in_captured_names(plan: Plan, run: Graph, graph: Graph) -> Plan:
    """Return a plan of the graph that micro-batches `run`, in the names of the captured graph."""
    if run is graph:
        return plan
    names = {place: name for name, place in node_keys(graph).items()}
    renamed = {node.name: names[node.key] for node in run.nodes if node.key in names}
    nodes = {renamed.get(key, key): choices for key, choices in plan.nodes.items()}
    places, place = {}, ""
    for node in run.nodes:
        place = node.key if node.key in names else place
        places[node.key] = place  # a node that was added has the place of the one before it
    stages = tuple(replace(s, first=places.get(s.first, s.first)) for s in plan.stages)
    return plan.with_(nodes=known_choices(nodes, graph), stages=stages)


def _parameters(
    graph: Graph,
    fold: FoldedGraph,
    placements: Choices,
    roles: Mapping[str, str],
    execution: ExecutionConfig,
) -> dict[str, ParameterEntry]:
    """Return the entry of every parameter: that of its representative in the folded graph."""
    axes = [axis for axis, role in roles.items() if role == "parameters"]
    uses, entries = fold.parameter_uses(graph), {}
    for parameter in graph.parameters:
        _, representative = uses.get(parameter.value, (0, parameter.name))
        shards = placements.get(representative, {})
        layout = {axis: shards.get(axis, REPLICATED) for axis in axes}
        level, sync = execution.level(parameter.name), execution.syncs.get(representative)
        entries[parameter.name] = ParameterEntry(layout=layout, zero=level, sync=sync)
    return fold_entries(entries)


def _nodes(
    graph: Graph, fold: FoldedGraph, choices: Choices, roles: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the choice of every node on axes that shard parameters, by place or glob."""
    axes = [axis for axis, role in roles.items() if role == "parameters"]
    if not axes:
        return {}
    keys = [place if "." in place else name for name, place in node_keys(graph).items()]
    chosen: dict[str, dict[str, str]] = {}
    for place, node in zip(keys, fold.order, strict=True):
        if node >= 0:
            by_axis = choices[fold.graph.nodes[node].name]
            chosen[place] = {axis: by_axis[axis] for axis in axes}
    return fold_entries(chosen)


# ------------------------------------------------------------ collectives
MAX_RANKS = 64  # of a group that is solved on demand: unequal ranks take some seconds
REDUCTIONS = {0: ("all_reduce",), 1: ("all_reduce", "all_gather")}  # of gradients, by zero level
SHARDED_REDUCTIONS = ("reduce_scatter", "all_gather")  # from zero 2 on


def choose(plan: Plan, cluster: Cluster, *, use: str = "", max_ranks: int = MAX_RANKS) -> Plan:
    """Return the plan with the fastest predicted implementation of each collective on `cluster`.

    Gradient reductions and redistributions along mesh axes may be solved for the cluster's links.
    The library is used unless a solution saves more than a tenth of its time, and for groups of
    more than `max_ranks`. `use` forces one of "library", "hierarchical", "solved" and "shared"
    where possible.
    """
    if use and use not in IMPLEMENTATIONS:
        raise PlanError(
            f"collectives have no implementation {use!r}{did_you_mean(use, IMPLEMENTATIONS)}",
            hint=", ".join(IMPLEMENTATIONS),
        )
    return with_choices(plan, chooser(check_cluster(plan, cluster), max_ranks, use))


def with_choices(plan: Plan, choose: Chooser | None) -> Plan:
    """Return the plan with all collectives for which `choose` does not select the library."""
    if choose is None:
        return plan.with_(collectives=())
    choices: dict[tuple[str, tuple[tuple[int, ...], ...]], CollectiveChoice] = {}
    for mesh, ranks in dict.fromkeys((stage.mesh, stage.ranks) for stage in plan.all_stages):
        group = Group(mesh=mesh, ranks=ranks)
        for operation, axes in _used(plan, mesh.names):
            choice = choose(operation, group.along(axes))
            if choice is not None and not choice.is_library:
                choices.setdefault((choice.operation, choice.groups), choice)
    return plan.with_(collectives=tuple(choices.values()))


def _used(plan: Plan, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the collectives that a step may run, with their mesh axes.

    Axes that shard only the batch have gradient reductions; others have redistributions as well.
    """
    levels = {entry.zero or 0 for entry in plan.parameters.values()} or {0}
    reductions = dict.fromkeys(
        op for level in sorted(levels) for op in REDUCTIONS.get(level, SHARDED_REDUCTIONS)
    )
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            batch = all(plan.roles[axis] == "batch" for axis in axes)
            for operation in reductions if batch else OPERATIONS:
                yield operation, axes
