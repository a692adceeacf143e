"""Run an emitted program, of one stage or a pipeline, for one training step with a thread per rank.

The emitted code runs with the runtime's own gradient reduction and optimizer; only the transport is
in memory.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from shardwise import runtime as rt
from shardwise.cluster import Mesh
from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.check import interpret
from shardwise.emit import emit, emit_pipeline
from shardwise.equivalence.reference import LEARNING_RATE, double_functions
from shardwise.equivalence.trial import Tensors, Trial
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.program import Pipeline, Program
from shardwise.runtime.loader import LoadedPipeline, build, load, parameters_of
from shardwise.runtime.pipeline.executor import PipelineRun
from shardwise.runtime.splits import Split, assemble, local_shape
from shardwise.runtime.transport.threads import Collective, run_threads
from shardwise.sharding.placements import PARTIAL, REPLICATE, Layout, Partial, Placement, Replicate

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a training step on one rank, as full tensors gathered from all ranks."""

    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor | None]
    state_after: Tensors
    replicas: Tensors  # local copies of parameters that another stage owns, after the step


@dataclass(frozen=True, slots=True)
class View:
    """A rank program and where its values were recorded."""

    program: Program
    places: tuple[tuple[int, str], ...]  # (rank, prefix of the names) in the order of its mesh
    sent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # value -> receiving stages
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> its stages

    def values(self, records: Sequence[rt.Records], name: str) -> list[torch.Tensor] | None:
        """Return the local parts of a value, or None if a rank stopped before computing it."""
        recorded = [records[rank].values.get(prefix + name) for rank, prefix in self.places]
        parts = [part for part in recorded if part is not None]
        return parts if len(parts) == len(recorded) else None

    def gradients(self, records: Sequence[rt.Records], name: str) -> list[torch.Tensor] | None:
        """Return the gradients of the local parts of a value, with zeros for missing ones.

        None if a rank did not compute the value, or if it is the tensor of another value there.
        """
        parts = self.values(records, name)
        if parts is None or any(prefix + name in records[r].aliases for r, prefix in self.places):
            return None
        recorded = [records[rank].gradients.get(prefix + name) for rank, prefix in self.places]
        return [
            torch.zeros_like(part) if gradient is None else gradient
            for part, gradient in zip(parts, recorded, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank's part of the model, and its forward and backward: loss and outputs of inputs."""

    store: rt.ParameterStore
    step: Callable[[Tensors], tuple[torch.Tensor, Sequence[Any]]]


Open = Callable[[int, Any, Tensors], Opened]  # of rank, transport and state


class Subject(ABC):
    """The program under test."""

    graph: Graph
    computed: Graph  # whose values the programs compute
    plan: Plan
    num_ranks: int
    mesh: str
    views: tuple[View, ...]

    @abstractmethod
    def sources(self, *, probe: bool = False) -> list[str]:
        """Emit the text of every rank program, with a probe after each statement if asked."""

    @abstractmethod
    def load(self, sources: Sequence[str]) -> Open:
        """Return a function that opens one rank of these texts."""

    def run(
        self,
        sources: Sequence[str],
        state: Tensors,
        inputs: Tensors,
        *,
        timeout_s: float,
        records: Sequence[rt.Records] | None = None,
    ) -> list[Outcome]:
        """Run a training step on all ranks; `records` collects the values that probes see."""
        opening = self.load(sources)

        def run(rank: int, transport: Any) -> Outcome:
            probes = contextlib.nullcontext() if records is None else rt.recording(records[rank])
            with double_functions(self.graph), probes:
                opened = opening(rank, transport, state)
                return _outcome(opened.store, *opened.step(inputs))

        collective = along_trees(self.plan)
        return run_threads(self.num_ranks, run, timeout_s=timeout_s, collective=collective)


class OneStage(Subject):
    """A program whose step is one forward and one backward pass."""

    def __init__(self, program: Program) -> None:
        self.program, self.plan = program, program.plan
        self.graph = self.computed = program.graph
        self.num_ranks, self.mesh = program.mesh.size, str(program.mesh)
        self.views = (View(program, tuple((rank, "") for rank in range(self.num_ranks))),)

    def sources(self, *, probe: bool = False) -> list[str]:
        return [emit(self.program, p.ranks[0], probe=probe) for p in self.program.rank_programs]

    def load(self, sources: Sequence[str]) -> Open:
        modules = {
            rank: module
            for source, program in zip(sources, self.program.rank_programs, strict=True)
            for module in [load(source, self.graph.functions)]
            for rank in program.ranks
        }

        def open_rank(rank: int, transport: Any, state: Tensors) -> Opened:
            generated = modules[rank]
            mesh = rt.ProcessMesh(dict(self.program.mesh.axes), rank, transport)
            rng = rt.Rng(self.plan.seed, self.plan.rng, mesh)
            module = build(generated, mesh, rng, "cpu", self.graph)
            store = rt.ParameterStore(module, mesh, parameters_of(generated), generated.BUFFERS)
            store.load_with(lambda name: state[name])

            def step(inputs: Tensors) -> tuple[torch.Tensor, Sequence[Any]]:
                local = [
                    rt.take_local(inputs[name], splits, mesh.coordinates, mesh.axes)
                    for name, splits in generated.INPUTS.items()
                ]
                with rt.hooked(store, self.graph.hooks), store.step():
                    with store.forward():
                        loss, outputs = module(*local, outputs=True)
                    with store.backward(last=True):
                        loss.backward()
                return loss, outputs

            return Opened(store, step)

        return open_rank


class Stages(Subject):
    """A pipeline: its stages, micro-batches and schedule."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.plan = pipeline, pipeline.plan
        self.graph, self.computed = pipeline.graph, pipeline.computed
        self.num_ranks = self.plan.num_ranks
        self.mesh = f"{self.plan.mesh}, {self.plan.num_microbatches} times"
        if self.plan.stages:
            meshes = dict.fromkeys(str(stage.mesh) for stage in pipeline.stages)
            self.mesh = (
                f"{len(pipeline.stages)} stages of {' and '.join(meshes)}, "
                f"{self.plan.num_microbatches} micro-batches"
            )
        count = self.plan.num_microbatches if self.plan.splits_time else 1
        sent: dict[int, dict[str, tuple[int, ...]]] = {s.index: {} for s in pipeline.stages}
        for transfer in pipeline.transfers:
            targets = sent[transfer.source].get(transfer.value, ())
            sent[transfer.source][transfer.value] = (*targets, transfer.target)
        self.views = tuple(
            View(
                stage.program,
                tuple((rank, f"{stage.index}.{k}.") for k in range(count) for rank in stage.ranks),
                sent[stage.index],
                pipeline.tied,
            )
            for stage in pipeline.stages
        )

    def sources(self, *, probe: bool = False) -> list[str]:
        return emit_pipeline(self.pipeline, probe=probe).texts

    def load(self, sources: Sequence[str]) -> Open:
        texts = emit_pipeline(self.pipeline).with_texts(sources)
        spec = rt.PipelineSpec.of(load(texts.pipeline))

        def open_rank(rank: int, transport: Any, state: Tensors) -> Opened:
            mesh = spec.mesh(rank, transport)
            rng = rt.Rng(self.plan.seed, self.plan.rng, mesh)
            loaded = LoadedPipeline(texts, self.graph, mesh, rng)
            store = loaded.make_store()
            store.load_with(lambda name: state[name])
            executor = loaded.executor(store)

            def step(inputs: Tensors) -> tuple[torch.Tensor, Sequence[Any]]:
                with rt.hooked(store, self.graph.hooks):
                    with store.step():
                        run = PipelineRun(inputs=inputs, training=True, outputs=True)
                        loss, outputs = executor.run(run)
                    executor.tied.sum_gradients()
                assert loss is not None
                return loss, outputs or ()

            return Opened(store, step)

        return open_rank


def subject_of(program: Program | Pipeline) -> Subject:
    """Wrap a program for a check."""
    return Stages(program) if isinstance(program, Pipeline) else OneStage(program)


def _outcome(store: rt.ParameterStore, loss: torch.Tensor, outputs: Sequence[Any]) -> Outcome:
    """Gather the gradients, run an AdamW step, and gather the state after it."""
    gradients = rt.share(store.mesh, store.gather_gradients())
    holder = SimpleNamespace(store=store)
    rt.optimizer(holder, torch.optim.AdamW, lr=LEARNING_RATE).step()
    after: dict[str, Any] = dict(store.gather_state_dict())
    after |= {name: buffer.clone() for name, buffer in store.buffers.items()}
    shared = rt.share(store.mesh, after)
    return Outcome(
        loss=loss.detach(),
        outputs=tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs),
        gradients=gradients,
        state_after={name: tensor for name, tensor in shared.items() if tensor is not None},
        replicas={
            entry.spec.name: store.gather_full(entry, store.local_value(entry), piece=False)
            for entry in store.entries
            if entry.spec.borrowed
        },
    )


def along_trees(plan: Plan) -> Collective | None:
    """Return a function that runs collectives along the plan's trees, or None if it has none.

    The trees apply to data of any size here, so that a check exercises them.
    """
    trees = [replace(choice, min_bytes=0) for choice in plan.collectives if choice.has_trees]
    if not trees:
        return None
    from shardwise.collectives.solver.derive import derive

    programs: dict[object, MessageProgram | None] = {}

    def run(
        operation: str, ranks: tuple[int, ...], inputs: list[torch.Tensor], counts: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        chosen = [c for c in trees if c.operation == operation and ranks in c.groups]
        numel = sum(counts) if counts else inputs[0].numel()
        if not chosen or not numel or inputs[0].dtype != torch.float64:
            return None
        key = (operation, ranks, numel, counts)
        if key not in programs:
            programs[key] = derive(chosen[0], ranks, numel, inputs[0].element_size(), counts)
        program = programs[key]
        if program is None:
            return None
        results = interpret(program, [tensor.numpy() for tensor in inputs])
        return [torch.from_numpy(result) for result in results]

    return run


# ------------------------------------------------------------ runs with probes
@dataclass(frozen=True, slots=True)
class Probed:
    """The values that each rank recorded, and the exception that ended the run, if any."""

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


# ------------------------------------------------------------ full values from local parts
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Unassembled(Exception):
    """The local parts do not form a value; the message says why."""


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of a value's gradient: S for S, R for P and R, P for R~."""

    def dual(placement: Placement) -> Placement:
        if isinstance(placement, Replicate) and placement.partial_grad:
            return PARTIAL
        return REPLICATE if isinstance(placement, Partial | Replicate) else placement

    return Layout(tuple((axis, dual(p)) for axis, p in layout.axes))


def full_values(
    parts: Sequence[torch.Tensor], layout: Layout, shape: tuple[int, ...], mesh: Mesh
) -> list[tuple[str, torch.Tensor]]:
    """Return the first replica of a value, and every replica whose bits differ from it."""
    sizes = dict(mesh.axes)
    splits = [Split(axis=axis, dim=s.dim, of=s.of) for axis, s in layout.shards]
    partial = {axis: p for axis, p in layout.axes if isinstance(p, Partial)}
    terms: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for rank, tensor in enumerate(parts):
        place = mesh.coordinate(rank)
        expected = local_shape(shape, splits, place, sizes)
        if tuple(tensor.shape) != tuple(expected):
            raise Unassembled(
                f"rank {rank} has shape {tuple(tensor.shape)}, expected {tuple(expected)}"
            )
        key = tuple(0 if axis in partial else place[axis] for axis in sizes)
        terms.setdefault(key, []).append(tensor)
    op = next(iter(partial.values())).op if partial else "sum"
    sharded = {axis for axis, _ in layout.shards}
    replicas: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for key, tensors in terms.items():
        replica = tuple(0 if axis in sharded else i for axis, i in zip(sizes, key, strict=True))
        shard = tuple(i if axis in sharded else 0 for axis, i in zip(sizes, key, strict=True))
        replicas.setdefault(replica, {})[shard] = functools.reduce(_COMBINE[op], tensors)
    values: list[tuple[str, torch.Tensor]] = []
    for replica, shards in replicas.items():
        value = assemble(shards, shape, splits, sizes)
        if not values or not torch.allclose(value, values[0][1], rtol=0, atol=0, equal_nan=True):
            differing = [f"{i} of {axis}" for axis, i in zip(sizes, replica, strict=True) if i]
            values.append((f"ranks 0 and {', '.join(differing)}" if differing else "", value))
    return values
