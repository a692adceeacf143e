"""The compiled steps of a parallel module, and the cache of programs for later batches.

A `ModuleStep` runs a generated module; a `PipelineStep` runs the actions of this rank's stages.
A program is compiled when a batch with a new signature arrives. Training in which every batch has
another size or plain value would compile one program per step: a warning reports this, and the
least recently used programs are dropped. Ranks get the same batches, so they cache the same
programs.
"""

import contextlib
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.batch import flatten_batch, path_name, read_batch, rebuild_output
from shardwise.errors import ProgramError
from shardwise.runtime.compiled import begin_graphs
from shardwise.runtime.loader import CapturedModel, LoadedModule, LoadedPipeline, naming_places
from shardwise.runtime.memory import offload_activations
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.pipeline.executor import PipelineRun
from shardwise.runtime.splits import local_shape, take_local
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tracing import Recorder, called_submodules
from shardwise.runtime.user_model import Hook

MAX_PROGRAMS = 60  # `ParallelModule` has a bit per program in an int64 mask of those that fit
MAX_VARIANTS = 16  # combinations of guarded values for batches of one signature
MANY_PROGRAMS = 25  # warn about the cost of compilation at this number, and at every doubling


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """Everything that a compiled program depends on.

    `step` names one of several steps over the same modules; `batch` is the batch's signature;
    `world` is the relevant state outside the batch, such as flags of the user's model. Programs
    with guards have a `variant` for each combination of values that Python looked at.
    """

    step: str
    training: bool
    batch: Hashable
    world: Hashable
    variant: int = 0


FindBroken = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The properties of plan and graph that matter when a step runs.

    Floating-point inputs are cast to `input_dtypes`; `check_indices` raises a `BatchError` for
    indices of the full batch that are out of range; `find_broken` returns the user's line of a
    guard that does not hold for the tensors of a full batch and buffers; `units` are the modules
    whose hooks may break the graph under torch.compile.
    """

    check_indices: Callable[[Mapping[str, Tensor]], None]
    input_dtypes: Mapping[str, torch.dtype]
    offload_activations: bool
    trains: bool
    units: Sequence[str]
    find_broken: FindBroken | None = None


class StepProgram:
    """A compiled step for batches of one signature.

    A batch is given in full, or as this rank's part of it (`local`), which `local_batch` returns.
    """

    def __init__(self, graph: CapturedModel, options: StepOptions) -> None:
        self.graph, self.options = graph, options
        self.hooks: Sequence[Hook] = graph.hooks  # gradient hooks of the model's parameters
        self._constants = dict(graph.input_constants)
        self._local_shapes: Mapping[str, tuple[int, ...]] = {}

    def train(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor, Any]:
        """Run forward and backward inside `store.step`; return the loss and, on demand, outputs."""
        raise NotImplementedError

    def evaluate(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor | None, Any]:
        """Return the loss, if the model has one, and outputs on demand, in `store.evaluate`."""
        raise NotImplementedError

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of an input of the full batch."""
        raise NotImplementedError

    def generated(self) -> list[nn.Module]:
        """Return the generated modules, which use the memory of the store."""
        raise NotImplementedError

    @property
    def is_guarded(self) -> bool:
        """Whether Python looked at values of the batch when the step was captured."""
        return self.options.find_broken is not None

    def broken_guard(self, batch: Any, store: ParameterStore) -> str | None:
        """Return the user's line of a guard that does not hold for a full batch, if there is one.

        A guard is a value that Python looked at when the step was captured.
        """
        if self.options.find_broken is None:
            return None
        return self.options.find_broken(flatten_batch(batch)[0], store.buffers)

    def finish(self) -> None:
        """Finish a step once its gradients are complete."""

    def local_batch(self, batch: Any) -> Any:
        """Return the batch with this rank's part of every tensor."""
        call = read_batch(batch)
        return call.batch_with([self.local_part(path_name(path), t) for path, t in call.tensors])

    def takes(self, batch: Any) -> bool:
        """Return whether a local batch has the shapes and constants that this program expects."""
        tensors, constants = flatten_batch(batch)
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        return shapes == self._local_shapes and constants == self._constants

    def _tensors(self, batch: Any, local: bool) -> dict[str, Tensor]:
        tensors = flatten_batch(batch)[0]
        if not local:
            # Every rank has the full batch and finds the same mistake: all of them raise.
            self.options.check_indices(tensors)
        return tensors

    def _offloading(self) -> contextlib.AbstractContextManager[object]:
        enabled = self.options.offload_activations
        return offload_activations() if enabled else contextlib.nullcontext()


