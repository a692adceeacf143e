"""Plans: the mesh, the sharding of every parameter, and the execution of a step.

A `Plan` is made by a strategy or the planner, or read from a JSON file that a person may edit. It
has few decisions; the layout of every node follows from them (`shardwise.plans.resolve`), and any
node or parameter can be overridden by name or glob. Later entries win.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypeVar

from shardwise.cluster import Cluster, Mesh
from shardwise.collectives.messages.choice import CollectiveChoice, check_ranks
from shardwise.collectives.messages.program import parse_ranks
from shardwise.errors import PlanError, PlanMismatch, did_you_mean
from shardwise.files import read_json, write_text
from shardwise.ir import Graph, Node, node_keys
from shardwise.ir.blocks import ConstraintKey, block_glob
from shardwise.plans.execution import (
    OFFLOADS,
    RECOMPUTE_MODES,
    TIME,
    MeshField,
    Precision,
    Stage,
    check_stages,
    require_known,
)
from shardwise.plans.search_result import HOOKS, SearchResult
from shardwise.plans.sync import Sync, check_parameter, operator_uses
from shardwise.schedules.schedule import require_counts
from shardwise.schema import Form, Range, Reader, Writer

Entry = TypeVar("Entry")


def model_fingerprint(graph: Graph) -> str:
    """Return a digest of a model's class, parameters and buffers, without batch and dtype."""
    lines = [graph.name]
    for parameter in graph.parameters:
        kind = "trained" if parameter.requires_grad else "frozen"
        names = " ".join((parameter.name, *parameter.aliases))
        lines.append(f"{names} {graph.values[parameter.value].shape} {kind}")
    lines += [f"{b.name} {graph.values[b.value].shape}" for b in graph.buffers]
    return hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).hexdigest()[:16]


# ------------------------------------------------------------ choices of nodes
def find_choices(nodes: Mapping[str, Mapping[str, str]], graph: Graph) -> dict[str, dict[str, str]]:
    """Return node -> mesh axis -> choice; later keys win. Keys may match no node of the graph."""
    choices: dict[str, dict[str, str]] = {}
    for key, names in _matches(nodes, graph).items():
        for name in names:
            choices.setdefault(name, {}).update(nodes[key])
    return choices


def check_choices(nodes: Mapping[str, Mapping[str, str]], graph: Graph) -> None:
    """Raise `PlanError` unless every key matches a node."""
    for key, names in _matches(nodes, graph).items():
        if not names:
            known = [name for pair in node_keys(graph).items() for name in pair]
            raise PlanError(
                f"the plan names node {key!r}, the graph has none{did_you_mean(key, known)}",
                hint="shardwise explain lists the nodes",
            )


def known_choices(
    nodes: Mapping[str, Mapping[str, str]], graph: Graph
) -> dict[str, Mapping[str, str]]:
    """Return the choices that match a node of the graph."""
    return {key: nodes[key] for key, names in _matches(nodes, graph).items() if names}


def _matches(keys: Iterable[str], graph: Graph) -> dict[str, list[str]]:
    """Return the nodes that each key matches: a name, a place or a glob of places."""
    keys = list(keys)
    if not keys:
        return {}
    places = node_keys(graph)
    by_key: dict[str, list[str]] = {}
    for name, place in places.items():
        for key in dict.fromkeys((place, block_glob(place))):
            by_key.setdefault(key, []).append(name)
    by_key |= {name: [name] for name in places}  # outside of all modules, a place may be a name
    matches = {}
    for key in keys:
        matches[key] = by_key.get(key, [])
        if not matches[key] and any(c in key for c in "*?["):
            matches[key] = [name for name, place in places.items() if fnmatchcase(place, key)]
    return matches


def fold_entries(entries: Mapping[str, Entry], names: Iterable[str] = ()) -> dict[str, Entry]:
    """Return the entries, with equal ones of numbered modules as one glob.

    If `names` lists more than the entries have, a glob must stand for all of them that it matches.
    """
    groups: dict[str, list[str]] = {}
    for name in names or entries:
        groups.setdefault(block_glob(name), []).append(name)
    folded: dict[str, Entry] = {}
    for glob, members in groups.items():
        known = {name: entries[name] for name in members if name in entries}
        is_equal = len(known) == len(members) > 1 and all(
            entry == known[members[0]] for entry in known.values()
        )
        folded |= {glob: known[members[0]]} if is_equal else known
    return folded


