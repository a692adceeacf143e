"""`verify(model, batch, plan)`: check by execution that a plan computes what the model computes."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.api.compile import (
    capture_for_plan,
    compile,
    read_sources,
    require_guards,
    separate_batches,
    widen_sources,
)
from shardwise.api.parallelize import derive_for
from shardwise.batch import flatten_batch, read_batch
from shardwise.equivalence import Certificate, check, double, run_reference
from shardwise.equivalence.inexact_check import check_inexact, inexact_globs, shortened, synchronous
from shardwise.equivalence.reference import (
    Reference,
    TraceDouble,
    double_by_default,
    draws,
    run_graph,
    widen_graph,
)
from shardwise.equivalence.twin import available_bytes, certify_twin, needed_bytes, parameter_bytes
from shardwise.errors import ShardwiseError, VerifyError, explaining
from shardwise.files import read_json, write_text
from shardwise.frontend import capture
from shardwise.frontend.errors import describe_failure
from shardwise.frontend.objective import LossFn, Model, Objective, StepFn, as_module, objective
from shardwise.ir import Graph
from shardwise.plans import Plan, Precision
from shardwise.runtime.devices import process_rank
from shardwise.runtime.rendezvous import starting
from shardwise.version import __version__

MAX_THREADS = 64
VERIFIED = "verified.json"
MAX_WAIT_S = 3600.0  # of other ranks for the check


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

    The emitted code runs in float64 with a thread per rank, and the model on one device: once with
    the given weights and batch, and once with both changed so that zeros, ties and extreme values
    hide no difference. Loss, outputs, all gradients, and parameters and buffers after an AdamW step
    must agree to 1e-9 of each element, or to the rounding error measured for it; in the second
    trial, so must every intermediate value and its gradient. The certificate records these trials,
    which are strong evidence but not a proof for all batches, and what they did not exercise. On
    failure it names the first node whose value differs.

    `program` is a folder that `shardwise compile` wrote: the code in it runs instead, including
    edits by hand, with the plan in the folder unless `plan` is given.

    A model that draws random numbers is compared with its captured graph on one device under the
    same draws (`rng="exact"`). A plan whose micro-batches are separate batches is compared with one
    device that accumulates over the same micro-batches. Dtypes of the plan are ignored. Trees
    of the plan's collectives are checked, and the run adds in their order.

    A plan with inexact synchronization (local steps, late gradients, compression) is checked twice:
    as a synchronous plan, and over several steps against the reference of its synchronization. The
    certificate names the difference from synchronous training.

    A model without weights (meta tensors), or one that needs more than `max_bytes` (by default the
    free memory of this machine) or too many threads, is checked on a scaled twin with fewer layers,
    smaller sizes, fewer ranks and micro-batches, whose stages begin at the same nodes and follow
    the same schedule. The certificate then lists what was scaled. A loss, gradient or parameter
    that is not finite is a `VerifyError`, because a NaN hides every difference. With several named
    steps, call this for each: `step` is as in `capture`.
    """
    model, computed = as_module(model), objective(loss_fn, step)
    if plan is None:
        if program is None:
            raise VerifyError("no plan to verify", hint="sw.verify(model, batch, plan)")
        plan = Plan.load(Path(program) / "plan.json")
    with explaining(partial(_failure, model)), double_by_default():
        return _verify(model, batch, plan, computed, program, timeout_s, max_bytes)


def _failure(model: nn.Module, error: Exception) -> VerifyError:
    """Return the error for an exception of the model or of torch, with its place."""
    place, text = describe_failure(error)
    return VerifyError(
        f"{type(model).__name__} cannot be verified: a float64 copy of it fails\n  because: {text}",
        where=place,
        hint="check that copy.deepcopy(model).double() runs on the batch (Mixture-of-Experts "
        'of transformers: config._experts_implementation = "batched_mm")',
    )


def _verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    loss_fn: Objective,
    folder: str | Path | None,
    timeout_s: float,
    max_bytes: float | None,
) -> Certificate:
    derive_for(plan)  # checks the plan's trees
    wide = plan.with_(precision=Precision())
    limit = available_bytes() if max_bytes is None else max_bytes
    weights_bytes = parameter_bytes(sum(p.numel() for p in model.parameters()), plan)
    if plan.num_ranks > MAX_THREADS or is_meta(model, batch) or weights_bytes > limit:
        _require_no_edits(folder)
        graph = widen_graph(capture_for_plan(model, batch, wide, loss_fn))
        return _certify_twin(graph, model, batch, wide, timeout_s, limit)
    twin, wide_batch = double(model, batch)
    first, *more = separate_batches(wide_batch, plan)
    graph = widen_graph(capture(twin, first, loss_fn, around=TraceDouble))
    require_guards(graph, more, dict(twin.named_buffers()))
    plan.check(graph)
    if needed_bytes(graph, plan) > limit:
        _require_no_edits(folder)
        return _certify_twin(graph, twin, wide_batch, wide, timeout_s, limit)
    globs = inexact_globs(wide)
    compiled = compile(graph, synchronous(wide) if globs else wide)
    sources = emitted = None
    if folder is not None:
        written = compile(capture_for_plan(model, batch, plan, loss_fn), plan)
        sources, emitted = read_sources(folder, written), widen_sources(written.sources)
    run = _Model(twin, graph, plan, wide_batch, loss_fn)
    reference = run.step(wide_batch)
    certificate = check(
        compiled.lowered,
        reference,
        wide_batch,
        rerun=run.rerun,
        sources=sources,
        emitted=emitted,
        timeout_s=timeout_s,
    )
    if not globs or not certificate:
        return certificate
    short, scaled = shortened(wide)
    program = compile(graph, short).lowered
    return check_inexact(
        program, reference.state, wide_batch, certificate, scaled=scaled, timeout_s=timeout_s
    )


