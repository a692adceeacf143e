"""Sections of a plan's details: modules, machines, links, collectives, memory, what-if.

Texts that a plan's file numbers are
texts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shardwise import files
from shardwise.cluster import Cluster
from shardwise.cluster.links import expand
from shardwise.messages.choice import REFERENCE_BYTES, CollectiveChoice, format_groups
from shardwise.messages.program import format_ranks
from shardwise.plans import Plan
from shardwise.plans.search_result import PARAMETER_COLUMNS, PlanDetails, SearchResult
from shardwise.reports.document import CollectiveWay, Machines, MemoryBar, Modules, RankClass
from shardwise.reports.timeline import short
from shardwise.simulation import Estimate, MemoryUse
from shardwise.simulation.stored import memory_over_time

STATE = ("parameters", "optimizer")  # parts of memory that stay between steps
MOST_RANKS = 12  # of a device, listed one by one


# ------------------------------------------------------------ modules


def modules_of(details: PlanDetails) -> Modules | None:
    """Return the module tree, if the plan's file has one."""
    found = details.modules
    if found is None:
        return None
    layouts, ops = found.layouts, found.ops
    rows = _rows(found.rows)
    for number, row in enumerate(rows):
        row["id"] = number
        row["parent"] = None if row["parent"] < 0 else row["parent"]
        row["layout"] = layouts[row["layout"]] if row["layout"] >= 0 else ""
    parameters = [dict(zip(PARAMETER_COLUMNS, values, strict=True)) for values in found.parameters]
    for row in parameters:
        row["layout"] = layouts[row["layout"]]
        above = rows[row["module"]]["path"]
        row["path"] = f"{above}.{row['name']}" if above else row["name"]
    nodes: dict[str, Any] = dict(found.nodes)
    nodes["op"] = [ops[at].removesuffix(".default") for at in nodes["op"]]
    nodes["layout"] = [layouts[at] for at in nodes["layout"]]
    nodes["bytes"] = nodes.pop("activation_bytes")
    return Modules(
        rows=tuple(rows),
        parameters=tuple(parameters),
        nodes=nodes,
        sources=tuple(source_row(source, text) for source, text in found.sources),
    )


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def source_row(source: str, text: str) -> dict[str, Any]:
    """`model.py:41` and the line's text."""
    file, _, line = source.rpartition(":")
    known = bool(file) and line.isdigit()
    return {"file": file if known else source, "line": int(line) if known else 0, "text": text}


# ------------------------------------------------------------ machines


def machines_of(details: PlanDetails, plan: Plan, estimate: Estimate) -> Machines | None:
    """Return the cluster with its ranks, if the plan's file has it."""
    if not details.cluster:
        return None
    cluster = Cluster.from_yaml(json.dumps(details.cluster), "search.details.cluster")
    home = {rank: number for number, ranks in enumerate(plan.groups) for rank in ranks}
    return Machines(
        name=cluster.name,
        nodes=tuple(_nodes(cluster, home, estimate.memory)),
        links=details.links,
    )


def _nodes(
    cluster: Cluster, home: Mapping[int, int], memory: Sequence[MemoryUse]
) -> Iterator[dict[str, Any]]:
    """Yield an entry for machines that are alike; devices with the ranks of all copies."""
    first = 0
    for node in cluster.nodes:
        machines = range(node.copies)
        devices = []
        for local, device in enumerate(node.devices):
            ranks = [first + machine * node.count + local for machine in machines]
            groups = sorted({home[rank] for rank in ranks if rank in home})
            fullest = max(groups, key=lambda g: memory[g].peak_bytes, default=None)
            devices.append(
                {
                    "name": device.name,
                    "kind": device.kind,
                    "memory_bytes": device.memory_bytes,
                    "ranks": listed_ranks(ranks),
                    "groups": groups,
                    "group": groups[0] if groups else None,
                    "peak_bytes": memory[fullest].peak_bytes if fullest is not None else 0.0,
                }
            )
        names = expand(node.name)
        yield {
            "name": node.name,
            "machines": [names[0], names[-1]] if node.copies > 1 else [names[0]],
            "copies": node.copies,
            "kind": node.device.name,
            "first": first,
            "devices": devices,
            "groups": _groups_by_machine(node.copies, node.count, first, home),
        }
        first += node.copies * node.count


