"""What is checked: a program of one stage, or a pipeline of several, run a thread per rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from shardwise import runtime as rt
from shardwise.cluster import Mesh
from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.check import interpret
from shardwise.emit import emit, emit_pipeline
from shardwise.equivalence.reference import LEARNING_RATE
from shardwise.equivalence.trial import Trial
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.program import Pipeline, Program
from shardwise.runtime.loader import LoadedPipeline, build, load
from shardwise.runtime.splits import Split, assemble, local_shape
from shardwise.runtime.transport.threads import Collective, run_threads
from shardwise.sharding.placements import PARTIAL, REPLICATE, Layout, Partial, Placement, Replicate

# Runs emitted source, a thread per rank, for one training step.
#
# What runs is the emitted code with the runtime's own reducer and optimizer; only the transport is
# in memory.


TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has after a training step; full tensors, gathered from all."""

    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor | None]
    state_after: Mapping[str, torch.Tensor]
    borrowed: Mapping[str, torch.Tensor]  # copies of other stages' parameters, after the step


def run_ranks(
    program: Program,
    sources: Sequence[str],
    state: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    timeout_s: float = TIMEOUT_S,
    records: Sequence[rt.Records] | None = None,
) -> list[Outcome]:
    """One training step of every rank, in threads; `records` collects what probes see."""
    modules = [load(source, program.graph.functions) for source in sources]
    by_rank = {
        rank: module
        for module, ranks in zip(modules, program.rank_programs, strict=True)
        for rank in ranks.ranks
    }

    def run(rank: int, transport: Any) -> Outcome:
        mesh = rt.ProcessMesh(dict(program.mesh.axes), rank, transport)
        if records is None:
            return _train_once(by_rank[rank], mesh, program, state, inputs)
        with rt.recording(records[rank]):
            return _train_once(by_rank[rank], mesh, program, state, inputs)

    collective = along_trees(program.plan)
    return run_threads(program.mesh.size, run, timeout_s=timeout_s, collective=collective)


def along_trees(plan: Plan) -> Collective | None:
    """Do the collectives for which a plan has trees as these say, whatever the size of the data."""
    trees = [replace(choice, min_bytes=0) for choice in plan.collectives if choice.has_trees]
    if not trees:
        return None
    from shardwise.collectives.solver.derive import derive

    known: dict[object, MessageProgram | None] = {}

    def run(
        operation: str, ranks: tuple[int, ...], inputs: list[torch.Tensor], counts: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        chosen = [c for c in trees if c.operation == operation and ranks in c.groups]
        numel = sum(counts) if counts else inputs[0].numel()
        if not chosen or not numel or inputs[0].dtype != torch.float64:
            return None
        key = (operation, ranks, numel, counts)
        if key not in known:
            known[key] = derive(chosen[0], ranks, numel, inputs[0].element_size(), counts)
        program = known[key]
        if program is None:
            return None
        results = interpret(program, [tensor.numpy() for tensor in inputs])
        return [torch.from_numpy(result) for result in results]

    return run


def _train_once(
    generated: Any,
    mesh: rt.ProcessMesh,
    program: Program,
    state: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
) -> Outcome:
    rng = rt.Rng(program.plan.seed, program.plan.rng, mesh)
    module = build(generated, mesh, rng, "cpu", program.graph)
    store = rt.ParameterStore(module, mesh, generated.PARAMETERS, generated.BUFFERS)
    store.load_with(lambda name: state[name])
    local = [
        rt.take_local(inputs[name], splits, mesh.coordinates, mesh.axes)
        for name, splits in generated.INPUTS.items()
    ]
    with rt.hooked(store, program.graph.hooks), store.step():
        with store.forward():
            loss, outputs = module(*local, outputs=True)
        with store.backward(last=True):
            loss.backward()
    return step_outcome(store, loss, outputs)


def step_outcome(store: rt.ParameterStore, loss: torch.Tensor, outputs: Sequence[Any]) -> Outcome:
    """What is there after backward, and after an AdamW step."""
    gradients = rt.share(store.mesh, store.gather_gradients())
    holder = SimpleNamespace(store=store)
    rt.optimizer(holder, torch.optim.AdamW, lr=LEARNING_RATE).step()
    after: dict[str, Any] = dict(store.gather_state_dict())
    after |= {name: buffer.clone() for name, buffer in store.buffers.items()}
    shared = rt.share(store.mesh, after)
    after = {name: tensor for name, tensor in shared.items() if tensor is not None}
    borrowed = {
        e.spec.name: store.gather_full(e, store.local_value(e), piece=False)
        for e in store.entries
        if e.spec.borrowed
    }
    return Outcome(
        loss=loss.detach(),
        outputs=tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs),
        gradients=gradients,
        state_after=after,
        borrowed=borrowed,
    )


