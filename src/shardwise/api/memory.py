"""How much memory a rank will need: `predict_memory(graph, plan)`.

Enters: `Graph`, `Plan`, a rank and an optimizer. Leaves: `MemoryEstimate`.

The rank's generated program, its parameter store and its optimizer run two steps on tensors without
data, over a transport that only pretends. A ledger counts the bytes of every storage while it
lives; the estimate is that of the second step, when the optimizer's state is there.

A storage is a parameter, a gradient or optimizer state where the store or the optimizer holds it;
it is an activation if it is alive when a forward ends; anything else is temporary: what
operators, recomputation and communication need for a moment, gathered parameters, the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise import runtime as rt
from shardwise.api.alone import SingleRank
from shardwise.api.compiled import PipelineProgram, Program, compile
from shardwise.api.ledger import NEEDS_DATA, Ledger, Peak
from shardwise.errors import OptimizerError, PlanError, ShardwiseError, did_you_mean
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.runtime.optimizer import ELEMENTWISE

_OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    c.__name__.lower(): c for c in ELEMENTWISE
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The bytes that a rank holds at most in a step, of what they are made, and when.

    `activations_peak_bytes` is the most that is kept for backward at any time, also if that is not
    when the sum is highest.
    """

    rank: int
    peak_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporary_bytes: int
    activations_peak_bytes: int
    when: str  # "0B3": as actions of a schedule; "optimizer"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("activations", self.activations_bytes),
            ("temporary", self.temporary_bytes),
            ("peak", self.peak_bytes),
            ("activations at most", self.activations_peak_bytes),
        ]
        lines = [f"memory of rank {self.rank}, highest in {self.when}"]
        return "\n".join([*lines, *(f"  {name:20} {_mib(size):>12}" for name, size in rows)])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def predict_memory(
    graph: Graph,
    plan: Plan,
    rank: int = 0,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    *,
    device: torch.device | str = "cpu",
    **options: Any,
) -> MemoryEstimate:
    """The memory that `rank` needs for a step under `plan`, without allocating it.

    `optimizer` is a class or the name of one of torch's, with its `options`. `device` may be "cuda"
    where there is a GPU: some operators take another way there.
    """
    if not 0 <= rank < plan.num_ranks:
        raise PlanError(f"rank {rank} is not among the {plan.num_ranks} of the plan")
    device = torch.device(device)
    _check_device(plan, device)
    program, cls = compile(graph, plan), _optimizer_class(optimizer)
    ledger = Ledger(device)
    try:
        with ledger.counting():
            _play(_Player(program, rank, ledger), cls, options, ledger)
    except NEEDS_DATA as error:
        raise ShardwiseError(
            f"memory cannot be predicted: the program asks for values of tensors ({error})",
            where=graph.name,
            hint="measure a step with torch.profiler.profile(profile_memory=True)",
        ) from error
    return _estimate(rank, ledger.peak())


def _estimate(rank: int, peak: Peak) -> MemoryEstimate:
    return MemoryEstimate(
        rank=rank,
        peak_bytes=sum(peak.bytes_of.values()),
        **{f"{kind}_bytes": size for kind, size in peak.bytes_of.items()},
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
