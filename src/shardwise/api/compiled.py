"""A graph and a plan as readable Python: `compile(graph, plan)`.

Enters: `Graph`, `Plan`. Leaves: `Program`, whose sources are what runs. Equal graphs and plans are
compiled once per process: the fingerprint covers the graph, the plan and Shardwise's version.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save

from shardwise import program as lowering
from shardwise.api.captured import require_precision
from shardwise.dtypes import DTYPES
from shardwise.emit import emit, emit_pipeline
from shardwise.errors import ProgramError, ShardwiseError
from shardwise.files import read_json, write_bytes, write_text
from shardwise.ir import Graph
from shardwise.layouts.allowed import constant_values
from shardwise.plans import Plan, Resolved, resolve
from shardwise.runtime.loader import PipelineSources
from shardwise.sharding.registry import rules_revision
from shardwise.version import __version__

if TYPE_CHECKING:
    import torch

    from shardwise.simulation import MemoryUse

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
