"""One variable for several nodes that choose alike.

Enters: the states of each of them; stars in which a variable then occurs more than once. Leaves:
states in which all of them agree, and stars in which every variable occurs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

import numpy as np

from shardwise.planner.layouts.model import Star, Use

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
    """The names by what they agree with, in order."""
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


def once_each(star: Star) -> Star:
    """The star with every variable once: what its states mean together."""
    variables = [use.variable for use in star.uses if use.variable is not None]
    for variable in dict.fromkeys(variables):
        if variables.count(variable) > 1:
            star = _joined(star, variable)
    own = next((use for use in star.uses if use.variable == star.producer), None)
    return star if own is None else _turned(star, own)


def _joined(star: Star, variable: int) -> Star:
    """All uses by one variable as one, which needs what each of them does."""
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


def _turned(star: Star, own: Use) -> Star:
    """A star whose producer uses it, too: that use belongs to how the value is held."""
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
