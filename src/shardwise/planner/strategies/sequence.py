"""Shard the sequence: which dim of an input it is, and the choices of nodes that follow it.

Context parallelism shards it over a mesh axis of its own. Sequence parallelism shards it over the
tensor-parallel ranks wherever these would do the same work: norms, dropout and residuals.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd, prod

from shardwise.errors import InfeasiblePlan, PlanError, did_you_mean
from shardwise.ir import Graph, Node, node_keys
from shardwise.layouts.beam import assign, parameter_values
from shardwise.layouts.problem import Assignment, Task
from shardwise.plans import Plan, Resolved
from shardwise.plans.plan import fold_entries
from shardwise.plans.resolve import input_shards
from shardwise.routing import COLLECT, DISPATCH, GROUPED_LINEAR
from shardwise.sharding.candidates import Same, ShardAxis
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import Shard
from shardwise.shares import AxisSize

ATTENTION = ("auto", "gather", "ring", "heads")
FUSED = "aten.scaled_dot_product_attention"
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
LONG = 1024  # key positions per rank, from which on messages hide behind the work on them
SequenceDim = int | Mapping[str, int] | None


# ---------------------------------------------------------------- attention
@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The nodes of one attention: the fused operator, or two products and the softmax between."""

    nodes: tuple[Node, ...]
    queries: int
    keys: int


def attentions(graph: Graph) -> list[Attention]:
    """Return all attention of a graph, in order."""
    producers = graph.producers
    users = {name: node for node in reversed(graph.nodes) for name in node.inputs}  # the first ones
    result = []
    for node in graph.nodes:
        if node.op.startswith(FUSED):
            query, key = (graph.values[name].shape for name in node.inputs[:2])
            result.append(Attention(nodes=(node,), queries=query[-2], keys=key[-2]))
        elif node.op.split(".")[1] in ("softmax", "_softmax", "_safe_softmax"):
            before = _nearest_product(graph, node.inputs[:1], producers, lambda n: n.inputs)
            after = _nearest_product(graph, node.outputs, users, lambda n: n.outputs)
            *_, rows, columns = (0, 0, *graph.values[node.inputs[0]].shape)
            if before is not None and after is not None:
                nodes = (before, node, after)
                result.append(Attention(nodes=nodes, queries=rows, keys=columns))
    return result


def _nearest_product(
    graph: Graph,
    names: Iterable[str],
    neighbours: Mapping[str, Node],
    beyond: Callable[[Node], Iterable[str]],
) -> Node | None:
    """Return the product of activations that scores come from, or go to, elementwise."""
    parameters = {p.value for p in graph.parameters}
    waiting = list(names)
    scores = graph.values[waiting[0]]
    for name in waiting:  # grows
        node = neighbours.get(name)
        if node is None or graph.values[name].shape[-2:] != scores.shape[-2:]:
            continue
        if node.op.split(".")[1] in PRODUCTS:
            return None if parameters & set(node.inputs) else node
        waiting += [n for n in beyond(node) if n not in waiting]
    return None


# ---------------------------------------------------------------- the dim of an input
def sequence_inputs(
    graph: Graph, batch: Mapping[str, int | None], chosen: SequenceDim
) -> dict[str, int | None]:
    """Return the sequence dim of each input that has one; `chosen` overrides what is inferred.

    It is the first dim, other than the batch dim, as long as the queries or keys of some attention,
    or one longer if the model shifts labels. A model without attention has the sequence in dim 1 of
    integer inputs.
    """
    shapes = {i.name: graph.values[i.value].shape for i in graph.inputs if i.kind == "batch"}
    if isinstance(chosen, Mapping):
        for name in chosen:
            if name not in shapes:
                raise PlanError(
                    f"sequence_dim names input {name!r}, the model has none"
                    f"{did_you_mean(name, shapes)}",
                    hint=", ".join(shapes),
                )
    lengths = {n for a in attentions(graph) for n in (a.queries, a.keys) if n > 1}
    if not lengths:
        values = [graph.values[i.value] for i in graph.inputs if i.kind == "batch"]
        integers = [v for v in values if not v.dtype.is_floating_point]
        lengths = {v.shape[1] for v in integers if len(v.shape) > 1}
    dims: dict[str, int | None] = {}
    for name, shape in shapes.items():
        if isinstance(chosen, Mapping):
            dim = chosen.get(name)
        elif chosen is not None:
            dim = chosen if -len(shape) <= chosen < len(shape) else None
        else:
            rows = batch.get(name) if len(shape) > 1 else None
            free = [d for d in range(len(shape)) if d != rows]
            shifted = (d for d in free if shape[d] - 1 in lengths)
            dim = next((d for d in free if shape[d] in lengths), next(shifted, None))
        if dim is not None:
            if not -len(shape) <= dim < len(shape):
                raise PlanError(f"sequence_dim={dim} of input {name!r} with shape {shape}")
            dims[name] = dim % len(shape)
    return dims


