"""The decision: which mesh, which parameter is cut how, and what follows for gradients.

Enters: a strategy's decisions, or a JSON file a person wrote or edited. Leaves: `Plan`.
A plan holds few decisions; the layout of every node follows from them (`shardwise.plans.resolve`),
and any node or parameter can be overridden by name or glob. Later entries win.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardwise.cluster import Mesh
from shardwise.errors import PlanError, PlanMismatch, ShardwiseError, did_you_mean
from shardwise.ir import Graph

FORMAT_VERSION = 1
ROLES = ("batch", "parameters")
RNG_MODES = ("exact", "fast")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """What a plan says of the parameters that match a glob.

    `layout` maps a mesh axis to a cut, "0" (dim 0) or "0:3x[4]x16" (the heads of a fused dim), or
    to "whole". `zero` is how gradients and state are shared among the ranks that hold the same
    values: 0 all-reduced, 1 sharded optimizer state, 2 also gradients, 3 also the parameter itself.
    """

    layout: Mapping[str, str] = field(default_factory=dict)
    zero: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to split one model over a mesh, as data.

    `roles` says what each mesh axis cuts: the "batch" (parameters whole) or "parameters". `inputs`
    maps input globs to the dim that batch axes cut. `nodes` forces single nodes to a choice of
    `shardwise explain`, for example `{"linear_3": {"tp": "cut n"}}`.
    """

    name: str
    model: str
    fingerprint: str
    mesh: Mesh
    roles: Mapping[str, str]
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    parameters: Mapping[str, ParameterEntry] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    rng: str = "exact"
    seed: int = 0
    notes: tuple[str, ...] = ()
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check(self)

    # ------------------------------------------------------------ reading decisions

    def entry(self, parameter: str) -> ParameterEntry:
        """The merged entry of a parameter: later globs override earlier ones, field by field."""
        layout: dict[str, str] = {}
        zero: int | None = None
        for pattern, entry in self.parameters.items():
            if fnmatchcase(parameter, pattern):
                layout.update(entry.layout)
                zero = entry.zero if entry.zero is not None else zero
        return ParameterEntry(layout=layout, zero=zero)

    def unit(self, parameter: str) -> str:
        """The gather unit a parameter belongs to: the longest module path of `units` above it."""
        above = [u for u in self.units if parameter.startswith(f"{u}.")]
        return max(above, key=len, default="")

    def check(self, graph: Graph) -> None:
        """Raise unless this plan is for this model, and every name in it exists."""
        if self.fingerprint != model_fingerprint(graph):
            raise PlanMismatch(
                f"the plan {self.name!r} was made for {self.model} ({self.fingerprint}), "
                f"this model is {graph.name} ({model_fingerprint(graph)})",
                hint=f"make a new plan: sw.strategies.{self.name}(graph, cluster)",
            )
        names = [n for p in graph.parameters for n in (p.name, *p.aliases)]
        _check_globs("parameter", self.parameters, names)
        _check_globs("input", self.inputs, [i.name for i in graph.inputs])
        for node in self.nodes:
            known = {n.name for n in graph.nodes}
            if node not in known:
                raise PlanError(
                    f"the plan names node {node!r}, the graph has none{did_you_mean(node, known)}",
                    hint="shardwise explain lists the nodes",
                )

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    # ------------------------------------------------------------ files and text

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "name": self.name,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "mesh": dict(self.mesh.axes),
            "roles": dict(self.roles),
            "inputs": dict(self.inputs),
            "parameters": {k: _entry_json(v) for k, v in self.parameters.items()},
            "nodes": {k: dict(v) for k, v in self.nodes.items()},
            "units": list(self.units),
            "rng": self.rng,
            "seed": self.seed,
            "notes": list(self.notes),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; a mistake in it is an error that names the field."""
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise PlanError(f"there is no plan file {path}") from None
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{path} is not JSON: {error.msg}", where=f"line {error.lineno}"
            ) from None
        return Plan.from_json(data, where=str(path))

    @staticmethod
    def from_json(data: Any, where: str = "plan") -> Plan:
        """The plan that `to_json` gave, or an edited one."""
        fields = _fields(data, _PLAN_FIELDS, where)
        _check_items(fields, where)
        parameters = {
            glob: _entry(entry, f"{where}: parameters[{glob!r}]")
            for glob, entry in fields.get("parameters", {}).items()
        }
        try:
            mesh = Mesh(axes=tuple(fields["mesh"].items()))
            return Plan(
                **{k: v for k, v in fields.items() if k not in ("mesh", "parameters")},
                mesh=mesh,
                parameters=parameters,
            )
        except PlanError as error:
            place = f"{where}: {error.where}" if error.where else where
            raise PlanError(error.message, where=place, hint=error.hint) from None
        except ShardwiseError as error:
            raise PlanError(error.message, where=where, hint=error.hint) from None

    def __str__(self) -> str:
        from shardwise.plans.text import format_plan

        return format_plan(self)


_PLAN_FIELDS: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "name": str,
    "model": str,
    "fingerprint": str,
    "mesh": dict,
    "roles": dict,
    "inputs": dict,
    "parameters": dict,
    "nodes": dict,
    "units": list,
    "rng": str,
    "seed": int,
    "notes": list,
}
_REQUIRED = ("version", "name", "model", "fingerprint", "mesh", "roles")
_ENTRY_FIELDS: dict[str, type | tuple[type, ...]] = {"layout": dict, "zero": int}


def _fields(data: Any, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object's fields, each known and of its type."""
    if not isinstance(data, dict):
        raise PlanError(f"expected an object, found {type(data).__name__}", where=where)
    for key, value in data.items():
        if key not in known:
            raise PlanError(f"unknown field {key!r}{did_you_mean(key, known)}", where=where)
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise PlanError(
                f"field {key!r} should be {known[key].__name__}, found {value!r}", where=where
            )
    if known is _PLAN_FIELDS:
        missing = [key for key in _REQUIRED if key not in data]
        if missing:
            raise PlanError(f"field {missing[0]!r} is missing", where=where)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def _check_items(fields: Mapping[str, Any], where: str) -> None:
    """What the lists and objects of a plan hold: text, dims of inputs, choices of nodes."""
    for key in ("units", "notes"):
        for item in fields.get(key, ()):
            if not isinstance(item, str):
                raise PlanError(f"{key} should be a list of text, found {item!r}", where=where)
    for name, dim in fields.get("inputs", {}).items():
        if dim is not None and type(dim) is not int:
            raise PlanError(f"inputs[{name!r}] should be a dim or null, found {dim!r}", where=where)
    for node, choices in fields.get("nodes", {}).items():
        texts = choices.values() if isinstance(choices, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise PlanError(
                f"nodes[{node!r}] should map mesh axes to choices, found {choices!r}",
                where=where,
                hint='{"tp": "cut n"}; shardwise explain lists the choices',
            )


def _entry(data: Any, where: str) -> ParameterEntry:
    fields = _fields(data, _ENTRY_FIELDS, where)
    for axis, cut in fields.get("layout", {}).items():
        if not isinstance(cut, str):
            raise PlanError(f"layout of axis {axis!r} should be text, found {cut!r}", where=where)
    return ParameterEntry(**fields)


def _entry_json(entry: ParameterEntry) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if entry.layout:
        data["layout"] = dict(entry.layout)
    if entry.zero is not None:
        data["zero"] = entry.zero
    return data


def _check(plan: Plan) -> None:
    """The plan's own consistency, without a graph."""
    if plan.version != FORMAT_VERSION:
        raise PlanError(f"plan version {plan.version}, this Shardwise reads {FORMAT_VERSION}")
    axes = plan.mesh.names
    for axis, role in plan.roles.items():
        if axis not in axes:
            raise PlanError(
                f"roles name axis {axis!r}, {plan.mesh} has none{did_you_mean(axis, axes)}"
            )
        if role not in ROLES:
            raise PlanError(
                f"role {role!r} of axis {axis!r}{did_you_mean(role, ROLES)}",
                hint=" or ".join(ROLES),
            )
    missing = [axis for axis in axes if axis not in plan.roles]
    if missing:
        raise PlanError(f"axis {missing[0]!r} has no role", hint='roles: {"dp": "batch"}')
    if plan.rng not in RNG_MODES:
        raise PlanError(
            f"rng {plan.rng!r}{did_you_mean(plan.rng, RNG_MODES)}", hint=" or ".join(RNG_MODES)
        )
    for glob, entry in plan.parameters.items():
        if entry.zero not in (None, 0, 1, 2, 3):
            raise PlanError(f"zero={entry.zero} of {glob!r}", hint="0, 1, 2 or 3")
        _check_axes(entry.layout, axes, f"parameters[{glob!r}]")
    for node, choices in plan.nodes.items():
        _check_axes(choices, axes, f"nodes[{node!r}]")


def _check_axes(mapping: Mapping[str, Any], axes: tuple[str, ...], where: str) -> None:
    for axis in mapping:
        if axis not in axes:
            raise PlanError(f"unknown mesh axis {axis!r}{did_you_mean(axis, axes)}", where=where)


def _check_globs(what: str, globs: Mapping[str, Any], names: list[str]) -> None:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise PlanError(
                f"{what} {glob!r} of the plan matches none of the model's {len(names)}"
                f"{did_you_mean(glob, names)}"
            )


def model_fingerprint(graph: Graph) -> str:
    """Identifies a model by its class, parameters and buffers; batch and dtype are left out."""
    import hashlib

    lines = [graph.name]
    for parameter in graph.parameters:
        kind = "trained" if parameter.requires_grad else "frozen"
        names = " ".join((parameter.name, *parameter.aliases))
        lines.append(f"{names} {graph.values[parameter.value].shape} {kind}")
    lines += [f"{b.name} {graph.values[b.value].shape}" for b in graph.buffers]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
