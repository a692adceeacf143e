"""Compare two plans: their decisions, and the cost of the differences."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from shardwise.collectives.messages.choice import format_groups
from shardwise.collectives.messages.program import format_ranks
from shardwise.plans import ParameterEntry, Plan
from shardwise.plans.search_result import CAUSES
from shardwise.plans.text import SHOWN
from shardwise.reports.timeline import named_events
from shardwise.sharding.placements import REPLICATED
from shardwise.simulation import Estimate, stored_estimate

Pair = tuple[Any, Any]
ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A decision that differs; `name` is the parameter, node or other item of its `kind`."""

    kind: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A figure of both plans, in seconds or bytes."""

    kind: str  # "time", "memory" or "traffic"
    name: str
    text: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """The increase of the figure."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The differences of two plans; `notes` explain what could not be compared."""

    changes: tuple[Change, ...]
    step_time_s: tuple[float, float] | None = None
    samples_per_s: tuple[float, float] | None = None
    memory_bytes: tuple[float, float] | None = None  # of the rank closest to its limit
    costs: tuple[Cost, ...] = ()
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the differences as data."""
        pairs = ("step_time_s", "samples_per_s", "memory_bytes")
        shown = ("kind", "name", "before", "after", "difference")
        return {
            "changes": [asdict(change) for change in self.changes],
            **{name: _pair_json(getattr(self, name)) for name in pairs},
            "costs": [{name: getattr(cost, name) for name in shown} for cost in self.costs],
            "notes": list(self.notes),
        }


def _pair_json(pair: tuple[float, float] | None) -> dict[str, float] | None:
    if pair is None:
        return None
    before, after = pair
    ratio = after / before if before else 0.0
    return {"before": before, "after": after, "difference": after - before, "ratio": ratio}


def diff(before: Plan, after: Plan) -> Difference:
    """Return the decisions in which `after` differs from `before`, and their cost."""
    notes: list[str] = []
    if before.fingerprint != after.fingerprint:
        notes.append(
            f"different models: {before.model} ({before.fingerprint}) and {after.model} "
            f"({after.fingerprint}); each has its own times and bytes"
        )
    changes = tuple(_changes(before, after))
    first, second = (_estimate(plan, notes) for plan in (before, after))
    if first is None or second is None:
        return Difference(changes=changes, notes=tuple(notes))
    if first.rows != second.rows:
        notes.append(f"batches of {first.rows:,} and {second.rows:,} samples")
    return Difference(
        changes=changes,
        step_time_s=(first.step_time_s, second.step_time_s),
        samples_per_s=(_rate(first), _rate(second)),
        memory_bytes=(first.peak.peak_bytes, second.peak.peak_bytes),
        costs=tuple(_costs(before, after, first, second)),
        notes=tuple(notes),
    )


def _rate(estimate: Estimate) -> float:
    return estimate.rows / estimate.step_time_s if estimate.step_time_s else 0.0


def _estimate(plan: Plan, notes: list[str]) -> Estimate | None:
    """Return the plan's stored step, or add a note with the command that stores it."""
    if plan.search is None:
        why = "has no figures"
    elif plan.is_edited:
        why = "was changed after its search, so its figures do not apply"
    else:
        return stored_estimate(plan)
    notes.append(
        f"the plan {plan.name!r} {why}; to add them: shardwise report PLAN.json "
        "MODULE.py:FUNCTION --cluster c.yaml --plan-out PLAN.json"
    )
    return None


# ------------------------------------------------------------ decisions
def _changes(before: Plan, after: Plan) -> Iterator[Change]:
    """Yield all decisions that differ, in the order of a plan file."""
    for kind, (old, new) in _single(before, after).items():
        if old != new:
            yield Change(kind=kind, name="", before=old, after=new)
    yield from _stages(before, after)
    names = dict.fromkeys((*before.parameters, *after.parameters))
    yield from _by_name("parameters", _parameters(before, names), _parameters(after, names))
    choices = ({n: _shards(c) for n, c in plan.nodes.items()} for plan in (before, after))
    yield from _by_name("nodes", *choices)
    dims = (
        {n: REPLICATED if dim is None else f"dim {dim}" for n, dim in plan.inputs.items()}
        for plan in (before, after)
    )
    yield from _by_name("inputs", *dims)
    yield from _by_name("collectives", _collectives(before), _collectives(after))


def _single(before: Plan, after: Plan) -> dict[str, tuple[str, str]]:
    """Return the decisions that a plan makes only once, as texts of both plans."""
    texts = DECISIONS | {
        f.name.replace("_", " "): attrgetter(f.name) for f in fields(Plan) if f.name not in SHOWN
    }
    return {name: (str(text(before)), str(text(after))) for name, text in texts.items()}


def _cluster(plan: Plan) -> str:
    cluster = plan.search and plan.search.cluster
    return f"{cluster.name} ({cluster.fingerprint[:8]})" if cluster else "not recorded"


def _schedule(plan: Plan) -> str:
    if isinstance(plan.schedule, str):
        return plan.schedule or "none"
    return "custom: " + "; ".join(" ".join(actions) for actions in plan.schedule)


