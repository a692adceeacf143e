"""`capture` a training step as a graph, and `compile(graph, plan)` to readable Python.

Equal graphs and plans are compiled once per process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import nn

from shardwise import program as lowering
from shardwise.batch import path_name, read_batch
from shardwise.cluster import Mesh
from shardwise.dtypes import DTYPES
from shardwise.emit import emit, emit_pipeline
from shardwise.errors import BatchError, PlanError, ProgramError, ShardwiseError
from shardwise.files import read_json, write_bytes, write_text
from shardwise.frontend import capture as capture_once
from shardwise.frontend import skeleton
from shardwise.frontend.hooks import hooks_of, name_of, place_of
from shardwise.frontend.objective import LossFn, Model, Objective, StepFn, as_module, objective
from shardwise.frontend.python_state import Reads
from shardwise.frontend.sizes import GraphsBySize
from shardwise.ir import Graph
from shardwise.layouts.problem import constant_values
from shardwise.plans import Plan, Precision, Resolved, resolve
from shardwise.plans.execution import check_types
from shardwise.runtime.loader import PipelineSources
from shardwise.sharding.registry import rules_revision
from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise.simulation import MemoryUse


# ------------------------------------------------------------ capture
def capture(
    model: Model,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    plan: Plan | None = None,
    precision: str | Precision | None = None,
    step: StepFn | None = None,
    training: bool | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Capture the forward step of `model` on `batch`, up to the loss, as a graph.

    `batch` is a dict (keyword arguments), a tuple (positional) or a tensor. `training` sets the
    mode of the captured copy, by default the model's own. `device` is where tensors are taken to
    be, by default the model's device, or the CPU for meta tensors. With `precision`, for example
    "bf16", the step is captured in these dtypes; with `plan`, in the plan's dtypes, and for one
    micro-batch if micro-batches are separate batches (`per_microbatch`).

    Instead of a model and its loss function, a `step` may define what is computed: a function of
    the modules (the model, or a mapping from names to several) and the batch that returns the
    loss, or outputs that contain it.

    >>> graph = capture(nn.Linear(2, 1), (torch.zeros(3, 2),), lambda y, batch: y.mean())
    >>> [node.op for node in graph.nodes]
    ['aten.linear.default', 'aten.mean.default']
    """
    if plan is not None and precision is not None:
        raise PlanError(
            "plan= and precision= exclude each other", hint="a plan has its own precision"
        )
    if plan is None and precision is None:
        return capture_once(model, batch, loss_fn, step=step, training=training, device=device)
    if plan is None:
        kinds = Precision.of(precision)
        plan = Plan(name="", model="", fingerprint="", mesh=Mesh(), roles={}, precision=kinds)
    return capture_for_plan(
        model, batch, plan, loss_fn, step=step, training=training, device=device
    )


def capture_for_plan(
    model: Model,
    batch: Any,
    plan: Plan,
    loss_fn: Objective = None,
    *,
    step: StepFn | None = None,
    training: bool | None = None,
    device: torch.device | str | None = None,
    reads: Reads | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    graphs: GraphsBySize | None = None,
) -> Graph:
    """Capture one step as the plan computes it; see `capture`.

    `reads` collects the Python state that the graph depends on. `buffers` has the data of a model
    without any. `graphs` remembers traces of this step for batches of other sizes.
    """
    trace = graphs or capture_once
    model, loss_fn = as_module(model), objective(loss_fn, step)
    region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    first, *more = separate_batches(batch, plan)
    if more:
        _require_no_hooks(model)
    if buffers is None:
        buffers = dict(model.named_buffers())
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if plan.precision.compute:
        dtype = getattr(torch, plan.precision.compute)
        if plan.precision.autocast:
            region = torch.autocast(torch.device(device or "cpu").type, dtype, cache_enabled=False)
        else:
            model = cast_model(model, dtype)
            first, *more = (_cast_batch(part, dtype) for part in (first, *more))
    with region:
        graph = trace(
            model, first, loss_fn, training=training, device=device, reads=reads, buffers=buffers
        )
    require_guards(graph, more, buffers)
    return graph


