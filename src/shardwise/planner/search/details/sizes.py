"""The same machines in another number, and the same plan on them.

Enters: a cluster, or a simulated step. Leaves: a cluster of a multiple of its ranks, and the step's
setting with as many times the data-parallel ranks; None where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from shardwise.cluster import Cluster, Mesh
from shardwise.cluster.cluster import ClusterNode
from shardwise.errors import ClusterError
from shardwise.planner.search.details.subject import Subject
from shardwise.simulation.setting import Setting
from shardwise.simulation.times import Group
from shardwise.simulation.works import Works

BATCH_AXIS = "dp"


def resized(cluster: Cluster, factor: Fraction) -> Cluster | None:
    """`factor` times the machines; where there is one without a network, the devices."""
    try:
        return _resized(cluster, factor)
    except ClusterError:  # nothing is said of what would connect them
        return None


def _resized(cluster: Cluster, factor: Fraction) -> Cluster | None:
    if len(cluster.nodes) != 1 or cluster.network.trunks:
        return None
    (node,) = cluster.nodes
    copies, devices = node.copies * factor, node.count * factor
    if copies.denominator == 1 and node.nic is not None:
        stem = re.sub(r"\[.*\]", "", node.name) or "node"
        name = node.name if copies == 1 and node.copies == 1 else f"{stem}[0-{int(copies) - 1}]"
        return _renamed(cluster, node, name)
    if devices.denominator == 1 and node.copies == 1 and devices >= 1:
        kinds = node.devices * -(-int(devices) // node.count)
        return replace(cluster, nodes=(replace(node, devices=kinds[: int(devices)]),))
    return None


def _renamed(cluster: Cluster, node: ClusterNode, name: str) -> Cluster | None:
    network, everywhere = cluster.network, (node.name,)
    named = [domain.nodes for domain in network.domains] + [s.nodes for s in network.switches]
    if any(nodes != everywhere for nodes in named):
        return None
    return replace(
        cluster,
        nodes=(replace(node, name=name, address="", ssh=None),),
        network=replace(
            network,
            domains=tuple(replace(d, nodes=(name,)) for d in network.domains),
            switches=tuple(replace(s, nodes=(name,)) for s in network.switches),
        ),
    )


def stretched(
    subject: Subject, factor: Fraction
) -> tuple[Setting, Mapping[Mesh, Works] | Works] | None:
    """The setting with `factor` times the data-parallel ranks in every group, and its works."""
    groups, works = [], {}
    offset = 0
    for number, group in enumerate(subject.setting.groups):
        mine = subject.works_of(number)
        mesh = _stretched_mesh(group.mesh, factor)
        first = group.ranks[0]
        consecutive = group.ranks == tuple(range(first, first + len(group.ranks)))
        if mesh is None or not consecutive or BATCH_AXIS not in mine.batch:
            return None
        ranks = tuple(range(offset, offset + mesh.size))
        offset += mesh.size
        groups.append(Group(mesh=mesh, ranks=ranks))
        works[mesh] = mine
    found: Mapping[Mesh, Works] | Works = works
    if isinstance(subject.works, Works):
        found = subject.works
    return replace(subject.setting, groups=tuple(groups)), found


def _stretched_mesh(mesh: Mesh, factor: Fraction) -> Mesh | None:
    axes = dict(mesh.axes)
    size = axes.get(BATCH_AXIS, 1)
    wanted = int(size) * factor
    if wanted.denominator != 1 or getattr(size, "weights", None):
        return None
    others = tuple((axis, n) for axis, n in mesh.axes if axis != BATCH_AXIS)
    return Mesh(axes=((BATCH_AXIS, int(wanted)), *others))
