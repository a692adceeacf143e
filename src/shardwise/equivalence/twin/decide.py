"""A plan's decisions in new sizes.

Enters: what was decided for a graph, and its twin with solved `Sizes`. Leaves: the same choices for
the twin's nodes, parameters and plan entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from shardwise.cluster import Mesh
from shardwise.equivalence.twin.rewrite import node_keys
from shardwise.equivalence.twin.sizes import Key, Sizes, Unscalable
from shardwise.ir import Graph
from shardwise.layouts.problem import Assignment
from shardwise.plans import ParameterEntry, Plan, Resolved, model_fingerprint
from shardwise.sharding.candidates import Candidate, Cut, Pass, cut_candidate, pass_candidate, same
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Placement, Shard, format_shard, parse_shard


def scale_resolved(
    resolved: Resolved, scaled: Graph, facts: Facts, mesh: Mesh, sizes: Sizes
) -> Resolved:
    """Every choice and every placement of a program of one stage."""
    assignments = []
    for old in resolved.assignments:
        nodes = {
            name: _choose(resolved.graph, facts, name, candidate, sizes)
            for name, candidate in old.nodes.items()
        }
        parameters = {
            value: _place(("dim", value), placement, sizes)
            for value, placement in old.parameters.items()
        }
        assignments.append(
            Assignment(
                axis=old.axis,
                ranks=mesh.axis_size(old.axis),
                nodes=nodes,
                parameters=parameters,
                cost=old.cost,
            )
        )
    entries = scale_entries(resolved.graph, resolved.plan, sizes)
    plan = resolved.plan.with_(mesh=mesh, fingerprint=model_fingerprint(scaled), parameters=entries)
    return Resolved(graph=scaled, plan=plan, facts=facts, assignments=tuple(assignments))


def forced_choices(
    graph: Graph, facts: Facts, stages: Sequence[Resolved], sizes: Sizes
) -> dict[str, dict[str, str]]:
    """Return the choices of all stages as a plan's `nodes`; what stages choose differently is left
    out.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for stage in stages:
        for axis, name, candidate in _choices(stage):
            if name in facts.rules:  # not one that lowering added
                chosen = _choose(graph, facts, name, candidate, sizes).choice
                found.setdefault((name, axis), set()).add(str(chosen))
    forced: dict[str, dict[str, str]] = {}
    for (name, axis), texts in found.items():
        if len(texts) == 1:
            forced.setdefault(name, {})[axis] = texts.pop()
    return forced


def _choices(resolved: Resolved) -> Iterator[tuple[str, str, Candidate]]:
    for assignment in resolved.assignments:
        if not resolved.is_time(assignment.axis):
            for name, candidate in assignment.nodes.items():
                yield assignment.axis, name, candidate


def _choose(graph: Graph, facts: Facts, name: str, old: Candidate, sizes: Sizes) -> Candidate:
    rule, choice = facts.rules[name], old.choice
    if isinstance(choice, Pass):
        return pass_candidate(rule, choice.operands)
    if not isinstance(choice, Cut):
        return same(rule)
    pattern = sizes.pattern(("axis", name, choice.axis), choice.pattern)
    found = cut_candidate(rule, choice.axis, pattern) if choice.axis in rule.axes else None
    if found is None:
        node = next(n for n in graph.nodes if n.name == name)
        raise Unscalable(node_keys(node, graph), f"{name} cannot {choice} in new sizes")
    return found


def _place(key: Key, placement: Placement, sizes: Sizes) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim, sizes.pattern((*key, str(placement.dim)), placement.of))


def scale_entries(graph: Graph, plan: Plan, sizes: Sizes) -> dict[str, ParameterEntry]:
    """Return the plan's entries of parameters, as they would be written for the twin."""
    entries: dict[str, ParameterEntry] = {}
    by_name = {n: p.value for p in graph.parameters for n in (p.name, *p.aliases)}
    for glob, entry in plan.parameters.items():
        value = by_name[matching(glob, list(by_name))[0]]
        layout = {
            axis: cut
            if cut == "whole"
            else _written(
                _place(("dim", value), parse_shard(cut, graph.values[value].shape), sizes)
            )
            for axis, cut in entry.layout.items()
        }
        entries[glob] = ParameterEntry(layout=layout, zero=entry.zero)
    return entries


def matching(glob: str, names: list[str]) -> list[str]:
    """Return the names that a glob of a plan means."""
    return [name for name in names if fnmatchcase(name, glob)]


def _written(placement: Placement) -> str:
    assert isinstance(placement, Shard)
    return format_shard(placement)
