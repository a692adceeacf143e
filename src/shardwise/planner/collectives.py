"""The collectives of a plan: which way each takes on these machines.

Enters: a `Plan` and a `Cluster`. Leaves: the plan with its `collectives`; none where all ranks and
links are alike, so that the library's ways are the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from shardwise.cluster import Cluster
from shardwise.cost.selection import chooser
from shardwise.errors import PlanError, did_you_mean
from shardwise.messages.choice import IMPLEMENTATIONS, OPERATIONS, Chooser, CollectiveChoice
from shardwise.plans import Plan
from shardwise.simulation.costs import Group
from shardwise.simulation.estimate import check_cluster

MOST_RANKS = 64  # of a group that is solved on request: some seconds for that many unequal ones
SUMS = {0: ("all_reduce",), 1: ("all_reduce", "all_gather")}  # what gradients take, by zero level
PARTS = ("reduce_scatter", "all_gather")  # from zero 2 on


def choose(plan: Plan, cluster: Cluster, *, use: str = "", most_ranks: int = MOST_RANKS) -> Plan:
    """The plan with the way of each of its collectives on `cluster`, by predicted time.

    Sums of gradients and redistributions along mesh axes may be solved for the links at hand; the
    library's are kept unless that saves more than a tenth of their time, and for groups of more
    than `most_ranks`. `use` forces a way where it is possible: "library", "hierarchical", "solved".
    """
    if use and use not in IMPLEMENTATIONS:
        raise PlanError(
            f"there is no implementation {use!r}{did_you_mean(use, IMPLEMENTATIONS)}",
            hint=", ".join(IMPLEMENTATIONS),
        )
    return with_choices(plan, chooser(check_cluster(plan, cluster), most_ranks, use))


def with_choices(plan: Plan, choose: Chooser | None) -> Plan:
    """The plan with what `choose` says of its collectives, where that is not the library."""
    if choose is None:
        return plan.with_(collectives=())
    found: dict[tuple[str, tuple[tuple[int, ...], ...]], CollectiveChoice] = {}
    for stage in plan.all_stages:
        group = Group(mesh=stage.mesh, ranks=stage.ranks)
        for operation, axes in _used(plan, stage.mesh.names):
            choice = choose(operation, group.along(axes))
            if choice is not None and not choice.is_library:
                found.setdefault((choice.operation, choice.groups), choice)
    return plan.with_(collectives=tuple(found.values()))


def _used(plan: Plan, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Operations and the mesh axes along which a step may do them.

    Along axes that cut the batch alone, only gradients are summed; others move values, too.
    """
    levels = {entry.zero or 0 for entry in plan.parameters.values()} or {0}
    sums = dict.fromkeys(op for level in sorted(levels) for op in SUMS.get(level, PARTS))
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            batch = all(plan.roles[axis] == "batch" for axis in axes)
            for operation in sums if batch else OPERATIONS:
                yield operation, axes
