"""What a change of the machines, or of what is fixed, would buy; all of it simulated.

Enters: what the search came to. Leaves: rows with a change, its step time and its ratio to the
best one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Any

from shardwise.cluster import Cluster, Device
from shardwise.cluster.links import Link, Network
from shardwise.planner.search.found import Candidate, Found
from shardwise.planner.search.search import Search
from shardwise.planner.search.space import Fixed
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.memory import peak_of

MORE_MEMORY = (0.05, 0.1, 0.25, 0.5, 1.0)  # parts of a device's memory
TRIED = 4  # quicker points that are simulated for each
SIMULATED = 12  # points in all that were not simulated before, for each
WORTH = 0.001  # of the step: a change that buys less is not told
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The search once more, with less that is fixed."""

    options: Callable[[Fixed], Found]
    constraints: Callable[[], Found] | None  # without them; None where there are none


def relaxations(
    found: Found, search: Search, fixed: Fixed, again: Again | None = None
) -> list[dict[str, Any]]:
    """What more memory, other options, quicker links and quicker devices would buy."""
    return [
        *_memory(found, search),
        *(_options(found, fixed, again) if again is not None else ()),
        *(_constraints(found, again) if again is not None else ()),
        *_machines(found, search),
    ]


def _row(change: str, kind: str, seconds: float, time: float, **more: Any) -> dict[str, Any]:
    return {
        "change": change,
        "kind": kind,
        "step_time_s": seconds,
        "ratio": seconds / time,
        **more,
    }


def _memory(found: Found, search: Search) -> Iterator[dict[str, Any]]:
    best = found.best.estimate
    time, limit = best.step_time_s, peak_of(best.memory).limit_bytes
    shortest = time * (1 - WORTH)
    for share in MORE_MEMORY:
        candidate = _with_memory(found, search, 1 + share, shortest)
        if candidate is not None:
            shortest = candidate.estimate.step_time_s
            extra = rounded_up((peak_of(candidate.estimate.memory).peak_bytes - limit) / GIB)
            change = f"{extra:g} GiB more per device"
            yield _row(change, "memory", shortest, time, gib=extra, what=str(candidate.point))


def rounded_up(gib: float) -> float:
    """As few digits as still are enough.

    >>> rounded_up(10.72), rounded_up(0.1403), rounded_up(0.0031)
    (10.8, 0.15, 0.0031)
    """
    places: int = 1 if gib >= 1 else 1 - floor(log10(gib))
    return round(ceil(gib * 10.0**places - 1e-9) / 10.0**places, places)


def _with_memory(found: Found, search: Search, most: float, shortest: float) -> Candidate | None:
    """The quickest point below `shortest` that fits in `most` of a device's memory."""
    tried = simulated = 0
    best: Candidate | None = None
    for bound in found.bounds:
        if bound.seconds >= shortest or tried >= TRIED or simulated >= SIMULATED:
            break
        if bound.memory > most:
            continue
        simulated += not search.knows(bound.point)  # of less memory: the next goes further
        candidate = search.simulate(bound.point)
        if not 1.0 < _fullest(candidate) <= most:
            continue
        candidate = search.simulate(bound.point, whole=True)
        if _fullest(candidate) > most:
            continue
        tried += 1
        if candidate.estimate.step_time_s < shortest:
            best, shortest = candidate, candidate.estimate.step_time_s
    return best


def _fullest(candidate: Candidate) -> float:
    """What the fullest rank needs, as a part of its device's memory."""
    peak = peak_of(candidate.estimate.memory)
    return peak.peak_bytes / peak.limit_bytes


def _options(found: Found, fixed: Fixed, again: Again) -> Iterator[dict[str, Any]]:
    """What the options that the user fixed cost."""
    given = [name for name in Fixed.__slots__ if getattr(fixed, name) is not None]
    if given:
        yield from _left(found, again.options(Fixed()), ", ".join(given), "options")


def _constraints(found: Found, again: Again) -> Iterator[dict[str, Any]]:
    """What the cuts of parameters that the user fixed cost."""
    if again.constraints is not None:
        yield from _left(found, again.constraints(), "constraints", "constraints")


def _left(found: Found, freed: Found, what: str, kind: str) -> Iterator[dict[str, Any]]:
    time = found.best.estimate.step_time_s
    if freed.feasible and freed.best.estimate.step_time_s < time * (1 - WORTH):
        seconds, best = freed.best.estimate.step_time_s, str(freed.best.point)
        yield _row(f"{what} left to the planner", kind, seconds, time, what=best)


def _machines(found: Found, search: Search) -> Iterator[dict[str, Any]]:
    """The same plan on quicker machines."""
    best, evaluator = found.best, search.evaluator
    time = best.estimate.step_time_s
    cluster, table = evaluator.cluster, evaluator.clock.table
    changes = [("links twice as fast", "links", faster_links(cluster, 2.0))]
    if table is None:  # measured times hold for the devices that they were measured on
        changes.append(("devices that compute 10% faster", "compute", faster_devices(cluster, 1.1)))
    for change, kind, other in changes:
        estimate = Evaluator(evaluator.fold, other, table).estimate(
            best.layouts.works, best.setting
        )
        yield _row(change, kind, estimate.step_time_s, time)


def faster_devices(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with every device's rates multiplied."""

    def quicker(device: Device) -> Device:
        return replace(device, speed=device.speed * factor)

    return replace(
        cluster,
        nodes=tuple(
            replace(node, devices=tuple(map(quicker, node.devices))) for node in cluster.nodes
        ),
    )


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with the bandwidth of every link, card, switch and trunk multiplied."""
    nodes = []
    for node in cluster.nodes:
        card = node.nic
        if card is not None:
            card = replace(card, bandwidth_bytes_per_s=card.bandwidth_bytes_per_s * factor)
        link = None if node.link is None else _faster(node.link, factor)
        nodes.append(replace(node, link=link, nic=card))
    return replace(cluster, nodes=tuple(nodes), network=_faster_network(cluster.network, factor))


def _faster(link: Link, factor: float) -> Link:
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        bus_bytes_per_s=link.bus_bytes_per_s * factor,
    )


def _faster_network(network: Network, factor: float) -> Network:
    return replace(
        network,
        domains=tuple(replace(d, link=_faster(d.link, factor)) for d in network.domains),
        switches=tuple(
            s
            if s.uplink_bytes_per_s is None
            else replace(s, uplink_bytes_per_s=s.uplink_bytes_per_s * factor)
            for s in network.switches
        ),
        trunks=tuple(
            replace(t, bandwidth_bytes_per_s=t.bandwidth_bytes_per_s * factor)
            for t in network.trunks
        ),
    )
