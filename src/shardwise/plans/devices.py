"""The devices that a plan uses: all of a cluster, or those that the planner did not leave out."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.messages.ranks import parse_ranks
from shardwise.plans.plan import Plan

__all__ = ["used_devices"]


def used_devices(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the part of `cluster` that `plan` runs on: all of it, unless it was planned otherwise.

    A plan whose search left devices out says of which cluster, and which ranks of it remain.
    """
    left_out = plan.search.left_out if plan.search is not None else None
    if left_out is None or left_out.fingerprint != cluster.fingerprint:
        return cluster
    return cluster.subset(parse_ranks(left_out.used, "search.left_out.used"))