Specialize = Callable[[ProgramKey, Any], StepProgram]


class ModuleStep(StepProgram):
    """A step of one generated module, which may be wrapped by torch.compile."""

    def __init__(
        self,
        loaded: LoadedModule,
        module: Any,
        mesh: ProcessMesh,
        device: torch.device,
        options: StepOptions,
        recorder: Recorder | None,
        *,
        graphs: bool = False,
    ) -> None:
        super().__init__(loaded.graph, options)
        self.module, self.mesh, self.device = module, mesh, device
        self.graphs = graphs  # whether CUDA graphs replay the step
        self.recorder = recorder or Recorder(0, enabled=False)
        # Hooks inside of a compiled program would break its graph; those of units do so anyway.
        compiled = hasattr(module, "_orig_mod")
        self.recorder.watch(module, options.units if compiled else called_submodules(module))
        self.splits = dict(loaded.generated.INPUTS)
        values, place, axes = self.graph.values, mesh.coordinates, mesh.axes
        self._local_shapes = {
            i.name: local_shape(values[i.value].shape, self.splits[i.name], place, axes)
            for i in self.graph.inputs
        }

    def train(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor, Any]:
        if self.graphs:
            begin_graphs(store)
        with store.forward(), self._offloading(), self.recorder.span("compute", "0F0"):
            loss, out = self._forward(batch, outputs, local)
        if loss is None or not loss.requires_grad:
            raise _not_trained()
        with store.backward(last=True), self.recorder.span("compute", "0B0"):
            store.scaled(loss).backward()  # type: ignore[no-untyped-call]
        if self.graphs:  # the next step uses the memory of these results
            loss, out = tree_map_only(Tensor, lambda t: t.detach().clone(), (loss, out))
        return loss, out

    def evaluate(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor | None, Any]:
        if self.graphs:
            begin_graphs(store)
        with store.forward():
            return self._forward(batch, outputs, local)

    def _forward(self, batch: Any, outputs: bool, local: bool) -> tuple[Tensor | None, Any]:
        tensors, dtypes = self._tensors(batch, local), self.options.input_dtypes
        inputs = []
        for name in self._local_shapes:
            tensor = tensors[name] if local else self.local_part(name, tensors[name])
            inputs.append(tensor.to(self.device, dtypes.get(name)))
        with naming_places():
            if not outputs:
                return self.module(*inputs), None
            loss, leaves = self.module(*inputs, outputs=True)
        return loss, rebuild_output(self.graph.output_spec, leaves)

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        splits = self.splits.get(name, ())
        return take_local(tensor.detach(), splits, self.mesh.coordinates, self.mesh.axes)

    def generated(self) -> list[nn.Module]:
        return [getattr(self.module, "_orig_mod", self.module)]


