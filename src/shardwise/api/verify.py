"""Does a plan compute what the model computes? `verify(model, batch, plan)`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.api.compile import capture_for_plan, compile, microbatch, read_sources, widen_sources
from shardwise.batch import flatten_batch, read_batch
from shardwise.equivalence import Certificate, check, double, run_reference
from shardwise.equivalence.reference import (
    Reference,
    TraceDouble,
    double_by_default,
    draws,
    run_graph_reference,
    widen_graph,
)
from shardwise.equivalence.twin import available_bytes, certify_twin, needed_bytes, parameter_bytes
from shardwise.errors import ShardwiseError, VerifyError
from shardwise.frontend import capture
from shardwise.frontend.errors import describe_failure
from shardwise.frontend.objective import LossFn, Model, Objective, StepFn, as_module, objective
from shardwise.ir import Graph
from shardwise.plans import Plan, Precision

MOST_THREADS = 64


def verify(
    model: Model,
    batch: Any,
    plan: Plan | None = None,
    loss_fn: LossFn | None = None,
    *,
    step: StepFn | None = None,
    program: str | Path | None = None,
    timeout_s: float = 120.0,
    max_bytes: float | None = None,
) -> Certificate:
    """Check by execution that a plan's program computes what the model computes.

    The emitted code runs in float64, a thread per rank, and the model beside it on one device:
    once with the weights and batch as given, and once with both changed so that zeros, ties and
    extreme numbers hide nothing. Loss, outputs, every gradient, and parameters and buffers after an
    AdamW step must agree to 1e-9 of each element, or to the rounding that is measured for it; in
    the second trial so must every single value and its gradient. The certificate says so of these
    trials, which is strong evidence and not a proof for all batches; it names what they did not
    exercise. On failure it names the first node whose value differs.

    `program` is a folder that `shardwise compile` wrote: the code in it runs instead, as it may
    have been edited by hand, with the plan beside it unless `plan` is given.

    A model that draws random numbers is compared with its captured graph on one device under the
    same draws (`rng="exact"`). A plan whose micro-batches are batches of their own is compared with
    one device that accumulates over the same micro-batches. Number types of the plan are left
    aside. Trees of the plan's collectives are checked as trees, and sums take them in the run.

    A model without weights (meta tensors), or one that needs more than `max_bytes` (by default what
    this machine has free) or more ranks than threads are sensible, is checked on a scaled twin:
    fewer layers, smaller sizes, fewer ranks and micro-batches; its stages begin at the same nodes
    and work in the same order. The certificate then says what was scaled. A loss, gradient or
    parameter that is not finite is a `VerifyError`: beside a NaN every program looks right.
    With several named steps, call this for each: `step` is as in `capture`.
    """
    model, computed = as_module(model), objective(loss_fn, step)
    if plan is None:
        if program is None:
            raise VerifyError("no plan to verify", hint="sw.verify(model, batch, plan)")
        plan = Plan.load(Path(program) / "plan.json")
    with _explained(model), double_by_default():
        return _verify(model, batch, plan, computed, program, timeout_s, max_bytes)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Give errors of the model, or of torch, a place and a name; our own stay as they are."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        place, text = describe_failure(error)
        raise VerifyError(
            f"{type(model).__name__} cannot be verified: a float64 copy of it fails\n"
            f"  because: {text}",
            where=place,
            hint="check that copy.deepcopy(model).double() runs on the batch (Mixture-of-Experts "
            'of transformers: config._experts_implementation = "batched_mm")',
        ) from error


def _verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss_fn: Objective,
    folder: str | Path | None,
    timeout_s: float,
    max_bytes: float | None,
) -> Certificate:
    if plan.collectives:
        from shardwise.collectives.derive import verify as verify_trees

        for choice in plan.collectives:
            verify_trees(choice)
    wide = plan.with_(precision=Precision())
    limit = available_bytes() if max_bytes is None else max_bytes
    if plan.num_ranks > MOST_THREADS or is_meta(model, batch) or too_large(model, plan, limit):
        _require_no_edits(folder)
        small = wide.with_(collectives=())
        graph = widen_graph(capture_for_plan(model, batch, small, loss_fn))
        return _certify_twin(graph, model, batch, small, timeout_s, limit)
    twin, wide_batch = double(model, batch)
    accumulates = plan.per_microbatch and plan.num_microbatches > 1
    first = microbatch(wide_batch, plan, 0) if accumulates else wide_batch
    graph = widen_graph(capture(twin, first, loss_fn, around=TraceDouble))
    plan.check(graph)
    if needed_bytes(graph, plan) > limit:
        _require_no_edits(folder)
        return _certify_twin(graph, twin, wide_batch, wide.with_(collectives=()), timeout_s, limit)
    compiled = compile(graph, wide)
    sources = emitted = None
    if folder is not None:
        written = compile(capture_for_plan(model, batch, plan, loss_fn), plan)
        sources, emitted = read_sources(folder, written), widen_sources(written.sources)
    run = _Model(twin, graph, plan, wide_batch, loss_fn)
    reference = run.step(wide_batch)
    return check(
        compiled.lowered,
        reference,
        wide_batch,
        rerun=run.rerun,
        sources=sources,
        emitted=emitted,
        timeout_s=timeout_s,
    )


class _Model:
    """The model on one device: what every trial is compared with."""

    def __init__(
        self,
        twin: nn.Module,
        graph: Graph,
        plan: Plan,
        batch: Any,
        loss_fn: Objective,
    ) -> None:
        self.twin, self.graph, self.plan, self.loss_fn = twin, graph, plan, loss_fn
        self.call, self.draws = read_batch(batch), draws(graph)

    def step(self, batch: Any) -> Reference:
        """One training step; the plan's micro-batches are accumulated if they are its batches."""
        plan = self.plan
        first, *more = [batch]
        if plan.per_microbatch and plan.num_microbatches > 1:
            first, *more = [microbatch(batch, plan, k) for k in range(plan.num_microbatches)]
        if not self.draws:
            return run_reference(self.twin, first, self.loss_fn, more=more)
        state = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        return run_graph_reference(self.graph, plan, state, first, more=more)

    def rerun(
        self, state: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> Reference:
        """The same with other weights and another batch."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(state[name])
        return self.step(self.call.batch_with(list(inputs.values())))

    def _tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        return (*self.twin.named_parameters(), *self.twin.named_buffers())


def _require_no_edits(folder: str | Path | None) -> None:
    if folder is not None:
        raise VerifyError(
            "edited code is verified in the sizes it was written for, which are too large here",
            where=str(folder),
            hint="verify it on a machine with more memory, or pass max_bytes=",
        )


def _certify_twin(
    graph: Graph, model: nn.Module, batch: Any, plan: Plan, timeout_s: float, limit: float
) -> Certificate:
    inputs, _ = flatten_batch(batch)
    buffers = dict(model.named_buffers())
    hooks, graph = graph.hooks, replace(graph, hooks=())
    found = certify_twin(graph, plan, buffers, inputs, timeout_s=timeout_s, max_bytes=limit)
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
