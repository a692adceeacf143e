"""Which dims the integers of a graph index.

Enters: a `Graph`. Leaves: the dims that a value indexes, and those of tables whose indices are
computed with constants (T5's buckets of distances, positions with an offset): their sizes stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.equivalence.twin.sizes import Key
from shardwise.ir import Graph
from shardwise.ir.schema import indexed_dim, op_name

# What makes other numbers of indices, and what only arranges them.
ARITHMETIC = (
    *("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "abs", "neg"),
    *("minimum", "maximum", "min", "max", "clamp", "clamp_min", "clamp_max"),
    *("where", "masked_fill", "bucketize", "cumsum", "sum"),
)
SHAPES = (
    *("view", "reshape", "flatten", "expand", "repeat", "unsqueeze", "squeeze"),
    *("transpose", "permute", "slice", "select"),
    *("to", "_to_copy", "clone", "contiguous", "detach", "alias"),
)


def computed_indices(graph: Graph) -> Iterator[Key]:
    """Dims of tables that are indexed by what is computed with constants."""
    producers = graph.producers
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            found = indexed_dim(node, name)
            while found is not None and name in producers and op_name(producers[name]) in SHAPES:
                name = producers[name].inputs[0]
            if found is not None and name in producers and op_name(producers[name]) in ARITHMETIC:
                table, dim = found
                yield ("dim", table, str(dim % max(1, len(graph.values[table].shape))))
