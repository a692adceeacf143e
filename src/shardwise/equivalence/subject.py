"""What is checked: a program of one stage, or a pipeline of several, run a thread per rank.

Enters: a `Program` or a `Pipeline`. Leaves: a `Subject`, which gives its emitted texts, runs them
for one training step, and knows where the parts of each value are found among the records of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwise import runtime as rt
from shardwise.emit import emit, emit_pipeline
from shardwise.equivalence.ranks import Outcome, along_trees, run_ranks, step_outcome
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.program import Pipeline, Program
from shardwise.runtime.loader import LoadedPipeline, load


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
        return rt.run_threads(self.num_ranks, run, timeout_s=timeout_s, collective=collective)

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
