"""Does a plan compute what the model computes? `verify(model, batch, plan)`.

Enters: the user's model and batch, a plan. Leaves: a `Certificate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.api.compiled import compile
from shardwise.equivalence import Certificate, check, double, run_reference
from shardwise.equivalence.precision import widen_graph
from shardwise.equivalence.randomness import draws, run_graph_reference
from shardwise.frontend import capture
from shardwise.plans import Plan


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    timeout: float = 120.0,
) -> Certificate:
    """Run the plan's emitted code in float64, a thread per rank, and compare it with the model.

    Loss, outputs, every gradient, and parameters and buffers after an AdamW step must agree within
    1e-9 relative. A model that draws random numbers is compared with its captured graph on one device
    under the same draws (`rng="exact"`). On failure the certificate names the first node whose value differs.
    """
    twin, wide_batch = double(model, batch)
    graph = widen_graph(capture(twin, wide_batch, loss_fn))
    plan.check(graph)
    program = compile(graph, plan)
    if draws(graph):
        state = {n: t.detach() for n, t in (*twin.named_parameters(), *twin.named_buffers())}
        reference = run_graph_reference(graph, plan, state, wide_batch)
    else:
        reference = run_reference(twin, wide_batch, loss_fn)
    return check(program.lowered, reference, wide_batch, timeout=timeout)