def _zero(plan: Plan) -> str:
    levels = sorted({entry.zero or 0 for entry in plan.parameters.values()} or {0})
    return ", ".join(map(str, levels))


def _listed(items: Any) -> str:
    return items if isinstance(items, str) else ", ".join(items)


def _mesh(mesh: Any) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.axes) or "one rank"


DECISIONS: dict[str, Callable[[Plan], Any]] = {
    "model": lambda p: p.model,
    "cluster": _cluster,
    "ranks": lambda p: p.num_ranks,
    "mesh": lambda p: _mesh(p.mesh),
    "roles": lambda p: ", ".join(f"{a}: {r}" for a, r in p.roles.items()),
    "groups of stages": lambda p: len(p.groups),
    "stages": lambda p: len(p.all_stages),
    "schedule": _schedule,
    "micro-batches": lambda p: p.num_microbatches,
    "per micro-batch": lambda p: "yes" if p.per_microbatch else "no",
    "zero": _zero,
    "recompute": lambda p: _listed(p.recompute),
    "offload": lambda p: _listed(p.offload) or "none",
    "precision": lambda p: (
        _listed(f"{k} {v}" for k, v in p.precision.to_json().items()) or "as in the model"
    ),
    "units": lambda p: _listed(p.units) or "none",
    "random numbers": lambda p: f"{p.rng}, seed {p.seed}",
}


def _stages(before: Plan, after: Plan) -> Iterator[Change]:
    stages = [
        {
            str(at): f"ranks {format_ranks(s.ranks)} ({_mesh(s.mesh)}) from "
            f"{s.first or 'the first node'}"
            for at, s in enumerate(plan.stages)
        }
        for plan in (before, after)
    ]
    yield from _by_name("stage", *stages)


def _parameters(plan: Plan, names: Iterable[str]) -> dict[str, str]:
    """Return the entries of a plan for names and globs, including entries of other globs.

    >>> from shardwise import Mesh
    >>> one, two = ParameterEntry(layout={"tp": "0"}), ParameterEntry(layout={"tp": "1"})
    >>> plan = Plan(name="a", model="M", fingerprint="", mesh=Mesh.of(tp=2),
    ...             roles={"tp": "parameters"},
    ...             parameters={"up.*": one, "down.0": one, "down.1": two})
    >>> _parameters(plan, ["up.0", "down.*", "head"])
    {'up.0': 'tp: 0', 'down.*': 'various'}
    """
    texts = {}
    for name in names:
        if name in plan.parameters:
            entries = {_entry(plan.parameters[name])}
        elif any(fnmatchcase(name, glob) for glob in plan.parameters):
            entries = {_entry(plan.entry(name))}
        else:
            entries = {_entry(e) for part, e in plan.parameters.items() if fnmatchcase(part, name)}
        if entries:
            texts[name] = entries.pop() if len(entries) == 1 else "various"
    return texts


def _entry(entry: ParameterEntry) -> str:
    shards = _shards({a: s for a, s in entry.layout.items() if s != REPLICATED}) or REPLICATED
    return f"{shards}, zero {entry.zero}" if entry.zero is not None else shards


def _shards(layout: Mapping[str, str]) -> str:
    return ", ".join(f"{axis}: {shard}" for axis, shard in layout.items())


def _collectives(plan: Plan) -> dict[str, str]:
    return {
        f"{c.operation} of {format_groups(c.groups, limit=len(c.groups))}": c.summary
        for c in plan.collectives
    }


def _by_name(kind: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if old != new:
            yield Change(kind=kind, name=name, before=old, after=new)


# ------------------------------------------------------------ costs
def _costs(before: Plan, after: Plan, first: Estimate, second: Estimate) -> Iterator[Cost]:
    yield from _figures("time", first.timeline.causes, second.timeline.causes, CAUSES)
    yield from _figures("memory", first.peak.parts, second.peak.parts, {})
    yield from _figures("traffic", _traffic(before), _traffic(after), {})


def _figures(
    kind: str, before: Mapping[str, float], after: Mapping[str, float], texts: Mapping[str, str]
) -> Iterator[Cost]:
    for name in dict.fromkeys((*before, *after)):
        yield Cost(
            kind=kind,
            name=name,
            text=texts.get(name, name),
            before=before.get(name, 0.0),
            after=after.get(name, 0.0),
        )


def _traffic(plan: Plan) -> dict[str, float]:
    """Return the bytes over the busiest link of each kind."""
    traffic: dict[str, float] = {}
    for link in plan.figures.details.links:
        traffic[link.name] = traffic.get(link.name, 0.0) + link.traffic_bytes
    return traffic


# ------------------------------------------------------------ timelines for Perfetto
def side_by_side(plans: list[tuple[str, Plan, Estimate]]) -> dict[str, Any]:
    """Return a trace with several named predicted steps."""
    events: list[dict[str, Any]] = []
    first = 0
    for name, plan, estimate in plans:
        events += named_events(plan, estimate, f"{name}: ", first=first)
        first += len(plan.groups)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
