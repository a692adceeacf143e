"""A plan shown equal on a scaled twin.

Enters: a graph in float64, a plan, and what real tensors there are. Leaves: a `Certificate` that
says what was scaled. The reference is the captured graph itself in the twin's sizes, on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardwise.equivalence.certificate import Certificate
from shardwise.equivalence.check import check
from shardwise.equivalence.randomness import run_graph_reference
from shardwise.equivalence.reference import Reference
from shardwise.equivalence.twin.build import build_twin
from shardwise.equivalence.twin.data import make_batches, make_inputs, make_state
from shardwise.equivalence.twin.memory import needed_bytes
from shardwise.errors import VerifyError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.program import Pipeline, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A twin that is ready to be checked."""

    program: Program | Pipeline
    reference: Reference
    inputs: Mapping[str, torch.Tensor]
    scaled: tuple[str, ...]


def prepare_twin(
    graph: Graph,
    plan: Plan,
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    max_bytes: float = float("inf"),
) -> Prepared:
    """Return the twin's program, data and reference."""
    plan.check(graph)
    twin = build_twin(graph, plan)
    small = twin.graph
    needed = needed_bytes(small, twin.plan)
    if needed > max_bytes:
        raise VerifyError(
            f"the smallest twin of {graph.name} needs {needed / 2**30:.1f} GiB, "
            f"{max_bytes / 2**30:.1f} GiB are available",
            hint="verify a smaller configuration of the model",
        )
    state = make_state(small, buffers)
    if twin.plan.per_microbatch and twin.plan.num_microbatches > 1:
        data, (first, *more) = make_batches(small, twin.plan, inputs)
    else:
        data, more = make_inputs(small, inputs), []
        first = data
    try:
        reference = run_graph_reference(small, twin.plan, state, first, more=more)
    except (IndexError, RuntimeError) as error:
        raise VerifyError(f"the scaled twin of {graph.name} does not run: {error}") from error
    drawn = "weights: drawn; the reference is the captured graph in these sizes"
    return Prepared(
        program=twin.program,
        reference=reference,
        inputs=data,
        scaled=(*twin.scaled, drawn),
    )


def certify_twin(
    graph: Graph,
    plan: Plan,
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    timeout_s: float,
    max_bytes: float = float("inf"),
) -> Certificate:
    """Check the plan on a scaled twin."""
    twin = prepare_twin(graph, plan, buffers, inputs, max_bytes)
    return check(twin.program, twin.reference, twin.inputs, timeout_s=timeout_s, scaled=twin.scaled)
