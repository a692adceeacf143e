"""Which nodes a plan forces to a choice: by name, by place, or by a glob of places.

Enters: a plan's `nodes` and a graph. Leaves: the choices of every node that is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, node_keys


def starred(place: str) -> str:
    """A place with a star for the number of each numbered module.

    >>> starred("model.layers.7.mlp.up.linear_0")
    'model.layers.*.mlp.up.linear_0'
    """
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", place)


def find_choices(nodes: Mapping[str, Mapping[str, str]], graph: Graph) -> dict[str, dict[str, str]]:
    """Node -> mesh axis -> choice; later keys win. A part of a graph has some of the nodes."""
    found: dict[str, dict[str, str]] = {}
    for key, names in _meant(nodes, graph).items():
        for name in names:
            found.setdefault(name, {}).update(nodes[key])
    return found


def check_choices(nodes: Mapping[str, Mapping[str, str]], graph: Graph) -> None:
    """Raise unless every key means a node."""
    for key, names in _meant(nodes, graph).items():
        if not names:
            known = [name for pair in node_keys(graph).items() for name in pair]
            raise PlanError(
                f"the plan names node {key!r}, the graph has none{did_you_mean(key, known)}",
                hint="shardwise explain lists the nodes",
            )


def known_choices(
    nodes: Mapping[str, Mapping[str, str]], graph: Graph
) -> dict[str, Mapping[str, str]]:
    """Those choices whose nodes the graph has."""
    return {key: nodes[key] for key, names in _meant(nodes, graph).items() if names}


def _meant(keys: Iterable[str], graph: Graph) -> dict[str, list[str]]:
    """For every key the nodes that it means."""
    keys = list(keys)
    if not keys:
        return {}
    places = node_keys(graph)
    by_key: dict[str, list[str]] = {}
    for name, place in places.items():
        for key in dict.fromkeys((place, starred(place))):
            by_key.setdefault(key, []).append(name)
    by_key |= {name: [name] for name in places}  # outside of all modules a place may be a name
    found = {}
    for key in keys:
        found[key] = by_key.get(key, [])
        if not found[key] and any(c in key for c in "*?["):
            found[key] = [name for name, place in places.items() if fnmatchcase(place, key)]
    return found
