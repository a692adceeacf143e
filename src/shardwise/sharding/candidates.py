"""The choices of a node on one mesh axis, with the placements that they need and give.

- `Same`: every rank does the same work on full values.
- `ShardAxis(axis, pattern)`: an axis of the node is sharded.
- `Pass(operands)`: partial sums pass through a node that is linear in these operands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.sharding.dims import (
    Pattern,
    Structure,
    canonical,
    choices,
    merge,
    section,
    split_at,
    unfactored,
)
from shardwise.sharding.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    format_pattern,
    parse_pattern,
)
from shardwise.sharding.rule import Dim, Dims, NodeRule, Part


@dataclass(frozen=True, slots=True)
class Same:
    """Every rank does the same work."""

    def __str__(self) -> str:
        return "same"


@dataclass(frozen=True, slots=True)
class ShardAxis:
    """The node's axis `axis` is sharded by `pattern`, in positions of the axis."""

    axis: str
    pattern: Pattern

    def __str__(self) -> str:
        return f"shard {self.axis}{format_pattern(self.pattern)}"  # the text in plan files


@dataclass(frozen=True, slots=True)
class Pass:
    """The operands at these positions are partial sums, and so are the results."""

    operands: frozenset[int]

    def __str__(self) -> str:
        return f"pass {','.join(map(str, sorted(self.operands)))}"


Choice = Same | ShardAxis | Pass


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
    result = [same(rule)]
    structures = axis_structures(rule) | dict(structures or {})
    if rule.replicated_because is None:
        for axis in rule.axes.values():
            if axis.frozen or axis.size <= 1:
                continue
            options = choices(structures[axis.name])
            if axis.outermost:
                options = tuple(p for p in options if len(p) == 1 and p[0][0] == 1)[:1]
            sharded = (shard_candidate(rule, axis.name, merge(pattern)) for pattern in options)
            result += [candidate for candidate in sharded if candidate is not None]
        result += [pass_candidate(rule, operands) for operands in rule.linear]
    return tuple(result)


def match_choice(rule: NodeRule, options: Sequence[Candidate], text: str) -> tuple[Candidate, ...]:
    """Return the candidates whose choice has this text, or else those that match up to sizes.

    A plan may be used with other batch sizes. Then "shard n0:[8]x128" stands for the outer factor
    of n0, or for a factor of one element if there is none. A reshape whose axes differ for the new
    sizes matches all its candidates.
    """
    exact = tuple(c for c in options if str(c.choice) == text)
    axis, _, factors = text.removeprefix("shard ").partition(":")
    pattern = parse_pattern(factors or "[1]")
    if exact or pattern is None:
        return exact
    requested = ShardAxis(axis, pattern)
    if requested.axis not in rule.axes:
        return tuple(options) if rule.by_size else ()
    if rule.axes[requested.axis].joins:  # a candidate that only plans name
        joined = shard_candidate(rule, axis, ((1, rule.axes[axis].size, 1),))
        return (joined,) if joined is not None else ()
    similar = [
        (c, c.choice.pattern)
        for c in options
        if isinstance(c.choice, ShardAxis) and _up_to_sizes(c.choice) == _up_to_sizes(requested)
    ]
    for part in (2, 1, 0):  # prefer equal inner sizes, then sharded ones, then outer ones
        sizes = [factors[part] for factors in requested.pattern]
        equal = [(c, of) for c, of in similar if [factors[part] for factors in of] == sizes]
        similar = equal or similar
    if len(similar) == 1:
        return (similar[0][0],)
    single = _single_element(requested, rule.axes[requested.axis].size) if not similar else None
    candidate = shard_candidate(rule, requested.axis, single) if single is not None else None
    return (candidate,) if candidate is not None else ()


def _single_element(requested: ShardAxis, size: int) -> Pattern | None:
    """Return the pattern of a factor of one, at the end of the axis that is requested."""
    if len(requested.pattern) != 1:
        return None
    outer, _, inner = requested.pattern[0]
    if outer == inner == 1 and size != 1:
        return None
    return ((size, 1, 1),) if inner == 1 else ((1, 1, size),) if outer == 1 else None


