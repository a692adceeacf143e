"""What crosses every link of the cluster in a step, by what it is for.

Enters: a simulated step. Leaves: rows for a plan's file: links that are alike are one, with the
bytes of the busiest. Bytes follow from the algorithm that the cost model takes for each message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.names import expand
from shardwise.cost.collectives import CollectiveModel, crossing_bytes
from shardwise.cost.traffic import PHASES
from shardwise.planner.search.details.subject import Subject
from shardwise.simulation.stages import Layers, StageCost
from shardwise.simulation.step import pairs
from shardwise.simulation.times import Group
from shardwise.simulation.work import FORWARD, Floats

PURPOSES = {
    "gather": "parameters",
    "root": "parameters",
    "reduce": "gradients",
    "update": "new parameters",
}


@dataclass(frozen=True, slots=True)
class Message:
    """Equal collectives of a step: what for, among which rows of ranks, how large, how often."""

    purpose: str
    op: str
    rows: NDArray[np.int64]
    num_bytes: float
    times: float


def link_traffic(subject: Subject) -> list[dict[str, Any]]:
    """`links` of a plan's details."""
    cluster, clock = subject.evaluator.cluster, subject.evaluator.clock
    moved: dict[str, Floats] = {}
    known: dict[object, Floats] = {}
    for message in messages(subject):
        if message.rows.shape[-1] < 2 or not message.num_bytes * message.times:
            continue
        algorithm = _algorithm(clock.collective(message.op, message.rows), message.num_bytes)
        key = (message.op, message.rows.tobytes(), message.rows.shape, algorithm)
        if key not in known:
            known[key] = crossing_bytes(cluster, message.op, message.rows, algorithm)
        total = moved.setdefault(message.purpose, np.zeros_like(cluster.topology.capacity))
        total += known[key] * (message.num_bytes * message.times)
    return _rows(subject, moved)


def _algorithm(model: CollectiveModel, num_bytes: float) -> str:
    """The library's quickest: trees that were solved for these links carry about as much."""
    known = [line for line in model.lines if line.algorithm in PHASES]
    return min(known, key=lambda line: line.seconds(num_bytes)).algorithm


def messages(subject: Subject) -> Iterator[Message]:
    """All messages of a step."""
    groups, stages = subject.setting.groups, subject.estimate.stages
    for stage, layers in zip(stages, subject.layers, strict=True):
        group = groups[stage.group]
        yield from _between_nodes(subject, stage, layers, group)
        yield from _of_parameters(subject, stage, layers, group)
        if stage.index + 1 < len(stages) and stage.send_bytes:
            there = groups[stages[stage.index + 1].group]
            if there is not group:
                rows = pairs(group.array, there.array)
                times = float(subject.setting.num_microbatches)
                for way in (rows, rows[:, ::-1]):
                    yield Message("between stages", "send", way, stage.send_bytes, times)


def _between_nodes(
    subject: Subject, stage: StageCost, layers: Layers, group: Group
) -> Iterator[Message]:
    """Collectives that nodes wait for; forward's once more where backward computes it again."""
    first, end = subject.span(stage)
    index = subject.fold.index[first:end]
    count = np.bincount(index, minlength=len(subject.fold.graph.nodes) + 1)
    repeated = subject.columns["again"][first:end] > 0
    again = np.bincount(index[repeated], minlength=len(count))
    found: dict[tuple[str, tuple[str, ...], float], float] = defaultdict(float)
    for talk in layers.work.talks:
        times = count[talk.node] + (again[talk.node] if talk.phase == FORWARD else 0)
        found[talk.op, talk.axes, talk.num_bytes] += float(times)
    for (op, axes, num_bytes), times in found.items():
        rows = group.along(axes)
        yield Message("activations", op, rows, num_bytes, times * subject.setting.num_microbatches)


def _of_parameters(
    subject: Subject, stage: StageCost, layers: Layers, group: Group
) -> Iterator[Message]:
    """Parameters are gathered for forward and for backward of every micro-batch (zero 3)."""
    for kind in layers.sent(*subject.span(stage), subject.setting):
        often = 2.0 * subject.setting.num_microbatches if kind.purpose == "gather" else 1.0
        rows = group.along(kind.axes)
        alike: dict[float, float] = defaultdict(float)
        for size, count in zip(kind.num_bytes.tolist(), kind.messages.tolist(), strict=True):
            if count:
                alike[size / count] += count
        for size, count in alike.items():
            yield Message(PURPOSES[kind.purpose], kind.op, rows, size, count * often)


# ------------------------------------------------------------ links that are alike


def _rows(subject: Subject, moved: dict[str, Floats]) -> list[dict[str, Any]]:
    topology = subject.evaluator.cluster.topology
    total = sum(moved.values(), np.zeros_like(topology.capacity))
    busy = total / topology.capacity
    step = subject.estimate.step_time_s
    alike: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for resource, key in enumerate(_kinds(subject)):
        alike.setdefault(key, []).append(resource)
    found = []
    for (kind, name, nodes), members in alike.items():
        worst = max(members, key=lambda r: busy[r])
        capacity = float(topology.capacity[worst])
        found.append(
            {
                "name": name,
                "kind": kind,
                "nodes": list(nodes),
                "count": len(members),
                "busiest": topology.label(worst),
                "bytes_per_s": capacity if np.isfinite(capacity) else None,
                "traffic_bytes": float(total[worst]),
                "total_bytes": float(total[members].sum()),
                "busy_s": float(busy[worst]),
                "share": float(busy[worst]) / step if step else 0.0,
                "what": {k: float(v[worst]) for k, v in moved.items() if v[worst]},
            }
        )
    return found


def _kinds(subject: Subject) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Of every resource: what it is, a name for all that are alike, and the nodes it is at."""
    cluster = subject.evaluator.cluster
    topology = cluster.topology
    entries = [node for node in cluster.nodes for _ in range(node.copies)]
    for resource in range(len(topology.capacity)):
        if resource < 2 * topology.num_ranks:
            node = entries[int(topology.node[resource % topology.num_ranks])].name
            yield "inside", f"links of devices, {node}", (node,)
            continue
        kind, _, rest = topology.label(resource).partition(" ")
        name = rest if kind == "bus" else rest.rpartition(" ")[0]  # without its direction
        if kind in ("nic", "bus"):
            machine = name.rpartition(".")[0] if kind == "nic" else name
            node = next((e.name for e in cluster.nodes if machine in _names(e.name)), machine)
            if kind == "nic":
                yield "between", f"network cards, {node}", (node,)
            else:
                yield "inside", f"bus, {node}", (node,)
        elif kind == "switch":
            base = next((s for s in cluster.network.switches if _is_of(name, s.name)), None)
            nodes = base.nodes if base is not None else ()
            yield "switch", f"switch {base.name if base else name}", tuple(nodes)
        else:
            trunk = next((t for t in cluster.network.trunks if t.name == name), None)
            ends = () if trunk is None else (*trunk.between[0], *trunk.between[1])
            yield "trunk", f"trunk {name}", tuple(ends)


def _is_of(name: str, switch: str) -> bool:
    """Whether a resource is one of a switch's: `leaf.3` is one of `leaf`."""
    number = name.removeprefix(f"{switch}.")
    return name == switch or (number != name and number.isdigit())


@cache
def _names(pattern: str) -> frozenset[str]:
    return frozenset(expand(pattern))
