"""Predict the memory of one rank by running its program on tensors without data.

The rank's generated program, its parameter store and its optimizer run two steps over a transport
that sends nothing. A tracker follows the size of every live storage; the second step counts, in
which the optimizer's state exists.

Storages of the store and the optimizer are parameters, gradients or optimizer state. A storage that
is alive when a forward ends is an activation. Everything else is temporary: what operators,
recomputation and communication allocate for a moment, gathered parameters, the batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
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
from shardwise.api.steps import load_program, make_step
from shardwise.cost.meta_run import Storage, StorageTracker
from shardwise.errors import OptimizerError, PlanError, ShardwiseError, did_you_mean
from shardwise.ir import TensorType
from shardwise.plans import Plan
from shardwise.runtime.loader import make_store
from shardwise.runtime.mesh import mesh_of
from shardwise.runtime.optimizer import ELEMENTWISE
from shardwise.runtime.step import PipelineStep
from shardwise.runtime.transport.fake import (
    FakeRng,
    FakeTransport,
    UninitializedTransport,
    disconnect,
)
from shardwise.simulation.memory import MemoryUse

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
MAX_CONSTANT_NUMEL = 1 << 16  # of constants that are computed, because programs may read them
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_OPTIMIZERS = {c.__name__.lower(): c for c in ELEMENTWISE}


def rank_memory(
    program: Program | PipelineProgram,
    rank: int,
    optimizer: str | Callable[..., torch.optim.Optimizer],
    device: torch.device | str,
    options: Mapping[str, Any],
    prepare: Callable[[SingleRank], Mapping[str, Tensor]] | None = None,
) -> MemoryUse:
    """Return the memory that `rank` needs for a step; see `Program.memory`.

    With `prepare`, which fills parameters and returns a batch, the steps are computed on the device
    and the memory is measured.
    """
    plan = program.plan
    if not 0 <= rank < plan.num_ranks:
        raise PlanError(f"rank {rank} is not among the {plan.num_ranks} of the plan")
    device = torch.device(device)
    _check_device(plan, device)
    tracker = MemoryTracker(device)
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True) if prepare is None else nullcontext()
        with mode, tracker:
            cls = _optimizer_class(optimizer)
            _train_two_steps(program, rank, cls, options, tracker, prepare)
    except NEEDS_DATA as error:
        raise ShardwiseError(
            f"memory cannot be predicted: the program asks for values of tensors ({error})",
            where=program.graph.name,
            hint="measure a step with torch.profiler.profile(profile_memory=True)",
        ) from error
    peak, phase, max_activations = tracker.peak_by_kind()
    return MemoryUse(
        group=next(i for i, ranks in enumerate(plan.groups) if rank in ranks),
        rank=rank,
        peak_bytes=sum(peak.values()),
        parts=peak,
        activations_peak_bytes=max_activations,
        when=phase,
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
        raise OptimizerError(
            f"unknown optimizer {name!r}{did_you_mean(name, _OPTIMIZERS)}",
            hint=f"{', '.join(_OPTIMIZERS)}, or a class",
        )
    return _OPTIMIZERS[name]


# ---------------------------------------------------------------- storages by kind
class MemoryTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Run operators without data, and track the storages on a device by kind.

    Small constants, which depend on nothing but numbers, are computed: programs may read them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.phase = device, ""
        self._resizable: list[tuple[torch.UntypedStorage, Storage]] = []
        self._events: list[tuple[Storage, int, str]] = []
        self._is_recording = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = _call(func, args, dict(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                self._storage(item)
        for storage, record in self._resizable:
            self.resize(record, storage.nbytes())
        return result

    def _storage(self, tensor: Tensor) -> Storage | None:
        """Return the record of a tensor's storage, if it is on this device."""
        if tensor.device.type != self.device.type or tensor.layout is not torch.strided:
            return None
        return self.track(tensor)

    def resize(self, storage: Storage, size: int) -> None:
        if size != storage.size and self._is_recording:
            self._events.append((storage, size - storage.size, self.phase))
        super().resize(storage, size)

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Set the kind of storages that have none yet."""
        for tensor in tensors:
            storage = self._storage(tensor) if isinstance(tensor, Tensor) else None
            if storage is not None and storage.kind is None:
                storage.kind = kind

    def mark_resizable(self, kind: str, tensor: Tensor) -> None:
        """Set the kind of a storage that is resized without an operator."""
        self.mark(kind, [tensor])
        storage = self._storage(tensor)
        if storage is not None:
            self._resizable.append((tensor.untyped_storage(), storage))

    def mark_unknown(self, kind: str) -> None:
        """Set the kind of all live storages that have none yet."""
        for storage in self.storages.values():
            storage.kind = storage.kind or kind

    def begin_step(self, *, record: bool) -> None:
        """Begin a step, whose memory counts if it is recorded."""
        gc.collect()
        self.mark_unknown("temporary")
        if record:
            self._events = [(storage, storage.size, "") for storage in self.storages.values()]
        self._is_recording = record

    def peak_by_kind(self) -> tuple[dict[str, int], str, int]:
        """Return the bytes of each kind at the peak, its phase, and the most activations ever."""
        current, peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        peak_phase, max_activations = "", 0
        for storage, change, phase in self._events:
            current[storage.kind or "temporary"] += change
            max_activations = max(max_activations, current["activations"])
            if change > 0 and sum(current.values()) > sum(peak.values()):
                peak, peak_phase = dict(current), phase
        return peak, peak_phase, max_activations


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_constant(func, args, kwargs):
        return func(*args, **kwargs)
    with suppress(*NEEDS_DATA):
        result = func(*args, **kwargs)
        tensors = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        if any(tensor.numel() > MAX_CONSTANT_NUMEL for tensor in tensors):
            return result
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _is_constant(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call computes numbers on the CPU from nothing but small constants."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    if not tensors:
        return getattr(func, "overloadpacket", None) is torch.ops.aten.arange
    return not any(
        isinstance(t, FakeTensor) or t.is_meta or t.numel() > MAX_CONSTANT_NUMEL for t in tensors
    )


# ---------------------------------------------------------------- one rank's steps
class SingleRank:
    """One rank's part of a program, without weights, that trains on its own or with a mesh."""

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
        transport: Callable[[int, int], FakeTransport] = FakeTransport,
    ) -> None:
        plan = program.plan
        self.program, self.device = program, device
        self.transport = transport(rank, plan.num_ranks)  # unused with a mesh
        self.mesh = mesh or mesh_of(
            rank,
            ((s.ranks, dict(s.mesh.axes)) for s in plan.all_stages),
            self.transport,
            num_microbatches=plan.num_microbatches,
            timed=plan.splits_time,
        )
        if recorder is not None:
            self.mesh.note(recorder)
        generator = rng(plan.seed, plan.rng, self.mesh)
        loaded = load_program(program, self.mesh, generator, device)
        self.store = make_store([loaded], loaded.parameters, self.mesh, device)
        self.step = make_step(loaded, program.graph, plan, self.store, recorder=recorder)
        if mesh is None:
            disconnect(self.store, on_gradient)
        self.module = rt.ParallelModule(
            self.store, self.mesh, generator, lambda *_: self.step, check_batches=False
        )

    def batch_types(self) -> dict[str, TensorType]:
        """Return the tensor type of every input of the full batch."""
        graph = self.program.graph
        types = {source.name: graph.values[source.value] for source in graph.inputs}
        if isinstance(self.step, PipelineStep):  # whose graph may be of one micro-batch
            shapes = self.step.executor.reader.shapes
            types = {name: TensorType(shapes[name], kind.dtype) for name, kind in types.items()}
        return types


