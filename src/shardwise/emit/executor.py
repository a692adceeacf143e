"""Emitted files of a pipeline as what one rank runs.

Enters: `PipelineSources`, and this rank's mesh. Leaves: an `Executor` over a `ParameterStore`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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
        for k in range(self.spec.num_microbatches):
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

    @property
    def modules(self) -> list[tuple[Hashable, nn.Module]]:
        """Every module of this rank, with the stage that it belongs to."""
        found: list[tuple[Hashable, nn.Module]] = []
        for part, stage in self.stages.items():
            others = [stage.beforehand[0]] if stage.beforehand else []
            for module in (*stage.modules, *others):
                if not any(module is known for _, known in found):
                    found.append((part, module))
        return found

    def make_store(self) -> rt.ParameterStore:
        """Memory for the parameters and buffers of this rank's stages."""
        return make_store([self], self.parameters, self.mesh, self.device)

    def attach(self, store: rt.ParameterStore) -> None:
        """Use memory that is there already."""
        for part, module in self.modules:
            store.attach(module, part, self.parameters)

    def executor(self, store: rt.ParameterStore, recorder: Any = None) -> rt.Executor:
        """What runs this rank's actions."""
        shapes = {i.name: self._whole(i) for i in self.graph.inputs}
        return rt.Executor(self.spec, self.stages, self.mesh, store, shapes, self.device, recorder)

    def _whole(self, source: Input) -> tuple[int, ...]:
        """The shape of an input of the whole batch; the graph may be of one micro-batch."""
        shape = list(self.graph.values[source.value].shape)
        dim = self.spec.batch_dims.get(source.name)
        if dim is not None and not self.spec.timed:
            shape[dim] *= self.spec.num_microbatches
        return tuple(shape)


class LoadedModule:
    """The generated module of one rank of a program without stages."""

    def __init__(
        self,
        source: str,
        graph: Graph,
        mesh: rt.ProcessMesh,
        rng: rt.Rng,
        device: torch.device | str = "cpu",
    ) -> None:
        self.graph, self.generated = graph, load(source, graph.functions)
        self.module = build(self.generated, mesh, rng, device, graph)
        self.parameters: list[rt.ParameterSpec] = list(self.generated.PARAMETERS)
        self.buffers: list[rt.BufferSpec] = list(self.generated.BUFFERS)
        self.modules: list[tuple[Hashable, nn.Module]] = [(0, self.module)]

    def attach(self, store: rt.ParameterStore) -> None:
        """Use memory that is there already."""
        store.attach(self.module, specs=self.parameters)


def make_store(
    programs: Sequence[LoadedModule | LoadedPipeline],
    parameters: Sequence[rt.ParameterSpec],
    mesh: rt.ProcessMesh,
    device: torch.device | str,
) -> rt.ParameterStore:
    """Memory for what this rank holds, used by all of these programs."""
    buffers = {buffer.name: buffer for program in programs for buffer in program.buffers}
    modules = [pair for program in programs for pair in program.modules]
    store = rt.ParameterStore(modules, mesh, parameters, list(buffers.values()), device=device)
    graph = programs[0].graph
    held = {p.name for p in parameters} | set(buffers)
    sources: list[Parameter | Buffer] = [*graph.parameters, *graph.buffers]
    store.elsewhere = frozenset(
        name for s in sources if s.name not in held for name in (s.name, *s.aliases)
    )
    store.stand_ins = {
        p.name: nn.Parameter(
            torch.empty(
                graph.values[p.value].shape, dtype=graph.values[p.value].dtype, device="meta"
            ),
            requires_grad=p.requires_grad,
        )
        for p in graph.parameters
        if p.name not in held
    }
    store.parameters_elsewhere = tuple(
        (p.name, *p.aliases) for p in graph.parameters if p.name not in held
    )
    return store


def build(generated: Any, mesh: rt.ProcessMesh, rng: Any, device: Any, graph: Graph) -> nn.Module:
    """The generated module; constants are passed where it takes some."""
    takes = "constants" in generated.Model.__init__.__code__.co_varnames
    constants: Mapping[str, torch.Tensor] = {c.value: c.data for c in graph.constants}
    extra = {"constants": constants} if takes else {}
    module: nn.Module = generated.Model(mesh, rng, device, **extra)
    return module
