"""Emitted files of a pipeline as what one rank runs.

Enters: `PipelineSources`, and this rank's mesh. Leaves: an `Executor` over a `ParameterStore`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise import runtime as rt
from shardwise.emit.load import load
from shardwise.emit.pipeline import PipelineSources, StageSources
from shardwise.errors import ProgramError
from shardwise.ir import Buffer, Graph, Input, Parameter


class LoadedPipeline:
    """The generated modules of one rank's stages."""

    def __init__(
        self,
        sources: PipelineSources,
        graph: Graph,
        mesh: rt.ProcessMesh,
        rng: rt.Rng,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = rt.PipelineSpec.of(load(sources.pipeline))
        self.graph, self.mesh, self.rng, self.device = graph, mesh, rng, device
        rank = mesh.ranks[mesh.rank]
        mine = [i for i, stage in enumerate(self.spec.stages) if rank in stage.ranks]
        self.stages = {i: self._stage(sources.stages[i]) for i in mine}

    def _stage(self, sources: StageSources) -> rt.StageModules:
        files = [load(text, self.graph.functions) for text in sources.texts]
        built = [build(f, self.mesh, self.rng, self.device, self.graph) for f in files]
        chosen = []
        for k in range(self.spec.microbatches):
            place = k * self.mesh.size + self.mesh.rank if self.spec.timed else self.mesh.rank
            chosen.append(next(i for i, places in enumerate(sources.places) if place in places))
        beforehand = None
        for ranks, text in zip(sources.before_ranks, sources.before, strict=True):
            if self.mesh.rank in ranks:
                file = load(text, self.graph.functions)
                beforehand = (build(file, self.mesh, self.rng, self.device, self.graph), file)
        return rt.StageModules(
            modules=[built[i] for i in chosen],
            generated=[files[i] for i in chosen],
            beforehand=beforehand,
        )

    @property
    def parameters(self) -> list[rt.ParameterSpec]:
        """The parameters of this rank's stages, each once."""
        found: dict[str, rt.ParameterSpec] = {}
        for stage in self.stages.values():
            for spec in stage.generated[0].PARAMETERS:
                known = found.setdefault(spec.name, spec)
                if known != spec:
                    raise ProgramError(
                        f"{spec.name} is stored in one way in a stage and in another in a stage "
                        f"of the same ranks: {known} and {spec}",
                        hint=f"fix its layout: parameters[{spec.name!r}] of the plan",
                    )
        return list(found.values())

    @property
    def buffers(self) -> list[rt.BufferSpec]:
        """The buffers of this rank's stages, each once."""
        found: dict[str, rt.BufferSpec] = {}
        for stage in self.stages.values():
            before = stage.beforehand[1].BUFFERS if stage.beforehand else ()
            for spec in (*stage.generated[0].BUFFERS, *before):
                found.setdefault(spec.name, spec)
        return list(found.values())

    def make_store(self) -> rt.ParameterStore:
        """Memory for the parameters and buffers of this rank's stages."""
        first: dict[Hashable, nn.Module] = {
            part: stage.modules[0] for part, stage in self.stages.items()
        }
        store = rt.ParameterStore(
            first, self.mesh, self.parameters, self.buffers, device=self.device
        )
        self._attach(store, but=list(first.values()))
        mine = {p.name for p in self.parameters} | {b.name for b in self.buffers}
        sources: list[Parameter | Buffer] = [*self.graph.parameters, *self.graph.buffers]
        store.elsewhere = frozenset(
            name for s in sources if s.name not in mine for name in (s.name, *s.aliases)
        )
        store.trained_elsewhere = tuple(
            (p.name, *p.aliases)
            for p in self.graph.parameters
            if p.requires_grad and p.name not in mine
        )
        return store

    def attach(self, store: rt.ParameterStore) -> None:
        """Use memory that is there already."""
        self._attach(store, but=[])

    def _attach(self, store: rt.ParameterStore, but: list[nn.Module]) -> None:
        done = list(but)
        for part, stage in self.stages.items():
            others = [stage.beforehand[0]] if stage.beforehand else []
            for module in (*stage.modules, *others):
                if not any(module is known for known in done):
                    done.append(module)
                    store.attach(module, part)

    def executor(self, store: rt.ParameterStore, recorder: Any = None) -> rt.Executor:
        """What runs this rank's actions."""
        shapes = {i.name: self._whole(i) for i in self.graph.inputs}
        return rt.Executor(self.spec, self.stages, self.mesh, store, shapes, self.device, recorder)

    def _whole(self, source: Input) -> tuple[int, ...]:
        """The shape of an input of the whole batch; the graph may be of one micro-batch."""
        shape = list(self.graph.values[source.value].shape)
        dim = self.spec.batch_dims.get(source.name)
        if dim is not None and not self.spec.timed:
            shape[dim] *= self.spec.microbatches
        return tuple(shape)


def build(generated: Any, mesh: rt.ProcessMesh, rng: Any, device: Any, graph: Graph) -> nn.Module:
    """The generated module; constants are passed where it takes some."""
    takes = "constants" in generated.Model.__init__.__code__.co_varnames
    constants: Mapping[str, torch.Tensor] = {c.value: c.data for c in graph.constants}
    extra = {"constants": constants} if takes else {}
    module: nn.Module = generated.Model(mesh, rng, device, **extra)
    return module