def _train_two_steps(
    program: Program | PipelineProgram,
    rank: int,
    cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    tracker: MemoryTracker,
    prepare: Callable[[SingleRank], Mapping[str, Tensor]] | None,
) -> None:
    """Train for two steps; the tracker records the second."""
    run = SingleRank(
        program,
        rank,
        tracker.device,
        rng=FakeRng if prepare is None else rt.Rng,
        recorder=_PhaseRecorder(tracker),
        on_gradient=lambda leaf: tracker.mark("gradients", [leaf.grad]),
        transport=FakeTransport if prepare is None else UninitializedTransport,
    )
    batch = (prepare or _empty_batch)(run)
    for group in run.store.groups:  # with ZeRO-3, gathered parameters exist only for a moment
        tracker.mark_resizable("temporary" if group.zero == 3 else "parameters", group.full)
        tracker.mark("parameters", [group.shard, group.resident])
    parameters = [t for e in run.store.entries for t in (e.leaf, e.piece, e.shown)]
    tracker.mark("parameters", [*parameters, *run.store.buffers.values()])
    if tracker.device.type == "cuda" and isinstance(cls, type) and cls in ELEMENTWISE:
        options = {"foreach": not options.get("fused", False), **options}  # torch's default on GPUs
    optimizer = rt.optimizer(run.module, cls, **options)
    for is_second in (False, True):
        tracker.begin_step(record=is_second)
        run.module.train_step(batch)
        entries = run.store.entries
        tracker.mark("gradients", [t.grad for e in entries for t in (e.leaf, e.piece, e.shown)])
        tracker.phase = "optimizer"
        optimizer.step()
        tracker.mark("optimizer", tree_leaves([dict(s) for s in optimizer.inner.state.values()]))
        optimizer.zero_grad()


def _empty_batch(run: SingleRank) -> dict[str, Tensor]:
    return {
        name: torch.empty(kind.shape, dtype=kind.dtype, device=run.device)
        for name, kind in run.batch_types().items()
    }


class _PhaseRecorder(rt.Recorder):
    """Report to a tracker which action runs, and when a forward ends."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__(0, enabled=False)
        self._tracker = tracker

    @contextmanager
    def span(self, lane: str, name: str, **details: Any) -> Iterator[None]:
        self._tracker.phase = name
        yield
        if "F" in name:
            self._tracker.mark_unknown("activations")