def _up_to_sizes(choice: ShardAxis) -> tuple[object, ...]:
    """Return the axis, and on which sides of the sharded factor there are other factors."""
    return choice.axis, *((outer == 1, inner == 1) for outer, _, inner in choice.pattern)


def axis_structures(rule: NodeRule) -> dict[str, Structure]:
    """Return the structures that follow from the rule itself: parts of an axis are segments."""
    bounds: dict[str, set[int]] = {name: set() for name in rule.axes}
    for dim in (dim for dims in (*rule.operands, *rule.results) for dim in dims):
        if isinstance(dim, Part):
            bounds[dim.axis] |= {dim.start, dim.stop}
    structures: dict[str, Structure] = {}
    for name, positions in bounds.items():
        segments = split_at(unfactored(rule.axes[name].size), tuple(sorted(positions)))
        assert segments is not None, "an axis of one factor can be split anywhere"
        structures[name] = canonical(segments)
    return structures


def same(rule: NodeRule) -> Candidate:
    """Return the candidate in which every rank does the same work on full values."""
    return Candidate(Same(), (REPLICATE,) * len(rule.operands), (REPLICATE,) * len(rule.results))


def pass_candidate(rule: NodeRule, operands: frozenset[int]) -> Candidate:
    """Return the candidate that passes partial sums of these operands; others are R~."""
    needs = tuple(PARTIAL if i in operands else PARTIAL_GRAD for i in range(len(rule.operands)))
    return Candidate(Pass(operands), needs, (PARTIAL,) * len(rule.results))


def shard_candidate(rule: NodeRule, axis: str, pattern: Pattern) -> Candidate | None:
    """Return the candidate that shards `axis`; None if a dim cannot express the pattern."""
    needs = [_place(rule, dims, axis, pattern) for dims in rule.operands]
    gives = [_place(rule, dims, axis, pattern) for dims in rule.results]
    if None in needs or None in gives:
        return None
    reduce = rule.axes[axis].reduce
    reduced = REPLICATE if reduce == "same" else Partial(reduce)
    partial = isinstance(reduced, Partial) and PARTIAL_GRAD in gives
    return Candidate(
        ShardAxis(axis, pattern),
        tuple(
            PARTIAL
            if p == PARTIAL_GRAD
            and ((partial and i in rule.additive) or i in rule.axes[axis].counts)
            else p
            for i, p in enumerate(needs)
            if p is not None
        ),
        tuple(reduced if p == PARTIAL_GRAD else p for p in gives if p is not None),
    )


def _place(rule: NodeRule, dims: Dims, axis: str, pattern: Pattern) -> Placement | None:
    """Return the shard of the dim with this axis, R~ if no dim has it, None if inexpressible."""
    for index, dim in enumerate(dims):
        if isinstance(dim, Part):
            if dim.axis != axis:
                continue
            placed = section_pattern(pattern, dim.start, dim.stop)
        elif axis in dim:
            placed = _in_product(rule, dim, axis, pattern)
        elif len(dim) == 1 and dim[0] in rule.axes[axis].joins:
            placed = ((1, rule.axes[dim[0]].size, 1),)
        else:
            continue
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
    """Return the pattern of positions `start:stop` of an axis that `pattern` shards.

    >>> section_pattern(((3, 4, 16),), 64, 128)
    ((1, 4, 16),)
    >>> section_pattern(((1, 8, 16), (1, 2, 16), (1, 2, 16)), 128, 160)
    ((1, 2, 16),)
    """
    pieces, position = [], 0
    for outer, size, inner in pattern:
        row = size * inner
        first, last = max(start, position), min(stop, position + outer * row)
        if first < last:
            if (first - position) % row or (last - first) % row:
                return None
            pieces.append(((last - first) // row, size, inner))
        position += outer * row
    return merge(tuple(pieces)) if pieces else None


def compose(dim: Dim, structures: Mapping[str, Structure]) -> Structure | None:
    """Return the structure of a dim from the structures of its axes."""
    if isinstance(dim, Part):
        return section(structures[dim.axis], dim.start, dim.stop)
    if len(dim) == 1:
        return structures[dim[0]]
    if any(len(structures[a]) != 1 for a in dim):
        return None
    return (tuple(f for a in dim for f in structures[a][0]),)
