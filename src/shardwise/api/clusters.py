"""A cluster from what was typed: a file, or known machines such as `h100:8x8`.

Enters: text. Leaves: `Cluster`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ClusterError

if TYPE_CHECKING:
    from shardwise.cluster import Cluster

FORMS = "a file such as cluster.yaml, or h100:8x8 (8 nodes of 8), h100:16, h100, cpu:4"
SUFFIXES = (".yaml", ".yml", ".json")


def cluster_of(text: str) -> Cluster:
    """The cluster that a file describes, or one of equal nodes of a known kind."""
    from shardwise.cluster import Cluster
    from shardwise.cluster.presets import preset_names

    path = Path(text)
    if path.suffix in SUFFIXES or path.is_file() or "/" in text:
        return Cluster.load(path)
    kind, colon, sizes = text.partition(":")
    nodes, each = _sizes(sizes, text) if colon else (1, None)
    if kind == "local":
        return Cluster.local((nodes or 1) * (each or 1))
    try:
        if nodes is None:
            assert each is not None
            return of_count(kind, each)
        return Cluster.preset(kind, nodes=nodes, devices_per_node=each)
    except ClusterError as error:
        if "no preset" not in error.message:
            raise
        message = f"{text!r} is no file, and there is {error.message}"
        raise ClusterError(message, hint=f"{FORMS}; kinds: {', '.join(preset_names())}") from None


def of_count(kind: str, count: int) -> Cluster:
    """So many devices of a kind, in as few equal nodes as its usual size allows."""
    from shardwise.api.advise import cluster_of_kind

    return cluster_of_kind(kind, count)


def _sizes(sizes: str, text: str) -> tuple[int | None, int | None]:
    """`8x4` as nodes and devices of each; `16` as devices in all."""
    nodes, cross, each = sizes.partition("x")
    if not nodes.isdigit() or (cross and not each.isdigit()) or 0 in map(int, (nodes, each or 1)):
        raise ClusterError(f"{text!r} has no sizes of a cluster", hint=FORMS)
    return (int(nodes), int(each)) if cross else (None, int(nodes))
