"""The memory of one rank, found by running its program on tensors without data.

The rank's generated program, its parameter store and its optimizer run two steps over a transport
that sends nothing. A tracker counts the bytes of every storage while it lives; the second step
counts, when the optimizer's state is there.

A storage is a parameter, a gradient or optimizer state where the store or the optimizer holds it;
it is an activation if it is alive when a forward ends; anything else is temporary: what
operators, recomputation and communication need for a moment, gathered parameters, the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise import runtime as rt
from shardwise.api.alone import SingleRank
from shardwise.api.compiled import PipelineProgram, Program
from shardwise.api.ledger import NEEDS_DATA, Ledger
from shardwise.errors import OptimizerError, PlanError, ShardwiseError, did_you_mean
from shardwise.plans import Plan
from shardwise.runtime.optimizer import ELEMENTWISE
from shardwise.simulation.memory import MemoryUse

_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    c.__name__.lower(): c for c in ELEMENTWISE
}


def rank_memory(
    program: Program | PipelineProgram,
    rank: int,
    optimizer: str | Callable[..., torch.optim.Optimizer],
    device: torch.device | str,
    options: Mapping[str, Any],
) -> MemoryUse:
    """Return the memory that `rank` needs for a step; see `Program.memory`."""
    plan = program.plan
    if not 0 <= rank < plan.num_ranks:
        raise PlanError(f"rank {rank} is not among the {plan.num_ranks} of the plan")
    device = torch.device(device)
    _check_device(plan, device)
    ledger = Ledger(device)
    try:
        with ledger.counting():
            _play(_Player(program, rank, ledger), _optimizer_class(optimizer), options, ledger)
    except NEEDS_DATA as error:
        raise ShardwiseError(
            f"memory cannot be predicted: the program asks for values of tensors ({error})",
            where=program.graph.name,
            hint="measure a step with torch.profiler.profile(profile_memory=True)",
        ) from error
    peak = ledger.peak()
    return MemoryUse(
        group=next(i for i, ranks in enumerate(plan.groups) if rank in ranks),
        rank=rank,
        peak_bytes=sum(peak.bytes_of.values()),
        parts=peak.bytes_of,
        activations_peak_bytes=peak.most_activations_bytes,
        when=peak.when,
    )


def _check_device(plan: Plan, device: torch.device) -> None:
    if device.type == "cpu":
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ShardwiseError(
            f"memory on {device} cannot be predicted: torch finds no such device here",
            hint='device="cpu": parameters, gradients and optimizer state are the same',
        )
    if plan.offload:
        raise PlanError(f"memory on {device} with offload={plan.offload} cannot be predicted")


def _optimizer_class(
    name: str | Callable[..., torch.optim.Optimizer],
) -> Callable[..., torch.optim.Optimizer]:
    if not isinstance(name, str):
        return name
    if name not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        raise OptimizerError(
            f"optimizer {name!r}{did_you_mean(name, _OPTIMIZERS)}", hint=f"{known}, or a class"
        )
    return _OPTIMIZERS[name]


# ---------------------------------------------------------------- one rank's steps


class _Player(SingleRank):
    """One rank's part of a program, on tensors without data."""

    def __init__(self, program: Program | PipelineProgram, rank: int, ledger: Ledger) -> None:
        self.ledger = ledger
        super().__init__(
            program,
            rank,
            ledger.device,
            rng=rt.FakeRng,
            recorder=_Windows(ledger),
            on_gradient=lambda leaf: ledger.mark("gradients", [leaf.grad]),
        )

    def batch(self) -> dict[str, Tensor]:
        """A whole batch."""
        return {
            name: torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
            for name, kind in self.batch_types().items()
        }

    def mark_parameters(self) -> None:
        """Tell parameters and buffers; gathered ones are there for a moment."""
        for group in self.store.groups:
            self.ledger.watch(group.full, "temporary" if group.zero == 3 else "parameters")
            self.ledger.mark("parameters", [group.shard, group.resident])
        held = [t for e in self.store.entries for t in (e.leaf, e.piece, e.shown)]
        self.ledger.mark("parameters", [*held, *self.store.buffers.values()])

    def mark_gradients(self) -> None:
        """Tell the gradients of a step that has just ended."""
        entries = self.store.entries
        self.ledger.mark("gradients", [t.grad for e in entries for t in (e.leaf, e.piece, e.shown)])


def _play(
    player: _Player,
    cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    ledger: Ledger,
) -> None:
    """Two steps of training, of which the ledger records the second."""
    batch = player.batch()
    player.mark_parameters()
    if ledger.device.type == "cuda" and isinstance(cls, type) and cls in ELEMENTWISE:
        options = {"foreach": not options.get("fused", False), **options}  # torch's choice there
    optimizer = rt.optimizer(player.module, cls, **options)
    for last in (False, True):
        ledger.begin(record=last)
        player.module.train_step(batch)
        player.mark_gradients()
        ledger.phase = "optimizer"
        optimizer.step()
        ledger.mark("optimizer", tree_leaves([dict(s) for s in optimizer.inner.state.values()]))
        optimizer.zero_grad()


class _Windows(rt.Recorder):
    """Tells the ledger which action runs, and what a forward leaves."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(0, enabled=False)
        self._ledger = ledger

    @contextmanager
    def span(self, lane: str, name: str, **details: Any) -> Iterator[None]:
        self._ledger.phase = name
        yield
        if "F" in name:
            self._ledger.keep()
