"""Does a plan compute what the model computes? `verify(model, batch, plan)`.

Enters: the user's model and batch, a plan. Leaves: a `Certificate`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.api.captured import capture_for_plan, microbatch
from shardwise.api.compiled import compile
from shardwise.equivalence import Certificate, check, double, run_reference
from shardwise.equivalence.precision import widen_graph
from shardwise.equivalence.randomness import draws, run_graph_reference
from shardwise.equivalence.twin import (
    available_bytes,
    certify_twin,
    needed_bytes,
    parameter_bytes,
)
from shardwise.frontend.batch import flatten_batch
from shardwise.frontend.objective import Model, Objective, StepFn, as_module, objective
from shardwise.ir import Graph
from shardwise.plans import Plan, Precision

MOST_THREADS = 64


def verify(
    model: Model,
    batch: Any,
    plan: Plan,
    loss_fn: Objective = None,
    *,
    step: StepFn | None = None,
    timeout: float = 120.0,
    max_bytes: float | None = None,
) -> Certificate:
    """Run the plan's emitted code in float64, a thread per rank, and compare it with the model.

    Loss, outputs, every gradient, and parameters and buffers after an AdamW step must agree within
    1e-9 relative. A model that draws random numbers is compared with its captured graph on one
    device under the same draws (`rng="exact"`). On failure the certificate names the first node
    whose value differs. A plan whose micro-batches are batches of their own is compared with one
    device that accumulates over the same micro-batches. Number types of the plan are left aside:
    everything is computed in float64. Trees of the plan's collectives are checked by themselves
    (every part once, in one order, nobody waits for ever); threads then add in the order of ranks.

    A model without weights (meta tensors), or one that needs more than `max_bytes` (by default what
    this machine has free) or more ranks than threads are sensible, is certified on a scaled twin:
    fewer layers, smaller sizes, fewer ranks and micro-batches; its stages begin at the same nodes
    and work in the same order. The certificate then says what was scaled. With several named
    steps, call this for each: `step` is as in `capture`.
    """
    model, loss_fn = as_module(model), objective(loss_fn, step)
    if plan.collectives:
        from shardwise.collectives.derive import verify as verify_trees

        for choice in plan.collectives:
            verify_trees(choice)
    wide = plan.with_(precision=Precision(), collectives=())
    limit = available_bytes() if max_bytes is None else max_bytes
    if plan.num_ranks > MOST_THREADS or is_meta(model, batch) or too_large(model, plan, limit):
        graph = widen_graph(capture_for_plan(model, batch, wide, loss_fn))
        return _certify_twin(graph, model, batch, wide, timeout, limit)
    twin, wide_batch = double(model, batch)
    graph = widen_graph(capture_for_plan(twin, wide_batch, wide, loss_fn))
    plan.check(graph)
    if needed_bytes(graph, plan) > limit:
        return _certify_twin(graph, twin, wide_batch, wide, timeout, limit)
    program = compile(graph, wide)
    first, *more = [wide_batch]
    if plan.per_microbatch and plan.microbatches > 1:
        first, *more = [microbatch(wide_batch, plan, k) for k in range(plan.microbatches)]
    if draws(graph):
        state = {n: t.detach() for n, t in (*twin.named_parameters(), *twin.named_buffers())}
        reference = run_graph_reference(graph, plan, state, first, more=more)
    else:
        reference = run_reference(twin, first, loss_fn, more=more)
    return check(program.lowered, reference, wide_batch, timeout=timeout)


def _certify_twin(
    graph: Graph, model: nn.Module, batch: Any, plan: Plan, timeout: float, limit: float
) -> Certificate:
    inputs, _ = flatten_batch(batch)
    buffers = dict(model.named_buffers())
    hooks, graph = graph.hooks, replace(graph, hooks=())
    found = certify_twin(graph, plan, buffers, inputs, timeout=timeout, max_bytes=limit)
    if not hooks:
        return found
    omitted = f"gradient hooks left out: {', '.join(map(str, hooks))}"
    return replace(found, scaled=(*found.scaled, omitted))


def is_meta(model: nn.Module, batch: Any) -> bool:
    """Whether the model or the batch has tensors without data."""
    inputs, _ = flatten_batch(batch)
    return any(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs.values()))


def too_large(model: nn.Module, plan: Plan, limit: float) -> bool:
    """Whether the parameters alone are more than fits."""
    return parameter_bytes(sum(p.numel() for p in model.parameters()), plan) > limit
