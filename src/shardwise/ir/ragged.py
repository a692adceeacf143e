"""Values with a dim of rows that are routed to experts.

Their first dim is ragged (see `shardwise.routing`): the type says of how many rows one exists, and
every value belongs to the counts of one `route`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardwise.errors import CaptureError
from shardwise.ir.graph import Graph, Node, TensorType
from shardwise.routing import COLLECT, DISPATCH, ROUTE


def mark_ragged(nodes: Iterable[Node], types: dict[str, TensorType]) -> None:
    """Mark the types of all values with a ragged dim; refuse nodes that lose it."""
    for node in nodes:
        if node.op == COLLECT:
            continue
        if node.op == ROUTE:
            order, counts = node.outputs
            types[order] = replace(types[order], ragged=types[counts].shape[0])
            continue
        rows = [types[name] for name in node.inputs if types[name].ragged > 1]
        for name in node.outputs if rows else ():
            kind = types[name]
            if kind.shape[:1] != rows[0].shape[:1] or "dropout" in node.op:
                raise CaptureError(
                    f"{node.op} makes {kind} of {rows[0]}, rows that are routed to experts: it may "
                    "neither mix rows nor draw random numbers for them",
                    where=node.origin,
                    hint="apply it after the rows have returned to their tokens",
                )
            types[name] = replace(kind, ragged=rows[0].ragged)


def row_counts(graph: Graph) -> Mapping[str, str]:
    """Map each ragged value to the counts of its rows."""
    counts: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == ROUTE:
            counts[node.outputs[0]] = node.outputs[1]
        elif node.op != COLLECT:
            ragged = [counts[name] for name in node.inputs if name in counts]
            if node.op == DISPATCH or ragged:
                counts |= dict.fromkeys(node.outputs, ragged[0])
    return counts
