"""Why this plan: what the search found, as data that a plan carries.

Enters: what the search came to. Leaves: a mapping for `Plan.search`: the estimate and its causes,
the runners-up, the gaps, what limits the plan, what relaxing that would buy, and time and memory
by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.cluster import Cluster
from shardwise.planner.search.search import Candidate, Found, Search
from shardwise.planner.search.space import Fixed
from shardwise.simulation.estimate import Estimate
from shardwise.simulation.memory import peak_of

MORE_MEMORY = (0.05, 0.1, 0.25, 0.5, 1.0)  # parts of a device's memory
TRIED = 4  # quicker points that are simulated for each
GIB = 2**30


def search_report(
    found: Found, search: Search, fixed: Fixed, cluster: Cluster, memory_gib: float | None
) -> dict[str, Any]:
    """What a plan says of its own making."""
    best = found.best
    relaxed = relaxations(found, search)
    return {
        "cluster": {
            "name": cluster.name,
            "fingerprint": cluster.fingerprint,
            "num_ranks": cluster.num_ranks,
        },
        "fixed": {k: v for k, v in asdict(fixed).items() if v is not None}
        | ({"memory_gib": memory_gib} if memory_gib is not None else {}),
        "best": described(best),
        "runners_up": [described(other) for other in found.feasible[1:6]],
        "gap": {
            "layouts": best.layouts.solution.gap,
            "search": found.gap,
            "points": found.points,
            "simulated": len(found.feasible) + len(found.infeasible),
        },
        "binding": binding(best.estimate, relaxed),
        "relaxations": relaxed,
        "layers": by_layer(best, search),
        "stages": [stage_json(stage) for stage in best.estimate.stages],
    }


def described(candidate: Candidate) -> dict[str, Any]:
    """A simulated point in figures."""
    estimate = candidate.estimate
    peak = peak_of(estimate.memory)
    return {
        "what": str(candidate.point),
        "step_time_s": estimate.step_time_s,
        "bubble_fraction": estimate.timeline.bubble_fraction,
        "causes": dict(estimate.timeline.causes),
        "memory": peak.to_json(),
        "rows": estimate.rows,
    }


def relaxations(found: Found, search: Search) -> list[dict[str, Any]]:
    """What more memory would buy, and quicker links or devices at most."""
    best = found.best.estimate
    time, limit = best.step_time_s, peak_of(best.memory).limit_bytes
    rows: list[dict[str, Any]] = []
    shortest = time
    for share in MORE_MEMORY:
        candidate = _with_memory(found, search, 1 + share, shortest)
        if candidate is not None:
            shortest = candidate.estimate.step_time_s
            extra = (peak_of(candidate.estimate.memory).peak_bytes - limit) / GIB
            rows.append(
                {
                    "change": f"{extra:.1f} GiB more per device",
                    "step_time_s": shortest,
                    "ratio": shortest / time,
                    "what": str(candidate.point),
                }
            )
    causes = best.timeline.causes
    talking = sum(causes[name] for name in ("collectives", "parameters", "gradients", "update"))
    computing = causes["compute"] + causes["recompute"] + causes["optimizer"]
    for change, gain in (
        ("links twice as fast", talking / 2),
        ("devices that compute 10% faster", computing / 11),
    ):
        rows.append({"change": change, "step_time_s": time - gain, "ratio": 1 - gain / time})
    return rows


def _with_memory(found: Found, search: Search, most: float, shortest: float) -> Candidate | None:
    """The quickest point that fits in `most` of a device's memory and is quicker than `shortest`."""
    tried = 0
    best: Candidate | None = None
    for bound in found.bounds:
        if bound.seconds >= shortest or tried >= TRIED:
            break
        if bound.memory > most:
            continue
        candidate = search.simulate(bound.point)
        peak = peak_of(candidate.estimate.memory)
        if not 1.0 < peak.peak_bytes / peak.limit_bytes <= most:
            continue
        tried += 1
        if candidate.estimate.step_time_s < shortest:
            best, shortest = candidate, candidate.estimate.step_time_s
    return best


def binding(estimate: Estimate, relaxed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What limits the plan: memory, where more of it would help; else the largest cause."""
    memory = next((row for row in relaxed if "GiB" in row["change"]), None)
    if memory is not None:
        gain = 1 - memory["ratio"]
        return {"what": "memory", "text": f"memory: {memory['change']}: -{gain:.1%} step time"}
    causes = estimate.timeline.causes
    largest = max(causes, key=lambda name: causes[name])
    share = causes[largest] / estimate.step_time_s
    return {"what": largest, "text": f"{largest}: {share:.0%} of the step"}


def by_layer(candidate: Candidate, search: Search) -> list[dict[str, Any]]:
    """Time of a step and bytes of every unit, one line for equal ones."""
    setting = candidate.setting
    rows: list[dict[str, Any]] = []
    for stage in candidate.estimate.stages:
        works = candidate.layouts.works
        layers = search.evaluator.group_layers(works, setting, stage.group)[0]
        saved = search.fold.spread(layers.work.saved)
        for unit in stage.units:
            numel = sum(
                float(share.numel[unit.end] - share.numel[unit.first])
                for share in layers.parameters(setting).values()
            )
            rows.append(
                {
                    "name": unit.name or search.fold.places[unit.first].rpartition(".")[0],
                    "stage": stage.index,
                    "count": 1,
                    "forward_s": unit.forward * setting.microbatches,
                    "backward_s": unit.backward * setting.microbatches,
                    "communication_s": unit.talk * setting.microbatches,
                    "parameters": numel,
                    "activation_bytes": float(saved[unit.first : unit.end].sum()),
                }
            )
    return _merged(rows)


def _merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours with the same figures as one row that counts them."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if found and all(
            found[-1][key] == row[key] for key in row if key not in ("name", "count", "last")
        ):
            found[-1]["count"] += 1
            found[-1]["last"] = row["name"]
        else:
            found.append(dict(row))
    return found


def stage_json(stage: Any) -> dict[str, Any]:
    """A stage's costs, from which its part of a step can be played again."""
    return {
        "index": stage.index,
        "group": stage.group,
        "send_bytes": stage.send_bytes,
        "numel": stage.numel,
        "tensors": stage.tensors,
        "update_gather": stage.update_gather,
        "forward_s": stage.forward,
        "backward_s": stage.backward,
        "units": len(stage.units),
    }
