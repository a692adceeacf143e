"""Names for random draws that do not depend on the plan: what a draw is keyed by.

>>> # "blocks.0.drop.dropout_0": the first dropout of the module blocks.0.drop
"""

from __future__ import annotations

from shardwise.ir import Graph


def random_keys(graph: Graph) -> dict[str, str]:
    """Node name -> module path, operator and its number among its like in that module."""
    counts: dict[tuple[str, str], int] = {}
    keys: dict[str, str] = {}
    for node in graph.nodes:
        name = node.op.split(".")[1] if "." in node.op else node.op
        number = counts.get((node.module, name), 0)
        counts[node.module, name] = number + 1
        path = f"{node.module}." if node.module else ""
        keys[node.name] = f"{path}{name}_{number}"
    return keys
