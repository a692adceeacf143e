"""Tie equal layers of a folded graph together, and count how often everything occurs.

Of many equal blocks the first two are in the folded graph, and the second stands for all that
follow. They follow each other in the model as these two do only if both choose the same layouts:
one variable stands for both. A value then counts as often as the model has one like it, produced
and used by nodes that are tied to the same ones. What leaves the first block counts for all but the
last, what leaves the second one once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.ir import Graph, Node
from shardwise.ir.blocks import MAX_DEPTH, ConstraintKey, block_kinds, is_number
from shardwise.layouts.factor_graph import MultiUse, Use

State = TypeVar("State")


def roots_of(alike: Mapping[str, str]) -> dict[str, str]:
    """For every name that must agree with another, the one with which all of them do.

    >>> roots_of({"c": "b", "b": "a"})
    {'c': 'a', 'b': 'a'}
    """
    found = {}
    for name in alike:
        root = name
        while root in alike:
            root = alike[root]
        found[name] = root
    return found


def families(names: Iterable[str], roots: Mapping[str, str]) -> list[list[str]]:
    """Return the names by what they agree with, in order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(roots.get(name, name), []).append(name)
    return list(found.values())


def agreeing(
    rows: Sequence[Sequence[State]], text: Callable[[State], str]
) -> list[tuple[State, ...]]:
    """For each member its state in every joint state: those whose texts are equal.

    >>> agreeing([["a1", "a2", "b"], ["b", "a"]], lambda s: s[0])
    [('a1', 'a2', 'b'), ('a', 'a', 'b')]
    """
    by_text: list[dict[str, list[State]]] = []
    for row in rows:
        found: dict[str, list[State]] = {}
        for state in row:
            found.setdefault(text(state), []).append(state)
        by_text.append(found)
    joint = [
        states
        for key in by_text[0]
        if all(key in found for found in by_text)
        for states in product(*(found[key] for found in by_text))
    ]
    return [tuple(states[i] for states in joint) for i in range(len(rows))]


def once_each(star: MultiUse) -> MultiUse:
    """Return the star with every variable once: what its states mean together."""
    variables = [use.variable for use in star.uses if use.variable is not None]
    for variable in dict.fromkeys(variables):
        if variables.count(variable) > 1:
            star = _joined(star, variable)
    own = next((use for use in star.uses if use.variable == star.producer), None)
    return star if own is None else _turned(star, own)


def _joined(star: MultiUse, variable: int) -> MultiUse:
    """Return all uses by one variable as one, which needs what each of them does."""
    mine = [use for use in star.uses if use.variable == variable]
    numbers: dict[tuple[int, ...], int] = {}
    first = 1 + max(star.same)
    need = [
        numbers.setdefault(needs, first + len(numbers))
        for needs in zip(*(use.need.tolist() for use in mine), strict=True)
    ]
    steps, same = dict(star.steps), dict(star.same)
    for needs, number in numbers.items():
        same[number] = frozenset[int]().union(*(star.same[n] for n in needs))
        for held in star.whole:
            steps[held, number] = _together([star.steps[held, n] for n in needs])
    at = star.uses.index(mine[0])
    uses = [use for use in star.uses if use.variable != variable]
    uses.insert(at, Use(variable, np.asarray(need, dtype=np.int64)))
    return replace(star, uses=uses, steps=steps, same=same)


def _turned(star: MultiUse, own: Use) -> MultiUse:
    """Return a star whose producer uses it, too: that use belongs to how the value is held."""
    numbers: dict[tuple[int, int], int] = {}
    held = [
        numbers.setdefault(pair, len(numbers))
        for pair in zip(star.held.tolist(), own.need.tolist(), strict=True)
    ]
    taken = 1 + max(star.same)  # a need that is always there: that of the producer itself
    steps: dict[tuple[int, int], tuple[int, ...] | None] = {}
    prices: dict[tuple[int, int], float] = {}
    whole: dict[int, frozenset[int]] = {}
    for (before, need), number in numbers.items():
        whole[number] = star.whole[before] - star.same[need]
        steps[number, taken] = star.steps[before, need]
        steps |= {(number, n): star.steps[before, n] for n in star.same}
        prices |= {(number, step): p for (h, step), p in star.prices.items() if h == before}
    return replace(
        star,
        held=np.asarray(held, dtype=np.int64),
        uses=[*(use for use in star.uses if use is not own), Use(None, np.asarray([taken]))],
        steps=steps,
        prices=prices,
        same={**star.same, taken: frozenset()},
        whole=whole,
    )


def _together(paths: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    found: dict[int, None] = {}
    for path in paths:
        if path is None:
            return None
        found |= dict.fromkeys(path)
    return tuple(found)


# Who makes a value, as which of its results, and who uses it; who ends it is a use of itself.
Like = tuple[str, int, frozenset[str]]


class FoldedGraph(Protocol):
    """What `tie_layers` reads of a graph whose repeated layers are folded."""

    @property
    def graph(self) -> Graph:
        """The small graph."""

    @property
    def order(self) -> tuple[int, ...]:
        """For each node of the model the index of the node that stands for it, or -1."""

    @property
    def copies(self) -> NDArray[np.int64]:
        """How many nodes of the model each node of the small graph stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTies:
    """`LayoutTask`'s fields of these names."""

    alike: Mapping[str, str]
    copies: Mapping[str, int]
    moves: Mapping[str, int]


def tie_layers(
    fold: FoldedGraph, graph: Graph, constraint_key: ConstraintKey | None = None
) -> LayerTies:
    """Which nodes agree with an earlier one, and how often nodes, parameters and moves count."""
    alike = _alike(fold, graph, constraint_key)
    moves = _moves(fold, graph, roots_of(alike))
    return LayerTies(alike=alike, copies=_copies(fold), moves=moves)


def _alike(fold: FoldedGraph, graph: Graph, constraint_key: ConstraintKey | None) -> dict[str, str]:
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
    """Return whether nodes of one block stand for those of several, at this depth."""
    return any(
        len({_numbers(module, depth) for module in standing.get(node.name, ())}) > 1
        for node in nodes
        if len(_numbers(node.module, depth)) == depth
    )


def _numbers(module: str, depth: int) -> tuple[str, ...]:
    """Return the first numbers in a module's path."""
    return tuple(piece for piece in module.split(".") if is_number(piece))[:depth]


def _copies(fold: FoldedGraph) -> dict[str, int]:
    small = fold.graph
    copies = {n.name: int(c) for n, c in zip(small.nodes, fold.copies, strict=True)}
    for parameter in small.parameters:
        users = [copies[n.name] for n in small.nodes if parameter.value in n.inputs]
        copies[parameter.value] = min(users, default=1)
    return copies


def _moves(fold: FoldedGraph, graph: Graph, roots: Mapping[str, str]) -> dict[str, int]:
    """Return how often the model has a value like each of the small graph's."""
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