def block_constraints(plan: Plan, graph: Graph) -> ConstraintKey:
    """Return a function that gives the key of a plan's decisions about a block.

    These are its entries of parameters, its choices of nodes, and its recomputed modules.
    """
    forced = plan.choices(graph)
    globs = () if isinstance(plan.recompute, str) else plan.recompute
    by_module: dict[str, list[str]] = {}  # parameters in a module and below
    for parameter in graph.parameters:
        pieces = parameter.name.split(".")
        for end in range(1, len(pieces)):
            by_module.setdefault(".".join(pieces[:end]), []).append(parameter.name)

    def key(path: str, nodes: Sequence[Node]) -> str:
        entries = {n.removeprefix(f"{path}."): plan.entry(n) for n in by_module.get(path, ())}
        choices = [forced.get(node.name) for node in nodes]
        recomputed = sorted(
            module.removeprefix(path)
            for module in {path, *(node.module for node in nodes)}
            if any(fnmatchcase(module, glob) for glob in globs)
        )
        return f"{entries} {choices} {recomputed}"

    return key


FORMAT_VERSION = 1
ROLES = ("batch", "parameters", "sequence", "time")
INPUT_ROLES = frozenset({"batch", "sequence"})  # of axes that shard inputs and replicate parameters
RNG_MODES = ("exact", "fast")
MAX_MICROBATCHES = 1 << 16
MAX_NAME = 500  # characters
OMITTED_IF_EMPTY = ("sequence", "collectives", "bucket_mib", "search")  # from plan files


def _line(text: str) -> str:
    if not text.isprintable() or len(text) > MAX_NAME:
        raise PlanError(f"{text[:80]!r} is not a line of up to {MAX_NAME} characters")
    return text


