"""What nodes cost and what crosses between them, to compare places where a model can be cut.

Enters: a graph with its `Facts`. Leaves: the work of every node, in units of one multiply-add, and
the bytes that cross before every node. These are relative costs, not predictions of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

from shardwise.ir import Graph, Node, TensorType
from shardwise.layouts.costs import work
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.sharding.factors import Facts

PER_MEMORY_BYTE = 2.0  # between a CPU's about 1 and a GPU's about 100: matmuls dominate


def node_work(graph: Graph, facts: Facts) -> list[float]:
    """What each node costs, forward and backward.

    Forward is its multiply-adds, at least `PER_MEMORY_BYTE` for each byte it reads and writes;
    backward as much again for each of up to two operands that need a gradient.
    """
    parameters = frozenset(p.value for p in graph.parameters)
    found = []
    for node in graph.nodes:
        backward = 0
        if any(name in facts.carries_grad for name in node.outputs):
            backward = min(2, sum(name in facts.carries_grad for name in set(node.inputs)))
        found.append((1 + backward) * _forward(node, graph, facts, parameters))
    return found


def stage_work(graph: Graph, facts: Facts, starts: Sequence[int]) -> list[float]:
    """The work of every stage, from the first node of each."""
    each = node_work(graph, facts)
    return [sum(each[a:b]) for a, b in pairwise((*starts, len(each)))]


def _forward(node: Node, graph: Graph, facts: Facts, parameters: frozenset[str]) -> float:
    types = graph.values
    read = dict.fromkeys(node.inputs)
    lookup = any(_is_whole_number(types[name]) for name in read)
    # A lookup multiplies nothing, and reads the rows that it gives rather than its whole table.
    moved = [*node.outputs, *(name for name in read if not (lookup and name in parameters))]
    by_bytes = PER_MEMORY_BYTE * sum(types[name].num_bytes for name in moved)
    return by_bytes if lookup else max(by_bytes, _multiply_adds(node, facts))


def _multiply_adds(node: Node, facts: Facts) -> float:
    """Those of the iteration space, without axes that are there for the sake of cutting only."""
    call = facts.calls[node.name]
    total = work(call, facts.rules[node.name])
    name = node.op.removeprefix("aten.")
    if name.startswith("scaled_dot_product_attention"):
        # It has the head sizes of queries and of values; each of the two products has one.
        queries, _, values = call.operands[:3]
        total *= 1 / queries[-1] + 1 / values[-1]
    elif name.startswith("conv"):
        # It has positions of input, kernel and output; two of them give the third.
        other = call.results[0] if "transpose" in name else call.operands[0]
        total /= prod(other[2 - len(call.operands[1]) :])
    return total


def _is_whole_number(value: TensorType) -> bool:
    return (
        not (value.dtype.is_floating_point or value.dtype.is_complex) and value.dtype.itemsize > 1
    )


def crossing_bytes(graph: Graph, facts: Facts) -> list[int]:
    """For each node, the bytes computed before it that it or a later node uses.

    A gradient that comes back counts as much again. What depends on the batch alone is not
    counted: a later stage can compute it from the batch.
    """
    free = values_of_inputs(graph)
    made = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last |= {name: index for name in node.inputs if name in made and name not in free}
    changes = [0] * (len(graph.nodes) + 1)
    for name, index in last.items():
        size = graph.values[name].num_bytes * (2 if name in facts.carries_grad else 1)
        changes[made[name] + 1] += size
        changes[index + 1] -= size
    return list(accumulate(changes[:-1]))
