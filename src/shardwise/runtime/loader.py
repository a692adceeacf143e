"""Load emitted sources as modules of this process, and build what one rank runs of them.

Sources are compiled from memory and registered with `linecache`, so that tracebacks show their
lines; nothing is read from disk. Errors about indices in emitted code get the place in the user's
model that the code came from.
"""

from __future__ import annotations

import contextlib
import hashlib
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

FILENAME = "<shardwise program "  # how the file names of emitted code begin
_ORIGIN = re.compile(r"^\s*# (?P<place>.+ \(\S+:\d+\))\s*$")
_OUT_OF_RANGE = re.compile(r"out of (range|bounds)", re.IGNORECASE)


class CapturedModel(Protocol):
    """What a program still needs of the graph it was compiled from (`shardwise.ir.Graph`)."""

    @property
    def functions(self) -> Mapping[str, Any]:
        """Classes of the user's that cannot be imported."""
        ...

    @property
    def values(self) -> Mapping[str, Any]:
        """Shape and dtype of every value."""
        ...

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
    """Return the module that `source` defines; `functions` has classes that cannot be imported."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"{FILENAME}{digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"shardwise_program_{digest}")
    module.__dict__["FUNCTIONS"] = dict(functions or {})
    try:
        exec(compile(source, filename, "exec"), module.__dict__)  # emitted by this package
    except SyntaxError as error:
        raise ProgramError(f"the emitted code is not valid Python: {error}") from error
    if "Model" in module.__dict__:  # tracebacks need the text as long as the program exists
        weakref.finalize(module.__dict__["Model"], linecache.cache.pop, filename, None)
    return module


@contextlib.contextmanager
def naming_places() -> Iterator[None]:
    """Give errors about indices in emitted code the place in the model that they arose from."""
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
            hint="compare the batch with the size of what it indexes",
        ) from error


def origin(error: BaseException) -> str | None:
    """Return the place in the model of the emitted line that raised: `head (model.py:41)`.

    Emitted code carries it in the last comment above the line.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(FILENAME) or frame.lineno is None:
            continue
        lines = linecache.getlines(frame.filename)[: frame.lineno]
        for line in reversed(lines):
            if result := _ORIGIN.match(line):
                return re.sub(r"\s+", " ", result["place"])
            if line.lstrip().startswith("def "):
                break
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSources:
    """The files of one stage: one per class of positions, and what it precomputes."""

    places: tuple[tuple[int, ...], ...]  # of each text: positions (micro-batch and rank)
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
        rest = iter(texts)
        pipeline = next(rest)
        stages = []
        for stage in self.stages:
            own = tuple(next(rest) for _ in stage.texts)
            before = tuple(next(rest) for _ in stage.before)
            stages.append(replace(stage, texts=own, before=before))
        return PipelineSources(pipeline=pipeline, stages=tuple(stages))

    def files(self) -> dict[str, str]:
        """Return the texts by file name."""
        result = {"pipeline.py": self.pipeline}
        for index, stage in enumerate(self.stages):
            for number, text in enumerate(stage.texts):
                more = f"_{number}" if len(stage.texts) > 1 else ""
                result[f"stage_{index}{more}.py"] = text
            for number, text in enumerate(stage.before):
                more = f"_{number}" if len(stage.before) > 1 else ""
                result[f"stage_{index}_beforehand{more}.py"] = text
        return result


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
        built = [build(f, self.mesh, self.rng, self.device, self.graph) for f in files]
        chosen = []
        for k in range(self.spec.num_microbatches):
            place = k * self.mesh.size + self.mesh.rank if self.spec.timed else self.mesh.rank
            chosen.append(next(i for i, places in enumerate(sources.places) if place in places))
        precomputed = None
        for ranks, text in zip(sources.before_ranks, sources.before, strict=True):
            if self.mesh.rank in ranks:
                file = load(text, self.graph.functions)
                precomputed = (build(file, self.mesh, self.rng, self.device, self.graph), file)
        return StageModules(
            modules=[built[i] for i in chosen],
            generated=[files[i] for i in chosen],
            beforehand=precomputed,
        )

    @property
    def parameters(self) -> list[ParameterSpec]:
        """The parameters of this rank's stages, each once."""
        specs: dict[str, ParameterSpec] = {}
        for stage in self.stages.values():
            for spec in stage.generated[0].PARAMETERS:
                known = specs.setdefault(spec.name, spec)
                if known != spec:
                    raise ProgramError(
                        f"two stages of the same ranks store {spec.name} differently: "
                        f"{known} and {spec}",
                        hint=f"fix its layout: parameters[{spec.name!r}] of the plan",
                    )
        return list(specs.values())

    @property
    def buffers(self) -> list[BufferSpec]:
        """The buffers of this rank's stages, each once."""
        result: dict[str, BufferSpec] = {}
        for stage in self.stages.values():
            before = stage.beforehand[1].BUFFERS if stage.beforehand else ()
            for spec in (*stage.generated[0].BUFFERS, *before):
                result.setdefault(spec.name, spec)
        return list(result.values())

    @property
    def modules(self) -> list[tuple[Hashable, nn.Module]]:
        """Every module of this rank, with the stage that it belongs to."""
        result: list[tuple[Hashable, nn.Module]] = []
        for part, stage in self.stages.items():
            others = [stage.beforehand[0]] if stage.beforehand else []
            for module in (*stage.modules, *others):
                if not any(module is known for _, known in result):
                    result.append((part, module))
        return result

    def make_store(self) -> ParameterStore:
        """Allocate the parameters and buffers of this rank's stages."""
        return make_store([self], self.parameters, self.mesh, self.device)

    def attach(self, store: ParameterStore) -> None:
        """Use parameters that are already allocated."""
        for part, module in self.modules:
            store.attach(module, part, self.parameters)

    def executor(self, store: ParameterStore, recorder: Recorder | None = None) -> Executor:
        """Return what runs this rank's actions."""
        shapes = {i.name: self._full_shape(i) for i in self.graph.inputs}
        return Executor(self.spec, self.stages, self.mesh, store, shapes, self.device, recorder)

    def _full_shape(self, source: Any) -> tuple[int, ...]:
        """Return the shape of an input of the full batch; the graph may be of one micro-batch."""
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
        graph: CapturedModel,
        mesh: ProcessMesh,
        rng: Rng,
        device: torch.device | str = "cpu",
    ) -> None:
        self.graph, self.generated = graph, load(source, graph.functions)
        self.module = build(self.generated, mesh, rng, device, graph)
        self.parameters: list[ParameterSpec] = list(self.generated.PARAMETERS)
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
    held = {p.name for p in parameters} | set(buffers)
    sources: list[Any] = [*graph.parameters, *graph.buffers]
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


def build(
    generated: Any, mesh: ProcessMesh, rng: Any, device: Any, graph: CapturedModel
) -> nn.Module:
    """Return the generated module, with the constants it takes."""
    takes = "constants" in generated.Model.__init__.__code__.co_varnames
    constants: Mapping[str, torch.Tensor] = {c.value: c.data for c in graph.constants}
    extra = {"constants": constants} if takes else {}
    module: nn.Module = generated.Model(mesh, rng, device, **extra)
    return module
