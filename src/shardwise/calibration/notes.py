"""What a prediction could not take from its row as it stands.

Enters: a `Row` with its `Cluster`. Leaves: notes, each of which says what was
taken instead. A row without notes is predicted as it says.
"""

from __future__ import annotations

from shardwise.calibration.machines import unread_links
from shardwise.calibration.models import shape_of
from shardwise.calibration.rows import Row
from shardwise.cluster import Cluster

_FAR = 0.2  # of the number of parameters; no variant of a transformer is so far from another


def notes_of(row: Row, cluster: Cluster) -> tuple[str, ...]:
    """What the row says and its prediction does not follow."""
    return (*_parameters(row), *_nodes(row, cluster), *_links(row))


def _parameters(row: Row) -> tuple[str, ...]:
    if row.params_text:
        return (f"params_b is {row.params_text!r}, not a number above 0: the dims alone count",)
    if row.params_b is None:
        return ()
    found_b = shape_of(row).num_parameters / 1e9
    if abs(found_b - row.params_b) - row.params_tolerance_b <= _FAR * row.params_b:
        return ()
    return (f"params_b is {row.params_b:g}, the dims make {found_b:.3g}: the dims count",)


def _nodes(row: Row, cluster: Cluster) -> tuple[str, ...]:
    per_node = row.gpus_per_node
    if per_node is None or row.gpus < per_node or row.gpus % per_node == 0:
        return ()
    taken = cluster.nodes[0].count
    return (f"{row.gpus} gpus are not whole nodes of {per_node}: nodes of {taken} are taken",)


def _links(row: Row) -> tuple[str, ...]:
    unread = unread_links(row.interconnect)
    if not unread:
        return ()
    return (f"interconnect {unread!r} has no rate that is known: the usual network is taken",)
