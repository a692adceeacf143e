"""Load emitted sources as modules of this process, and build one rank's program from them.

Sources are compiled from memory and registered with `linecache`, so that tracebacks show their
lines; nothing is read from disk. Errors about indices in emitted code name the place in the user's
model that the code came from.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import linecache
import re
import traceback
import types
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.errors import BatchError, ProgramError
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import BufferSpec, ParameterSpec
from shardwise.runtime.pipeline import PipelineSpec, StageModules
from shardwise.runtime.pipeline.executor import Executor
from shardwise.runtime.rng import Rng
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tracing import Recorder

FILENAME = "<shardwise program "  # the prefix of file names of emitted code
_ORIGIN = re.compile(r"^\s*# (?P<place>.+ \(\S+:\d+\))\s*$")
_OUT_OF_RANGE = re.compile(r"out of (range|bounds)", re.IGNORECASE)


class CapturedModel(Protocol):
    """The attributes of the captured graph (`shardwise.ir.Graph`) that a program uses."""

    @property
    def functions(self) -> Mapping[str, Any]: ...  # the user's classes that cannot be imported
    @property
    def values(self) -> Mapping[str, Any]: ...  # with shape and dtype
    @property
    def inputs(self) -> Sequence[Any]: ...
    @property
    def input_constants(self) -> Any: ...
    @property
    def constants(self) -> Sequence[Any]: ...
    @property
    def parameters(self) -> Sequence[Any]: ...
    @property
    def buffers(self) -> Sequence[Any]: ...
    @property
    def output_spec(self) -> Any: ...
    @property
    def hooks(self) -> Sequence[Any]: ...


def load(source: str, functions: Mapping[str, Any] | None = None) -> types.ModuleType:
    """Return the module that `source` defines; `functions` are classes that it cannot import."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"{FILENAME}{digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"shardwise_program_{digest}")
    module.__dict__["FUNCTIONS"] = dict(functions or {})
    try:
        exec(compile(source, filename, "exec"), module.__dict__)  # emitted by this package
    except SyntaxError as error:
        raise ProgramError(f"the emitted code is not valid Python: {error}") from error
    if "Model" in module.__dict__:  # tracebacks need the source as long as the program exists
        weakref.finalize(module.__dict__["Model"], linecache.cache.pop, filename, None)
    return module


def parameters_of(generated: Any) -> list[ParameterSpec]:
    """Return the parameters of an emitted file, which may give a size for all buckets."""
    size = getattr(generated, "BUCKET_BYTES", 0)
    return [spec if spec.bucket else replace(spec, bucket=size) for spec in generated.PARAMETERS]


@contextlib.contextmanager
def naming_places() -> Iterator[None]:
    """Add the place in the user's model to errors about indices in emitted code."""
    try:
        yield
    except BatchError as error:
        place = None if error.where else origin(error)
        if place is None:
            raise
        raise BatchError(error.message, where=place, hint=error.hint) from error
    except (IndexError, RuntimeError) as error:
        place = origin(error) if _OUT_OF_RANGE.search(str(error)) else None
        if place is None:
            raise
        first = str(error).partition("\n")[0]
        raise BatchError(
            f"an index of the batch is out of range: {first}",
            where=place,
            hint="compare the batch with the sizes of the tensors that it indexes",
        ) from error


