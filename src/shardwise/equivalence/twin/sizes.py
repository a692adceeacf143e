"""Which sizes of a graph are the same size, and how sizes are made of each other.

Enters: a `Graph` and the rules of its nodes. Leaves: `Sizes`, which maps every dim of every value,
every axis of every node and every cut to smaller numbers that fit together.

A dim is the same size as the node axis it is made of; a dim of several axes is their product; an
axis of several parts is their sum. What is neither a product nor a sum is a base size, and free.
Two factorizations of one size are refined to their common one; where there is none, nothing of it
is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from math import prod

from shardwise.ir import Graph
from shardwise.sharding.dims import Pattern, merge
from shardwise.sharding.rule import NodeRule, Part

Key = tuple[str, ...]  # ("dim", value, index), ("axis", node, axis), ("part", node, axis, index), …


class Unscalable(Exception):
    """These sizes do not fit together once scaled: leave them as they are, or else `others` too."""

    def __init__(self, keys: Iterable[Key], why: str, others: Iterable[Key] = ()) -> None:
        super().__init__(why)
        self.keys, self.others = set(keys), set(others)


class Sizes:
    """Classes of equal sizes with their products and sums."""

    def __init__(self, graph: Graph, rules: Mapping[str, NodeRule]) -> None:
        self.parent: dict[Key, Key] = {}
        self.size: dict[Key, int] = {}
        self.products: list[tuple[Key, list[Key]]] = []
        self.sums: list[tuple[Key, list[Key]]] = []
        self.frozen: set[Key] = set()
        self.bounds: dict[Key, list[int]] = {}
        self.scale: dict[int, int] = {}
        self._table: dict[Key, tuple[str, list[Key]]] = {}
        for value, kind in graph.values.items():
            for index, size in enumerate(kind.shape):
                self._make(("dim", value, str(index)), size)
        for node in graph.nodes:
            self._add_node(node.name, node.inputs, node.outputs, rules[node.name])

    # ------------------------------------------------------------ classes

    def _make(self, key: Key, size: int) -> Key:
        self.parent.setdefault(key, key)
        self.size.setdefault(key, size)
        return key

    def find(self, key: Key) -> Key:
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def union(self, a: Key, b: Key) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        if self.size[a] != self.size[b]:
            self.freeze((a, b))
            return
        self.parent[b] = a
        if b in self.frozen:
            self.frozen.add(a)

    def freeze(self, keys: Iterable[Key]) -> None:
        self.frozen |= {self.find(k) for k in keys if k in self.parent}

    def _constant(self, size: int) -> Key:
        key = self._make(("constant", str(size)), size)
        self.frozen.add(self.find(key))
        return key

    def _add_node(
        self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], rule: NodeRule
    ) -> None:
        for axis in rule.axes.values():
            self._make(("axis", name, axis.name), axis.size)
        operands = zip(inputs, rule.operands, strict=True)
        results = zip(outputs, rule.results, strict=True)
        parts: dict[str, list[tuple[Key, Part]]] = {}
        for value, dims in (*operands, *results):
            for index, dim in enumerate(dims):
                key: Key = ("dim", value, str(index))
                if isinstance(dim, Part):
                    parts.setdefault(dim.axis, []).append((key, dim))
                elif len(dim) == 1:
                    self.union(key, ("axis", name, dim[0]))
                elif not dim:
                    self.freeze([key])
                else:
                    self.products.append((key, [("axis", name, axis) for axis in dim]))
        for axis_name, found in parts.items():
            self._add_parts(("axis", name, axis_name), found)

    def _add_parts(self, axis: Key, parts: list[tuple[Key, Part]]) -> None:
        """Boundaries of all parts cut the axis into segments; each part is some of them."""
        bounds = sorted({0, self.size[axis], *(p for _, d in parts for p in (d.start, d.stop))})
        self.bounds[axis] = bounds
        segments = [
            self._make(("part", *axis[1:], str(i)), stop - start)
            for i, (start, stop) in enumerate(pairwise(bounds))
        ]
        for first in segments:
            for second in segments:
                if self.size[first] == self.size[second]:
                    self.union(first, second)
        self.sums.append((axis, segments))
        for key, part in parts:
            self.sums.append((key, segments[bounds.index(part.start) : bounds.index(part.stop)]))

    # ------------------------------------------------------------ solving

    def solve(self, target: Callable[[int, int], int]) -> None:
        """Fix new sizes: `target(size, above)` is what a base size becomes, more than `above`."""
        while self._unify():
            pass
        self._spread_frozen()
        base = {
            self.size[root]
            for root in map(self.find, list(self.parent))
            if not self._definition(root) and root not in self.frozen and self.size[root] > 1
        }
        above = 1
        self.scale = {}
        for size in sorted(base):
            above = self.scale[size] = min(size, target(size, above))

    def _definitions(self) -> tuple[dict[Key, list[list[Key]]], dict[Key, list[list[Key]]]]:
        products: dict[Key, list[list[Key]]] = {}
        sums: dict[Key, list[list[Key]]] = {}
        for key, factors in self.products:
            roots = [self.find(f) for f in factors if self.size[f] != 1]
            self._define(products, self.find(key), roots)
        for key, terms in self.sums:
            roots = [self.find(t) for t in terms if self.size[t]]
            if len(roots) > 1 and len(set(roots)) == 1:
                self._define(products, self.find(key), [self._constant(len(roots)), roots[0]])
            else:
                self._define(sums, self.find(key), roots)
        return products, sums

    def _define(self, table: dict[Key, list[list[Key]]], key: Key, roots: list[Key]) -> None:
        if len(roots) == 1:
            self.union(key, roots[0])
        elif roots and roots not in table.setdefault(key, []):
            table[key].append(roots)

    def _unify(self) -> bool:
        """One round: make several definitions of one size agree; whether anything changed."""
        before = (len({self.find(k) for k in self.parent}), len(self.products), len(self.frozen))
        products, sums = self._definitions()
        self._table = {k: ("product", v[0]) for k, v in products.items()}
        for key, rows in products.items():
            for row in rows[1:]:
                self._match(self._factors(rows[0]), self._factors(row))
            if key in sums:
                self.freeze([key, *(r for row in (*rows, *sums[key]) for r in row)])
        for key, rows in sums.items():
            self._table.setdefault(key, ("sum", rows[0]))
            for row in rows[1:]:
                self._match_terms(key, rows[0], row)
        after = (len({self.find(k) for k in self.parent}), len(self.products), len(self.frozen))
        return before != after

    def _factors(self, row: list[Key], depth: int = 0) -> list[Key]:
        """Return a product's factors, with factors that are products themselves taken apart."""
        found: list[Key] = []
        for key in row:
            kind, inner = self._definition(key) or ("", [])
            apart = kind == "product" and depth < 8
            found += self._factors(inner, depth + 1) if apart else [self.find(key)]
        return found

    def _definition(self, key: Key) -> tuple[str, list[Key]] | None:
        return self._table.get(self.find(key))

    def _match(self, left: list[Key], right: list[Key]) -> None:
        """Make two factorizations of one size the same, refining where one is coarser."""
        while left and right:
            a, b = left[0], right[0]
            x, y = self.size[a], self.size[b]
            if x == y:
                self.union(a, b)
                left, right = left[1:], right[1:]
            elif x > y and x % y == 0 and self._definition(a) is None:
                rest = self._make(("factor", *a, str(y)), x // y)
                self.products.append((a, [b, rest]))
                left, right = [rest, *left[1:]], right[1:]
            elif y > x and y % x == 0 and self._definition(b) is None:
                left, right = right, left
            else:
                self.freeze((*left, *right))
                return

    def _match_terms(self, key: Key, left: list[Key], right: list[Key]) -> None:
        a, b = (sorted(row, key=lambda k: self.size[k]) for row in (left, right))
        if [self.size[k] for k in a] != [self.size[k] for k in b]:
            self.freeze([key, *a, *b])
            return
        for x, y in zip(a, b, strict=True):
            self.union(x, y)

    def _spread_frozen(self) -> None:
        """What a frozen size is made of is frozen, too."""
        waiting = [self.find(k) for k in self.frozen]
        self.frozen = set(waiting)
        while waiting:
            _, inner = self._definition(waiting.pop()) or ("", [])
            for key in map(self.find, inner):
                if key not in self.frozen:
                    self.frozen.add(key)
                    waiting.append(key)

    # ------------------------------------------------------------ answers

    def new(self, key: Key) -> int:
        """Return the new size of a dim, axis or part."""
        root = self.find(key)
        if root in self.frozen or self.size[root] <= 1:
            return self.size[root]
        kind, inner = self._definition(root) or ("", [])
        if not kind:
            return self.scale[self.size[root]]
        made = [self.new(k) for k in inner]
        return prod(made) if kind == "product" else sum(made)

    def position(self, axis: Key, place: int) -> int:
        """Where a boundary between parts of an axis lies now."""
        bounds = self.bounds[axis]
        count = bounds.index(place)
        return sum(self.new(("part", *axis[1:], str(i))) for i in range(count))

    def pattern(self, key: Key, pattern: Pattern) -> Pattern:
        """Return a cut of a dim or axis in new sizes."""
        if self.find(key) in self.frozen:
            return pattern
        if len(pattern) == 1 and pattern[0][0] == pattern[0][2] == 1:
            return ((1, self.new(key), 1),)
        segments = self._segments(key)
        several = segments is not None and len(segments) > len(pattern) == 1
        if segments is not None and several and all(s == segments[0] for s in segments):
            segments = [[self._constant(len(segments)), *segments[0]]]
        if segments is None or len(segments) != len(pattern):
            raise Unscalable([key], f"the cut {pattern} of a size made otherwise")
        return merge(tuple(self._cut(key, s, p) for s, p in zip(segments, pattern, strict=True)))

    def _segments(self, key: Key) -> list[list[Key]] | None:
        kind, inner = self._definition(key) or ("", [])
        if not kind:
            return [[self.find(key)]]
        below = [self._segments(k) for k in inner]
        if kind == "sum":
            return [s for found in below for s in found] if all(below) else None  # type: ignore[union-attr]
        if any(found is None or len(found) != 1 for found in below):
            return None
        return [[f for found in below for f in found[0]]]  # type: ignore[index]

    def _cut(self, key: Key, factors: list[Key], cut: tuple[int, int, int]) -> tuple[int, int, int]:
        sizes = [self.size[f] for f in factors]
        for start in range(len(factors) + 1):
            for stop in range(start, len(factors) + 1):
                old = tuple(map(prod, (sizes[:start], sizes[start:stop], sizes[stop:])))
                if old == cut:
                    new = [self.new(f) for f in factors]
                    return prod(new[:start]), prod(new[start:stop]), prod(new[stop:])
        raise Unscalable([key], f"the cut {cut} is not at a factor of {sizes}")
