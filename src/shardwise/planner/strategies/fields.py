"""The fields of a plan that follow from the graph: inputs, mesh axes, entries, units, notes.

Enters: a `Graph`, or what a plan resolved to. Leaves: values for the fields of a `Plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import block_glob
from shardwise.plans import ParameterEntry, Resolved, Stage
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Shard, format_shard


def batch_inputs(graph: Graph, batch_dim: int | None) -> dict[str, int | None]:
    """The dim that the batch cut takes of each input: where the most common first size is."""
    shapes = {i.name: graph.values[i.value].shape for i in graph.inputs}
    dim = batch_dim or 0
    sizes = Counter(shape[dim] for shape in shapes.values() if len(shape) > dim)
    if not sizes:
        return {}
    size = max(sizes, key=lambda s: (sizes[s], s))
    return {
        name: dim if len(shape) > dim and shape[dim] == size else None
        for name, shape in shapes.items()
    }


def tensor_axes(graph: Graph, facts: Facts, tp: int) -> tuple[int, ...]:
    """`tp` as one mesh axis, or refined into two where heads come in groups of fewer.

    With 2 key heads on 4 ranks, keys are cut over the first axis of 2 and are the same on the
    second, which cuts the query heads of each group.
    """
    for node in graph.nodes:
        if not node.op.startswith("aten.scaled_dot_product_attention"):
            continue
        heads = facts.dims[node.inputs[0]][-3]
        if len(heads) != 1 or len(heads[0]) != 2:
            continue
        groups, queries = heads[0]
        if groups < tp and tp % groups == 0 and queries % (tp // groups) == 0 and groups > 1:
            return (groups, tp // groups)
    return (tp,)


def parameter_entries(
    graph: Graph, resolved: Mapping[Stage, Resolved], zero: int
) -> dict[str, ParameterEntry]:
    """What was decided for every parameter, with equal entries of numbered modules as one glob.

    A parameter is cut as the first stage that uses it has it; on mesh axes which that stage lacks,
    as the next one does.
    """
    found: dict[str, ParameterEntry] = {}
    homes = _homes(graph, list(resolved))
    for parameter in graph.parameters:
        cuts: dict[str, str] = {}
        home = homes.get(parameter.value, 0)
        for stage in (*list(resolved)[home:], *list(resolved)[:home]):
            for axis, cut in _layout(resolved[stage], parameter.value).items():
                cuts.setdefault(axis, cut)
        found[parameter.name] = ParameterEntry(layout=cuts, zero=zero)
    return fold_entries(found)


def _homes(graph: Graph, stages: list[Stage]) -> dict[str, int]:
    """For each value, the first stage with a node that uses it."""
    firsts = {stage.first: index for index, stage in enumerate(stages)}
    homes: dict[str, int] = {}
    places, stage = node_keys(graph), 0
    for node in graph.nodes:
        stage = firsts.get(places[node.name], stage)
        for name in node.inputs:
            homes.setdefault(name, stage)
    return homes


def _layout(resolved: Resolved, value: str) -> dict[str, str]:
    layout = resolved.parameter_layout(value)
    cuts = {axis: format_shard(p) for axis, p in layout.axes if isinstance(p, Shard)}
    for assignment in resolved.assignments:
        if resolved.plan.roles[assignment.axis] == "parameters":
            cuts.setdefault(assignment.axis, "whole")
    return cuts


def fold_entries(entries: Mapping[str, ParameterEntry]) -> dict[str, ParameterEntry]:
    """Equal entries of numbered modules as one glob."""
    groups: dict[str, list[str]] = {}
    for name in entries:
        groups.setdefault(block_glob(name), []).append(name)
    folded: dict[str, ParameterEntry] = {}
    for glob, names in groups.items():
        first = entries[names[0]]
        if len(names) > 1 and all(entries[n] == first for n in names):
            folded[glob] = first
        else:
            folded.update({n: entries[n] for n in names})
    return folded


def notes(resolved: Resolved) -> list[str]:
    """What a reader of the plan should know: rules found by experiment, operators left whole."""
    found: dict[str, None] = {}
    for node in resolved.graph.nodes:
        rule = resolved.facts.rules[node.name]
        if rule.discovered:
            found.setdefault(f"{node.op}: rule found by experiment ({node.origin})")
        elif rule.whole and resolved.facts.calls[node.name].operands:
            found.setdefault(f"{node.op} is left whole: {rule.whole}")
    return [*found, *resolved.graph.warnings]