# ---------------------------------------------------------------- context parallelism
def context_axes(graph: Graph, cp: int, attention: str) -> dict[str, int]:
    """Return `cp` as one mesh axis, or as two if heads are exchanged and there are too few.

    With 2 key heads on 6 ranks, groups of 2 exchange heads, and 3 such groups form a ring.
    """
    if cp == 1:
        return {}
    heads = min((_num_heads(graph, a) for a in attentions(graph)), default=cp)
    inner = gcd(cp, heads) if attention == "heads" and heads < cp else cp
    return {"cp": cp} if inner in (1, cp) else {"cp": cp // inner, "cp1": inner}


def _num_heads(graph: Graph, attention: Attention) -> int:
    """Return the number of heads that can be divided: those of keys, if they are fewer."""
    node = attention.nodes[0]
    shapes = [graph.values[name].shape for name in node.inputs[:2]]
    return min(shape[-3] if len(shape) > 3 else 1 for shape in shapes)


def attention_choices(
    graph: Graph, facts: Facts, axes: Mapping[str, int], attention: str, *, free_heads: bool
) -> dict[str, dict[str, str]]:
    """Return the choice of every attention on the mesh axes that shard the sequence.

    "auto" exchanges heads if they can be divided evenly and no other axis divides them
    (`free_heads`): this sends least. Otherwise long blocks of keys travel around a ring, and short
    ones are gathered. An attention without the chosen candidate gathers keys and values.
    """
    if attention not in ATTENTION:
        raise InfeasiblePlan(f"attention={attention!r}", hint=", ".join(ATTENTION))
    places, choices = node_keys(graph), dict[str, dict[str, str]]()
    for each in attentions(graph):
        for index, (axis, ranks) in enumerate(axes.items()):
            method = attention
            if attention == "auto":
                even = free_heads and _num_heads(graph, each) % ranks == 0
                method = "heads" if even else "ring" if each.keys >= LONG * ranks else "gather"
            elif len(axes) > 1 and index == 0:  # between the groups that exchange heads
                method = "ring"
            for node in each.nodes:
                text = _choice(graph, facts, node, each, method)
                if text is not None:
                    choices.setdefault(places[node.name], {})[axis] = text
    return fold_entries(choices, places.values())


def _choice(
    graph: Graph, facts: Facts, node: Node, attention: Attention, method: str
) -> str | None:
    """Return the choice of one of the nodes of an attention, by default to shard its queries."""
    result = graph.values[node.outputs[0]].shape
    choices = facts.candidates(node.name)
    if method == "ring" and "ring" in facts.rules[node.name].axes:
        return "shard ring"
    if method == "heads" and len(result) > 3:
        for candidate in choices:
            placed = candidate.results[0]
            if isinstance(placed, Shard) and placed.dim == len(result) - 3 and placed.of[0][0] == 1:
                return str(candidate.choice)
    rows = Shard(len(result) - 2, ((1, attention.queries, 1),))
    return next((str(c.choice) for c in choices if c.results[0] == rows), None)


# ---------------------------------------------------------------- sequence parallelism
def sequence_choices(graph: Graph, resolved: Resolved) -> dict[str, dict[str, str]]:
    """Return choices that shard the sequence over tensor-parallel ranks, by globs of places.

    Nodes outside of tensor-parallel regions take the choice that they have on an axis that shards
    the sequence. Where a region begins, its first product all-gathers; its last reduce-scatters.
    """
    plan, facts = resolved.plan, resolved.facts
    choices: dict[str, dict[str, str]] = {}
    places = node_keys(graph)
    # Rows of experts follow from their matrices; attention of a sequence that `cp` divides as well
    # may be a ring.
    free = {node.name for node in graph.nodes if node.op in (DISPATCH, GROUPED_LINEAR, COLLECT)}
    if "sequence" in plan.roles.values():
        free |= {node.name for attention in attentions(graph) for node in attention.nodes}
    for assignment in resolved.assignments:
        if plan.roles[assignment.axis] != "parameters" or assignment.ranks == 1:
            continue
        along = _along_sequence(graph, plan, facts, assignment.ranks)
        inside = _tensor_regions(graph, assignment)
        for node in graph.nodes:
            choice = along.nodes[node.name].choice
            is_activation = not facts.carries_grad.isdisjoint(node.outputs)
            if is_activation and node.name not in inside | free and isinstance(choice, ShardAxis):
                choices.setdefault(places[node.name], {})[assignment.axis] = str(choice)
        if not choices:
            raise InfeasiblePlan(
                f"{plan.name}: sequence_parallel=True, but no node that the ranks of "
                f"{assignment.axis} compute in full has a sequence dim",
                hint="sequence_dim=1 names the dim of the inputs; or sequence_parallel=False",
            )
    return fold_entries(choices, places.values())


def norm_choices(graph: Graph, facts: Facts, axes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return choices that keep norms of tokens in full, so that products around them are sharded.

    Such a node multiplies rows of an activation by a vector of parameters, or of values computed
    from them. A norm of each head is not one of them.
    """
    pure, places = parameter_values(graph, facts), node_keys(graph)
    choices: dict[str, dict[str, str]] = {}
    for node in graph.nodes:
        if node.op.split(".")[1] in ("add", "sub") or pure.issuperset(node.outputs):
            continue
        shape = graph.values[node.outputs[0]].shape
        vectors = [graph.values[n].shape for n in node.inputs if n in pure]
        scales = bool(vectors) and all(prod(v) == shape[-1] == max(v, default=0) for v in vectors)
        if scales and len(shape) <= 3:
            choices[places[node.name]] = dict.fromkeys(axes, "same")
    return choices


def _tensor_regions(graph: Graph, assignment: Assignment) -> set[str]:
    """Return the nodes that use sharded matrices, and those between a region's first and last.

    A region begins at a product with a sharded matrix and ends at the next one.
    """
    matrices = {
        p.value
        for p in graph.parameters
        if isinstance(assignment.parameters[p.value], Shard)
        and sum(size > 1 for size in graph.values[p.value].shape) > 1
    }
    inside: set[str] = set()
    interior: set[str] = set()  # values
    for node in graph.nodes:
        uses_matrix = not matrices.isdisjoint(node.inputs)
        follows = not interior.isdisjoint(node.inputs)
        if uses_matrix or (follows and not isinstance(assignment.nodes[node.name].choice, Same)):
            inside.add(node.name)
        begins = uses_matrix and node.op.split(".")[1] in (*PRODUCTS, "linear", "addmm", "mm")
        if begins != follows:  # the first product of a region, or a node within it
            interior |= set(node.outputs)
    return inside


def _along_sequence(graph: Graph, plan: Plan, facts: Facts, ranks: AxisSize) -> Assignment:
    """Return the choices of all nodes on an axis that shards the sequence."""
    inputs = input_shards(graph, plan, "sequence")
    choices = {  # they shard the queries of every attention
        node.name: text
        for attention in attentions(graph)
        for node in attention.nodes
        if (text := _choice(graph, facts, node, attention, "gather")) is not None
    }
    task = Task(
        axis="sequence",
        ranks=ranks,
        inputs=inputs,
        begins_inside=not inputs,
        choices=choices,
        beam=48,
    )
    return assign(graph, facts, task)
