"""A cluster from what was typed; torch is imported when it is made, not with the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.cluster import Cluster


def cluster_of(text: str) -> Cluster:
    """The cluster that a file describes, or one of equal nodes of a known kind."""
    from shardwise.api import clusters

    return clusters.cluster_of(text)