class PipelineStep(StepProgram):
    """A step of stages and micro-batches: the actions of this rank."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        store: ParameterStore,
        options: StepOptions,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(loaded.graph, options)
        self.loaded, self.store = loaded, store
        self.executor = loaded.executor(store, recorder)
        reader = self.executor.reader
        self._local_shapes = {i.name: reader.local_shape(i.name) for i in self.graph.inputs}

    def train(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor, Any]:
        if not self.options.trains:
            raise _not_trained()
        with self._offloading():
            loss, out = self._run(batch, outputs, local, training=True, scale=store.loss_scale)
        assert loss is not None
        return loss, out

    def evaluate(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor | None, Any]:
        return self._run(batch, outputs, local, training=False)

    def _run(
        self, batch: Any, outputs: bool, local: bool, **options: Any
    ) -> tuple[Tensor | None, Any]:
        dtypes, tensors = self.options.input_dtypes, self._tensors(batch, local)
        inputs = {name: tensor.to(dtype=dtypes.get(name)) for name, tensor in tensors.items()}
        run = PipelineRun(inputs=inputs, outputs=outputs, local=local, **options)
        with naming_places():
            loss, leaves = self.executor.run(run)
        return loss, None if leaves is None else rebuild_output(self.graph.output_spec, leaves)

    def finish(self) -> None:
        """Sum the gradients of parameters that several stages use."""
        with self.store.recorder.span("waiting", "gradients"):
            self.executor.tied.sum_gradients()

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        return self.executor.reader.local_part(name, tensor)

    def generated(self) -> list[nn.Module]:
        return [module for _, module in self.loaded.modules]


def _not_trained() -> ProgramError:
    if not torch.is_grad_enabled():
        return ProgramError(
            "train_step computes gradients, which are disabled here",
            hint="call it outside of torch.no_grad() and torch.inference_mode(); "
            "pm.eval_loss(batch) returns the loss without gradients",
        )
    return ProgramError(
        "the loss does not depend on any trained parameter",
        hint="parameter.requires_grad_(True) for the parameters to train",
    )


class Programs:
    """A cache of programs by key, which drops the least recently used."""

    def __init__(
        self,
        store: ParameterStore,
        specialize: Specialize,
        programs: Mapping[ProgramKey, StepProgram],
        *,
        warns: bool,
    ) -> None:
        self._store, self._specialize, self._warns = store, specialize, warns
        self._by_key: OrderedDict[ProgramKey, StepProgram] = OrderedDict(programs)
        self._num_variants = Counter(replace(key, variant=0) for key in programs)
        self.is_guarded = any(program.is_guarded for program in programs.values())
        self._num_compiled, self._seconds = 0, 0.0
        self._limit = MANY_PROGRAMS

    def __contains__(self, key: ProgramKey) -> bool:
        return key in self._by_key

    def items(self) -> Iterator[tuple[ProgramKey, StepProgram]]:
        """Iterate over all programs, in an order that is the same on every rank."""
        yield from self._by_key.items()

    def variants(self, key: ProgramKey) -> list[tuple[ProgramKey, StepProgram]]:
        """Return the programs that differ from a key only in their variant."""
        num = self._num_variants[replace(key, variant=0)]
        keys = [replace(key, variant=variant) for variant in range(num)]
        return [(k, self._by_key[k]) for k in keys if k in self._by_key]

    def next_variant(self, key: ProgramKey) -> ProgramKey:
        """Return the key of a program that does not exist yet."""
        return replace(key, variant=self._num_variants[replace(key, variant=0)])

    def use(self, key: ProgramKey) -> None:
        """Mark a program as just used."""
        self._by_key.move_to_end(key)

    def get(self, key: ProgramKey, batch: Any) -> StepProgram:
        """Return the program for a batch, compiled if it is new; all ranks call this together."""
        program = self._by_key.get(key)
        if program is None:
            start = time.perf_counter()
            program = self._by_key[key] = self._specialize(key, batch)
            self._seconds += time.perf_counter() - start
            base = replace(key, variant=0)
            self._num_variants[base] = max(self._num_variants[base], key.variant + 1)
            self.is_guarded |= program.is_guarded
            self._num_compiled += 1
            if self._num_compiled >= self._limit:
                self._warn()
            while len(self._by_key) > MAX_PROGRAMS:
                oldest, dropped = self._by_key.popitem(last=False)
                self._store.detach(oldest, dropped.generated())
        self.use(key)
        return program

    def _warn(self) -> None:
        self._limit *= 2
        if self._warns:
            warnings.warn(
                f"{self._num_compiled} programs were compiled for batches of different sizes or "
                f"values, in {self._seconds:.1f} s in total; the {MAX_PROGRAMS} most recently used "
                "are kept. Pad batches to a few lengths (multiples of 64), and pass changing "
                "numbers as tensors",
                RuntimeWarning,
                stacklevel=2,
            )
