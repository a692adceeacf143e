"""A graph and a plan as readable Python: `compile(graph, plan)`.

Equal graphs and plans are
compiled once per process: the fingerprint covers the graph, the plan and Shardwise's version.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
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


# `capture`: the graph of a step, in the dtypes and for the micro-batches of a plan.


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
    micro-batch if each is a batch of its own (`per_microbatch`).

    Instead of a model and its loss function, a `step` may define what is computed: a function of
    the modules (the model, or a mapping from names to several) and the batch that returns the
    loss, or outputs that contain it.

    >>> graph = capture(nn.Linear(2, 1), (torch.zeros(3, 2),), lambda y, batch: y.mean())
    >>> [node.op for node in graph.nodes]
    ['aten.linear.default', 'aten.mean.default']
    """
    if plan is not None and precision is not None:
        raise PlanError("both plan= and precision= are given", hint="a plan has its own precision")
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
    graphs: GraphsBySize | None = None,
) -> Graph:
    """Capture one step as the plan computes it; see `capture`.

    `reads` collects the Python state that the graph depends on. `graphs` remembers traces of this
    step for batches of other sizes.
    """
    trace = graphs or capture_once
    model, loss_fn = as_module(model), objective(loss_fn, step)
    if plan.per_microbatch and plan.num_microbatches > 1:
        _require_no_hooks(model)
        batch = microbatch(batch, plan, 0)
    precision = plan.precision
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if not precision.compute:
        return trace(model, batch, loss_fn, training=training, device=device, reads=reads)
    dtype = getattr(torch, precision.compute)
    if precision.autocast:
        kind = torch.device(device).type if device is not None else "cpu"
        with torch.autocast(kind, dtype, cache_enabled=False):
            return trace(model, batch, loss_fn, training=training, device=device, reads=reads)
    model = cast_model(model, dtype)
    return trace(
        model, cast_batch(batch, dtype), loss_fn, training=training, device=device, reads=reads
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


def require_precision(graph: Graph, plan: Plan) -> None:
    """Raise when the graph was not captured in the number types of the plan."""
    check_types(graph, plan.precision, hint="graph = sw.capture(model, batch, plan=plan)")


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy without data whose floating parameters and buffers are of another type."""
    twin = skeleton(model)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return twin


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with floating tensors of another type."""
    call = read_batch(batch)
    return call.batch_with([t.to(dtype) if t.is_floating_point() else t for _, t in call.tensors])


def microbatch(batch: Any, plan: Plan, index: int) -> Any:
    """One of a batch's micro-batches, where each is a batch of its own; all have one size."""
    call = read_batch(batch)
    parts = []
    for path, tensor in call.tensors:
        dim = _batch_dim(path_name(path), plan, tensor)
        if dim is None:
            parts.append(tensor)
            continue
        rows, rest = divmod(tensor.shape[dim], plan.num_microbatches)
        if rest:
            raise BatchError(
                f"{tensor.shape[dim]} samples are not {plan.num_microbatches} micro-batches of one "
                "size, which the plan takes as batches of their own",
                where=path_name(path),
                hint="another batch size, or per_microbatch=False if the model allows it",
            )
        parts.append(tensor.narrow(dim, index * rows, rows))
    return call.batch_with(parts)


def _batch_dim(name: str, plan: Plan, tensor: torch.Tensor) -> int | None:
    found = None
    for glob, dim in plan.inputs.items():
        if fnmatchcase(name, glob):
            found = dim
    return found if found is not None and tensor.dim() > found else None


CACHED_PROGRAMS = 32
WIDE = {dtype.name: dtype.exact for dtype in DTYPES.values() if dtype.exact}
_NARROW = re.compile(rf"\b({'|'.join(WIDE)})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The parallel program of all ranks: what was lowered, and its text."""

    lowered: lowering.Program
    sources: tuple[str, ...]  # one per distinct rank program
    choices: Mapping[str, Mapping[str, str]]  # node -> mesh axis -> what it does, but for tables

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    @property
    def fingerprint(self) -> str:
        """Identifies the programs of all ranks: equal on ranks that may run together."""
        return _fingerprint(self.plan, self.sources)

    def source(self, rank: int = 0) -> str:
        """The text that `rank` runs."""
        for text, ranks in zip(self.sources, self.lowered.rank_programs, strict=True):
            if rank in ranks.ranks:
                return text
        self.lowered.of_rank(rank)  # raises
        raise AssertionError

    def memory(
        self,
        rank: int = 0,
        optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
        *,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> MemoryUse:
        """Run a step of `rank` on tensors without data, and return its peak memory.

        `optimizer` is a class or the name of one of torch's, with its `options`. `device` may be
        "cuda" where there is a GPU: some operators allocate differently there.
        """
        from shardwise.api.memory import rank_memory

        return rank_memory(self, rank, optimizer, device, options)

    def save(self, folder: str | Path) -> dict[str, tuple[int, ...]]:
        """Write one Python file per distinct rank program, `ranks.json`, and the plan.

        Gives the code's files, with the ranks that run each.
        """
        folder = Path(folder)
        files = {}
        for text, ranks in zip(self.sources, self.lowered.rank_programs, strict=True):
            name = f"rank_{ranks.ranks[0]}.py"
            write_text(folder / name, text, ProgramError)
            files[name] = ranks.ranks
        _save_rest(folder, files, self.plan, self.graph)
        return files

    def __str__(self) -> str:
        return str(self.lowered)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgram:
    """The parallel program of a plan with stages or micro-batches, and its files."""

    lowered: lowering.Pipeline
    text: PipelineSources

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    @property
    def sources(self) -> tuple[str, ...]:
        """The texts of all files."""
        return tuple(self.text.texts)

    @property
    def fingerprint(self) -> str:
        """Identifies the programs of all ranks: equal on ranks that may run together."""
        return _fingerprint(self.plan, self.sources)

    def source(self, rank: int = 0) -> str:
        """The text that `rank` runs for its first stage and micro-batch."""
        for stage, sources in zip(self.lowered.stages, self.text.stages, strict=True):
            if rank in stage.ranks:
                place = stage.ranks.index(rank)
                return next(
                    t for p, t in zip(sources.places, sources.texts, strict=True) if place in p
                )
        raise ProgramError(f"rank {rank} is not among the {self.plan.num_ranks} of the plan")

    def memory(
        self,
        rank: int = 0,
        optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
        *,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> MemoryUse:
        """Run a step of `rank` on tensors without data, and return its peak memory.

        `optimizer` is a class or the name of one of torch's, with its `options`. `device` may be
        "cuda" where there is a GPU: some operators allocate differently there.
        """
        from shardwise.api.memory import rank_memory

        return rank_memory(self, rank, optimizer, device, options)

    def save(self, folder: str | Path) -> dict[str, tuple[int, ...]]:
        """Write a Python file per stage program, `pipeline.py`, `ranks.json`, and the plan.

        Gives the code's files, with the ranks that run each.
        """
        folder = Path(folder)
        files = {}
        for name, text in self.text.files().items():
            write_text(folder / name, text, ProgramError)
            files[name] = tuple(range(self.plan.num_ranks))
            if name.startswith("stage_"):
                stage = int(name.removesuffix(".py").split("_")[1])
                files[name] = self.lowered.stages[stage].ranks
        _save_rest(folder, files, self.plan, self.graph)
        return files

    def __str__(self) -> str:
        return str(self.lowered)


def read_sources(folder: str | Path, program: Program | PipelineProgram) -> list[str]:
    """Return the code in a folder that `save` wrote, in the order of the program's sources.

    Number types become float64, for a check.
    """
    if isinstance(program, PipelineProgram):
        names = list(program.text.files())
    else:
        names = [f"rank_{ranks.ranks[0]}.py" for ranks in program.lowered.rank_programs]
    texts = []
    for name in names:
        path = Path(folder) / name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ProgramError(
                f"{name} of the program cannot be read: {reason}",
                where=str(path),
                hint="shardwise compile MODEL.py:FUNCTION --out FOLDER writes a whole program",
            ) from None
        texts.append(text)
    return widen_sources(texts)


def widen_sources(texts: Iterable[str]) -> list[str]:
    """Return code with float64 for every narrower floating type."""
    return [_NARROW.sub(lambda found: WIDE[found[0]], text) for text in texts]


def _fingerprint(plan: Plan, sources: Iterable[str]) -> str:
    digest = hashlib.sha256(json.dumps(plan.to_json()).encode())
    for source in sources:
        digest.update(source.encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def _save_rest(
    folder: Path, files: Mapping[str, tuple[int, ...]], plan: Plan, graph: Graph
) -> None:
    """What stands beside the code: who runs which file, the plan, tensors of the graph."""
    listed = {name: list(ranks) for name, ranks in files.items()}
    _remove_stale(folder, files)
    write_text(folder / "ranks.json", json.dumps(listed, indent=2) + "\n", ProgramError)
    plan.save(folder / "plan.json")
    constants = {c.value: c.data.contiguous() for c in graph.constants}
    if constants:
        write_bytes(folder / "constants.safetensors", save(constants), ProgramError)


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
    """Lower a plan and write the code of every distinct rank program.

    A plan with stages or micro-batches gives a `PipelineProgram`.
    """
    require_precision(graph, plan)
    key = _cache_key(graph, plan)
    if key not in _cache:
        _cache[key] = _compile(graph, plan)
        while len(_cache) > CACHED_PROGRAMS:
            _cache.popitem(last=False)
    return _cache[key]


def _cache_key(graph: Graph, plan: Plan) -> str:
    """Of all that a graph and a plan say: what a process compiled before must change no program.

    Graphs of one fingerprint may give other code, which shows places and names of classes. An
    autograd function is known by itself, as one of the same name may compute something else.
    """
    functions = [(name, id(function)) for name, function in graph.functions.items()]
    told = f"{__version__} {rules_revision()} {graph.fingerprint} {graph!r} {functions}"
    whole = f"{told} {json.dumps(plan.to_json())}".encode(errors="backslashreplace")
    return hashlib.sha256(whole).hexdigest()


def _compile(graph: Graph, plan: Plan) -> Program | PipelineProgram:
    if plan.is_scheduled:
        pipeline = lowering.build_pipeline(graph, plan)
        return PipelineProgram(lowered=pipeline, text=emit_pipeline(pipeline))
    resolved = resolve(graph, plan)
    lowered = lowering.lower(resolved)
    sources = tuple(emit(lowered, p.ranks[0]) for p in lowered.rank_programs)
    return Program(lowered=lowered, sources=sources, choices=_choices(resolved))


def _choices(resolved: Resolved) -> dict[str, dict[str, str]]:
    """What every node does on each mesh axis, as a plan would write it."""
    tables = constant_values(resolved.graph)
    return {
        node.name: {a.axis: str(a.nodes[node.name].choice) for a in resolved.assignments}
        for node in resolved.graph.nodes
        if not tables.issuperset(node.outputs)
    }
