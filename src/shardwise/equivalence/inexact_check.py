"""Check by execution that ranks synchronize as `reference_sync.py` defines.

The emitted program trains for several steps with a thread per rank. The gradients that autograd
computes on each rank are the contributions of the reference, which has to arrive at the parameters
of every rank after every step. That the contributions of equal replicas add up to the gradient of
the model is shown by the check of synchronous training, which comes first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from shardwise import runtime as rt
from shardwise.batch import flatten_batch
from shardwise.equivalence.certificate import Certificate, Comparison, compare
from shardwise.equivalence.ranks import along_trees, subject_of
from shardwise.equivalence.reference_sync import SimulatedRanks
from shardwise.equivalence.trial import Tensors
from shardwise.errors import VerifyError
from shardwise.inexact import Inexact
from shardwise.plans import Plan, Sync
from shardwise.program import Pipeline, Program
from shardwise.runtime.grad_sync import sync_axis
from shardwise.runtime.transport.threads import run_threads

MAX_EVERY, MAX_STALE, MAX_WARMUP = 4, 3, 1  # larger numbers are made smaller for a check
ROUNDING = 1e-12  # of a tensor's largest element
RATE = 0.05  # of SGD, which does not magnify gradients that are zero up to rounding


def inexact_globs(plan: Plan) -> dict[str, Inexact]:
    """Return the globs of a plan whose synchronization is inexact."""
    syncs = {glob: entry.sync for glob, entry in plan.parameters.items()}
    return {g: sync.inexact for g, sync in syncs.items() if sync is not None and sync.inexact}


def synchronous(plan: Plan) -> Plan:
    """Return the plan with synchronous sums that are not compressed."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(Inexact)}
    return _with_syncs(plan, lambda sync: replace(sync, **defaults))


def shortened(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with short rounds, which a few steps can show, and what was scaled."""
    scaled: dict[str, None] = {}

    def shorten(sync: Sync) -> Sync:
        every, compression = min(sync.every, MAX_EVERY), sync.compression
        if compression is not None:
            compression = replace(compression, warmup=min(compression.warmup, MAX_WARMUP))
        short = replace(
            sync,
            every=every,
            stale=min(sync.stale, MAX_STALE),
            fragments=min(sync.fragments, every),
            overlap=min(sync.overlap, every - 1),
            compression=compression,
        )
        if short != sync:
            scaled[" -> ".join(", ".join(s.inexact.words()) for s in (sync, short))] = None
        return short

    return _with_syncs(plan, shorten), tuple(scaled)


def _with_syncs(plan: Plan, change: Callable[[Sync], Sync]) -> Plan:
    return plan.with_(
        parameters={
            glob: entry if entry.sync is None else replace(entry, sync=change(entry.sync))
            for glob, entry in plan.parameters.items()
        }
    )


@dataclass(slots=True)
class _History:
    """One rank: its parameters at first and after every step, and its contributions to each."""

    ranks: dict[str, tuple[int, ...]]  # that sum the gradient of a parameter
    syncs: dict[str, Inexact]
    parameters: list[Tensors]
    contributions: list[dict[str, torch.Tensor]]


def check_inexact(
    program: Program | Pipeline,
    state: Tensors,
    batch: Any,
    certificate: Certificate,
    *,
    scaled: tuple[str, ...],
    timeout_s: float,
) -> Certificate:
    """Add the comparisons with the reference to the certificate of synchronous training."""
    subject = subject_of(program)
    if subject.graph.hooks:
        raise VerifyError(
            f"the gradient hook of {subject.graph.hooks[0].parameter} is not part of the reference "
            "of inexact synchronization",
            hint="verify a synchronous plan, or remove the hook",
        )
    syncs = inexact_globs(program.plan)
    steps = max(2 * s.every + s.overlap + s.stale + 2 for s in syncs.values())
    opening, (inputs, _) = subject.load(subject.sources()), flatten_batch(batch)

    def run(rank: int, transport: Any) -> _History:
        opened = opening(rank, transport, state)
        return _train(opened.store, lambda: opened.step(inputs), steps)

    collective = along_trees(program.plan)
    histories = run_threads(subject.num_ranks, run, timeout_s=timeout_s, collective=collective)
    return replace(
        certificate,
        plan=program.plan.name,
        comparisons=(*certificate.comparisons, *_comparisons(histories)),
        scaled=(*certificate.scaled, *scaled),
        trials=(*certificate.trials, f"{steps} steps of SGD, each rank with its reference"),
        inexact=tuple(f"{glob}: {', '.join(sync.words())}" for glob, sync in syncs.items()),
    )


def _train(store: rt.ParameterStore, step: Callable[[], object], steps: int) -> _History:
    """Train one rank, and record what autograd computes before gradients are summed."""
    entries = [e for e in store.entries if e.spec.requires_grad]
    optimizer = rt.optimizer(SimpleNamespace(store=store), torch.optim.SGD, lr=RATE)
    current: dict[str, torch.Tensor] = {}
    for entry in entries:

        def add(grad: torch.Tensor, name: str = entry.spec.name) -> None:
            current[name] = current[name] + grad if name in current else grad.clone()

        entry.leaf.register_hook(add)  # type: ignore[no-untyped-call]

    def parameters() -> Tensors:
        return {e.spec.name: store.local_value(e).clone() for e in entries}

    history = _History(
        ranks={e.spec.name: sync_axis(e, store.mesh).ranks for e in entries},
        syncs={e.spec.name: e.spec.inexact or Inexact() for e in entries},
        parameters=[parameters()],
        contributions=[],
    )
    for _ in range(steps):
        current.clear()
        optimizer.zero_grad()
        step()
        optimizer.step()
        history.contributions.append(dict(current))
        history.parameters.append(parameters())
    return history


def _comparisons(histories: Sequence[_History]) -> Iterator[Comparison]:
    """Simulate each group of ranks that sums gradients, and compare the parameters of its ranks."""
    groups: dict[tuple[int, ...], dict[str, None]] = {}  # the parameters that ranks sum
    for history in histories:
        for name, ranks in history.ranks.items():
            groups.setdefault(ranks, {}).setdefault(name)
    for ranks, names in groups.items():
        members = [histories[rank] for rank in ranks]
        first = members[0].parameters[0]
        used = {n for member in members for step in member.contributions for n in step}
        simulated = SimulatedRanks(
            {name: first[name] for name in names},
            {name: members[0].syncs[name] for name in names},
            len(ranks),
            lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        )
        for number in range(len(members[0].contributions)):
            contributions = [m.contributions[number] for m in members]
            simulated.step(
                [{n: c.get(n, torch.zeros_like(first[n])) for n in names} for c in contributions]
            )
            for rank, member, replica in zip(ranks, members, simulated.replicas, strict=True):
                for name in (n for n in names if n in used):
                    expected = replica[name].detach()
                    noise = ROUNDING * float(expected.abs().max()) if expected.numel() else 0.0
                    what = f"replica of {name} on rank {rank} after step {number + 1}"
                    yield compare(what, member.parameters[number + 1][name], expected, noise=noise)