@dataclass(frozen=True, slots=True)
class View:
    """A program, and for every place of its mesh whose records hold its values, and under what."""

    program: Program
    places: tuple[tuple[int, str], ...]  # (rank, prefix of names)
    sent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # value -> stages it goes to
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> its stages

    def values(self, records: Sequence[rt.Records], name: str) -> list[torch.Tensor] | None:
        """Return the parts of a value at all places; None when a rank stopped before."""
        found = [records[rank].values.get(prefix + name) for rank, prefix in self.places]
        parts = [part for part in found if part is not None]
        return parts if len(parts) == len(found) else None

    def gradients(self, records: Sequence[rt.Records], name: str) -> list[torch.Tensor] | None:
        """Return the gradients of these parts; zero where none came."""
        parts = self.values(records, name)
        if parts is None:
            return None
        found = [records[rank].gradients.get(prefix + name) for rank, prefix in self.places]
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parts, found, strict=True)]


class Subject(Protocol):
    """What can be checked."""

    graph: Graph
    computed: Graph  # whose values the programs compute
    plan: Plan
    num_ranks: int

    @property
    def views(self) -> tuple[View, ...]: ...

    @property
    def mesh(self) -> str: ...

    def sources(self, *, probe: bool = False) -> list[str]: ...

    def run(
        self,
        sources: Sequence[str],
        state: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        *,
        timeout_s: float,
        records: Sequence[rt.Records] | None = None,
    ) -> list[Outcome]: ...


class OneStage:
    """A program whose step is one forward and one backward."""

    def __init__(self, program: Program) -> None:
        self.program, self.plan = program, program.plan
        self.graph = self.computed = program.graph
        self.num_ranks = program.mesh.size

    @property
    def mesh(self) -> str:
        return str(self.program.mesh)

    @property
    def views(self) -> tuple[View, ...]:
        return (View(self.program, tuple((rank, "") for rank in range(self.num_ranks))),)

    def sources(self, *, probe: bool = False) -> list[str]:
        return [emit(self.program, p.ranks[0], probe=probe) for p in self.program.rank_programs]

    def run(
        self,
        sources: Sequence[str],
        state: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        *,
        timeout_s: float,
        records: Sequence[rt.Records] | None = None,
    ) -> list[Outcome]:
        return run_ranks(self.program, sources, state, inputs, timeout_s=timeout_s, records=records)


