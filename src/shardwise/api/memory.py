"""The memory of one rank, found by running its program on tensors without data.

The rank's generated program, its parameter store and its optimizer run two steps over a transport
that sends nothing. A tracker counts the bytes of every storage while it lives; the second step
counts, when the optimizer's state is there.

A storage is a parameter, a gradient or optimizer state where the store or the optimizer holds it;
it is an activation if it is alive when a forward ends; anything else is temporary: what
operators, recomputation and communication need for a moment, gathered parameters, the batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from shardwise import runtime as rt
from shardwise.api.compile import PipelineProgram, Program
from shardwise.api.steps import step_options
from shardwise.cost.meta_run import Storage, StorageTracker
from shardwise.errors import OptimizerError, PlanError, ShardwiseError, did_you_mean
from shardwise.ir import TensorType
from shardwise.plans import Plan
from shardwise.runtime.loader import LoadedModule, LoadedPipeline
from shardwise.runtime.optimizer import ELEMENTWISE
from shardwise.runtime.step import ModuleStep, PipelineStep
from shardwise.runtime.transport.fake import FakeRng, FakeTransport, disconnect
from shardwise.simulation.memory import MemoryUse

# Run operators on tensors without data, and count the bytes that they would take, by kind.


KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
SMALL = 1 << 16  # elements of a constant that is computed, so that its values can be asked for
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes there were at a time, by kind, and in which phase."""

    bytes_of: Mapping[str, int]
    most_activations_bytes: int  # at any time
    when: str


class Ledger(StorageTracker):  # type: ignore[no-untyped-call]
    """Runs operators without data, and keeps account of the storages on a device.

    Small constants, which depend on nothing but numbers, are computed for real: programs may ask
    for their values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.phase = device, ""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._elastic: list[tuple[torch.UntypedStorage, Storage]] = []
        self._events: list[tuple[Storage, int, str]] = []
        self._recording = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            stack.enter_context(self)
            yield
            self._recording = False

    # --- operators -----------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = self._call(func, args, dict(kwargs or {}))
        for item in tree_leaves(found):
            if isinstance(item, Tensor):
                self._record(item)
        for storage, block in self._elastic:
            self.resize(block, storage.nbytes())
        return found

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_constant(func, args, kwargs):
            return func(*args, **kwargs)
        try:
            found = func(*args, **kwargs)
            if any(t.numel() > SMALL for t in tree_leaves(found) if isinstance(t, Tensor)):
                return found
        except NEEDS_DATA:
            pass
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    # --- storages ------------------------------------------------------------------------

    def _record(self, tensor: Tensor) -> Storage | None:
        """Return the record of a tensor's storage, if it is on this device."""
        if tensor.device.type != self.device.type or tensor.layout is not torch.strided:
            return None
        return self.track(tensor)

    def resize(self, storage: Storage, size: int) -> None:
        if size != storage.size and self._recording:
            self._events.append((storage, size - storage.size, self.phase))
        super().resize(storage, size)

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Say what storages are; the first word counts."""
        for tensor in tensors:
            block = self._record(tensor) if isinstance(tensor, Tensor) else None
            if block is not None and block.kind is None:
                block.kind = kind

    def watch(self, tensor: Tensor, kind: str) -> None:
        """Mark a storage that changes its size without an operator."""
        self.mark(kind, [tensor])
        block = self._record(tensor)
        if block is not None:
            self._elastic.append((tensor.untyped_storage(), block))

    def keep(self) -> None:
        """A forward ends: what it leaves are activations."""
        for block in self.storages.values():
            block.kind = block.kind or "activations"

    # --- steps ---------------------------------------------------------------------------

    def begin(self, *, record: bool) -> None:
        """A step begins: what is there and unknown belongs to none."""
        gc.collect()
        for block in self.storages.values():
            block.kind = block.kind or "temporary"
        if record:
            self._events = [(block, block.size, "") for block in self.storages.values()]
        self._recording = record

    def peak_by_kind(self) -> Peak:
        """The highest sum of what was recorded, and its parts."""
        now, best = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        when, most_kept = "", 0
        for block, change, phase in self._events:
            now[block.kind or "temporary"] += change
            most_kept = max(most_kept, now["activations"])
            if change > 0 and sum(now.values()) > sum(best.values()):
                best, when = dict(now), phase
        return Peak(bytes_of=best, most_activations_bytes=most_kept, when=when)


def _is_constant(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this makes small numbers of nothing but small numbers, on the host."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    if not tensors:
        return getattr(func, "overloadpacket", None) is torch.ops.aten.arange
    return not any(isinstance(t, FakeTensor) or t.is_meta or t.numel() > SMALL for t in tensors)


# One rank's part of a program, without its weights and, if nobody is there, without the others.
#
# On a mesh that is given, it communicates as any other.


class SingleRank:
    """A rank that trains with nobody, or with those of its mesh."""

    def __init__(
        self,
        program: Program | PipelineProgram,
        rank: int,
        device: torch.device,
        *,
        rng: type[rt.Rng] = rt.Rng,
        recorder: rt.Recorder | None = None,
        on_gradient: Callable[[Tensor], None] = lambda leaf: None,
        mesh: rt.ProcessMesh | None = None,
        transport: type[FakeTransport] = FakeTransport,
    ) -> None:
        plan, graph = program.plan, program.graph
        self.program, self.device = program, device
        self.transport = transport(rank, plan.num_ranks)  # where no mesh is given
        self.mesh = mesh or _mesh(plan, rank, self.transport)
        numbers = rng(plan.seed, plan.rng, self.mesh)
        options = step_options(graph, plan)
        self.step: ModuleStep | PipelineStep
        if isinstance(program, PipelineProgram):
            stages = LoadedPipeline(program.text, graph, self.mesh, numbers, device)
            self.store = stages.make_store()
            self.step = PipelineStep(stages, self.store, options, recorder)
        else:
            source = program.source(self.mesh.rank)
            loaded = LoadedModule(source, graph, self.mesh, numbers, device)
            self.store = rt.ParameterStore(
                loaded.module, self.mesh, loaded.parameters, loaded.buffers, device=device
            )
            self.step = ModuleStep(loaded, loaded.module, self.mesh, device, options, recorder)
        if mesh is None:
            disconnect(self.store, on_gradient)
        self.module = rt.ParallelModule(
            self.store, self.mesh, numbers, lambda *_: self.step, check_batches=False
        )

    def batch_types(self) -> dict[str, TensorType]:
        """The tensors of a whole batch by input."""
        graph, found = self.program.graph, {}
        for given in graph.inputs:
            kind = graph.values[given.value]
            shape = list(kind.shape)
            if isinstance(self.step, PipelineStep):
                spec = self.step.executor.spec
                dim = spec.batch_dims.get(given.name)
                if dim is not None and not spec.timed:  # the graph is of one micro-batch
                    shape[dim] *= spec.num_microbatches
            found[given.name] = TensorType(tuple(shape), kind.dtype)
        return found


def _mesh(plan: Plan, rank: int, transport: FakeTransport) -> rt.ProcessMesh:
    stage = next(s for s in plan.all_stages if rank in s.ranks)
    return rt.ProcessMesh(
        dict(stage.mesh.axes),
        stage.ranks.index(rank),
        transport,
        ranks=stage.ranks,
        groups=plan.groups,
        num_microbatches=plan.num_microbatches,
        timed=plan.splits_time,
    )


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
    peak = ledger.peak_by_kind()
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
            rng=FakeRng,
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
