"""Why this plan: what the search found, as data that a plan carries.

Enters: what the search came to. Leaves: a mapping for `Plan.search`: the estimate and its causes,
the runners-up, the gaps, what limits the plan, what relaxing that would buy, and time and memory
by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isclose
from typing import Any

from shardwise.cluster import Cluster
from shardwise.ir import Graph
from shardwise.ir.blocks import block_glob
from shardwise.planner.search.found import Candidate, Found
from shardwise.planner.search.relax import Again, relaxations
from shardwise.planner.search.replay import step_json
from shardwise.planner.search.search import Search
from shardwise.planner.search.space import Fixed
from shardwise.simulation.estimate import Estimate
from shardwise.simulation.memory import peak_of
from shardwise.simulation.sums import Share

RUNNERS_UP = 5
BINDS = 0.01  # of the step: what relaxing a constraint must buy for it to be the binding one
SAME = 1e-9  # relative difference up to which figures are equal
CAUSES = {
    "compute": "computing",
    "recompute": "computing activations again",
    "collectives": "waiting for collectives between nodes of the graph",
    "parameters": "waiting for parameters to be gathered",
    "bubble": "waiting for other stages",
    "gradients": "waiting for sums of gradients",
    "optimizer": "the optimizer's step",
    "update": "gathering new parameters",
}


def search_report(
    found: Found,
    search: Search,
    fixed: Fixed,
    cluster: Cluster,
    given: Mapping[str, Any],
    again: Again | None = None,
) -> dict[str, Any]:
    """What a plan says of its own making; `again` searches with less fixed.

    `given` is what the user fixed beside options.
    """
    best = found.best
    relaxed = relaxations(found, search, fixed, again)
    return {
        "cluster": {
            "name": cluster.name,
            "fingerprint": cluster.fingerprint,
            "num_ranks": cluster.num_ranks,
            "price_per_hour": price_per_hour(cluster),
        },
        "batch": batch_sizes(search.graph, best.estimate.rows),
        "fixed": {k: v for k, v in {**asdict(fixed), **given}.items() if v is not None},
        "best": described(best),
        "runners_up": [described(other) for other in distinct(found.feasible)[1:]],
        "gap": {
            "layouts": best.layouts.solution.gap,
            "search": found.gap,
            "points": found.points,
            "simulated": len(found.feasible),
        },
        "polish": asdict(found.polish) if found.polish is not None else None,
        "binding": binding(best.estimate, relaxed),
        "relaxations": relaxed,
        "layers": by_layer(best, search),
        **step_json(best.estimate, best.setting, search.evaluator),
    }


def price_per_hour(cluster: Cluster) -> float:
    """Of all devices together."""
    return sum(
        node.copies * sum(device.price_per_hour for device in node.devices)
        for node in cluster.nodes
    )


def batch_sizes(graph: Graph, rows: int) -> dict[str, int]:
    """The samples of a batch, and its tokens where an input is a matrix of whole numbers."""
    found = {"rows": rows}
    for source in graph.inputs:
        kind = graph.values[source.value]
        whole = not (kind.dtype.is_floating_point or kind.dtype.is_complex)
        if whole and len(kind.shape) == 2 and kind.shape[0] == rows and kind.shape[1] > 1:
            return found | {"tokens": rows * kind.shape[1]}
    return found


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best and its runners-up, without those that take as long and no less memory."""
    found: list[Candidate] = []
    for candidate in candidates:
        if len(found) > RUNNERS_UP:
            break
        if not any(_idle(candidate.estimate, other.estimate) for other in found):
            found.append(candidate)
    return found


def _idle(one: Estimate, other: Estimate) -> bool:
    """Whether `one` has nothing for it: it takes as long as the other and no less memory."""
    same = isclose(one.step_time_s, other.step_time_s, rel_tol=SAME)
    return same and one.peak.peak_bytes >= other.peak.peak_bytes * (1 - SAME)


