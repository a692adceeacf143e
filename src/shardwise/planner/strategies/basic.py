"""Data parallelism, ZeRO, tensor parallelism and their combination.

Enters: a `Graph` and a `Cluster`. Leaves: a `Plan` whose parameter entries say what was decided.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardwise.cluster import Cluster, Mesh
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.plans import ParameterEntry, Plan, Resolved, model_fingerprint, resolve
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Shard, format_shard


def ddp(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """The batch is cut over all ranks; gradients are all-reduced in buckets."""
    return make_plan("ddp", graph, cluster, dp=cluster.num_ranks, **options)


def zero1(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """As `ddp`, with the optimizer state sharded."""
    return make_plan("zero1", graph, cluster, dp=cluster.num_ranks, zero=1, **options)


def zero2(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """As `zero1`, with the gradients sharded too."""
    return make_plan("zero2", graph, cluster, dp=cluster.num_ranks, zero=2, **options)


def fsdp(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """As `zero2`, with the parameters sharded too: gathered for use, block by block."""
    return make_plan("fsdp", graph, cluster, dp=cluster.num_ranks, zero=3, **options)


def tensor(graph: Graph, cluster: Cluster, **options: Any) -> Plan:
    """Parameters are cut over all ranks, and the work on them with them."""
    return make_plan("tensor", graph, cluster, tp=cluster.num_ranks, **options)


def hybrid(
    graph: Graph, cluster: Cluster, *, dp: int = 1, tp: int = 1, zero: int = 0, **options: Any
) -> Plan:
    """`dp` groups over the batch, each of `tp` ranks over the parameters."""
    return make_plan("hybrid", graph, cluster, dp=dp, tp=tp, zero=zero, **options)


def make_plan(
    name: str,
    graph: Graph,
    cluster: Cluster,
    *,
    dp: int = 1,
    tp: int = 1,
    zero: int = 0,
    batch_dim: int | None = None,
    rng: str = "exact",
    seed: int = 0,
    parameters: Mapping[str, ParameterEntry] | None = None,
) -> Plan:
    """A plan for `dp` x `tp` ranks; `parameters` adds or overrides entries by glob."""
    _check_sizes(name, cluster, dp, tp, zero)
    facts = analyze(graph)
    axes = [("dp", dp)] if dp > 1 or tp == 1 else []
    if tp > 1:
        axes += [(f"tp{i}" if i else "tp", n) for i, n in enumerate(tensor_axes(graph, facts, tp))]
    mesh = Mesh(axes=tuple(axes))
    draft = Plan(
        name=name,
        model=graph.name,
        fingerprint=model_fingerprint(graph),
        mesh=mesh,
        roles={axis: "batch" if axis == "dp" else "parameters" for axis in mesh.names},
        inputs=batch_inputs(graph, batch_dim) if dp > 1 else {},
        parameters=dict(parameters or {}),
        units=blocks(graph),
        rng=rng,
        seed=seed,
    )
    resolved = resolve(graph, draft, facts)
    entries = parameter_entries(resolved, zero)
    plan = draft.with_(parameters={**entries, **(parameters or {})}, notes=tuple(notes(resolved)))
    _check_split(plan, resolved, dp, tp)
    return plan


def _check_sizes(name: str, cluster: Cluster, dp: int, tp: int, zero: int) -> None:
    if dp < 1 or tp < 1:
        raise InfeasiblePlan(f"{name}: dp={dp}, tp={tp} need at least one rank each")
    if dp * tp != cluster.num_ranks:
        raise InfeasiblePlan(
            f"{name}: dp={dp} x tp={tp} = {dp * tp} ranks, the cluster has {cluster.num_ranks}",
            hint=f"dp={max(1, cluster.num_ranks // tp)}, tp={tp}",
        )
    if zero not in (0, 1, 2, 3):
        raise InfeasiblePlan(f"{name}: zero={zero}", hint="0, 1, 2 or 3")


def _check_split(plan: Plan, resolved: Resolved, dp: int, tp: int) -> None:
    """Say so when there is nothing to cut on an axis that was asked for."""
    for assignment in resolved.assignments:
        if assignment.ranks == 1:
            continue
        cut = any(str(c.choice).startswith("cut") for c in assignment.nodes.values())
        if not cut:
            what = "batch dim" if plan.roles[assignment.axis] == "batch" else "parameter dim"
            raise InfeasiblePlan(
                f"{plan.name}: no {what} of {resolved.graph.name} can be cut over "
                f"{assignment.axis}={assignment.ranks}",
                hint="shardwise explain shows what each node allows; register_rule adds a rule",
            )


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


def parameter_entries(resolved: Resolved, zero: int) -> dict[str, ParameterEntry]:
    """What was decided for every parameter, with equal entries of numbered modules as one glob."""
    found: dict[str, ParameterEntry] = {}
    for parameter in resolved.graph.parameters:
        layout = resolved.parameter_layout(parameter.value)
        cuts = {axis: format_shard(p) for axis, p in layout.axes if isinstance(p, Shard)}
        for assignment in resolved.assignments:
            if resolved.plan.roles[assignment.axis] == "parameters":
                cuts.setdefault(assignment.axis, "whole")
        found[parameter.name] = ParameterEntry(layout=cuts, zero=zero)
    return _fold(found)


def _fold(entries: Mapping[str, ParameterEntry]) -> dict[str, ParameterEntry]:
    groups: dict[str, list[str]] = {}
    for name in entries:
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), []).append(name)
    folded: dict[str, ParameterEntry] = {}
    for glob, names in groups.items():
        first = entries[names[0]]
        if len(names) > 1 and all(entries[n] == first for n in names):
            folded[glob] = first
        else:
            folded.update({n: entries[n] for n in names})
    return folded


def blocks(graph: Graph) -> tuple[str, ...]:
    """The outermost numbered modules with several nodes: what ZeRO-3 gathers at a time."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        pieces = node.module.split(".")
        for i, piece in enumerate(pieces):
            if piece.isdigit():
                counts[".".join(pieces[: i + 1])] += 1
                break
    return tuple(path for path, count in counts.items() if count >= 6)


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
