"""What a check in one process would need.

Enters: a `Graph` and a `Plan`. Leaves: bytes, from counts alone.

    8 x parameters x (16 + ranks x (2 + 4 / (cut x groups)))    and    8 x activations x 12

The reference holds the model, its state before and after, gradients and two moments, the same for
other weights, and the noise of each; values and their gradients are kept, with their noise. Every
rank
holds its part of parameter, gradient and moments, and gathers all gradients and the state after the
step. Each of the groups that run stages has about as many parameters. The activations of all ranks
and micro-batches together are those of the model, where the plan cuts them.
"""

from __future__ import annotations

import os

from shardwise.ir import Graph
from shardwise.plans import Plan

ITEM = 8  # float64
HELD_BY_REFERENCE = 16
GATHERED = 2
HELD_BY_RANK = 4
ACTIVATIONS = 12
SHARE = 0.6  # of the memory that is free now


def available_bytes() -> float:
    """How much memory a check may take on this machine."""
    return SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parameter_bytes(count: int, plan: Plan) -> float:
    """What `count` parameters take, over the reference and all ranks."""
    meshes = {stage.ranks: stage.mesh for stage in plan.all_stages}
    held = 0.0
    for mesh in meshes.values():
        cut = len(meshes)
        for axis, size in mesh.axes:
            cut *= size if plan.roles[axis] == "parameters" else 1
        held += mesh.size * (GATHERED + HELD_BY_RANK / cut)
    return ITEM * count * (HELD_BY_REFERENCE + held)


def needed_bytes(graph: Graph, plan: Plan) -> float:
    """What a check of the plan would take."""
    count = sum(graph.values[p.value].numel for p in graph.parameters)
    made = sum(graph.values[name].numel for node in graph.nodes for name in node.outputs)
    return parameter_bytes(count, plan) + ITEM * ACTIVATIONS * made
