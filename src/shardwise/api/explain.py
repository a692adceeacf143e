"""`explain(plan)` and `explain(graph, plan)`: why a plan was chosen, and how it runs each node."""

from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, node_keys
from shardwise.plans import Plan, Resolved, resolve
from shardwise.plans.text import explain_plan, format_plan
from shardwise.program import Pipeline, Program, build_pipeline, lower

NAME_WIDTH = 32


def explain(target: Graph | Plan, plan: Plan | None = None, node: str | None = None) -> str:
    """Explain a plan that `sw.plan` made, or how a plan runs the nodes of a graph.

    `explain(plan)` tells why it was chosen over the runner-up, where its time and memory go, and
    what would change them. `explain(graph, plan)` lists all nodes with their choice on every mesh
    axis, and all redistributions; with `node`, all candidates of that node.
    """
    if isinstance(target, Plan):
        if plan is not None or node is not None:
            raise PlanError(
                "the nodes of a plan need the model", hint="sw.explain(graph, plan, node)"
            )
        return explain_plan(target)
    if plan is None:
        raise PlanError("no plan to explain", hint="sw.explain(graph, plan), or sw.explain(plan)")
    if plan.is_scheduled:
        pipeline = build_pipeline(target, plan)
        if node is None:
            return _explain_stages(pipeline)
        stages = [stage.resolved for stage in pipeline.stages]
        names = [{n.name for n in stage.graph.nodes} for stage in stages]
        index = next((i for i, known in enumerate(names) if node in known), 0)
        return _explain_node(stages[index], node)
    resolved = resolve(target, plan)
    if node is not None:
        return _explain_node(resolved, node)
    return "\n".join([format_plan(plan), "", *_list_nodes(resolved, lower(resolved))])


def _explain_stages(pipeline: Pipeline) -> str:
    lines = [format_plan(pipeline.plan), "", str(pipeline.schedule)]
    for stage in pipeline.stages:
        lines += ["", f"stage {stage.index} on ranks {format_ranks(stage.ranks)}:"]
        for transfer in pipeline.transfers:
            if transfer.target == stage.index:
                back = ", its gradient goes back" if transfer.gradient else ""
                value = f"%{transfer.value} {transfer.type}"
                lines.append(f"  receives {value} of stage {transfer.source}{back}")
        if stage.precomputed is not None:
            names = [ref.name for ref in stage.precomputed.graph.outputs]
            lines.append(f"  computes {', '.join(names)} of the full batch in advance")
        lines += _list_nodes(stage.resolved, stage.program)
    tied = [f"{n} of stages {', '.join(map(str, s))}" for n, s in pipeline.tied.items()]
    lines += ["", f"tied: {'; '.join(tied)}"] if tied else []
    return "\n".join(lines)


def _list_nodes(resolved: Resolved, program: Program) -> list[str]:
    """List redistributions and nodes as the first rank runs them, with choices and origins."""
    ranks, graph = program.rank_programs[0], program.graph
    keys, nodes = node_keys(graph), {node.name: node for node in graph.nodes}
    lines = [f"{len(nodes)} nodes:"]
    width = min(NAME_WIDTH, max((len(name) for name in nodes), default=0))
    choices = {
        name: ", ".join(f"{a.axis}: {a.nodes[name].choice}" for a in resolved.assignments)
        for name in nodes
    }
    middle = min(NAME_WIDTH, max(map(len, choices.values()), default=0))
    for step in ranks.steps:
        if step.is_move:
            value = ranks.values[step.inputs[0]].value
            axes = ".".join(step.axes)
            lines.append(f"    {step.fn.removeprefix('rt.')} %{value} over {axes}")
        else:
            source = f"  ({nodes[step.node].source})" if nodes[step.node].source else ""
            chosen = choices[step.node]
            lines.append(f"  {step.node:<{width}}  {chosen:<{middle}}  {keys[step.node]}{source}")
    return lines


def _explain_node(resolved: Resolved, name: str) -> str:
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
    if rule.replicated_because:
        lines.append(f"  replicated: {rule.replicated_because}")
    for assignment in resolved.assignments:
        lines.append(f"  {assignment.axis}={assignment.ranks}: {assignment.nodes[name].choice}")
    lines.append("  candidates, with the placements of operands and results:")
    for candidate in resolved.facts.candidates(name):
        operands = " ".join(map(str, candidate.operands))
        results = " ".join(map(str, candidate.results))
        lines.append(f"    {candidate.choice!s:<20} {operands} -> {results}")
    return "\n".join(lines)
