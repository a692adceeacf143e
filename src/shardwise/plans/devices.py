"""The devices that a plan uses: all of a cluster, or those that the planner did not leave out."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cluster import Cluster
from shardwise.messages.ranks import parse_ranks
from shardwise.plans.plan import Plan

__all__ = ["used_devices"]


def used_devices(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the part of `cluster` that `plan` runs on: all of it, unless it was planned otherwise.

    A plan whose search left devices out says of which cluster, and which ranks of it remain.
    """
    left_out = plan.search.get("left_out")
    if not isinstance(left_out, Mapping) or left_out.get("fingerprint") != cluster.fingerprint:
        return cluster
    return cluster.subset(parse_ranks(str(left_out.get("used", "")), "search.left_out.used"))
