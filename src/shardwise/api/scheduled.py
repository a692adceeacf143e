"""A step of stages and micro-batches, as the parallel module calls it.

Enters: what one rank runs of a pipeline. Leaves: a `StepProgram`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise import runtime as rt
from shardwise.api.indices import BatchIndices
from shardwise.api.steps import trained_parameters
from shardwise.emit import LoadedPipeline, naming_places
from shardwise.errors import ProgramError
from shardwise.frontend import flatten_batch, rebuild_output
from shardwise.frontend.batch import path_name, read_batch
from shardwise.ir import Graph
from shardwise.plans import Plan


class ScheduledStep:
    """Runs the actions of this rank for batches of one signature."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        loaded: LoadedPipeline,
        store: rt.ParameterStore,
        recorder: rt.Recorder | None,
    ) -> None:
        self.plan, self.graph, self.loaded, self.store = plan, graph, loaded, store
        self.executor = loaded.executor(store, recorder)
        self.spec, self.hooks = graph.output_spec, graph.hooks
        self.trains = bool(trained_parameters(graph))
        self.constants = dict(graph.input_constants)
        self.dtypes = input_dtypes(graph, plan)
        self.indices = BatchIndices(graph)
        reader = self.executor.reader
        self.local_shapes = {i.name: reader.local_shape(i.name) for i in graph.inputs}

    def train(
        self, batch: Any, store: rt.ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor, Any]:
        if not self.trains:
            raise not_trained()
        tensors = self._tensors(batch, local)
        with offloading(self.plan), naming_places():
            loss, leaves = self.executor.train(
                tensors, outputs=outputs, scale=store.loss_scale, whole=not local
            )
        return loss, rebuild_output(self.spec, leaves) if leaves is not None else None

    def evaluate(
        self, batch: Any, store: rt.ParameterStore, *, local: bool
    ) -> tuple[Tensor | None, Any]:
        tensors = self._tensors(batch, local)
        with naming_places():
            loss, leaves = self.executor.evaluate(tensors, whole=not local)
        return loss, rebuild_output(self.spec, leaves)

    def loss(self, batch: Any, store: rt.ParameterStore, *, local: bool) -> Tensor:
        tensors = self._tensors(batch, local)
        with naming_places():
            return self.executor.evaluate_loss(tensors, whole=not local)

    def finish(self) -> None:
        """Sum the gradients of parameters that several stages use."""
        with self.store.recorder.span("waiting", "gradients"):
            self.executor.tied.sum_gradients()

    def _tensors(self, batch: Any, local: bool) -> Mapping[str, Tensor]:
        tensors, _ = flatten_batch(batch)
        if not local:
            self.indices.check(tensors)
        return {name: t.to(dtype=self.dtypes.get(name)) for name, t in tensors.items()}

    def local_batch(self, batch: Any) -> Any:
        """What this rank reads of a batch: its rows of every micro-batch, nothing of the rest."""
        call = read_batch(batch)
        parts = [self.executor.reader.local_part(path_name(path), t) for path, t in call.tensors]
        return call.batch_with(parts)

    def generated(self) -> list[torch.nn.Module]:
        """The generated modules of this rank's stages."""
        return [module for _, module in self.loaded.modules]

    def takes(self, batch: Any) -> bool:
        """Whether these are parts of the batch this program was made for."""
        tensors, constants = flatten_batch(batch)
        mine = {name: tuple(t.shape) for name, t in tensors.items()}
        return mine == self.local_shapes and constants == self.constants


def input_dtypes(graph: Graph, plan: Plan) -> dict[str, torch.dtype]:
    """The types that floating inputs are cast to, where the plan computes in a type of its own."""
    if not plan.precision.compute or plan.precision.autocast:
        return {}
    kinds = {i.name: graph.values[i.value].dtype for i in graph.inputs}
    return {name: dtype for name, dtype in kinds.items() if dtype.is_floating_point}


def offloading(plan: Plan) -> contextlib.AbstractContextManager[object]:
    """Where the plan keeps activations on the host."""
    return rt.offload_activations() if "activations" in plan.offload else contextlib.nullcontext()


def not_trained() -> ProgramError:
    """The error of a training step that has nothing to train."""
    if not torch.is_grad_enabled():
        return ProgramError(
            "train_step computes gradients, and they are switched off here",
            hint="call it outside of torch.no_grad() and torch.inference_mode(); "
            "pm.eval_loss(batch) is the loss without gradients",
        )
    return ProgramError(
        "the loss depends on no parameter that is trained",
        hint="parameter.requires_grad_(True) for what is to be trained",
    )
