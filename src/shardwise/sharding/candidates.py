"""What a node can do on one mesh axis, and the placements that follow.

Enters: a `NodeRule` and the structures of its axes. Leaves: `Candidate`s, each with what it needs
of every operand and what it gives for every result.

- `Same`: every rank does the same work on whole values.
- `Cut(axis, pattern)`: an axis of the node is cut.
- `Pass(operands)`: partial sums pass through a node that is linear in these operands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.sharding.dims import (
    Pattern,
    Structure,
    canonical,
    choices,
    cut,
    merge,
    section,
    whole,
)
from shardwise.sharding.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    Placement,
    Shard,
)
from shardwise.sharding.rule import Dim, Dims, NodeRule, Part


@dataclass(frozen=True, slots=True)
class Same:
    """Every rank does the same work."""

    def __str__(self) -> str:
        return "same"


@dataclass(frozen=True, slots=True)
class Cut:
    """The node's axis `axis` is cut as `pattern`, in positions of the axis."""

    axis: str
    pattern: Pattern

    def __str__(self) -> str:
        if len(self.pattern) == 1 and self.pattern[0][0] == self.pattern[0][2] == 1:
            return f"cut {self.axis}"
        factors = "|".join(
            f"{o}x" * (o != 1) + f"[{s}]" + f"x{i}" * (i != 1) for o, s, i in self.pattern
        )
        return f"cut {self.axis}:{factors}"


@dataclass(frozen=True, slots=True)
class Pass:
    """The operands at these positions are partial sums, and so are the results."""

    operands: frozenset[int]

    def __str__(self) -> str:
        return f"pass {','.join(map(str, sorted(self.operands)))}"


Choice = Same | Cut | Pass
_FACTORS = re.compile(r"(?:(\d+)x)?\[(\d+)\](?:x(\d+))?")  # of a segment: 3x[4]x16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice with the placements it needs (`operands`) and gives (`results`)."""

    choice: Choice
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]


def candidates(
    rule: NodeRule, structures: Mapping[str, Structure] | None = None
) -> tuple[Candidate, ...]:
    """Return all candidates, `Same` first. `structures` refine the node's axes (see `factors`)."""
    found = [same(rule)]
    structures = axis_structures(rule) | dict(structures or {})
    if rule.whole is None:
        for axis in rule.axes.values():
            if axis.frozen or axis.size <= 1:
                continue
            options = choices(structures[axis.name])
            if axis.outermost:
                options = tuple(p for p in options if len(p) == 1 and p[0][0] == 1)[:1]
            for pattern in options:
                candidate = cut_candidate(rule, axis.name, merge(pattern))
                if candidate is not None:
                    found.append(candidate)
        for operands in rule.linear:
            found.append(pass_candidate(rule, operands))
    return tuple(found)


def written(rule: NodeRule, found: Sequence[Candidate], text: str) -> tuple[Candidate, ...]:
    """The candidates whose choice is written so; else the one that is the same for other sizes.

    A plan is used with other batches, too. Of "cut n0:[8]x128" then stays what is cut: the outer
    factor of n0, of one element where there is no such factor. Of a reshape that has other axes
    with these sizes all are meant.
    """
    exact = tuple(c for c in found if str(c.choice) == text)
    asked = _read_cut(text)
    if exact or asked is None:
        return exact
    if asked.axis not in rule.axes:
        return tuple(found) if rule.by_size else ()
    cuts = [(c, c.choice) for c in found if isinstance(c.choice, Cut)]
    alike = [(c, cut) for c, cut in cuts if _places(cut) == _places(asked)]
    for part in (2, 1, 0):  # inner sizes, those that are cut, outer ones
        sizes = [factors[part] for factors in asked.pattern]
        same = [(c, cut) for c, cut in alike if [f[part] for f in cut.pattern] == sizes]
        alike = same or alike
    if len(alike) == 1:
        return (alike[0][0],)
    single = _of_one(asked, rule.axes[asked.axis].size) if not alike else None
    candidate = cut_candidate(rule, asked.axis, single) if single is not None else None
    return (candidate,) if candidate is not None else ()


def _of_one(asked: Cut, size: int) -> Pattern | None:
    """Return the cut of a factor of one element, at the end of an axis at which it is asked for."""
    if len(asked.pattern) != 1:
        return None
    outer, _, inner = asked.pattern[0]
    if outer == inner == 1 and size != 1:
        return None
    return ((size, 1, 1),) if inner == 1 else ((1, 1, size),) if outer == 1 else None


def _places(cut: Cut) -> tuple[object, ...]:
    """Return what is cut but for its sizes: the axis, and whether there are factors around it."""
    return cut.axis, *((outer == 1, inner == 1) for outer, _, inner in cut.pattern)