def described(candidate: Candidate) -> dict[str, Any]:
    """A simulated point in figures."""
    estimate = candidate.estimate
    peak = peak_of(estimate.memory)
    return {
        "what": str(candidate.point),
        "point": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(candidate.point).items()
        },
        "step_time_s": estimate.step_time_s,
        "bubble_fraction": estimate.timeline.bubble_fraction,
        "causes": dict(estimate.timeline.causes),
        "memory": peak.to_json(),
        "rows": estimate.rows,
    }


def binding(estimate: Estimate, relaxed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What limits the plan: memory or what is fixed, where relaxing it helps; or a cause."""
    for kind in ("memory", "options", "constraints"):
        row = next((r for r in relaxed if r["kind"] == kind and r["ratio"] < 1 - BINDS), None)
        if row is not None:
            text = f"{row['change']}: -{1 - row['ratio']:.1%} step time"
            return {"what": kind, "text": text}
    causes = estimate.timeline.causes
    largest = max(causes, key=lambda name: causes[name])
    share = causes[largest] / estimate.step_time_s if estimate.step_time_s else 0.0
    return {"what": largest, "text": f"{CAUSES[largest]}: {share:.0%} of the step"}


def by_layer(candidate: Candidate, search: Search) -> list[dict[str, Any]]:
    """Time of a step and bytes of every unit on a rank, one line for equal ones."""
    setting, estimate = candidate.setting, candidate.estimate
    kept = {"none": "saved", "selective": "saved_selective"}.get(str(setting.recompute))
    rows: list[dict[str, Any]] = []
    for stage in estimate.stages:
        layers = search.evaluator.group_layers(candidate.layouts.works, setting, stage.group)[0]
        saved = search.fold.spread(getattr(layers.work, kept or "saved_full"))
        shares = layers.parameters(setting).values()
        mine = [s for s in estimate.stages if s.group == stage.group]
        total = sum(_numel(shares, u.first, u.end) for s in mine for u in s.units)
        parts = estimate.memory[stage.group].parts
        static = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
        for unit in stage.units:
            numel = _numel(shares, unit.first, unit.end)
            rows.append(
                {
                    "name": unit.name or outside(search, unit.first, unit.end),
                    "stage": stage.index,
                    "count": 1,
                    "forward_s": unit.forward * setting.num_microbatches,
                    "backward_s": unit.backward * setting.num_microbatches,
                    "communication_s": (unit.forward_talk + unit.backward_talk)
                    * setting.num_microbatches,
                    "parameters": numel,
                    "state_bytes": static * numel / total if total else 0.0,
                    "activation_bytes": float(saved[unit.first : unit.end].sum()),
                }
            )
    return merged(rows)


def _numel(shares: Iterable[Share], first: int, end: int) -> float:
    return sum(float(share.numel[end] - share.numel[first]) for share in shares)


def outside(search: Search, first: int, end: int) -> str:
    """The name of a unit outside of all blocks: its modules, those with parameters if any."""
    places = search.fold.places[first:end]
    modules = list(dict.fromkeys(place.rpartition(".")[0] for place in places))
    owners = {p.name.rpartition(".")[0] for p in search.graph.parameters}
    named = [m for m in modules if m in owners and m] or [m for m in modules if m]
    more = f", {len(named) - 2} more" if len(named) > 2 else ""
    return ", ".join(named[:2]) + more if named else f"({search.graph.name})"


def merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a stage with the same figures, in modules that differ in a number, as one."""
    found: list[dict[str, Any]] = []
    known: dict[object, list[dict[str, Any]]] = {}
    for row in rows:
        alike = known.setdefault((row["stage"], block_glob(f"{row['name']}.")), [])
        first = next((other for other in alike if _alike(other, row)), None)
        if first is None:
            found.append(dict(row))
            alike.append(found[-1])
        else:
            first["count"] += 1
            first["last"] = row["name"]
    return found


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    figures = [key for key in other if key not in ("name", "count", "last")]
    return all(isclose(one[k], other[k], rel_tol=SAME, abs_tol=1e-15) for k in figures)
