"""Tables in parts: what depends on no input is made as it is used.

Enters: the choices of all nodes on every mesh axis. Leaves: the same, where tables (positions,
masks) are cut from where they can be. The search leaves them whole until an activation needs a
part: so it has fewer states, and a part of a whole table costs nothing to take. But a mask of
`batch x length x length` is large: where all uses of a table take the same part of it, its node
makes that part, and takes parts of what it is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from shardwise.ir import Graph, Node, Ref
from shardwise.sharding.allowed import constant_values, leaves_room
from shardwise.sharding.candidates import Candidate, Cut, Same, candidates
from shardwise.sharding.costs import same_placement
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Partial, Placement, Shard
from shardwise.sharding.task import Assignment


def cut_tables(
    graph: Graph,
    facts: Facts,
    assignments: tuple[Assignment, ...],
    named: Mapping[str, Collection[str]],
) -> tuple[Assignment, ...]:
    """The assignments with tables in parts; `named` are nodes of which a plan says an axis."""
    tables = constant_values(graph) - _shown(graph)
    made = [node for node in reversed(graph.nodes) if tables.issuperset(node.outputs)]
    if not made:
        return assignments
    found = list(assignments)
    users = _users(graph)
    for index, assignment in enumerate(assignments):
        others = tuple(other for other in found if other.axis != assignment.axis)
        nodes = dict(assignment.nodes)
        for node in made:
            if assignment.axis not in named.get(node.name, ()):
                nodes[node.name] = _as_used(node, facts, nodes, users, assignment, others)
        found[index] = replace(assignment, nodes=nodes)
    return tuple(found)


def _shown(graph: Graph) -> frozenset[str]:
    """Values that somebody outside of the graph sees."""
    found = {leaf.name for leaf in graph.outputs if isinstance(leaf, Ref)}
    found |= {b.mutation for b in graph.buffers if b.mutation} | set(graph.sends)
    return frozenset(found | ({graph.loss} if graph.loss else set()))


def _users(graph: Graph) -> dict[str, list[tuple[str, int]]]:
    """Where every value is used: nodes, and the operand's place there."""
    found: dict[str, list[tuple[str, int]]] = {}
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            found.setdefault(name, []).append((node.name, place))
    return found


def _as_used(
    node: Node,
    facts: Facts,
    nodes: Mapping[str, Candidate],
    users: Mapping[str, list[tuple[str, int]]],
    assignment: Assignment,
    others: tuple[Assignment, ...],
) -> Candidate:
    """The choice of a table's node: the part that all uses take, where it can make that."""
    known = nodes[node.name]
    if not isinstance(known.choice, Same) or len(node.outputs) != 1:
        return known
    needs = [nodes[user].operands[place] for user, place in users.get(node.outputs[0], ())]
    part = _agreed(needs, assignment.ranks)
    if part is None:
        return known
    for candidate in candidates(facts.rules[node.name], facts.structures[node.name]):
        fits = isinstance(candidate.choice, Cut) and same_placement(
            candidate.results[0], part, assignment.ranks
        )
        summed = any(isinstance(p, Partial) for p in candidate.operands)
        if fits and not summed and leaves_room(node, candidate, assignment.ranks, facts, others):
            return candidate
    return known


def _agreed(needs: list[Placement], ranks: int) -> Shard | None:
    """The one part that is needed; None if there is more than that."""
    first = needs[0] if needs else None
    if isinstance(first, Shard) and all(same_placement(first, need, ranks) for need in needs):
        return first
    return None