class Stages:
    """A pipeline: its stages, micro-batches and schedule."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.plan = pipeline, pipeline.plan
        self.graph, self.computed = pipeline.graph, pipeline.computed
        self.num_ranks = pipeline.plan.num_ranks

    @property
    def mesh(self) -> str:
        meshes = dict.fromkeys(str(stage.mesh) for stage in self.pipeline.stages)
        count = self.plan.num_microbatches
        return f"{len(self.pipeline.stages)} stages of {' and '.join(meshes)}, " * bool(
            self.plan.stages
        ) + (f"{count} micro-batches" if self.plan.stages else f"{self.plan.mesh}, {count} times")

    @property
    def views(self) -> tuple[View, ...]:
        views = []
        for stage in self.pipeline.stages:
            count = self.plan.num_microbatches if self.plan.splits_time else 1
            places = [(rank, f"{stage.index}.{k}.") for k in range(count) for rank in stage.ranks]
            sent: dict[str, tuple[int, ...]] = {}
            for transfer in self.pipeline.transfers:
                if transfer.source == stage.index:
                    sent[transfer.value] = (*sent.get(transfer.value, ()), transfer.target)
            views.append(View(stage.program, tuple(places), sent, self.pipeline.tied))
        return tuple(views)

    def sources(self, *, probe: bool = False) -> list[str]:
        return emit_pipeline(self.pipeline, probe=probe).texts

    def run(
        self,
        sources: Sequence[str],
        state: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        *,
        timeout_s: float,
        records: Sequence[rt.Records] | None = None,
    ) -> list[Outcome]:
        texts = emit_pipeline(self.pipeline).with_texts(sources)
        spec = rt.PipelineSpec.of(load(texts.pipeline))

        def run(rank: int, transport: Any) -> Outcome:
            mesh = spec.mesh(rank, transport)
            rng = rt.Rng(self.plan.seed, self.plan.rng, mesh)
            loaded = LoadedPipeline(texts, self.graph, mesh, rng)
            if records is None:
                return self._train_once(loaded, state, inputs)
            with rt.recording(records[rank]):
                return self._train_once(loaded, state, inputs)

        collective = along_trees(self.plan)
        return run_threads(self.num_ranks, run, timeout_s=timeout_s, collective=collective)

    def _train_once(
        self,
        loaded: LoadedPipeline,
        state: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
    ) -> Outcome:
        store = loaded.make_store()
        store.load_with(lambda name: state[name])
        executor = loaded.executor(store)
        with rt.hooked(store, self.graph.hooks):
            with store.step():
                loss, outputs = executor.train(inputs, outputs=True)
            executor.tied.sum_gradients()
        return step_outcome(store, loss, outputs or ())


def subject_of(program: Program | Pipeline) -> Subject:
    """What `program` is for a check."""
    return Stages(program) if isinstance(program, Pipeline) else OneStage(program)


# A run of a program that records every value and its gradient.


@dataclass(frozen=True, slots=True)
class Probed:
    """What each rank recorded, and why it stopped early, if it did."""

    records: tuple[rt.Records, ...]
    raised: Exception | None


def run_probed(subject: Subject, trial: Trial, timeout_s: float) -> Probed:
    """Run the program of a subject with a probe after every statement."""
    records = tuple(rt.Records() for _ in range(subject.num_ranks))
    raised: Exception | None = None
    try:
        sources = subject.sources(probe=True)
        state = trial.reference.state
        subject.run(sources, state, trial.inputs, timeout_s=timeout_s, records=records)
    except Exception as error:
        raised = error
    return Probed(records, raised)


# Whole values from what every rank holds of them.


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Unassembled(Exception):
    """The parts do not make up a value; the message says why."""


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a value of this layout lies: S as S, P and R as R, R~ as P."""
    return Layout(tuple((axis, _gradient_placement(p)) for axis, p in layout.axes))


def _gradient_placement(placement: Placement) -> Placement:
    if isinstance(placement, Replicate) and placement.partial_grad:
        return PARTIAL
    return placement if not isinstance(placement, Partial | Replicate) else REPLICATE


def whole_values(
    parts: Sequence[torch.Tensor], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> list[tuple[str, torch.Tensor]]:
    """Return the value as the first ranks hold it, then every copy of it that has other bits."""
    sizes = dict(mesh.axes)
    splits = [Split(axis=axis, dim=s.dim, of=s.of) for axis, s in layout.shards]
    partial = {axis: p for axis, p in layout.axes if isinstance(p, Partial)}
    held: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for rank, tensor in enumerate(parts):
        place = mesh.coordinate(rank)
        expected = local_shape(shape, splits, place, sizes)
        if tuple(tensor.shape) != tuple(expected):
            raise Unassembled(
                f"rank {rank} holds shape {tuple(tensor.shape)}, expected {tuple(expected)}"
            )
        key = tuple(0 if axis in partial else place[axis] for axis in sizes)
        held.setdefault(key, []).append(tensor)
    op = next(iter(partial.values())).op if partial else "sum"
    sums = {key: functools.reduce(_COMBINE[op], tensors) for key, tensors in held.items()}
    cut = {axis for axis, _ in layout.shards}
    copies: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for key, tensor in sums.items():
        copy = tuple(0 if axis in cut else i for axis, i in zip(sizes, key, strict=True))
        kept = tuple(i if axis in cut else 0 for axis, i in zip(sizes, key, strict=True))
        copies.setdefault(copy, {})[kept] = tensor
    wholes: list[tuple[str, torch.Tensor]] = []
    for copy, tensors in copies.items():
        whole = assemble(tensors, shape, splits, sizes)
        if not wholes or not _same_bits(whole, wholes[0][1]):
            differing = [f"{i} of {axis}" for axis, i in zip(sizes, copy, strict=True) if i]
            wholes.append((f"ranks 0 and {', '.join(differing)}" if differing else "", whole))
    return wholes


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
