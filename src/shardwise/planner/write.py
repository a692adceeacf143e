"""A plan from a simulated point: the decisions, and what the search found on its way.

Enters: the best candidate, and the runners-up. Leaves: a `Plan`. Layouts of the folded graph hold
for all layers that a node stands for; equal entries of numbered modules become one glob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import block_glob, large_blocks
from shardwise.planner.search import Candidate
from shardwise.planner.strategies.fields import batch_inputs, fold_entries
from shardwise.plans import ParameterEntry, Plan, Precision, Stage, model_fingerprint
from shardwise.plans.plan import known_choices
from shardwise.schedules import DEFAULT_SCHEDULE
from shardwise.simulation.folded_graph import FoldedGraph

Choices = dict[str, dict[str, str]]


def write_plan(graph: Graph, fold: FoldedGraph, candidate: Candidate, precision: Precision) -> Plan:
    """Return the plan of a candidate for the full graph."""
    config, setting = candidate.config, candidate.setting
    nodes, parameters = candidate.layouts.solution.as_choices()
    meshes = [group.mesh for group in setting.groups]
    roles = {
        axis: "batch" if axis == "dp" else "parameters" for mesh in meshes for axis in mesh.names
    }
    places = fold.places
    stages = tuple(
        Stage(
            first=places[first] if first else "",
            ranks=setting.groups[group].ranks,
            mesh=meshes[group],
        )
        for first, group in zip(setting.cuts, setting.placement, strict=True)
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
        parameters=_parameters(graph, fold, parameters, roles, setting.level),
        nodes=_nodes(graph, fold, nodes, roles),
        units=large_blocks(graph),
        stages=stages if len(stages) > 1 else (),
        schedule=(config.schedule or DEFAULT_SCHEDULE) if scheduled else "",
        num_microbatches=config.num_microbatches,
        recompute=config.recompute,
        precision=precision,
        offload=config.offload,
    )


def in_captured_names(plan: Plan, run: Graph, graph: Graph) -> Plan:
    """Return a plan of the graph that micro-batches `run`, in the names of the captured one."""
    if run is graph:
        return plan
    names = {place: name for name, place in node_keys(graph).items()}
    renamed = {node.name: names[node.key] for node in run.nodes if node.key in names}
    nodes = {renamed.get(key, key): choices for key, choices in plan.nodes.items()}
    stands, at = {}, ""
    for node in run.nodes:
        at = node.key if node.key in names else at
        stands[node.key] = at  # an added node stands where the one before it does
    stages = tuple(replace(s, first=stands.get(s.first, s.first)) for s in plan.stages)
    return plan.with_(nodes=known_choices(nodes, graph), stages=stages)


def _parameters(
    graph: Graph,
    fold: FoldedGraph,
    cuts: Choices,
    roles: Mapping[str, str],
    zero: Callable[[str], int],
) -> dict[str, ParameterEntry]:
    """The entry of every parameter: that of the one which stands for it."""
    axes = [axis for axis, role in roles.items() if role == "parameters"]
    names = {p.value: p.name for p in fold.graph.parameters}
    stands: dict[str, str] = {}  # parameter -> the one of the small graph that is used in its place
    for node, at in zip(graph.nodes, fold.order, strict=True):
        if at >= 0:
            pairs = zip(node.inputs, fold.graph.nodes[at].inputs, strict=True)
            for value, other in pairs:
                if other in names:
                    stands.setdefault(value, names[other])
    found = {}
    for parameter in graph.parameters:
        mine = cuts.get(stands.get(parameter.value, parameter.name), {})
        layout = {axis: mine.get(axis, "whole") for axis in axes}
        found[parameter.name] = ParameterEntry(layout=layout, zero=zero(parameter.name))
    return fold_entries(found)


def _nodes(
    graph: Graph, fold: FoldedGraph, choices: Choices, roles: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """The choice of every node on axes that cut parameters, by place, with globs."""
    axes = [axis for axis, role in roles.items() if role == "parameters"]
    if not axes:
        return {}
    keys = [place if "." in place else name for name, place in node_keys(graph).items()]
    found: dict[str, dict[str, str]] = {}
    for at, place in enumerate(keys):
        if fold.order[at] < 0:
            continue
        mine = choices[fold.graph.nodes[fold.order[at]].name]
        found[place] = {axis: mine[axis] for axis in axes}
    groups: dict[str, list[str]] = {}
    for place in found:
        groups.setdefault(block_glob(place), []).append(place)
    folded: dict[str, dict[str, str]] = {}
    for glob, names in groups.items():
        if all(found[n] == found[names[0]] for n in names):
            folded[glob if len(names) > 1 else names[0]] = found[names[0]]
        else:
            folded |= {n: found[n] for n in names}
    return folded