def origin(error: BaseException) -> str | None:
    """Return the place in the model of the emitted line that raised: `head (model.py:41)`.

    Emitted code has it in the last comment above the line.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(FILENAME) or frame.lineno is None:
            continue
        lines = linecache.getlines(frame.filename)[: frame.lineno]
        for line in reversed(lines):
            if comment := _ORIGIN.match(line):
                return re.sub(r"\s+", " ", comment["place"])
            if line.lstrip().startswith("def "):
                break
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSources:
    """The files of one stage: one per class of positions, and those that precompute values."""

    places: tuple[tuple[int, ...], ...]  # positions (micro-batch and rank) of each text
    texts: tuple[str, ...]
    before_ranks: tuple[tuple[int, ...], ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSources:
    """All files of a pipeline."""

    pipeline: str
    stages: tuple[StageSources, ...]

    @property
    def texts(self) -> list[str]:
        """All texts, in the order of `files`."""
        return list(self.files().values())

    def with_texts(self, texts: Sequence[str]) -> PipelineSources:
        """Return the same sources with other texts, in the order of `files`."""
        remaining = iter(texts)
        pipeline = next(remaining)
        stages = []
        for stage in self.stages:
            own = tuple(itertools.islice(remaining, len(stage.texts)))
            before = tuple(itertools.islice(remaining, len(stage.before)))
            stages.append(replace(stage, texts=own, before=before))
        return PipelineSources(pipeline=pipeline, stages=tuple(stages))

    def files(self) -> dict[str, str]:
        """Return the texts by file name."""
        files = {"pipeline.py": self.pipeline}
        for index, stage in enumerate(self.stages):
            for kind, texts in (("", stage.texts), ("_beforehand", stage.before)):
                for number, text in enumerate(texts):
                    suffix = f"_{number}" if len(texts) > 1 else ""
                    files[f"stage_{index}{kind}{suffix}.py"] = text
        return files


class LoadedPipeline:
    """The generated modules of one rank's stages."""

    def __init__(
        self,
        sources: PipelineSources,
        graph: CapturedModel,
        mesh: ProcessMesh,
        rng: Rng,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = PipelineSpec.of(load(sources.pipeline))
        self.graph, self.mesh, self.rng, self.device = graph, mesh, rng, device
        rank = mesh.ranks[mesh.rank]
        own = [i for i, stage in enumerate(self.spec.stages) if rank in stage.ranks]
        self.stages = {i: self._stage(sources.stages[i]) for i in own}

    def _stage(self, sources: StageSources) -> StageModules:
        files = [load(text, self.graph.functions) for text in sources.texts]
        modules = [build(f, self.mesh, self.rng, self.device, self.graph) for f in files]
        indices = []  # of each micro-batch's file
        for k in range(self.spec.num_microbatches):
            place = k * self.mesh.size + self.mesh.rank if self.spec.timed else self.mesh.rank
            indices.append(next(i for i, places in enumerate(sources.places) if place in places))
        precompute = None
        for ranks, text in zip(sources.before_ranks, sources.before, strict=True):
            if self.mesh.rank in ranks:
                file = load(text, self.graph.functions)
                precompute = (build(file, self.mesh, self.rng, self.device, self.graph), file)
        return StageModules(
            modules=[modules[i] for i in indices],
            generated=[files[i] for i in indices],
            precompute=precompute,
        )

    @property
    def parameters(self) -> list[ParameterSpec]:
        """The parameters of this rank's stages, each once."""
        specs: dict[str, ParameterSpec] = {}
        for stage in self.stages.values():
            for spec in parameters_of(stage.generated[0]):
                first = specs.setdefault(spec.name, spec)
                if first != spec:
                    raise ProgramError(
                        f"two stages of the same ranks store {spec.name} differently: "
                        f"{first} and {spec}",
                        hint=f"fix its layout: parameters[{spec.name!r}] of the plan",
                    )
        return list(specs.values())

    @property
    def buffers(self) -> list[BufferSpec]:
        """The buffers of this rank's stages, each once."""
        specs: dict[str, BufferSpec] = {}
        for stage in self.stages.values():
            more = stage.precompute[1].BUFFERS if stage.precompute else ()
            for spec in (*stage.generated[0].BUFFERS, *more):
                specs.setdefault(spec.name, spec)
        return list(specs.values())

    @property
    def modules(self) -> list[tuple[Hashable, nn.Module]]:
        """Every module of this rank, with the stage that it belongs to."""
        parts: dict[nn.Module, Hashable] = {}
        for part, stage in self.stages.items():
            for module in (*stage.modules, *(stage.precompute or ())[:1]):
                parts.setdefault(module, part)
        return [(part, module) for module, part in parts.items()]

    def make_store(self) -> ParameterStore:
        """Allocate the parameters and buffers of this rank's stages."""
        return make_store([self], self.parameters, self.mesh, self.device)

    def attach(self, store: ParameterStore) -> None:
        """Use parameters that are already allocated."""
        for part, module in self.modules:
            store.attach(module, part, self.parameters)

    def executor(self, store: ParameterStore, recorder: Recorder | None = None) -> Executor:
        """Return the executor of this rank's actions."""
        shapes = {}
        for source in self.graph.inputs:
            shape = list(self.graph.values[source.value].shape)
            dim = self.spec.batch_dims.get(source.name)
            if dim is not None and not self.spec.timed:  # the graph is of one micro-batch
                shape[dim] *= self.spec.num_microbatches
            shapes[source.name] = tuple(shape)
        return Executor(self.spec, self.stages, self.mesh, store, shapes, self.device, recorder)


class LoadedModule:
    """The generated module of one rank of a program without stages."""

    def __init__(
        self,
        source: str,
        graph: CapturedModel,
        mesh: ProcessMesh,
        rng: Rng,
        device: torch.device | str = "cpu",
    ) -> None:
        self.graph, self.generated = graph, load(source, graph.functions)
        self.module = build(self.generated, mesh, rng, device, graph)
        self.parameters: list[ParameterSpec] = parameters_of(self.generated)
        self.buffers: list[BufferSpec] = list(self.generated.BUFFERS)
        self.modules: list[tuple[Hashable, nn.Module]] = [(0, self.module)]

    def attach(self, store: ParameterStore) -> None:
        """Use parameters that are already allocated."""
        store.attach(self.module, specs=self.parameters)


def make_store(
    programs: Sequence[LoadedModule | LoadedPipeline],
    parameters: Sequence[ParameterSpec],
    mesh: ProcessMesh,
    device: torch.device | str,
) -> ParameterStore:
    """Allocate this rank's parameters and buffers, which all of these programs use."""
    buffers = {buffer.name: buffer for program in programs for buffer in program.buffers}
    modules = [pair for program in programs for pair in program.modules]
    store = ParameterStore(modules, mesh, parameters, list(buffers.values()), device=device)
    graph = programs[0].graph
    local = {p.name for p in parameters} | set(buffers)
    remote = [p for p in graph.parameters if p.name not in local]
    store.parameters_elsewhere = tuple((p.name, *p.aliases) for p in remote)
    remote_buffers = [(b.name, *b.aliases) for b in graph.buffers if b.name not in local]
    store.elsewhere = frozenset(
        name for names in (*store.parameters_elsewhere, *remote_buffers) for name in names
    )
    for p in remote:
        value = graph.values[p.value]
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        store.stand_ins[p.name] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return store


def build(
    generated: Any, mesh: ProcessMesh, rng: Any, device: Any, graph: CapturedModel
) -> nn.Module:
    """Return the generated module, constructed with the graph's constants if it uses them."""
    options = {}
    if "constants" in generated.Model.__init__.__code__.co_varnames:
        options["constants"] = {c.value: c.data for c in graph.constants}
    module: nn.Module = generated.Model(mesh, rng, device, **options)
    return module