Line = Annotated[str, Form(_line)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """The layout, ZeRO level and synchronization of the parameters that match a glob.

    `layout` maps a mesh axis to a shard, "0" (dim 0) or "0:3x[4]x16" (the heads of a fused dim), or
    to "replicate". Ranks with the same values shard the optimizer state with `zero` 1, also the
    gradients with 2, also the parameter itself with 3, and nothing with 0 (all-reduced gradients).
    `sync` selects other forms of synchronization: owners, sparse rows, factors.
    """

    layout: Mapping[str, str] = field(default_factory=dict)
    zero: int | None = None
    sync: Sync | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to split one model over a mesh, as data.

    `roles` maps each mesh axis to what it shards: the "batch" or the "sequence" (with replicated
    parameters) or "parameters". `inputs` maps input globs to the dim that batch axes shard,
    `sequence` to the dim that sequence axes shard; if no input has one, the sequence is sharded
    where attention begins. `nodes` forces single nodes to a choice of `shardwise explain`, for
    example `{"linear_3": {"tp": "shard n"}}`; a key may also be a glob of paths,
    `{"blocks.*.mlp.up.linear_0": {"tp": "shard n"}}`. `search` is the
    planner's result, from which `shardwise explain` says why this plan was chosen.

    `stages` divide the model into pipeline stages, each with its own ranks and mesh; `mesh` is that
    of the first. A step is computed in `num_microbatches`, with the result of the full batch; with
    `per_microbatch` each is a separate batch, as when one device accumulates gradients. `schedule`
    names the order of work, or lists the actions of every group of ranks. `recompute` selects the
    activations that backward recomputes: "none", "full" (by block), "selective" (the cheap ones),
    or a list of module globs. `collectives` lists those that do not use the library. Small
    parameters and gradients share messages of `bucket_mib`, which suits the cluster's links (0: as
    the runtime does without a cluster); a block's parameters are gathered in one of any size.
    """

    name: Line
    model: Line
    fingerprint: Line
    mesh: MeshField
    roles: Mapping[str, str]
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    sequence: Mapping[str, int | None] = field(default_factory=dict)
    parameters: Mapping[str, ParameterEntry] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    schedule: str | tuple[tuple[str, ...], ...] = ""
    num_microbatches: int = 1
    per_microbatch: bool = False
    recompute: str | tuple[str, ...] = "none"
    precision: Precision = field(default_factory=Precision)
    offload: tuple[str, ...] = ()
    collectives: tuple[CollectiveChoice, ...] = ()
    bucket_mib: Annotated[int, Range(0)] = 0
    rng: str = "exact"
    seed: int = 0
    notes: tuple[str, ...] = ()
    search: SearchResult | None = None
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check(self)

    # ------------------------------------------------------------ ranks and stages
    @property
    def num_ranks(self) -> int:
        """The number of ranks of all stages."""
        if not self.stages:
            return self.mesh.size
        return len({rank for stage in self.stages for rank in stage.ranks})

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The stages, or a single one for a plan without stages."""
        if self.stages:
            return self.stages
        return (Stage(first="", ranks=tuple(range(self.mesh.size)), mesh=self.mesh),)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that run stages, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.all_stages))

    @property
    def is_scheduled(self) -> bool:
        """Whether a step is more than one forward and one backward."""
        return bool(self.stages) or self.num_microbatches > 1

    @property
    def splits_time(self) -> bool:
        """Whether micro-batches are parts of one batch, as along a mesh axis in time."""
        return self.num_microbatches > 1 and not self.per_microbatch

    def for_stage(self, index: int) -> Plan:
        """Return the plan of a single stage, with micro-batches as its first mesh axis."""
        return self.on_mesh(self.all_stages[index].mesh, timed=self.splits_time)

    def on_mesh(self, mesh: Mesh, *, timed: bool = False) -> Plan:
        """Return the decisions for another mesh, without stages."""
        axes = ((TIME, self.num_microbatches), *mesh.axes) if timed else mesh.axes
        roles = {axis: self.roles[axis] for axis in mesh.names}
        return replace(
            self,
            mesh=Mesh(axes=axes),
            roles={TIME: "time", **roles} if timed else roles,
            parameters={
                glob: replace(e, layout={a: c for a, c in e.layout.items() if a in mesh.names})
                for glob, e in self.parameters.items()
            },
            nodes={n: {a: c[a] for a in c if a in mesh.names} for n, c in self.nodes.items()},
            stages=(),
            schedule="",
            num_microbatches=1,
            per_microbatch=False,
            collectives=(),  # they refer to the ranks of all stages
        )

    def for_part(self, graph: Graph, choices: Mapping[str, Mapping[str, str]]) -> Plan:
        """Return the decisions about a part of the model; `choices` are those of all nodes."""
        names = [n for p in graph.parameters for n in (p.name, *p.aliases)]
        nodes = {node.name for node in graph.nodes}
        used = {
            glob: entry
            for glob, entry in self.parameters.items()
            if any(fnmatchcase(name, glob) for name in names)
        }
        return replace(
            self,
            fingerprint=model_fingerprint(graph),
            parameters=used,
            nodes={name: own for name, own in choices.items() if name in nodes},
        )

    # ------------------------------------------------------------ reading decisions
    def entry(self, parameter: str) -> ParameterEntry:
        """Return the merged entries of a parameter; later globs win, field by field."""
        layout: dict[str, str] = {}
        zero: int | None = None
        sync: Sync | None = None
        for pattern, entry in self.parameters.items():
            if fnmatchcase(parameter, pattern):
                layout.update(entry.layout)
                zero = entry.zero if entry.zero is not None else zero
                sync = entry.sync if sync is None else sync.updated(entry.sync)
        return ParameterEntry(layout=layout, zero=zero, sync=sync)

    def choices(self, graph: Graph) -> dict[str, dict[str, str]]:
        """Return node -> mesh axis -> the choice that `nodes` forces; later keys win."""
        return find_choices(self.nodes, graph)

    def unit(self, parameter: str) -> str:
        """Return the gather unit of a parameter: the longest module path of `units` above it."""
        above = [u for u in self.units if parameter.startswith(f"{u}.")]
        return max(above, key=len, default="")

    def check(self, graph: Graph) -> None:
        """Raise unless the plan is for this model, and every name in it exists."""
        self._check_model(graph)
        places = list(node_keys(graph).values())
        order = []
        for index, stage in enumerate(self.stages[1:], start=1):
            if stage.first not in places:
                raise PlanError(
                    f"no node {stage.first!r} to begin a stage at"
                    f"{did_you_mean(stage.first, places)}",
                    where=f"stages[{index}]",
                    hint="shardwise explain lists the places of nodes",
                )
            order.append(places.index(stage.first))
        if any(b <= a for a, b in zip([0, *order], order, strict=False)):
            raise PlanError("stage boundaries must be in increasing node order", where="stages")

    def _check_model(self, graph: Graph) -> None:
        if self.fingerprint != model_fingerprint(graph):
            raise PlanMismatch(
                f"the plan {self.name!r} was made for {self.model} ({self.fingerprint}), but "
                f"this model is {graph.name} ({model_fingerprint(graph)})",
                hint="make a new plan for it: shardwise plan MODULE.py:FUNCTION -o plan.json",
            )
        names = [n for p in graph.parameters for n in (p.name, *p.aliases)]
        _check_globs("parameter", self.parameters, names)
        _check_globs("input", {**self.inputs, **self.sequence}, [i.name for i in graph.inputs])
        check_choices(self.nodes, graph)
        _check_syncs(self, graph)

    # ------------------------------------------------------------ figures
    @property
    def figures(self) -> SearchResult:
        """The search result; raises `PlanError` if the plan has none."""
        if self.search is None:
            raise PlanError(
                f"the plan {self.name!r} was not searched for, so it has no figures",
                hint="shardwise plan MODULE.py:FUNCTION --cluster c.yaml -o plan.json, or "
                "shardwise explain MODULE.py:FUNCTION --plan plan.json for its nodes",
            )
        return self.search

    @property
    def digest(self) -> str:
        """The hex digest of the decisions, without figures, notes and the name."""
        decisions = replace(self, search=None).to_json()
        data = {k: v for k, v in decisions.items() if k not in ("notes", "name")}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def is_edited(self) -> bool:
        """Whether decisions changed after the figures were made."""
        return self.search is not None and self.search.digest not in ("", self.digest)

    def with_figures(self, search: SearchResult) -> Plan:
        """Return the plan with figures that belong to its decisions."""
        return replace(self, search=replace(search, digest=self.digest))

    def with_(self, **changes: Any) -> Plan:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    # ------------------------------------------------------------ files and text
    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, its fields in the order of this class."""
        data: dict[str, Any] = {"version": self.version}
        for item in fields(self):
            value = getattr(self, item.name)
            if value or item.name not in OMITTED_IF_EMPTY:
                data[item.name] = Writer().write(value)
        return data

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, creating its folder if necessary."""
        hint = "-o with a folder that you may write to"
        write_text(path, plan_file_text(self.to_json()), PlanError, hint=hint)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; an error names the invalid field."""
        return Plan.from_json(read_json(path, PlanError, what="plan file"), where=str(path))

    @staticmethod
    def from_json(data: Any, where: str = "plan") -> Plan:
        """Return the plan that `to_json` returned, possibly edited."""
        reader = Reader(PlanError, where, hooks=HOOKS)
        values = reader.fields(Plan, data)
        if "version" not in values:
            reader.fail("field 'version' is missing", (), hint=f'"version": {FORMAT_VERSION}')
        plan = reader.construct(Plan, (), **values)
        reader.construct(check_ranks, (), plan.collectives, plan.num_ranks)
        return plan

    def __str__(self) -> str:
        from shardwise.plans.text import format_plan, plan_text

        searched = self.search is not None and not self.is_edited
        return plan_text(self) if searched else format_plan(self)

    def _repr_html_(self) -> str:
        from shardwise.plans.text import plan_html

        return plan_html(self)


def _check(plan: Plan) -> None:
    """Raise `PlanError` unless the plan is consistent in itself."""
    if plan.version != FORMAT_VERSION:
        raise PlanError(f"plan version {plan.version}, this Shardwise reads {FORMAT_VERSION}")
    check_stages(plan.stages)
    if plan.stages and plan.stages[0].mesh != plan.mesh:
        raise PlanError(f"mesh is {plan.mesh}, but the first stage has {plan.stages[0].mesh}")
    axes = tuple(dict.fromkeys([*plan.mesh.names, *(a for s in plan.stages for a in s.mesh.names)]))
    for axis, role in plan.roles.items():
        if axis not in axes:
            raise PlanError(
                f"roles name axis {axis!r}, but {plan.mesh} does not{did_you_mean(axis, axes)}"
            )
        require_known(f"role {role!r} of axis {axis!r}", role, ROLES, " or ".join(ROLES[:3]))
        if (role == "time") != (axis == TIME):
            raise PlanError(
                f"role {role!r} of axis {axis!r}: the axis of micro-batches is {TIME!r}",
                hint='"num_microbatches": 4 makes that axis',
            )
    missing = [axis for axis in axes if axis not in plan.roles]
    if missing:
        raise PlanError(f"axis {missing[0]!r} has no role", hint='roles: {"dp": "batch"}')
    require_known(f"rng {plan.rng!r}", plan.rng, RNG_MODES, " or ".join(RNG_MODES))
    if not 1 <= plan.num_microbatches <= MAX_MICROBATCHES:
        raise PlanError(
            f"num_microbatches={plan.num_microbatches:,}", hint=f"1 to {MAX_MICROBATCHES:,}"
        )
    require_counts(len(plan.all_stages), plan.num_microbatches)
    if isinstance(plan.recompute, str):
        hint = f"{', '.join(RECOMPUTE_MODES)} or a list of module globs"
        require_known(f"recompute {plan.recompute!r}", plan.recompute, RECOMPUTE_MODES, hint)
    for what in plan.offload:
        require_known(f"offload {what!r}", what, OFFLOADS)
    for glob, entry in plan.parameters.items():
        if entry.zero not in (None, 0, 1, 2, 3):
            raise PlanError(f"zero={entry.zero} of {glob!r}", hint="0, 1, 2 or 3")
        where = f"parameters[{glob!r}]"
        _check_axes(entry.layout, axes, where)
        if entry.sync is not None and set(plan.roles.values()) <= {"batch"}:
            for stage in plan.all_stages:
                entry.sync.check_ranks(stage.mesh.size, where)
        if entry.sync is not None and entry.sync.inexact:
            _check_inexact(plan, entry.sync, where)
    for node, choices in plan.nodes.items():
        _check_axes(choices, axes, f"nodes[{node!r}]")


def _check_axes(mapping: Mapping[str, Any], axes: tuple[str, ...], where: str) -> None:
    for axis in mapping:
        if axis not in axes:
            raise PlanError(f"unknown mesh axis {axis!r}{did_you_mean(axis, axes)}", where=where)


def _check_inexact(plan: Plan, sync: Sync, where: str) -> None:
    """Raise `PlanError` for plans whose parameters have no inexact synchronization."""
    offloaded = [kind for kind in plan.offload if kind != "activations"]
    if plan.stages:
        raise PlanError(
            f"sync ({sync}) in a plan with {len(plan.stages)} pipeline stages",
            where=where,
            hint="a plan without stages, or a synchronous one",
        )
    if sync.every > 1 and offloaded:
        raise PlanError(
            f"sync ({sync}) with offload={offloaded}: rounds need parameters on the device",
            where=where,
            hint="offload=(), or every=1",
        )


def _check_globs(what: str, globs: Mapping[str, Any], names: list[str]) -> None:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise PlanError(
                f"{what} {glob!r} of the plan matches none of the {len(names)} {what}s of the "
                f"model{did_you_mean(glob, names)}",
                hint=f"a glob of {', '.join(names[:3])}" + ", …" * (len(names) > 3),
            )


def _check_syncs(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` unless every `sync` suits a parameter of its glob; others ignore it."""
    syncs = {glob: entry for glob, entry in plan.parameters.items() if entry.sync is not None}
    uses = operator_uses(graph) if syncs else {}
    for glob, entry in syncs.items():
        assert entry.sync is not None
        problems = []
        for parameter in sorted(graph.parameters, key=lambda p: not p.requires_grad):
            if any(fnmatchcase(name, glob) for name in (parameter.name, *parameter.aliases)):
                zero = plan.entry(parameter.name).zero
                try:
                    check_parameter(graph, parameter, entry.sync, zero, uses)
                    break
                except PlanError as problem:
                    problems.append(problem)
        else:
            raise problems[0]


