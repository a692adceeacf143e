"""What no trial of a check could show to be right.

A parameter whose gradient is zero, a value that is always zero or an input that nothing reads: the
program may treat it in any way and still agree with the model. A certificate names them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.equivalence.trial import Trial
from shardwise.ir import Graph


def not_exercised(graph: Graph, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Describe what stayed zero, or had no gradient, in every trial."""
    lines = []
    for parameter in graph.parameters:
        gradients = [trial.reference.gradients.get(parameter.name) for trial in trials]
        if parameter.requires_grad and all(map(_is_zero, gradients)):
            lines.append(f"parameter {parameter.name}: its gradient is zero")
    used = {name for node in graph.nodes for name in node.inputs}
    for source in graph.inputs:
        if source.value not in used:
            lines.append(f"input {source.name}: nothing reads it")
    for node in graph.nodes:
        for name in node.outputs:
            if name not in trials[0].truth.gradients:
                continue
            if all(_is_zero(trial.truth.values[name]) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its value is zero")
            elif all(_is_zero(trial.truth.gradients.get(name)) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its gradient is zero")
    if len(trials) == 1:
        lines.append("other weights and batches: the model does not run on changed ones")
    return tuple(lines)


def _is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not bool(tensor.any())
