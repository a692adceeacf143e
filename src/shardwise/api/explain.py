"""Why a plan does what it does: every node with its choice on every mesh axis, and each move.

Enters: `Graph`, `Plan`. Leaves: text.
"""

from __future__ import annotations

from shardwise.api.compiled import compile
from shardwise.ir import Graph
from shardwise.plans import Plan, resolve
from shardwise.sharding.candidates import candidates


def explain(graph: Graph, plan: Plan, node: str | None = None) -> str:
    """All nodes in one line each; or one node with everything it could do."""
    resolved = resolve(graph, plan)
    if node is not None:
        return _one(resolved, node)
    program = compile(graph, plan).lowered.rank_programs[0]
    moves: dict[str, list[str]] = {}
    for step in program.steps:
        if step.is_move:
            value = program.values[step.inputs[0]].value
            text = f"{step.fn.removeprefix('rt.')} %{value} over {'.'.join(step.axes)}"
            moves.setdefault(step.node, []).append(text)
    lines = [str(plan), "", f"{len(graph.nodes)} nodes:"]
    for item in graph.nodes:
        lines += [f"    {move}" for move in moves.get(item.name, ())]
        chosen = ", ".join(f"{a.axis}: {a.nodes[item.name].choice}" for a in resolved.assignments)
        lines.append(f"  {item.name:<24} {chosen:<32} {item.origin}")
    return "\n".join(lines)


def _one(resolved: object, name: str) -> str:
    from shardwise.errors import PlanError, did_you_mean
    from shardwise.plans import Resolved

    assert isinstance(resolved, Resolved)
    known = {n.name: n for n in resolved.graph.nodes}
    if name not in known:
        raise PlanError(f"the graph has no node {name!r}{did_you_mean(name, known)}")
    node, rule = known[name], resolved.facts.rules[name]
    lines = [f"{name} = {node.op}  {node.origin}", f"  {node.source_text}".rstrip()]
    if rule.whole:
        lines.append(f"  left whole: {rule.whole}")
    for assignment in resolved.assignments:
        lines.append(f"  {assignment.axis}: {assignment.nodes[name].choice}, could:")
        for candidate in candidates(rule, resolved.facts.structures[name]):
            needs = " ".join(map(str, candidate.operands))
            gives = " ".join(map(str, candidate.results))
            lines.append(f"    '{candidate.choice}'  {needs} -> {gives}")
    return "\n".join(lines)
