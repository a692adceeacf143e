"""Relate the sizes of a graph by equality, products and sums, and rewrite the graph in new sizes.

A dim has the size of its node axis; a dim of several axes is their product; an axis of several
parts is their sum. A size that is neither a product nor a sum is a base size and can be scaled. Two
factorizations of one size are refined to a common one; if there is none, the size and its factors
are frozen.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.ir import Constant, Graph, Node, TensorType, map_refs
from shardwise.ir.operators import resolve, takes_device, tensors
from shardwise.sharding.dims import Pattern, merge
from shardwise.sharding.rule import Call, NodeRule, Part, replace_arguments

Key = tuple[str, ...]  # ("dim", value, index), ("axis", node, axis), ("part", node, axis, index), …


class Unscalable(Exception):
    """The scaled sizes do not fit together: freeze `keys`, or `others` if that does not help."""

    def __init__(self, keys: Iterable[Key], why: str, others: Iterable[Key] = ()) -> None:
        super().__init__(why)
        self.keys, self.others = set(keys), set(others)


class Sizes:
    """Classes of equal sizes (a union-find structure) with their products and sums."""

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
        """Return the representative of a key's class."""
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def union(self, a: Key, b: Key) -> None:
        """Merge two classes; if their sizes differ, freeze both."""
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
        """Exclude the classes of these keys from scaling."""
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
        for axis_name, axis_parts in parts.items():
            self._add_parts(("axis", name, axis_name), axis_parts)

    def _add_parts(self, axis: Key, parts: list[tuple[Key, Part]]) -> None:
        """Split an axis at the boundaries of its parts; each part is a sum of segments."""
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
        """Choose new sizes; `target(size, above)` scales a base size to one larger than `above`."""
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
        """Make several definitions of a size agree once; return whether anything changed."""
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
                a, b = (sorted(terms, key=lambda k: self.size[k]) for terms in (rows[0], row))
                if [self.size[k] for k in a] != [self.size[k] for k in b]:
                    self.freeze([key, *a, *b])
                    continue
                for x, y in zip(a, b, strict=True):
                    self.union(x, y)
        after = (len({self.find(k) for k in self.parent}), len(self.products), len(self.frozen))
        return before != after

    def _factors(self, row: list[Key], depth: int = 0) -> list[Key]:
        """Return the factors of a product, with nested products expanded."""
        factors: list[Key] = []
        for key in row:
            kind, inner = self._definition(key) or ("", [])
            expands = kind == "product" and depth < 8
            factors += self._factors(inner, depth + 1) if expands else [self.find(key)]
        return factors

    def _definition(self, key: Key) -> tuple[str, list[Key]] | None:
        return self._table.get(self.find(key))

    def _match(self, left: list[Key], right: list[Key]) -> None:
        """Unify two factorizations of one size; the coarser one is refined."""
        while left and right:
            a, b = left[0], right[0]
            x, y = self.size[a], self.size[b]
            if x == y:
                self.union(a, b)
                left, right = left[1:], right[1:]
            elif x > y and x % y == 0 and self._definition(a) is None:
                quotient = self._make(("factor", *a, str(y)), x // y)
                self.products.append((a, [b, quotient]))
                left, right = [quotient, *left[1:]], right[1:]
            elif y > x and y % x == 0 and self._definition(b) is None:
                left, right = right, left
            else:
                self.freeze((*left, *right))
                return

    def _spread_frozen(self) -> None:
        """Freeze the factors and terms of frozen sizes, too."""
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
        sizes = [self.new(k) for k in inner]
        return prod(sizes) if kind == "product" else sum(sizes)

    def position(self, axis: Key, place: int) -> int:
        """Return the new position of a boundary between parts of an axis."""
        count = self.bounds[axis].index(place)
        return sum(self.new(("part", *axis[1:], str(i))) for i in range(count))

    def pattern(self, key: Key, pattern: Pattern) -> Pattern:
        """Return the sharding pattern of a dim or axis in new sizes."""
        if self.find(key) in self.frozen:
            return pattern
        if len(pattern) == 1 and pattern[0][0] == pattern[0][2] == 1:
            return ((1, self.new(key), 1),)
        segments = self._segments(key)
        several = segments is not None and len(segments) > len(pattern) == 1
        if segments is not None and several and all(s == segments[0] for s in segments):
            segments = [[self._constant(len(segments)), *segments[0]]]
        if segments is None or len(segments) != len(pattern):
            raise Unscalable([key], f"the pattern {pattern} does not match the parts of the size")
        return merge(tuple(self._cut(key, s, p) for s, p in zip(segments, pattern, strict=True)))

    def _segments(self, key: Key) -> list[list[Key]] | None:
        kind, inner = self._definition(key) or ("", [])
        if not kind:
            return [[self.find(key)]]
        below = [self._segments(k) for k in inner]
        if kind == "sum":
            return [s for part in below for s in part] if all(below) else None  # type: ignore[union-attr]
        if any(part is None or len(part) != 1 for part in below):
            return None
        return [[f for part in below for f in part[0]]]  # type: ignore[index]

    def _cut(self, key: Key, factors: list[Key], cut: tuple[int, int, int]) -> tuple[int, int, int]:
        sizes = [self.size[f] for f in factors]
        for start in range(len(factors) + 1):
            for stop in range(start, len(factors) + 1):
                old = tuple(map(prod, (sizes[:start], sizes[start:stop], sizes[stop:])))
                if old == cut:
                    new = [self.new(f) for f in factors]
                    return prod(new[:start]), prod(new[start:stop]), prod(new[stop:])
        raise Unscalable([key], f"the pattern {cut} is not at a factor of {sizes}")


# ------------------------------------------------------------ the graph in new sizes
# Arguments that are rewritten below, or that are not sizes. Any other integer that equals the size
# of one of the node's axes (groups of a convolution, `repeats`, `k`) pins that axis.
SIZE_NAMES = {
    *("size", "shape", "sizes", "split_size", "split_sizes", "normalized_shape", "num_classes"),
    *("start", "end", "length", "index", "step", "padding_idx", "ignore_index"),
    *("dim", "dims", "dim0", "dim1", "start_dim", "end_dim"),
}


def size_keys(node: Node, graph: Graph) -> list[Key]:
    """Return all dims of a node's operands and results."""
    return [
        ("dim", value, str(i))
        for value in (*node.inputs, *node.outputs)
        for i in range(len(graph.values[value].shape))
    ]


def pinned(graph: Graph, calls: Mapping[str, Call], rules: Mapping[str, NodeRule]) -> Iterator[Key]:
    """Yield the node axes whose size is also an argument that is not rewritten."""
    for node in graph.nodes:
        numbers = {
            n
            for name, value in calls[node.name].arguments.items()
            if name not in SIZE_NAMES and name != rules[node.name].size_arg
            for n in tree_leaves(value)
            if isinstance(n, int) and not isinstance(n, bool)
        }
        for axis in rules[node.name].axes.values():
            if axis.size > 1 and axis.size in numbers:
                yield ("axis", node.name, axis.name)


def rewrite(
    graph: Graph, calls: Mapping[str, Call], rules: Mapping[str, NodeRule], sizes: Sizes
) -> Graph:
    """Return the graph in new sizes."""
    values = {
        name: TensorType(
            tuple(sizes.new(("dim", name, str(i))) for i in range(len(kind.shape))), kind.dtype
        )
        for name, kind in graph.values.items()
    }
    nodes = tuple(
        _rewrite_node(node, calls[node.name], rules[node.name], values, sizes)
        for node in graph.nodes
    )
    constants = tuple(
        Constant(value=c.value, data=crop(c.data, values[c.value].shape)) for c in graph.constants
    )
    scaled = dataclasses.replace(graph, nodes=nodes, values=values, constants=constants)
    _try_on_meta(scaled, rules)
    return scaled


def crop(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the first elements of a tensor along every dim."""
    return data[tuple(slice(0, size) for size in shape)].clone()


def _rewrite_node(
    node: Node, call: Call, rule: NodeRule, values: Mapping[str, TensorType], sizes: Sizes
) -> Node:
    results = [values[name].shape for name in node.outputs]
    changes: dict[str, Any] = {}
    arguments = call.arguments
    name = node.op.split(".")[1] if node.op.count(".") == 2 else ""
    if rule.size_arg is not None:
        changes[rule.size_arg] = results[0]
    elif name in ("slice", "narrow", "select"):
        changes = _positions(node, name, call, rule, values, sizes)
    elif name.startswith("split"):
        dim = arguments.get("dim", 0) % len(results[0])
        lengths = tuple(shape[dim] for shape in results)
        for key in ("split_size", "split_sizes"):
            if key in arguments:
                several = isinstance(arguments[key], tuple | list)
                changes[key] = lengths if several else lengths[0]
    elif "normalized_shape" in arguments:
        rank = len(arguments["normalized_shape"])
        changes["normalized_shape"] = values[node.inputs[0]].shape[-rank:]
    elif name == "arange":
        start, step = arguments.get("start", 0), arguments.get("step", 1)
        changes["end"] = start + step * results[0][0]
    elif "size" in arguments and not isinstance(arguments["size"], int) and results:
        changes["size"] = results[0]
    elif name == "reshape":
        changes["shape"] = results[0]
    elif name == "unflatten":
        dim = arguments["dim"] % len(call.operands[0])
        changes["sizes"] = results[0][dim : dim + len(arguments["sizes"])]
    elif name == "one_hot" and arguments.get("num_classes", -1) > 0:
        changes["num_classes"] = results[0][-1]
    elif arguments.get("padding_idx", -1) >= 0 and node.inputs:
        changes["padding_idx"] = min(arguments["padding_idx"], values[node.inputs[0]].shape[0] - 1)
    changes = {k: v for k, v in changes.items() if arguments.get(k) != v}
    if not changes:
        return node
    written = replace_arguments(node, changes)
    return dataclasses.replace(node, args=written.args, kwargs=written.kwargs)


def _positions(
    node: Node,
    name: str,
    call: Call,
    rule: NodeRule,
    values: Mapping[str, TensorType],
    sizes: Sizes,
) -> dict[str, Any]:
    """Return the new bounds of a slice, or the new index of a select."""
    arguments = call.arguments
    dim = arguments.get("dim", 0) % len(call.operands[0])
    length = values[node.inputs[0]].shape[dim]
    if name == "select":
        index = arguments["index"]
        return {"index": index if index < 0 else min(index, length - 1)}
    part = rule.results[0][dim]
    if not isinstance(part, Part):
        return {}
    axis = ("axis", node.name, part.axis)
    start, stop = sizes.position(axis, part.start), sizes.position(axis, part.stop)
    if name == "narrow":
        return {"start": start, "length": stop - start}
    return {"start": start, "end": stop}


def _try_on_meta(graph: Graph, rules: Mapping[str, NodeRule]) -> None:
    """Run every node on meta tensors and compare the shapes with the expected ones."""
    values = {
        name: torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        for name, kind in graph.values.items()
    }
    for node in graph.nodes:
        args = map_refs(node.args, lambda ref: values[ref.name])
        kwargs = {k: map_refs(v, lambda ref: values[ref.name]) for k, v in node.kwargs}
        if not node.inputs and takes_device(node.op):
            kwargs["device"] = "meta"
        all_keys, rule = size_keys(node, graph), rules[node.name]
        suspects = _frozen_keys(node, rule)
        where = f"{node.name} ({node.op})"
        try:
            with torch.no_grad():
                result = resolve(graph, node.op)(*args, **kwargs)
        except Exception as error:
            raise Unscalable(suspects, f"{where}: {error}", all_keys) from error
        for name, tensor in zip(node.outputs, tensors(result), strict=True):
            expected = graph.values[name].shape
            if tuple(tensor.shape) != expected:
                why = f"{where}: shape {tuple(tensor.shape)}, expected {expected}"
                raise Unscalable(suspects, why, all_keys)


def _frozen_keys(node: Node, rule: NodeRule) -> list[Key]:
    """Return the dims of a node that must not be sharded, such as spatial dims of a convolution."""
    tensors = (
        *zip(node.inputs, rule.operands, strict=True),
        *zip(node.outputs, rule.results, strict=True),
    )
    return [
        ("dim", value, str(i))
        for value, dims in tensors
        for i, dim in enumerate(dims)
        if not isinstance(dim, Part) and any(rule.axes[axis].frozen for axis in dim)
    ]
