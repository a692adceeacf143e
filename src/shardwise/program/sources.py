"""Decide the layouts of inputs, parameters, buffers and constants, and whose gradients are partial.

A replicated value whose uses all differ between the ranks of a mesh axis has a partial gradient. A
parameter's is synchronized in buckets (`sync`) instead of inside backward. The same holds for
values computed from parameters alone (a cast or scaled weight, a position bias): they are R~, so
that the reduction happens once, at the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.ir import Input, Ref
from shardwise.layouts.moves import same_placement
from shardwise.layouts.problem import Assignment
from shardwise.plans import Resolved
from shardwise.sharding.candidates import Same
from shardwise.sharding.placements import (
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Replicate,
    Shard,
    compatible,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Layouts of all graph sources, sync axes and gather units of parameters, and R~ values."""

    layouts: Mapping[str, Layout]
    sync: Mapping[str, tuple[str, ...]]
    units: Mapping[str, str]
    differing: Mapping[str, frozenset[str]]  # mesh axis -> values that are R~ on it

    def with_partial_grads(self, value: str, layout: Layout) -> Layout:
        """Return a layout with R~ instead of R where all uses of a value differ."""
        return Layout(
            tuple(
                (a, PARTIAL_GRAD if p == REPLICATE and value in self.differing[a] else p)
                for a, p in layout.axes
            )
        )


def replicated_layout(resolved: Resolved) -> Layout:
    """Return the layout of a value that every rank has in full, in any micro-batch."""
    axes = resolved.plan.mesh.names
    return Layout(tuple((a, PARTIAL_GRAD if resolved.is_time(a) else REPLICATE) for a in axes))


def find_sources(resolved: Resolved) -> Sources:
    """Return the layouts of all sources."""
    graph = resolved.graph
    every = frozenset(graph.values)  # micro-batches differ in all work: gradients add up
    differing = {
        a.axis: every if resolved.is_time(a.axis) else _differing_values(resolved, a)
        for a in resolved.assignments
    }
    layouts: dict[str, Layout] = {}
    sync: dict[str, tuple[str, ...]] = {}
    for parameter in graph.parameters:
        stored = resolved.parameter_layout(parameter.value)
        axes = tuple(
            a
            for a, p in stored.axes
            if isinstance(p, Replicate)
            and parameter.value in differing[a]
            and parameter.requires_grad
            and not resolved.is_time(a)
        )
        sync[parameter.value] = axes
        layouts[parameter.value] = Layout(
            tuple(
                (a, PARTIAL_GRAD if a in axes or resolved.is_time(a) else p) for a, p in stored.axes
            )
        )
    replicated = replicated_layout(resolved)
    layouts |= dict.fromkeys((b.value for b in graph.buffers), replicated)
    layouts |= dict.fromkeys((c.value for c in graph.constants), replicated)
    layouts |= {i.value: _input_layout(resolved, i, replicated) for i in graph.inputs}
    units = _parameter_units(resolved)
    return Sources(layouts=layouts, sync=sync, units=units, differing=differing)


def _differing_values(resolved: Resolved, assignment: Assignment) -> frozenset[str]:
    """Return replicated values of parameters alone whose every use differs on this axis."""
    graph, carries = resolved.graph, resolved.facts.carries_grad
    pure = {p.value for p in graph.parameters}
    for node in graph.nodes:
        inputs = [n for n in node.inputs if n in carries]
        same = isinstance(assignment.nodes[node.name].choice, Same)
        if same and inputs and node.grad_enabled and all(n in pure for n in inputs):
            pure |= {n for n in node.outputs if n in carries}
    differs = dict.fromkeys(pure, False)  # becomes True at the first differing use
    equal: set[str | None] = {b.mutation for b in graph.buffers} | {graph.loss, *graph.sends}
    equal |= {leaf.name for leaf in graph.outputs if isinstance(leaf, Ref)}
    for node in reversed(graph.nodes):
        candidate = assignment.nodes[node.name]
        through = isinstance(candidate.choice, Same) and all(
            n in differs and differs[n] and n not in equal for n in node.outputs if n in carries
        )
        through = through and any(n in carries for n in node.outputs)
        if not through:  # either all results of a split are R~, or none
            equal |= {n for n in node.outputs if n in differs}
        for name, needed in zip(node.inputs, candidate.operands, strict=True):
            if name not in differs or not node.grad_enabled or name not in carries:
                continue
            if needed == PARTIAL_GRAD or isinstance(needed, Shard) or through:
                differs[name] = True
            else:
                equal.add(name)
    return frozenset(v for v, used in differs.items() if used and v not in equal)


def _input_layout(resolved: Resolved, source: Input, layout: Layout) -> Layout:
    """Shard an input on each axis where all its uses agree; `layout` replicates it.

    An input received from an earlier stage has the layout that the search chose.
    """
    value = source.value
    for assignment in resolved.assignments:
        if resolved.timed is not None and resolved.is_time(assignment.axis):
            layout = layout.with_axis(assignment.axis, resolved.timed.values[value])
            continue
        if source.kind == "received":
            decided = assignment.parameters.get(value, REPLICATE)
            layout = layout.with_axis(assignment.axis, decided)
            continue
        needs = [
            needed
            for node in resolved.graph.nodes
            for name, needed in zip(node.inputs, assignment.nodes[node.name].operands, strict=True)
            if name == value
        ]
        first = next(iter(needs), REPLICATE)
        agreed = all(same_placement(first, n, assignment.ranks) for n in needs)
        if not (isinstance(first, Shard) and agreed):
            continue
        if all(s.dim != first.dim or compatible(s.of, first.of) for _, s in layout.shards):
            layout = layout.with_axis(assignment.axis, first)
    return layout


def _parameter_units(resolved: Resolved) -> dict[str, str]:
    """Return each parameter's gather unit: a block if only that block uses it, else the root."""
    users: dict[str, set[str]] = {}
    for node in resolved.graph.nodes:
        for name in node.inputs:
            users.setdefault(name, set()).add(f"{node.module}.")
    units: dict[str, str] = {}
    for parameter in resolved.graph.parameters:
        unit = resolved.plan.unit(parameter.name)
        inside = all(m.startswith(f"{unit}.") for m in users.get(parameter.value, ()))
        units[parameter.value] = unit if unit and inside else ""
    return units