def used_devices(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the devices of `cluster` that `plan` runs on: all, unless its search left some out."""
    left_out = plan.search.left_out if plan.search is not None else None
    if left_out is None or left_out.fingerprint != cluster.fingerprint:
        return cluster
    return cluster.subset(parse_ranks(left_out.used, "search.left_out.used"))


# ------------------------------------------------------------ files
def plan_file_text(data: Mapping[str, Any]) -> str:
    """Return the text of a plan file: indented JSON, with one line per table of `details`.

    >>> print(plan_file_text({"name": "a", "search": {"gap": 0, "details": {"links": [1, 2]}}}))
    {
      "name": "a",
      "search": {
        "gap": 0,
        "details": {
          "links": [1,2]
        }
      }
    }
    <BLANKLINE>
    """
    search = dict(data.get("search") or {})
    details = search.pop("details", None)
    if not details or not search:
        return json.dumps(data, indent=2) + "\n"
    decisions = {key: value for key, value in data.items() if key != "search"}
    text = json.dumps({**decisions, "search": search}, indent=2)
    inside = ",\n".join(
        f"      {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
        for key, value in details.items()
    )
    before = text.removesuffix("\n  }\n}")  # the braces of `search` and of all
    return f'{before},\n    "details": {{\n{inside}\n    }}\n  }}\n}}\n'
