"""The twin of a plan: fewer layers, smaller sizes, fewer ranks, the same decisions.

Enters: a `Graph` and a `Plan`. Leaves: a `Twin`: a `Resolved` in which every node has the choice
that it has in the original, in new sizes. Where a size cannot be changed it stays; the twin says
what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from shardwise.cluster import Mesh
from shardwise.equivalence.twin.layers import drop_layers
from shardwise.equivalence.twin.rewrite import node_keys, pinned, rewrite
from shardwise.equivalence.twin.sizes import Key, Sizes, Unscalable
from shardwise.errors import RuleError, VerifyError
from shardwise.ir import Graph
from shardwise.plans import ParameterEntry, Plan, Resolved, model_fingerprint, resolve
from shardwise.sharding.assign import Assignment
from shardwise.sharding.candidates import Candidate, Cut, Pass, cut_candidate, pass_candidate, same
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Placement, Shard, format_shard, parse_shard

SMALL = 8  # sizes up to this are kept
FEW = 2  # rows where there are fewer rows than ranks
MOST_RANKS = {"batch": 3, "parameters": 8}
ATTEMPTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Decisions in smaller sizes, and what was made smaller."""

    resolved: Resolved
    scaled: tuple[str, ...]


def build_twin(graph: Graph, plan: Plan) -> Twin:
    """The smallest twin that this module knows to make."""
    small, layers = drop_layers(graph)
    mesh = small_mesh(small, plan)
    facts = analyze(small)
    resolved = resolve(small, _for_layers(plan, small), facts)
    pins: set[Key] = set(pinned(small, facts.calls, facts.rules))
    rows = input_rows(small)
    few = any(plan.roles[axis] == "batch" and ranks > rows > 2 for axis, ranks in plan.mesh.axes)

    def target(size: int, above: int) -> int:
        if few and size == rows:
            return FEW  # the twin's batch axes have one rank more
        return small_size(size, above, plan.mesh, mesh)

    why = ""
    for _ in range(ATTEMPTS):
        sizes = Sizes(small, facts.rules)
        sizes.freeze(pins)
        sizes.solve(target)
        try:
            scaled = rewrite(small, facts.calls, facts.rules, sizes)
            decided = _decide(resolved, scaled, mesh, sizes)
        except Unscalable as error:
            why = str(error)
            fresh = (error.keys - pins) or (error.others - pins)
            if not fresh:
                break
            pins |= fresh
        else:
            return Twin(resolved=decided, scaled=(*layers, *_changes(small, sizes, plan, mesh)))
    raise VerifyError(
        f"no smaller twin of {graph.name} could be made: {why}",
        hint="verify a smaller configuration of the model, or give max_bytes",
    )


def small_mesh(graph: Graph, plan: Plan) -> Mesh:
    """Fewer ranks; a batch axis with more ranks than rows keeps empty ranks."""
    rows, axes = input_rows(graph), []
    for axis, ranks in plan.mesh.axes:
        batch = plan.roles[axis] == "batch"
        fewer = (FEW + 1 if ranks > rows else 2) if batch else MOST_RANKS["parameters"]
        axes.append((axis, fewer if ranks > MOST_RANKS[plan.roles[axis]] else ranks))
    return Mesh(axes=tuple(axes))


def input_rows(graph: Graph) -> int:
    """The least first size of all inputs: what batch axes cut."""
    shapes = [graph.values[i.value].shape for i in graph.inputs]
    return min((shape[0] for shape in shapes if shape), default=1)


def small_size(size: int, above: int, mesh: Mesh, smaller: Mesh) -> int:
    """The least size that divides over the new ranks as the old one does over the old ones."""
    if size <= SMALL:
        return size
    pairs = [
        (old, new) for (_, old), (_, new) in zip(mesh.axes, smaller.axes, strict=True) if old > 1
    ]
    pairs.append((prod(old for old, _ in pairs), prod(new for _, new in pairs)))
    least = max([above + 1, SMALL, *(new for old, new in pairs if size >= old)])
    for wanted in (pairs, [p for p in pairs if p[0] == p[1]], []):
        for n in range(least, least + 4 * pairs[-1][1]):
            alike = all((size % old == 0) == (n % new == 0) for old, new in wanted)
            if alike and n % 2 == size % 2:
                return n
    return size


def _for_layers(plan: Plan, graph: Graph) -> Plan:
    """The plan without entries for what was left out."""
    names = [n for p in graph.parameters for n in (p.name, *p.aliases)]
    nodes = {n.name for n in graph.nodes}
    return plan.with_(
        fingerprint=model_fingerprint(graph),
        parameters={g: e for g, e in plan.parameters.items() if _matches(g, names)},
        nodes={n: c for n, c in plan.nodes.items() if n in nodes},
    )


def _matches(glob: str, names: list[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, glob)]


def _decide(resolved: Resolved, scaled: Graph, mesh: Mesh, sizes: Sizes) -> Resolved:
    """Every choice and every placement in new sizes."""
    try:
        facts = analyze(scaled)
    except RuleError as error:
        raise VerifyError(f"the twin's rules: {error.message}", where=error.where) from error
    assignments = []
    for old in resolved.assignments:
        ranks = mesh.axis_size(old.axis)
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
                axis=old.axis, ranks=ranks, nodes=nodes, parameters=parameters, cost=old.cost
            )
        )
    plan = _scaled_plan(resolved, scaled, mesh, sizes)
    return Resolved(graph=scaled, plan=plan, facts=facts, assignments=tuple(assignments))


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


def _scaled_plan(resolved: Resolved, scaled: Graph, mesh: Mesh, sizes: Sizes) -> Plan:
    """The plan as it would be written for the twin."""
    graph, plan = resolved.graph, resolved.plan
    entries: dict[str, ParameterEntry] = {}
    by_name = {n: p.value for p in graph.parameters for n in (p.name, *p.aliases)}
    for glob, entry in plan.parameters.items():
        value = by_name[_matches(glob, list(by_name))[0]]
        layout = {
            axis: cut
            if cut == "whole"
            else _written(
                _place(("dim", value), parse_shard(cut, graph.values[value].shape), sizes)
            )
            for axis, cut in entry.layout.items()
        }
        entries[glob] = ParameterEntry(layout=layout, zero=entry.zero)
    return plan.with_(mesh=mesh, fingerprint=model_fingerprint(scaled), parameters=entries)


def _written(placement: Placement) -> str:
    assert isinstance(placement, Shard)
    return format_shard(placement)


def _changes(graph: Graph, sizes: Sizes, plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    """What changed, in words: sizes by a dim that has them, then mesh axes."""
    named: dict[tuple[int, int], str] = {}
    sources: Mapping[str, str] = {
        **{i.value: i.name for i in graph.inputs},
        **{p.value: p.name for p in graph.parameters},
        **{b.value: b.name for b in graph.buffers},
    }
    for value, name in sources.items():
        for index, size in enumerate(graph.values[value].shape):
            new = sizes.new(("dim", value, str(index)))
            if new != size:
                named.setdefault((size, new), f"dim {index} of {name}: {size} -> {new}")
    ranks = [
        f"mesh axis {axis}: {old} ranks -> {new}"
        for (axis, old), (_, new) in zip(plan.mesh.axes, mesh.axes, strict=True)
        if old != new
    ]
    return (*named.values(), *ranks)
