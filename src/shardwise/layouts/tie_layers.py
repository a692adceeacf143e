"""Tie equal layers of a folded graph together, and count how often everything occurs.

A folded graph contains the first two of many equal blocks, and the second stands for all that
follow. Costs between the two blocks are those between any two neighbours in the model only if both
make the same choices, so one variable stands for both. A value counts as often as the model has a
corresponding one, produced and used by nodes that are tied to the same ones: a value that leaves
the first block counts for all blocks but the last, a value that leaves the second counts once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Protocol, TypeVar

import numpy as np

from shardwise.arrays import Ints
from shardwise.ir import Graph, Node
from shardwise.ir.blocks import MAX_DEPTH, ConstraintKey, block_kinds, is_number
from shardwise.layouts.factor_graph import MultiUse, Use
from shardwise.layouts.problem import LayoutTask

State = TypeVar("State")


def roots_of(tied: Mapping[str, str]) -> dict[str, str]:
    """Return the first name of every chain of tied names.

    >>> roots_of({"c": "b", "b": "a"})
    {'c': 'a', 'b': 'a'}
    """
    return {name: _root(name, tied) for name in tied}


def _root(name: str, tied: Mapping[str, str]) -> str:
    while name in tied:
        name = tied[name]
    return name


def families(names: Iterable[str], roots: Mapping[str, str]) -> list[list[str]]:
    """Return the names grouped by their roots, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(roots.get(name, name), []).append(name)
    return list(groups.values())


def agreeing(
    rows: Sequence[Sequence[State]], text: Callable[[State], str]
) -> list[tuple[State, ...]]:
    """Return, for each member of a family, its state in every joint state with equal texts.

    >>> agreeing([["a1", "a2", "b"], ["b", "a"]], lambda s: s[0])
    [('a1', 'a2', 'b'), ('a', 'a', 'b')]
    """
    members: list[dict[str, list[State]]] = []
    for row in rows:
        by_text: dict[str, list[State]] = {}
        for state in row:
            by_text.setdefault(text(state), []).append(state)
        members.append(by_text)
    joint = [
        states
        for key in members[0]
        if all(key in by_text for by_text in members)
        for states in product(*(by_text[key] for by_text in members))
    ]
    return [tuple(states[i] for states in joint) for i in range(len(rows))]


def once_each(multi_use: MultiUse) -> MultiUse:
    """Return a multi-use in which every variable occurs once, with the uses of all tied nodes."""
    variables = [use.variable for use in multi_use.uses if use.variable is not None]
    for variable in dict.fromkeys(variables):
        if variables.count(variable) > 1:
            multi_use = _merge_uses(multi_use, variable)
    own = next((use for use in multi_use.uses if use.variable == multi_use.producer), None)
    return multi_use if own is None else _merge_into_producer(multi_use, own)


def _merge_uses(multi_use: MultiUse, variable: int) -> MultiUse:
    """Replace all uses by one variable by a single use, with the combined needs."""
    merged = [use for use in multi_use.uses if use.variable == variable]
    numbers: dict[tuple[int, ...], int] = {}
    first = 1 + max(multi_use.same_work)
    need = [
        numbers.setdefault(needs, first + len(numbers))
        for needs in zip(*(use.need.tolist() for use in merged), strict=True)
    ]
    steps, same_work = dict(multi_use.steps), dict(multi_use.same_work)
    for needs, number in numbers.items():
        same_work[number] = frozenset[int]().union(*(multi_use.same_work[n] for n in needs))
        for holding in multi_use.replicated:
            steps[holding, number] = _union([multi_use.steps[holding, n] for n in needs])
    at = multi_use.uses.index(merged[0])
    uses = [use for use in multi_use.uses if use.variable != variable]
    uses.insert(at, Use(variable, np.asarray(need, dtype=np.int64)))
    return replace(multi_use, uses=uses, steps=steps, same_work=same_work)


def _merge_into_producer(multi_use: MultiUse, own: Use) -> MultiUse:
    """Make a use by the producer itself part of the holding, since one state decides both."""
    numbers: dict[tuple[int, int], int] = {}
    holdings = [
        numbers.setdefault(pair, len(numbers))
        for pair in zip(multi_use.holding.tolist(), own.need.tolist(), strict=True)
    ]
    own_need = 1 + max(multi_use.same_work)  # stands for the producer's need in each holding
    steps: dict[tuple[int, int], tuple[int, ...] | None] = {}
    prices: dict[tuple[int, int], float] = {}
    replicated: dict[int, frozenset[int]] = {}
    for (before, need), number in numbers.items():
        replicated[number] = multi_use.replicated[before] - multi_use.same_work[need]
        steps[number, own_need] = multi_use.steps[before, need]
        steps |= {(number, n): multi_use.steps[before, n] for n in multi_use.same_work}
        prices |= {(number, step): p for (h, step), p in multi_use.prices.items() if h == before}
    uses = [use for use in multi_use.uses if use is not own]
    return replace(
        multi_use,
        holding=np.asarray(holdings, dtype=np.int64),
        uses=[*uses, Use(None, np.asarray([own_need]))],
        steps=steps,
        prices=prices,
        same_work={**multi_use.same_work, own_need: frozenset()},
        replicated=replicated,
    )


