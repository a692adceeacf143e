"""Why a plan does what it does: every node with its choice on every mesh axis, and each move.

Enters: `Graph`, `Plan`. Leaves: text.
"""

from __future__ import annotations

from shardwise.api.compiled import compile
from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph
from shardwise.plans import Plan, Resolved, resolve
from shardwise.sharding.candidates import candidates

NAME_WIDTH = 32


def explain(graph: Graph, plan: Plan, node: str | None = None) -> str:
    """All nodes in one line each; or one node with everything it could do."""
    resolved = resolve(graph, plan)
    return _every_node(resolved) if node is None else _one_node(resolved, node)


def _every_node(resolved: Resolved) -> str:
    graph, plan = resolved.graph, resolved.plan
    moves = _moves(graph, plan)
    lines = [str(plan), "", f"{len(graph.nodes)} nodes:"]
    width = min(NAME_WIDTH, max((len(n.name) for n in graph.nodes), default=0))
    choices = {
        n.name: ", ".join(f"{a.axis}: {a.nodes[n.name].choice}" for a in resolved.assignments)
        for n in graph.nodes
    }
    middle = min(NAME_WIDTH, max(map(len, choices.values()), default=0))
    for node in graph.nodes:
        lines += [f"    {move}" for move in moves.get(node.name, ())]
        lines.append(f"  {node.name:<{width}}  {choices[node.name]:<{middle}}  {node.origin}")
    return "\n".join(lines)


def _moves(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """The moves before each node, as rank 0 makes them."""
    program = compile(graph, plan).lowered.of_rank(0)
    found: dict[str, list[str]] = {}
    for step in program.steps:
        if step.is_move:
            value = program.values[step.inputs[0]].value
            text = f"{step.fn.removeprefix('rt.')} %{value} over {'.'.join(step.axes)}"
            found.setdefault(step.node, []).append(text)
    return found


def _one_node(resolved: Resolved, name: str) -> str:
    known = {n.name: n for n in resolved.graph.nodes}
    if name not in known:
        raise PlanError(
            f"the graph has no node {name!r}{did_you_mean(name, known)}",
            hint="shardwise explain lists the nodes",
        )
    node, rule = known[name], resolved.facts.rules[name]
    lines = [f"{name} = {node.op}  {node.origin}"]
    if node.source_text:
        lines.append(f"  {node.source_text}")
    if rule.whole:
        lines.append(f"  left whole: {rule.whole}")
    for assignment in resolved.assignments:
        lines.append(f"  {assignment.axis}={assignment.ranks}: {assignment.nodes[name].choice}")
    lines.append("  could be, with what it needs of its operands and gives:")
    for candidate in candidates(rule, resolved.facts.structures[name]):
        needs = " ".join(map(str, candidate.operands))
        gives = " ".join(map(str, candidate.results))
        lines.append(f"    {candidate.choice!s:<20} {needs} -> {gives}")
    return "\n".join(lines)