def _groups_by_machine(
    copies: int, count: int, first: int, home: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Which machines hold which groups, machines with the same groups once."""
    found: dict[tuple[int, ...], list[int]] = {}
    for machine in range(copies):
        begin = first + machine * count
        ranks = range(begin, begin + count)
        held = tuple(sorted({home[rank] for rank in ranks if rank in home}))
        found.setdefault(held, []).append(machine)
    return [
        {"machines": format_ranks(tuple(machines)), "groups": list(groups)}
        for groups, machines in found.items()
    ]


def listed_ranks(ranks: Sequence[int]) -> str:
    """Ranks one by one, the first few of many.

    >>> listed_ranks([0, 8]), listed_ranks(range(0, 160, 8))
    ('0, 8', '0, 8, 16, … 152; 20 in all')
    """
    if len(ranks) <= MOST_RANKS:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:3]))}, … {ranks[-1]}; {len(ranks)} in all"


def ways_of(plan: Plan) -> tuple[CollectiveWay, ...] | None:
    """Collectives that do not use the library; None where all do."""
    return tuple(_way(choice) for choice in plan.collectives) or None


def _way(choice: CollectiveChoice) -> CollectiveWay:
    return CollectiveWay(
        operation=choice.operation,
        groups=format_groups(choice.groups),
        num_groups=len(choice.groups),
        group_ranks=len(choice.groups[0]),
        uses=choice.uses,
        way=choice.way,
        min_bytes=choice.min_bytes,
        reference_bytes=REFERENCE_BYTES,
        predicted_s=dict(choice.predicted_s),
        saved_share=choice.gain,
    )


# ------------------------------------------------------------ memory, what-if


def memory_of(
    search: SearchResult, estimate: Estimate, classes: Sequence[RankClass]
) -> tuple[MemoryBar, ...]:
    """Return a bar for every class, with bytes at the moments of its step."""
    curves = {curve.group: curve for curve in search.details.memory}
    found = []
    for one in classes:
        use, data = estimate.memory[one.shown], search.memory[one.shown]
        curve = curves.get(one.shown)
        moments = (list(curve.times), list(curve.bytes)) if curve else _moments(use, estimate)
        times, sizes = _from_the_start(moments[0], moments[1], data.parts)
        found.append(
            MemoryBar(
                class_=one.id,
                group=one.shown,
                ranks=one.label,
                peak_bytes=data.peak_bytes,
                limit_bytes=data.limit_bytes,
                when=data.when,
                parts=data.parts,
                others=data.others,
                host_bytes=data.host_bytes,
                over_time=tuple(float(size) for size in sizes),
                times=tuple(float(time) for time in times),
            )
        )
    return tuple(found)


def _from_the_start(
    times: Sequence[float], sizes: Sequence[float], parts: Mapping[str, float]
) -> tuple[Sequence[float], Sequence[float]]:
    """Return a group that begins later holds its state all the while."""
    if not times or times[0] <= 0:
        return times, sizes
    state = sum(parts.get(name, 0.0) for name in STATE)
    return [0.0, *times], [min(state, sizes[0]), *sizes]


def _moments(use: MemoryUse, estimate: Estimate) -> tuple[list[float], list[float]]:
    """When each moment begins, that of the first of the actions that it stands for; its bytes."""
    timeline = estimate.timeline
    sizes = [len(mine) for mine in timeline.schedule.actions]
    begin = sum(sizes[: use.group])
    starts = timeline.starts[begin : begin + sizes[use.group]].tolist()
    values, last = memory_over_time(use), use.when == "optimizer"
    count = len(values) - last
    step = -(-len(starts) // count) if count > 0 else 1
    found = [short(starts[min(at * step, len(starts) - 1)]) for at in range(count)]
    if last:
        found.append(short(float(timeline.ends[begin : begin + sizes[use.group]].max())))
    return found, values


# Files that a command writes, with errors that say what to type for its option.


def write_whole(path: str | Path, text: str, *, option: str = "-o") -> None:
    """Write a file at once; errors say what to type for `option`."""
    files.write_text(path, text, hint=_cure(path, option))


def writing(path: str | Path, *, option: str = "-o") -> AbstractContextManager[None]:
    """Turn what the system refuses here into an error about `path`."""
    return files.writing(path, hint=_cure(path, option))


def require_writable(path: str | Path, *, option: str = "-o") -> None:
    """Refuse a path that cannot be written as a file, before long work."""
    files.require_writable(path, hint=_cure(path, option))


def _cure(path: str | Path, option: str) -> str:
    if Path(path).is_dir():
        return f"{option} {Path(path) / 'FILE'}"
    return f"{option} with a folder that you may write to"
