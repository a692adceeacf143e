"""Which dims the integers of a graph index.

Enters: a `Graph`. Leaves: the dims that a value indexes, and those of tables whose indices are
computed with constants (T5's buckets of distances, positions with an offset): their sizes stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.equivalence.twin.sizes import Key
from shardwise.ir import Graph, Node, Ref
from shardwise.ir.schema import bind

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


def op_name(node: Node) -> str:
    """`embedding` of `aten.embedding.default`."""
    return node.op.split(".")[1] if node.op.count(".") == 2 else ""


def indexed_dim(node: Node, index: str) -> tuple[str, int] | None:
    """The table and dim that a node indexes with a value, if it does."""
    op = op_name(node)
    if op not in ("embedding", "gather", "index_select", "scatter", "index"):
        return None
    given = bind(node)
    if op == "embedding":
        return (given["weight"].name, 0) if given.get("indices") == Ref(index) else None
    if op == "index":
        places = list(given.get("indices") or ())
        return (given["self"].name, places.index(Ref(index))) if Ref(index) in places else None
    if given.get("index") != Ref(index):
        return None
    return given["self"].name, given.get("dim", 0)


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
