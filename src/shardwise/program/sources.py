"""How inputs, parameters, buffers and constants are held, and whose gradients are partial.

Enters: `Resolved`. Leaves: `Sources`. On a mesh axis a whole value whose uses all differ between
ranks has a partial gradient. For a parameter that is synchronized in buckets (`sync`) instead of
inside backward; the same holds for values computed from parameters alone (a cast or scaled weight,
a position bias), which are then held as R~ so that the reduction happens once, at the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.ir import Graph, Input, Ref
from shardwise.layouts.costs import same_placement
from shardwise.layouts.problem import Assignment
from shardwise.plans import Resolved
from shardwise.sharding.candidates import Same
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Placement,
    Replicate,
    Shard,
    compatible,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Layouts of all graph sources, sync axes and gather unit of parameters, R~-held values."""

    layouts: Mapping[str, Layout]
    sync: Mapping[str, tuple[str, ...]]
    units: Mapping[str, str]
    differing: Mapping[str, frozenset[str]]  # mesh axis -> values held as R~ on it

    def stored(self, value: str, layout: Layout) -> Layout:
        """Return the layout of a node's result, with R~ where all its uses differ."""
        return Layout(
            tuple(
                (a, PARTIAL_GRAD if p == REPLICATE and value in self.differing[a] else p)
                for a, p in layout.axes
            )
        )


def find_sources(resolved: Resolved) -> Sources:
    """Decide how every source is held."""
    graph = resolved.graph
    every = frozenset(graph.values)  # in time all work differs: gradients are added up
    differing = {
        a.axis: every if resolved.is_time(a.axis) else differing_values(resolved, a)
        for a in resolved.assignments
    }
    layouts: dict[str, Layout] = {}
    sync: dict[str, tuple[str, ...]] = {}
    for parameter in graph.parameters:
        held = resolved.parameter_layout(parameter.value)
        axes = tuple(
            a
            for a, p in held.axes
            if isinstance(p, Replicate)
            and parameter.value in differing[a]
            and parameter.requires_grad
            and not resolved.is_time(a)
        )
        sync[parameter.value] = axes
        layouts[parameter.value] = Layout(
            tuple(
                (a, PARTIAL_GRAD if a in axes or resolved.is_time(a) else p) for a, p in held.axes
            )
        )
    whole = Layout(
        tuple(
            (a.axis, PARTIAL_GRAD if resolved.is_time(a.axis) else REPLICATE)
            for a in resolved.assignments
        )
    )
    layouts |= {buffer.value: whole for buffer in graph.buffers}
    layouts |= {constant.value: whole for constant in graph.constants}
    for source in graph.inputs:
        layouts[source.value] = _input_layout(resolved, source, whole)
    units = parameter_units(resolved)
    return Sources(layouts=layouts, sync=sync, units=units, differing=differing)


def differing_values(resolved: Resolved, assignment: Assignment) -> frozenset[str]:
    """Whole values computed from parameters alone whose every use differs on this axis."""
    graph, carries = resolved.graph, resolved.facts.carries_grad
    pure = {p.value for p in graph.parameters}
    for node in graph.nodes:
        inputs = [n for n in node.inputs if n in carries]
        same = isinstance(assignment.nodes[node.name].choice, Same)
        if same and inputs and node.grad_enabled and all(n in pure for n in inputs):
            pure |= {n for n in node.outputs if n in carries}
    kept = {b.mutation for b in graph.buffers} | {graph.loss}
    kept |= {leaf.name for leaf in graph.outputs if isinstance(leaf, Ref)} | set(graph.sends)
    differs = dict.fromkeys(pure, False)  # becomes True at the first differing use
    equal = {name for name in kept if name is not None}
    for node in reversed(graph.nodes):
        candidate = assignment.nodes[node.name]
        through = isinstance(candidate.choice, Same) and all(
            n in differs and differs[n] and n not in equal for n in node.outputs if n in carries
        )
        through = through and any(n in carries for n in node.outputs)
        if not through:  # of a split's parts either all are R~, or none
            equal |= {n for n in node.outputs if n in differs}
        for name, needed in zip(node.inputs, candidate.operands, strict=True):
            if name not in differs or not node.grad_enabled or name not in carries:
                continue
            if needed == PARTIAL_GRAD or isinstance(needed, Shard) or through:
                differs[name] = True
            else:
                equal.add(name)
    return frozenset(v for v, used in differs.items() if used and v not in equal)


def _input_layout(resolved: Resolved, source: Input, whole: Layout) -> Layout:
    """Return the shard that all uses of an input agree on, axis by axis; else whole.

    What comes from an earlier stage is held as the search decided.
    """
    layout, value = whole, source.value
    for assignment in resolved.assignments:
        if resolved.timed is not None and resolved.is_time(assignment.axis):
            layout = layout.with_axis(assignment.axis, resolved.timed.values[value])
            continue
        if source.kind == "received":
            decided = assignment.parameters.get(value, REPLICATE)
            layout = layout.with_axis(assignment.axis, decided)
            continue
        needs: list[Placement] = []
        for node in resolved.graph.nodes:
            for name, needed in zip(node.inputs, assignment.nodes[node.name].operands, strict=True):
                if name == value:
                    needs.append(needed)
        first = next(iter(needs), REPLICATE)
        agreed = all(same_placement(first, n, assignment.ranks) for n in needs)
        taken = [s for _, s in layout.shards]
        if not (isinstance(first, Shard) and agreed):
            continue
        if all(s.dim != first.dim or compatible(s.of, first.of) for s in taken):
            layout = layout.with_axis(assignment.axis, first)
    return layout


def parameter_units(resolved: Resolved) -> dict[str, str]:
    """Return the gather unit of every parameter: a block if only that block uses it,
    else the root.
    """
    graph, plan = resolved.graph, resolved.plan
    users = module_users(graph)
    units: dict[str, str] = {}
    for parameter in graph.parameters:
        unit = plan.unit(parameter.name)
        inside = all(m == unit or m.startswith(f"{unit}.") for m in users.get(parameter.value, ()))
        units[parameter.value] = unit if unit and inside else ""
    return units


def module_users(graph: Graph) -> dict[str, set[str]]:
    """Module paths of the nodes that use each value."""
    users: dict[str, set[str]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            users.setdefault(name, set()).add(node.module)
    return users
