"""Which nodes of a folded graph choose alike, and how often everything counts.

Enters: a `Fold` and the graph that it folds. Leaves: `Likeness`, for `LayoutTask`.

Of many equal blocks the first two are in the small graph, and the second stands for all that
follow. They follow each other in the model as these two do only if both choose alike. A value then
counts as often as the model has one like it: made by a node that chooses alike and used by such
nodes. What leaves the first block counts for all but the last, what leaves the second one once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.ir import Graph, Node
from shardwise.ir.blocks import MAX_DEPTH, ConstraintKey, block_kinds, is_number
from shardwise.planner.layouts.shared import roots_of
from shardwise.simulation.fold import Fold

# Who makes a value, as which of its results, and who uses it; who ends it is a use of itself.
Like = tuple[str, int, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """`LayoutTask`'s fields of these names."""

    alike: Mapping[str, str]
    copies: Mapping[str, int]
    moves: Mapping[str, int]


def alike_of(fold: Fold, graph: Graph, constraint_key: ConstraintKey | None = None) -> Likeness:
    """Which nodes agree with an earlier one, and how often nodes, parameters and moves count."""
    alike = _alike(fold, graph, constraint_key)
    moves = _moves(fold, graph, roots_of(alike))
    return Likeness(alike=alike, copies=_copies(fold), moves=moves)


def _alike(fold: Fold, graph: Graph, constraint_key: ConstraintKey | None) -> dict[str, str]:
    """Every node of a kind of block that stands for several, by that of the kind's first block."""
    small = fold.graph
    standing: dict[str, list[str]] = {}  # node of the small graph -> modules in the model
    for at, node in zip(fold.order, graph.nodes, strict=True):
        if at >= 0:
            standing.setdefault(small.nodes[at].name, []).append(node.module)
    found: dict[str, str] = {}
    for depth in range(1, MAX_DEPTH + 1):
        blocks, parents = block_kinds(small, depth, constraint_key)
        for kinds in parents.values():
            by_kind: dict[str, list[str]] = {}
            for path, kind in kinds.items():
                by_kind.setdefault(kind, []).append(path)
            for paths in by_kind.values():
                families = [blocks[path] for path in paths]
                if any(_stands_for_many(nodes, depth, standing) for nodes in families):
                    _join(families, found)
    return found


def _join(families: Sequence[Sequence[Node]], found: dict[str, str]) -> None:
    for nodes in families[1:]:
        for mine, first in zip(nodes, families[0], strict=True):
            a, b = (_root(n.name, found) for n in (first, mine))
            if a != b:
                found[b] = a


def _root(name: str, found: Mapping[str, str]) -> str:
    while name in found:
        name = found[name]
    return name


def _stands_for_many(
    nodes: Sequence[Node], depth: int, standing: Mapping[str, Sequence[str]]
) -> bool:
    """Whether nodes of one block stand for those of several, at this depth."""
    return any(
        len({_numbers(module, depth) for module in standing.get(node.name, ())}) > 1
        for node in nodes
        if len(_numbers(node.module, depth)) == depth
    )


def _numbers(module: str, depth: int) -> tuple[str, ...]:
    """The first numbers in a module's path."""
    return tuple(piece for piece in module.split(".") if is_number(piece))[:depth]


def _copies(fold: Fold) -> dict[str, int]:
    small = fold.graph
    copies = {n.name: int(c) for n, c in zip(small.nodes, fold.copies, strict=True)}
    for parameter in small.parameters:
        users = [copies[n.name] for n in small.nodes if parameter.value in n.inputs]
        copies[parameter.value] = min(users, default=1)
    return copies


def _moves(fold: Fold, graph: Graph, roots: Mapping[str, str]) -> dict[str, int]:
    """How often the model has a value like each of the small graph's."""
    small = fold.graph
    own = {n.name: roots.get(n.name, n.name) for n in small.nodes}
    names = {
        node.name: own[small.nodes[at].name]
        for at, node in zip(fold.order, graph.nodes, strict=True)
        if at >= 0
    }
    wanted = Counter(like for _, like in _likes(graph, names))
    mine: dict[Like, list[str]] = {}
    for value, like in _likes(small, own):
        mine.setdefault(like, []).append(value)
    for like in [
        like for like in wanted if like not in mine
    ]:  # there is no such value: the nearest
        near = [other for other in mine if other[:2] == like[:2]]
        if near:
            wanted[max(near, key=lambda n: (len(n[2] & like[2]), sorted(n[2])))] += wanted[like]
    found: dict[str, int] = {}
    for like, values in mine.items():
        found |= dict.fromkeys(values, 1)
        found[values[-1]] = max(1, wanted[like] - len(values) + 1)
    return found


def _likes(graph: Graph, names: Mapping[str, str]) -> Iterator[tuple[str, Like]]:
    users: dict[str, set[str]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            if node.name in names:
                users.setdefault(value, set()).add(names[node.name])
    ends = {graph.loss, *(b.mutation for b in graph.buffers)}
    for node in graph.nodes:
        if node.name in names:
            for position, value in enumerate(node.outputs):
                mine = frozenset(users.get(value, ())) | ({""} if value in ends else set())
                yield value, (names[node.name], position, mine)