def _union(paths: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Return the steps of all paths, or None if one of the paths is impossible."""
    steps: dict[int, None] = {}
    for path in paths:
        if path is None:
            return None
        steps |= dict.fromkeys(path)
    return tuple(steps)


# The producer of a value, the index among its results, and the users; "" stands for the end.
ValueKind = tuple[str, int, frozenset[str]]


class FoldedGraph(Protocol):
    """A small graph, and for each node of the model the index of the node that stands for it or -1.

    `copies` is the number of nodes of the model for which each node of the small graph stands.
    """

    @property
    def graph(self) -> Graph: ...
    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def copies(self) -> Ints: ...


def tie_layers(
    fold: FoldedGraph, graph: Graph, constraint_key: ConstraintKey | None = None
) -> LayoutTask:
    """Return a task without axes that ties repeated blocks, and counts nodes and moves."""
    tied = _tied_nodes(fold, graph, constraint_key)
    moves = _moves(fold, graph, roots_of(tied))
    return LayoutTask(axes=(), tied=tied, copies=_copies(fold), moves=moves)


def _tied_nodes(
    fold: FoldedGraph, graph: Graph, constraint_key: ConstraintKey | None
) -> dict[str, str]:
    """Map nodes of blocks that stand for several to the same nodes of the first such block."""
    small = fold.graph
    modules: dict[str, list[str]] = {}  # node of the small graph -> its modules in the model
    for at, node in zip(fold.order, graph.nodes, strict=True):
        if at >= 0:
            modules.setdefault(small.nodes[at].name, []).append(node.module)
    tied: dict[str, str] = {}
    for depth in range(1, MAX_DEPTH + 1):
        blocks, parents = block_kinds(small, depth, constraint_key)
        for kinds in parents.values():
            for paths in families(kinds, kinds):
                equal_blocks = [blocks[path] for path in paths]
                if any(_stands_for_many(nodes, depth, modules) for nodes in equal_blocks):
                    for first, *others in zip(*equal_blocks, strict=True):
                        for node in others:
                            a, b = _root(first.name, tied), _root(node.name, tied)
                            if a != b:
                                tied[b] = a
    return tied


def _stands_for_many(
    nodes: Sequence[Node], depth: int, modules: Mapping[str, Sequence[str]]
) -> bool:
    """Return whether the nodes of one block stand for those of several at this depth."""
    return any(
        len({_indices(module, depth) for module in modules.get(node.name, ())}) > 1
        for node in nodes
        if len(_indices(node.module, depth)) == depth
    )


def _indices(module: str, depth: int) -> tuple[str, ...]:
    """Return the first `depth` numbers in a module's path."""
    return tuple(piece for piece in module.split(".") if is_number(piece))[:depth]


def _copies(fold: FoldedGraph) -> dict[str, int]:
    small = fold.graph
    copies = {n.name: int(c) for n, c in zip(small.nodes, fold.copies, strict=True)}
    for parameter in small.parameters:
        users = [copies[n.name] for n in small.nodes if parameter.value in n.inputs]
        copies[parameter.value] = min(users, default=1)
    return copies


def _moves(fold: FoldedGraph, graph: Graph, roots: Mapping[str, str]) -> dict[str, int]:
    """Return how often each value of the small graph occurs in the model."""
    small = fold.graph
    own = {n.name: roots.get(n.name, n.name) for n in small.nodes}
    names = {
        node.name: own[small.nodes[at].name]
        for at, node in zip(fold.order, graph.nodes, strict=True)
        if at >= 0
    }
    counts = Counter(kind for _, kind in _value_kinds(graph, names))
    by_kind: dict[ValueKind, list[str]] = {}
    for value, kind in _value_kinds(small, own):
        by_kind.setdefault(kind, []).append(value)
    for kind in [kind for kind in counts if kind not in by_kind]:
        # The small graph lacks this kind: count it with the most similar one of the same producer.
        similar = [other for other in by_kind if other[:2] == kind[:2]]
        if similar:
            closest = max(similar, key=lambda s: (len(s[2] & kind[2]), sorted(s[2])))
            counts[closest] += counts[kind]
    multipliers: dict[str, int] = {}
    for kind, values in by_kind.items():
        multipliers |= dict.fromkeys(values, 1)
        multipliers[values[-1]] = max(1, counts[kind] - len(values) + 1)
    return multipliers


def _value_kinds(graph: Graph, names: Mapping[str, str]) -> Iterator[tuple[str, ValueKind]]:
    """Yield the kind of every value whose producer is in `names`."""
    users: dict[str, set[str]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            if node.name in names:
                users.setdefault(value, set()).add(names[node.name])
    ends = graph.ends
    for node in graph.nodes:
        if node.name in names:
            for position, value in enumerate(node.outputs):
                used_by = frozenset(users.get(value, ())) | ({""} if value in ends else set())
                yield value, (names[node.name], position, used_by)
