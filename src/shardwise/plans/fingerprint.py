"""A digest that identifies the model a plan is for."""

from __future__ import annotations

import hashlib

from shardwise.ir import Graph


def model_fingerprint(graph: Graph) -> str:
    """Identifies a model by its class, parameters and buffers; batch and dtype are left out."""
    lines = [graph.name]
    for parameter in graph.parameters:
        kind = "trained" if parameter.requires_grad else "frozen"
        names = " ".join((parameter.name, *parameter.aliases))
        lines.append(f"{names} {graph.values[parameter.value].shape} {kind}")
    lines += [f"{b.name} {graph.values[b.value].shape}" for b in graph.buffers]
    return hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).hexdigest()[:16]