class _Model:
    """The model on one device, with which every trial is compared."""

    def __init__(
        self, twin: nn.Module, graph: Graph, plan: Plan, batch: Any, loss_fn: Objective
    ) -> None:
        self.twin, self.graph, self.plan, self.loss_fn = twin, graph, plan, loss_fn
        self.call, self.draws = read_batch(batch), draws(graph)

    def step(self, batch: Any) -> Reference:
        """Run a training step; accumulate over micro-batches that are separate batches."""
        batches = separate_batches(batch, self.plan)
        if not self.draws:
            return run_reference(self.twin, batches[0], self.loss_fn, more=batches[1:])
        state = {name: tensor.detach().clone() for name, tensor in self._tensors()}
        named = [flatten_batch(part)[0] for part in batches]
        return run_graph(self.graph, self.plan, state, named)[0]

    def rerun(
        self, state: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> Reference:
        """Run a training step with other weights and another batch."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(state[name])
        return self.step(self.call.batch_with(list(inputs.values())))

    def _tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        return (*self.twin.named_parameters(), *self.twin.named_buffers())


def _require_no_edits(folder: str | Path | None) -> None:
    if folder is not None:
        raise VerifyError(
            "edited code can only be verified at its full size, which is too large here",
            where=str(folder),
            hint="verify it on a machine with more memory, or pass max_bytes=",
        )


def _certify_twin(
    graph: Graph, model: nn.Module, batch: Any, plan: Plan, timeout_s: float, limit: float
) -> Certificate:
    inputs, _ = flatten_batch(batch)
    buffers = dict(model.named_buffers())
    hooks, graph = graph.hooks, replace(graph, hooks=())
    result = certify_twin(graph, plan, buffers, inputs, timeout_s=timeout_s, max_bytes=limit)
    omitted = [f"gradient hooks left out: {', '.join(map(str, hooks))}"] if hooks else []
    if any(entry.sync is not None for entry in plan.parameters.values()):
        omitted.append("synchronization of single parameters left out: gradients are all-reduced")
    return replace(result, scaled=(*result.scaled, *omitted))


def is_meta(model: nn.Module, batch: Any) -> bool:
    """Return whether the model or the batch has tensors without data."""
    inputs, _ = flatten_batch(batch)
    return any(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs.values()))


# ------------------------------------------------------------ before training
def verify_first(
    model: Model,
    batch: Any,
    plan: Plan,
    loss_fn: LossFn | None = None,
    *,
    folder: Path | None = None,
) -> None:
    """Raise a `VerifyError` unless the plan's program equals the model.

    Rank 0 checks, the others wait for it, and all raise if it fails. With a `folder`, programs that
    passed are remembered in a file there, so that a training run that is resumed does not check the
    same program again.
    """
    with starting(MAX_WAIT_S) as agree:
        if process_rank() == 0:
            _verify_once(model, batch, plan, loss_fn, folder)
        agree("verified")


def _verify_once(
    model: Model, batch: Any, plan: Plan, loss_fn: LossFn | None, folder: Path | None
) -> None:
    file = None if folder is None else folder / VERIFIED
    key = fingerprint(model, batch, plan, loss_fn)
    passed = _passed(file)
    if key in passed:
        return
    certificate = verify(model, batch, plan, loss_fn)
    if not certificate.ok:
        raise VerifyError(
            str(certificate),
            hint="another plan, or an issue with this text; verify: false trains unchecked",
        )
    if file is not None:
        passed[key] = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "certificate": str(certificate)}
        write_text(file, json.dumps(passed, indent=2) + "\n", VerifyError)


def fingerprint(model: Model, batch: Any, plan: Plan, loss_fn: LossFn | None = None) -> str:
    """Return a digest of everything that the result of a check depends on."""
    graph = capture_for_plan(model, batch, plan, loss_fn)
    program = compile(graph, plan).fingerprint
    parts = (__version__, torch.__version__, graph.fingerprint, program)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]


def _passed(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {}
    try:
        passed = read_json(file, VerifyError)
    except ShardwiseError:
        return {}  # corrupt: check again and rewrite it
    return dict(passed) if isinstance(passed, dict) else {}
