"""A graph and a plan as readable Python: `compile(graph, plan)`.

Enters: `Graph`, `Plan`. Leaves: `Program`, whose sources are what runs. Equal graphs and plans are
compiled once per process: the fingerprint covers the graph, the plan and Shardwise's version.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from shardwise import program as lowering
from shardwise.emit import emit
from shardwise.ir import Graph
from shardwise.plans import Plan, resolve
from shardwise.version import __version__

CACHED_PROGRAMS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The parallel program of all ranks: what was lowered, and its text."""

    lowered: lowering.Program
    sources: tuple[str, ...]  # one per distinct rank program

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    @property
    def fingerprint(self) -> str:
        """Identifies the programs of all ranks: equal on ranks that may run together."""
        digest = hashlib.sha256(json.dumps(self.plan.to_json()).encode())
        for source in self.sources:
            digest.update(source.encode())
        return digest.hexdigest()[:16]

    def source(self, rank: int = 0) -> str:
        """The text that `rank` runs."""
        for text, ranks in zip(self.sources, self.lowered.rank_programs, strict=True):
            if rank in ranks.ranks:
                return text
        self.lowered.of_rank(rank)  # raises
        raise AssertionError

    def save(self, folder: str | Path) -> None:
        """Write one Python file per distinct rank program, `ranks.json`, and the plan."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for text, ranks in zip(self.sources, self.lowered.rank_programs, strict=True):
            name = f"rank_{ranks.ranks[0]}.py"
            (folder / name).write_text(text)
            files[name] = list(ranks.ranks)
        (folder / "ranks.json").write_text(json.dumps(files, indent=2) + "\n")
        self.plan.save(folder / "plan.json")
        constants = {c.value: c.data.contiguous() for c in self.graph.constants}
        if constants:
            save_file(constants, folder / "constants.safetensors")

    def __str__(self) -> str:
        return str(self.lowered)


_cache: OrderedDict[str, Program] = OrderedDict()


def compile(graph: Graph, plan: Plan) -> Program:
    """Lower a plan and write the code of every distinct rank program."""
    key = hashlib.sha256(
        f"{__version__} {graph.fingerprint} {json.dumps(plan.to_json())}".encode()
    ).hexdigest()
    if key not in _cache:
        lowered = lowering.lower(resolve(graph, plan))
        sources = tuple(emit(lowered, p.ranks[0]) for p in lowered.rank_programs)
        _cache[key] = Program(lowered=lowered, sources=sources)
        while len(_cache) > CACHED_PROGRAMS:
            _cache.popitem(last=False)
    return _cache[key]
