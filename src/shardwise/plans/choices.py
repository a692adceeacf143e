"""Look up what a plan says about nodes and blocks, by name, by place or by a glob of places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, Node, node_keys
from shardwise.ir.blocks import ConstraintKey, block_glob

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan


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
        for key in dict.fromkeys((place, block_glob(place))):
            by_key.setdefault(key, []).append(name)
    by_key |= {name: [name] for name in places}  # outside of all modules a place may be a name
    found = {}
    for key in keys:
        found[key] = by_key.get(key, [])
        if not found[key] and any(c in key for c in "*?["):
            found[key] = [name for name, place in places.items() if fnmatchcase(place, key)]
    return found


def block_constraints(plan: Plan, graph: Graph) -> ConstraintKey:
    """Return what a plan says about a block: parameter entries, choices of nodes, recomputation."""
    forced = plan.choices(graph)
    globs = () if isinstance(plan.recompute, str) else plan.recompute
    owned: dict[str, list[str]] = {}
    for parameter in graph.parameters:
        pieces = parameter.name.split(".")
        for end in range(1, len(pieces)):
            owned.setdefault(".".join(pieces[:end]), []).append(parameter.name)

    def key(path: str, nodes: Sequence[Node]) -> str:
        entries = {n.removeprefix(f"{path}."): plan.entry(n) for n in owned.get(path, ())}
        choices = [forced.get(node.name) for node in nodes]
        recomputed = sorted(
            module.removeprefix(path)
            for module in {path, *(node.module for node in nodes)}
            if any(fnmatchcase(module, glob) for glob in globs)
        )
        return f"{entries} {choices} {recomputed}"

    return key