def _read_cut(text: str) -> Cut | None:
    """The cut that is written as `text`, if it is one; without sizes, that of a whole axis."""
    axis, _, factors = text.removeprefix("cut ").partition(":")
    found = [_FACTORS.fullmatch(part) for part in (factors or "[1]").split("|")]
    if not all(found):
        return None
    sizes = [[int(size or 1) for size in match.groups()] for match in found if match]
    return Cut(axis, tuple((outer, size, inner) for outer, size, inner in sizes))


def axis_structures(rule: NodeRule) -> dict[str, Structure]:
    """Return what a rule itself says of its axes: parts of an axis are segments of it."""
    bounds: dict[str, set[int]] = {name: set() for name in rule.axes}
    for dim in (dim for dims in (*rule.operands, *rule.results) for dim in dims):
        if isinstance(dim, Part):
            bounds[dim.axis] |= {dim.start, dim.stop}
    found: dict[str, Structure] = {}
    for name, positions in bounds.items():
        segments = cut(whole(rule.axes[name].size), tuple(sorted(positions)))
        assert segments is not None, "an axis of one factor can be cut anywhere"
        found[name] = canonical(segments)
    return found


def same(rule: NodeRule) -> Candidate:
    """Every rank does the same work on whole values."""
    return Candidate(
        Same(),
        tuple(REPLICATE for _ in rule.operands),
        tuple(REPLICATE for _ in rule.results),
    )


def pass_candidate(rule: NodeRule, operands: frozenset[int]) -> Candidate:
    """Partial sums of these operands pass; the others are used for different work."""
    needs = tuple(PARTIAL if i in operands else PARTIAL_GRAD for i in range(len(rule.operands)))
    return Candidate(Pass(operands), needs, tuple(PARTIAL for _ in rule.results))


def cut_candidate(rule: NodeRule, axis: str, pattern: Pattern) -> Candidate | None:
    """Return the placements when `axis` is cut; None where a dim cannot express the cut."""
    reduce = rule.axes[axis].reduce
    needs: list[Placement] = []
    gives: list[Placement] = []
    for dims in rule.results:
        shard = _place(rule, dims, axis, pattern)
        if shard is None:
            return None
        if shard is PARTIAL_GRAD:
            gives.append(REPLICATE if reduce == "same" else Partial(reduce))
        else:
            gives.append(shard)
    partial = any(isinstance(p, Partial) for p in gives)
    for index, dims in enumerate(rule.operands):
        shard = _place(rule, dims, axis, pattern)
        if shard is None:
            return None
        needs.append(
            PARTIAL if shard is PARTIAL_GRAD and partial and index in rule.additive else shard
        )
    return Candidate(Cut(axis, pattern), tuple(needs), tuple(gives))


def _place(rule: NodeRule, dims: Dims, axis: str, pattern: Pattern) -> Placement | None:
    """Return the shard of the dim with this axis, R~ if no dim has it, None if inexpressible."""
    for index, dim in enumerate(dims):
        if isinstance(dim, Part):
            if dim.axis != axis:
                continue
            inside = section_pattern(pattern, dim.start, dim.stop)
            return None if inside is None else Shard(index, inside)
        if axis in dim:
            placed = _in_product(rule, dim, axis, pattern)
            return None if placed is None else Shard(index, placed)
    return PARTIAL_GRAD


def _in_product(
    rule: NodeRule, dim: tuple[str, ...], axis: str, pattern: Pattern
) -> Pattern | None:
    if len(dim) == 1:
        return pattern
    if len(pattern) != 1:
        return None
    at = dim.index(axis)
    before = prod(rule.axes[a].size for a in dim[:at])
    after = prod(rule.axes[a].size for a in dim[at + 1 :])
    outer, size, inner = pattern[0]
    return ((before * outer, size, inner * after),)


def section_pattern(pattern: Pattern, start: int, stop: int) -> Pattern | None:
    """Return the cut of positions `start:stop` of an axis cut as `pattern`.

    >>> section_pattern(((3, 4, 16),), 64, 128)
    ((1, 4, 16),)
    >>> section_pattern(((1, 8, 16), (1, 2, 16), (1, 2, 16)), 128, 160)
    ((1, 2, 16),)
    """
    found, position = [], 0
    for outer, size, inner in pattern:
        row = size * inner
        first, last = max(start, position), min(stop, position + outer * row)
        if first < last:
            if (first - position) % row or (last - first) % row:
                return None
            found.append(((last - first) // row, size, inner))
        position += outer * row
    return merge(tuple(found)) if found else None


def compose(dim: Dim, structures: Mapping[str, Structure]) -> Structure | None:
    """Return the structure of a dim from the structures of its axes."""
    if isinstance(dim, Part):
        return section(structures[dim.axis], dim.start, dim.stop)
    if len(dim) == 1:
        return structures[dim[0]]
    if any(len(structures[a]) != 1 for a in dim):
        return None
    return (tuple(f for a in dim for f in structures[a][0]),)
