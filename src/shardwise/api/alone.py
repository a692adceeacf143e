"""One rank's part of a program, without its weights and, if nobody is there, without the others.

Enters: a compiled program, a rank and a device. Leaves: a `ParallelModule` whose collectives answer
at once and move nothing: what it allocates and computes is real, its results mean nothing. On a
mesh that is given, it communicates as any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise import runtime as rt
from shardwise.api.compiled import PipelineProgram, Program
from shardwise.api.steps import step_options
from shardwise.ir import TensorType
from shardwise.plans import Plan
from shardwise.runtime.loader import LoadedModule, LoadedPipeline
from shardwise.runtime.step import ModuleStep, PipelineStep


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
        transport: type[rt.FakeTransport] = rt.FakeTransport,
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
            rt.disconnect(self.store, on_gradient)
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


def _mesh(plan: Plan, rank: int, transport: rt.FakeTransport) -> rt.ProcessMesh:
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
