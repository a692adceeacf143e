"""What if the machines were others: the same plan, simulated on them.

Enters: a simulated step, and what the search's relaxations came to. Leaves: rows for a plan's file:
a change of memory, bandwidth, compute or the number of devices, and the step that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from shardwise.cluster import Cluster
from shardwise.planner.search.details.sizes import resized, stretched
from shardwise.planner.search.details.subject import Subject
from shardwise.planner.search.infeasible import gib
from shardwise.planner.search.relax import faster_devices, faster_links
from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.memory import MemoryUse, peak_of

FIXED = ("options", "constraints")  # relaxations of what is no machine
KINDS = {"links": "bandwidth"}  # what relaxations call otherwise
LESS_MEMORY = (0.75, 0.5)
LINKS = {0.5: "links half as fast", 2.0: "links twice as fast"}
DEVICES = {1.1: "devices that compute 10% faster", 2.0: "devices that compute twice as fast"}
SIZES = {Fraction(1, 2): "half", Fraction(2): "twice"}
ANOTHER = "another plan is needed: shardwise plan with that cluster"


def what_if(
    subject: Subject, relaxed: Sequence[Mapping[str, Any]], memory_limit: float | None = None
) -> list[dict[str, Any]]:
    """`what_if` of a plan's details; rows that the search simulated are taken as they are."""
    time = _library_time(subject)
    known = [_known(row) for row in relaxed if row["kind"] not in FIXED]
    told = {row["change"] for row in known}
    return [
        *[row for row in known if row["kind"] == "memory"],
        *_less_memory(subject.estimate),
        *[row for row in known if row["kind"] != "memory"],
        *[row for row in _machines(subject, time) if row["change"] not in told],
        *_counts(subject, time, memory_limit),
    ]


def _library_time(subject: Subject) -> float:
    """The step with the library's collectives, as on machines for which none were solved."""
    clock = subject.evaluator.clock
    if clock.choose is None:
        return subject.estimate.step_time_s
    evaluator = Evaluator(subject.fold, clock.cluster, clock.table)
    return evaluator.estimate(subject.works, subject.setting, {0}).step_time_s


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": KINDS.get(row["kind"], row["kind"]),
        "change": row["change"],
        "value": row.get("gib", 2.0 if row["kind"] == "links" else 1.1),
        "step_time_s": row["step_time_s"],
        "ratio": row["ratio"],
        "feasible": True,
        "note": f"with the plan {row['what']}" if "what" in row else "",
    }


def _less_memory(estimate: Estimate) -> Iterator[dict[str, Any]]:
    """Whether the plan would still fit; nothing has to be simulated for that."""
    peak = peak_of(estimate.memory)
    for part in LESS_MEMORY:
        limit = peak.limit_bytes * part
        fits = peak.peak_bytes <= limit
        needs = f"{gib(peak.peak_bytes)} of {gib(limit)}"
        yield {
            "kind": "memory",
            "change": f"{part:.0%} of the memory per device",
            "value": part,
            "step_time_s": estimate.step_time_s if fits else None,
            "ratio": 1.0 if fits else None,
            "feasible": fits,
            "note": f"takes {needs}" if fits else f"needs {needs}; {ANOTHER}",
        }


def _machines(subject: Subject, time: float) -> Iterator[dict[str, Any]]:
    """The same plan with other links and devices."""
    cluster, table = subject.evaluator.cluster, subject.evaluator.clock.table
    if cluster.num_ranks > 1:
        for factor, change in LINKS.items():
            yield _again(subject, faster_links(cluster, factor), "bandwidth", change, factor, time)
    if table is None:  # measured times hold for the devices that they were measured on
        for factor, change in DEVICES.items():
            yield _again(subject, faster_devices(cluster, factor), "compute", change, factor, time)


def _again(
    subject: Subject, cluster: Cluster, kind: str, change: str, value: float, time: float
) -> dict[str, Any]:
    evaluator = Evaluator(subject.fold, cluster, subject.evaluator.clock.table)
    estimate = evaluator.estimate(subject.works, subject.setting, {0})
    return {
        "kind": kind,
        "change": change,
        "value": value,
        "step_time_s": estimate.step_time_s,
        "ratio": estimate.step_time_s / time,
        "feasible": True,
        "note": "",
    }


def _counts(subject: Subject, time: float, memory_limit: float | None) -> Iterator[dict[str, Any]]:
    """The same batch on other numbers of devices: more or fewer data-parallel ranks."""
    ranks = subject.evaluator.cluster.num_ranks
    for factor, word in SIZES.items():
        if (ranks * factor).denominator != 1:
            continue
        row = {
            "kind": "devices",
            "change": f"{word} the devices, {int(ranks * factor):,}",
            "value": float(factor),
            "step_time_s": None,
            "ratio": None,
            "feasible": False,
            "note": ANOTHER,
        }
        yield row | _counted(subject, factor, time, memory_limit)


def _counted(
    subject: Subject, factor: Fraction, time: float, memory_limit: float | None
) -> dict[str, Any]:
    cluster = resized(subject.evaluator.cluster, factor)
    found = stretched(subject, factor)
    if cluster is None or found is None:
        return {}
    setting, works = found
    most = max(dict(group.mesh.axes)["dp"] for group in setting.groups)
    if most * setting.num_microbatches > subject.estimate.rows:
        rows = f"{subject.estimate.rows} rows are too few for dp={int(most)} x"
        return {"note": f"{rows} {setting.num_microbatches} micro-batches; {ANOTHER}"}
    evaluator = Evaluator(subject.fold, cluster, subject.evaluator.clock.table)
    estimate = evaluator.estimate(works, setting, {0, 1, len(setting.groups) - 1})
    peak = peak_of(estimate.memory)
    limit = _limit(peak, memory_limit)
    if peak.peak_bytes > limit:
        return {"note": f"needs {gib(peak.peak_bytes)} of {gib(limit)}; {ANOTHER}"}
    return {
        "step_time_s": estimate.step_time_s,
        "ratio": estimate.step_time_s / time,
        "feasible": True,
        "note": f"the same batch with dp={int(most)}, {gib(peak.peak_bytes)} per device",
    }


def _limit(use: MemoryUse, memory_limit: float | None) -> float:
    return use.limit_bytes if memory_limit is None else min(use.limit_bytes, memory_limit)