def require_guards(
    graph: Graph, batches: Sequence[Any], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Raise a `BatchError` unless the guards of a graph hold for all of these batches."""
    for index, batch in enumerate(batches if graph.guards is not None else (), start=1):
        tensors = {path_name(path): tensor for path, tensor in read_batch(batch).tensors}
        broken = graph.guards.find_broken(tensors, buffers) if graph.guards else None
        if broken is not None:
            raise BatchError(
                f"micro-batches 0 and {index} are separate batches of the plan, and differ in a "
                "value that Python looks at",
                where=broken.source,
                hint="torch.where(condition, a, b), which computes both; or per_microbatch=False",
            )


def _require_no_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hook := next(iter(hooks_of(parameter)), None):
            raise PlanError(
                f"the gradient hook {name_of(hook)} on parameter {name} would run once per step, "
                "but on one device once per micro-batch",
                where=place_of(hook),
                hint="per_microbatch=False, or change the gradients between backward and step",
            )


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy without data whose floating-point parameters and buffers have this dtype."""
    twin = skeleton(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return twin


def _cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors in this dtype."""
    call = read_batch(batch)
    return call.batch_with([t.to(dtype) if t.is_floating_point() else t for _, t in call.tensors])


def microbatch(batch: Any, plan: Plan, index: int) -> Any:
    """Return micro-batch `index` of a batch whose micro-batches are separate, equal batches."""
    call = read_batch(batch)
    parts = []
    for path, tensor in call.tensors:
        dim = batch_dim(path_name(path), plan, tensor.shape)
        if dim is None:
            parts.append(tensor)
            continue
        rows, remainder = divmod(tensor.shape[dim], plan.num_microbatches)
        if remainder:
            raise BatchError(
                f"{tensor.shape[dim]} samples cannot be split into {plan.num_microbatches} "
                "micro-batches of equal size, which the plan treats as separate batches",
                where=path_name(path),
                hint="another batch size, or per_microbatch=False if the model allows it",
            )
        parts.append(tensor.narrow(dim, index * rows, rows))
    return call.batch_with(parts)


def separate_batches(batch: Any, plan: Plan) -> list[Any]:
    """Return the micro-batches that the plan treats as separate batches, or the full batch."""
    if not plan.per_microbatch or plan.num_microbatches == 1:
        return [batch]
    return [microbatch(batch, plan, index) for index in range(plan.num_microbatches)]


def batch_dim(name: str, plan: Plan, shape: Sequence[int]) -> int | None:
    """Return the dim of an input that counts samples; None if it has none."""
    dims = [dim for glob, dim in plan.inputs.items() if fnmatchcase(name, glob)]
    return dims[-1] if dims and dims[-1] is not None and len(shape) > dims[-1] else None


# ------------------------------------------------------------ compiled programs
CACHED_PROGRAMS = 32
WIDE = {dtype.name: dtype.exact for dtype in DTYPES.values() if dtype.exact}
_NARROW = re.compile(rf"\b({'|'.join(WIDE)})\b")


class _Compiled:
    """The common part of compiled programs: a lowered program and the texts of its files."""

    __slots__ = ()
    lowered: lowering.Program | lowering.Pipeline
    sources: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        """The captured step."""
        return self.lowered.graph

    @property
    def plan(self) -> Plan:
        """The plan that the program follows."""
        return self.lowered.plan

    @property
    def fingerprint(self) -> str:
        """A digest of the programs of all ranks; ranks that run together must agree on it."""
        digest = hashlib.sha256(json.dumps(self.plan.to_json()).encode())
        for source in self.sources:
            digest.update(source.encode(errors="backslashreplace"))
        return digest.hexdigest()[:16]

    def memory(
        self,
        rank: int = 0,
        optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
        *,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> MemoryUse:
        """Run a step of `rank` on tensors without data, and return its peak memory.

        `optimizer` is a class, or the name of one of torch's, with its `options`. `device` may be
        "cuda" on a machine with a GPU: some operators allocate differently there.
        """
        from shardwise.api.memory import rank_memory

        return rank_memory(self, rank, optimizer, device, options)  # type: ignore[arg-type]

    def files(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the ranks that run each file, and its text."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> dict[str, tuple[int, ...]]:
        """Write the code, `ranks.json` and the plan; return the ranks that run each file of code.

        Code that an earlier program left in the folder is removed.
        """
        folder, files = Path(folder), self.files()
        for name, (_, text) in files.items():
            write_text(folder / name, text, ProgramError)
        ranks_of = {name: ranks for name, (ranks, _) in files.items()}
        _remove_stale(folder, ranks_of)
        write_text(folder / "ranks.json", json.dumps(ranks_of, indent=2) + "\n", ProgramError)
        self.plan.save(folder / "plan.json")
        constants = {c.value: c.data.contiguous() for c in self.graph.constants}
        if constants:
            write_bytes(folder / "constants.safetensors", save(constants), ProgramError)
        return ranks_of

    def __str__(self) -> str:
        return str(self.lowered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(_Compiled):
    """The parallel program of all ranks: a text for each distinct rank program."""

    lowered: lowering.Program
    sources: tuple[str, ...]  # one per distinct rank program
    choices: Mapping[str, Mapping[str, str]]  # node -> mesh axis -> choice, except for constants

    def source(self, rank: int = 0) -> str:
        """Return the text that `rank` runs."""
        return self.files()[f"rank_{self.lowered.of_rank(rank).ranks[0]}.py"][1]

    def files(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the ranks that run each file, and its text: one per distinct rank program."""
        return {
            f"rank_{program.ranks[0]}.py": (program.ranks, text)
            for text, program in zip(self.sources, self.lowered.rank_programs, strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgram(_Compiled):
    """The parallel program of a plan with stages or micro-batches, and its files."""

    lowered: lowering.Pipeline
    text: PipelineSources

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        """The texts of all files."""
        return tuple(self.text.texts)

    def source(self, rank: int = 0) -> str:
        """Return the text that `rank` runs for its first stage and micro-batch."""
        for stage, sources in zip(self.lowered.stages, self.text.stages, strict=True):
            if rank in stage.ranks:
                index = stage.ranks.index(rank)
                texts = zip(sources.places, sources.texts, strict=True)
                return next(text for places, text in texts if index in places)
        raise ProgramError(f"rank {rank} is not among the {self.plan.num_ranks} of the plan")

    def files(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the ranks that run each file, and its text: one per stage, and `pipeline.py`."""
        all_ranks, files = tuple(range(self.plan.num_ranks)), {}
        for name, text in self.text.files().items():
            stage = re.match(r"stage_(\d+)", name)
            files[name] = (self.lowered.stages[int(stage[1])].ranks if stage else all_ranks, text)
        return files


def read_sources(folder: str | Path, program: Program | PipelineProgram) -> list[str]:
    """Return the code in a folder that `save` wrote, in the order of the program's sources.

    Floating-point dtypes become float64, as verification computes.
    """
    texts = []
    for name in program.files():
        path = Path(folder) / name
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ProgramError(
                f"{name} of the program cannot be read: {reason}",
                where=str(path),
                hint="shardwise compile MODEL.py:FUNCTION --out FOLDER writes a complete program",
            ) from None
    return widen_sources(texts)


def widen_sources(texts: Iterable[str]) -> list[str]:
    """Return code with float64 for every narrower floating-point dtype."""
    return [_NARROW.sub(lambda match: WIDE[match[0]], text) for text in texts]


def _remove_stale(folder: Path, files: Mapping[str, tuple[int, ...]]) -> None:
    """Remove the code that an earlier program left in the folder and this one does not have."""
    try:
        before = read_json(folder / "ranks.json")
    except ShardwiseError:
        return
    for name in before if isinstance(before, dict) else ():
        if re.fullmatch(r"(rank|stage)_\w+\.py|pipeline\.py", name) and name not in files:
            (folder / name).unlink(missing_ok=True)


_cache: OrderedDict[str, Program | PipelineProgram] = OrderedDict()


def compile(graph: Graph, plan: Plan) -> Program | PipelineProgram:
    """Lower a plan and generate the code of every distinct rank program.

    A plan with stages or micro-batches gives a `PipelineProgram`.
    """
    check_types(graph, plan.precision, hint="graph = sw.capture(model, batch, plan=plan)")
    key = _cache_key(graph, plan)
    if key not in _cache:
        _cache[key] = _compile(graph, plan)
        while len(_cache) > CACHED_PROGRAMS:
            _cache.popitem(last=False)
    return _cache[key]


def _cache_key(graph: Graph, plan: Plan) -> str:
    """Return a digest of everything that the code depends on.

    Graphs of one fingerprint may give different code, which shows source lines and class names. An
    autograd function is identified by the object: one of the same name may compute something else.
    """
    functions = [(name, id(function)) for name, function in graph.functions.items()]
    text = f"{__version__} {rules_revision()} {graph.fingerprint} {graph!r} {functions}"
    text = f"{text} {json.dumps(plan.to_json())}"
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _compile(graph: Graph, plan: Plan) -> Program | PipelineProgram:
    if plan.is_scheduled:
        pipeline = lowering.build_pipeline(graph, plan)
        return PipelineProgram(lowered=pipeline, text=emit_pipeline(pipeline))
    resolved = resolve(graph, plan)
    lowered = lowering.lower(resolved)
    sources = tuple(emit(lowered, p.ranks[0]) for p in lowered.rank_programs)
    return Program(lowered=lowered, sources=sources, choices=_choices(resolved))


def _choices(resolved: Resolved) -> dict[str, dict[str, str]]:
    """Return the choice of every node on each mesh axis, in the notation of plans."""
    tables = constant_values(resolved.graph)
    return {
        node.name: {a.axis: str(a.nodes[node.name].choice) for a in resolved.assignments}
        for node in resolved.graph.nodes
        if not tables.issuperset(node.outputs)
    }
