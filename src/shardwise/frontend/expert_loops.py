"""Turn loops over experts into tokens routed to experts.

    for e, expert in enumerate(experts):
        token, choice = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])

Each expert selects the tokens that chose it, computes, and adds the results to their rows. If all
experts compute the same with other weights, their nodes become those of `shardwise.routing`: the
selections one `route`, reads of tokens `dispatch`, products `grouped_linear` with stacked weights,
and the additions `collect`. Any other loop is left as it is, and refused for its unknown sizes.

Tokens may also be sorted first, so that each expert takes a number of rows:

    order = ids.flatten().argsort()
    parts = x[order // top_k].split(ids.flatten().bincount(minlength=len(experts)).tolist())
    rows = torch.cat([expert(part) for expert, part in zip(experts, parts)])
    out.index_add_(0, order // top_k, rows * weights.flatten()[order, None])
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from shardwise.frontend.builder import SYMBOLIC
from shardwise.ir import Node, Ref, TensorType, map_refs
from shardwise.ir.operators import bind
from shardwise.routing import COLLECT, DISPATCH, GROUPED_LINEAR, ROUTE
from shardwise.sharding import Call
from shardwise.sharding.registry import rule_for

_VIEWS = ("select", "unsqueeze", "view", "reshape", "transpose", "t", "permute", "flatten")
_PRODUCTS = {"linear": False, "matmul": True, "mm": True}  # whether the weight is [in, out]
_ZEROS = ("zeros", "zeros_like", "new_zeros", "full_like")
_RANDOM = ("dropout", "bernoulli", "rand")


class _Mismatch(Exception):
    """The loop has another form."""


def _require(condition: object) -> None:
    if not condition:
        raise _Mismatch


@dataclass(slots=True)
class _Expert:
    """The nodes of one expert: its selection, its own nodes, and the addition of its results.

    `where` maps indices of the selected rows to the dim of the ids that they index, and masks to
    -1. `names` maps the expert's values to those of the first one.
    """

    where: dict[str, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    sink: Node | None = None
    replaced: list[Node] = field(default_factory=list)  # all nodes, with the sink as it was


def merge_expert_loops(nodes: list[Node], types: dict[str, TensorType]) -> list[Node]:
    """Return the nodes with every recognized loop over experts replaced; add types of new ones."""
    producers = {name: node for node in nodes for name in node.outputs}
    loops: dict[str, dict[int, _Expert]] = {}
    for node in nodes:
        _add_selection(node, producers, loops)
    for ids, experts in loops.items():
        with suppress(_Mismatch):
            nodes = _Loop(ids, experts, nodes, types).merged()
    for ids, sizes in _sizes_of_experts(nodes, types).items():
        with suppress(_Mismatch):
            nodes = _SortedRows(ids, sizes, nodes, types).merged()
    return nodes


def _op(node: Node | None) -> str:
    return node.op.split(".")[1] if node is not None and node.op.count(".") == 2 else ""


def _add_selection(
    node: Node, producers: Mapping[str, Node], loops: dict[str, dict[int, _Expert]]
) -> None:
    """Record a mask such as `ids == 2` or `one_hot(ids)[..., 2]`, and the indices of its rows."""
    if _op(node) in ("where", "nonzero_numpy") and len(node.args) == 1:
        mask, outputs = node.args[0].name, node.outputs
    elif _op(node) == "index" and len(node.args[1]) == 1 and isinstance(node.args[1][0], Ref):
        mask, outputs = node.args[1][0].name, ()
    else:
        return
    source, order = producers.get(mask), None
    if _op(source) == "eq" and source is not None and isinstance(source.args[1], int):
        ids, number = source.args[0].name, source.args[1]
    elif _op(source) == "select" and source is not None:
        hot = producers.get(source.args[0].name)
        dim, number = source.args[1], source.args[2]
        if _op(hot) == "permute" and hot is not None:
            order = list(hot.args[1])
            hot = producers.get(hot.args[0].name)
        if _op(hot) != "one_hot" or hot is None:
            return
        ids, order = hot.args[0].name, order or list(range(len(outputs) + 1))
        if order.pop(dim) != len(order):  # the dim of classes must be the selected one
            return
    else:
        return
    expert = loops.setdefault(ids, {}).setdefault(number, _Expert())
    expert.where[mask] = -1
    for position, name in enumerate(outputs):
        expert.where[name] = order[position] if order else position


def _separates_rows(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Return whether a node computes every row of its results from the same rows of operands."""
    rule, num_rows = rule_for(Call.of(node, types)), types[node.outputs[0]].shape[:1]
    if rule is None:
        return False
    operands = zip(node.inputs, rule.operands, strict=True)
    first = {dims[0] for name, dims in operands if types[name].shape[:1] == num_rows}
    first |= {dims[0] for dims in rule.results}
    axes = [rule.axes[name] for dim in first if isinstance(dim, tuple) for name in dim]
    shards_all = len(first) == 1 == len(axes)
    return shards_all and not any(a.frozen or a.num_collectives or a.joins for a in axes)


def _pairs(args: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return both orders of two values."""
    refs = [arg for arg in args if isinstance(arg, Ref)]
    return [(refs[0], refs[1]), (refs[1], refs[0])] if len(refs) == len(args) == 2 else []


class _Loop:
    """One loop over experts, and the nodes that replace it."""

    def __init__(
        self, ids: str, experts: dict[int, _Expert], nodes: list[Node], types: dict[str, TensorType]
    ) -> None:
        self.ids, self.nodes, self.types = Ref(ids), nodes, types
        self.shape = types[ids].shape
        self.producers = {name: node for node in nodes for name in node.outputs}
        _require(sorted(experts) == list(range(len(experts))) and len(self.shape) in (1, 2))
        self.experts = [experts[number] for number in range(len(experts))]
        for expert in self.experts:
            self._find_nodes(expert)
        self.sinks = [expert.sink for expert in self.experts if expert.sink is not None]
        self.removed = {id(node) for expert in self.experts for node in expert.replaced}
        self.new: list[Node] = []
        self.rows: dict[str, Ref] = {}  # values of the first expert -> those of all experts

    def _find_nodes(self, expert: _Expert) -> None:
        """Find the nodes between the selection of rows and the addition of results."""
        own = {name for name, dim in expert.where.items() if dim >= 0}
        for node in self.nodes:
            masked = _op(node) in ("index", "index_put") and set(expert.where) & set(node.inputs)
            if not masked and own.isdisjoint(node.inputs):
                continue
            _require(expert.sink is None and not any(word in node.op for word in _RANDOM))
            if _op(node) in ("index_add", "index_put"):
                expert.sink = node
            else:
                expert.nodes.append(node)
                own |= set(node.outputs)
        _require(expert.sink is not None)
        expert.replaced = [*expert.nodes, *([expert.sink] if expert.sink else [])]
        self._normalize(expert)

    def _normalize(self, expert: _Expert) -> None:
        """Write `out[token] += value` as `index_add`, if no token chooses an expert twice."""
        sink = expert.sink
        if sink is None or _op(sink) != "index_put" or len(sink.args) != 3:
            return
        out, indices, value = sink.args
        added = self.producers.get(value.name)
        if added not in expert.nodes or _op(added) != "add" or added.kwargs:
            return
        terms = [(self.producers.get(ref.name), other) for ref, other in _pairs(added.args)]
        for read, other in terms:
            if read in expert.nodes and _op(read) == "index" and read.args == (out, indices):
                _require(_op(self.producers.get(self.ids.name)) == "topk" and len(indices) == 1)
                expert.nodes = [node for node in expert.nodes if node not in (read, added)]
                args = (out, 0, indices[0], other)
                expert.sink = replace(sink, op="aten.index_add.default", args=args)

    def merged(self) -> list[Node]:
        """Return all nodes, with those of the experts replaced."""
        if len(self.shape) == 1:
            kind = TensorType((*self.shape, 1), torch.int64)
            (self.ids,) = self._add("aten.unsqueeze.default", (self.ids, 1), kind)
        self._route()
        self._merge_nodes()
        self._add_results()
        at = self.nodes.index(self.experts[-1].replaced[-1])
        before, after = (
            [node for node in part if id(node) not in self.removed]
            for part in (self.nodes[:at], self.nodes[at:])
        )
        return [*before, *self.new, *after]

    def _route(self) -> None:
        """Add the node that sorts pairs of tokens and choices by expert."""
        count = len(self.experts)
        kinds = [TensorType((n,), torch.int64) for n in (count * prod(self.shape), count)]
        self.order, self.counts = self._add(ROUTE, (self.ids, count), *kinds)

    def _merge_nodes(self) -> None:
        """Add the nodes that compute the rows of all experts."""
        _require(len({len(expert.nodes) for expert in self.experts}) == 1)
        for counterparts in zip(*(expert.nodes for expert in self.experts), strict=True):
            self._merge(counterparts)

    def _merge(self, counterparts: Sequence[Node]) -> None:
        """Add the node that computes the rows of all experts."""
        first = counterparts[0]
        _require(
            len({(n.op, len(n.args), len(n.outputs), str(n.kwargs)) for n in counterparts}) == 1
        )
        region = (self.sinks[-1].grad_enabled, self.sinks[-1].autocast)
        _require(all((n.grad_enabled, n.autocast) == region for n in counterparts))
        _require(all(self.types[name].shape[:1] == (-1,) for name in first.outputs))
        kinds = [self._kind(name) for name in first.outputs]
        columns = list(zip(*(n.args for n in counterparts), strict=True))
        if _op(first) == "index":
            results: tuple[Ref, ...] = (self._read(counterparts),)
        elif _op(first) in _PRODUCTS and not self._is_shared([n.args[1] for n in counterparts]):
            rows, *weights = (self._rows(column) for column in columns)
            _require(isinstance(rows, Ref) and len(kinds[0].shape) == 2 and len(weights) <= 2)
            bias = weights[1] if len(weights) == 2 else None
            args = (rows, weights[0], self.counts, bias, _PRODUCTS[_op(first)])
            results = self._add(GROUPED_LINEAR, args, *kinds)
        else:
            args = tuple(self._rows(column, stack=False) for column in columns)
            results = self._add(first.op, args, *kinds, kwargs=first.kwargs)
            _require(_separates_rows(self.new[-1], self.types))
        self.rows |= dict(zip(first.outputs, results, strict=True))
        for expert, node in zip(self.experts, counterparts, strict=True):
            expert.names |= dict(zip(node.outputs, first.outputs, strict=True))

    def _kind(self, name: str) -> TensorType:
        kind = self.types[name]
        return replace(kind, shape=(len(self.experts) * prod(self.shape), *kind.shape[1:]))

    def _rows(self, column: Sequence[Any], *, stack: bool = True) -> Any:
        """Return the argument of all rows for those of each expert."""
        if not any(isinstance(item, Ref) for item in column):
            _require(all(item == column[0] for item in column))
            return column[0]
        _require(all(isinstance(item, Ref) for item in column))
        names = {e.names.get(r.name) for e, r in zip(self.experts, column, strict=True)}
        if names != {None}:
            _require(len(names) == 1)
            return self.rows[str(names.pop())]
        if self._is_shared(column):
            return column[0]
        _require(stack)
        return self._stack(column)

    def _is_shared(self, column: Sequence[Any]) -> bool:
        return all(isinstance(r, Ref) and self._key(r) == self._key(column[0]) for r in column)

    def _key(self, ref: Ref) -> Any:
        """Return a key that is equal for equal views of one value."""
        node = self.producers.get(ref.name)
        if node is None or _op(node) not in _VIEWS:
            return ref
        return node.op, map_refs(node.args, self._key), node.kwargs

    def _stack(self, column: Sequence[Ref]) -> Ref:
        """Return the weights of all experts: a parameter of all, or a stack of separate ones."""
        nodes = [self.producers.get(ref.name) for ref in column]
        selects = [node for node in nodes if node and _op(node) == "select" and node.args[1] == 0]
        if len(selects) == len(column) and len({node.args[0] for node in selects}) == 1:
            source: Ref = selects[0].args[0]
            if [node.args[2] for node in selects] == [*range(self.types[source.name].shape[0])]:
                return source
        kind = self.types[column[0].name]
        _require(all(self.types[ref.name] == kind for ref in column))
        stacked = replace(kind, shape=(len(column), *kind.shape))
        (result,) = self._add("aten.stack.default", (tuple(column), 0), stacked)
        return result

    def _read(self, counterparts: Sequence[Node]) -> Ref:
        """Read tokens by row, or the weights of tokens and choices."""
        sources = [node.args[0] for node in counterparts]
        _require(self._is_shared(sources) and sources[0].name not in self.rows)
        kind, rank = self.types[sources[0].name], len(self.shape)
        dims = self._dims([node.args[1] for node in counterparts])
        _require(kind.shape[: len(dims)] == self.shape[: len(dims)])
        source, top_k = sources[0], 1 if len(dims) == rank else self.shape[1]
        if len(dims) == 2:
            flat = replace(kind, shape=(prod(self.shape), *kind.shape[2:]))
            (source,) = self._add("aten.flatten.using_ints", (source, 0, 1), flat)
        (result,) = self._add(
            DISPATCH, (source, self.order, top_k), self._kind(counterparts[0].outputs[0])
        )
        return result

    def _dims(self, indices: Sequence[Sequence[Any]]) -> list[int]:
        """Return the dims of the ids that all experts index, in order: [0] or [0, 1]."""
        indexed = []
        for expert, index in zip(self.experts, indices, strict=True):
            dims = [expert.where.get(getattr(item, "name", ""), -2) for item in index]
            indexed.append(list(range(len(self.shape))) if dims == [-1] else dims)
        _require(all(dims == indexed[0] for dims in indexed) and indexed[0] in ([0], [0, 1]))
        return indexed[0]

    def _add_results(self) -> None:
        """Return rows to their tokens, and add them to the value to which the experts add."""
        sinks = self.sinks
        _require(all(s.op == sinks[0].op and not s.kwargs and len(s.args) >= 3 for s in sinks))
        if _op(sinks[0]) == "index_add":
            _require(all(s.args[1] == 0 for s in sinks))
            indices, values = [(s.args[2],) for s in sinks], [s.args[3] for s in sinks]
        else:
            indices, values = [s.args[1] for s in sinks], [s.args[2] for s in sinks]
            start = self.producers.get(sinks[0].args[0].name)
            _require(prod(self.shape[1:]) == 1 and _op(start) in _ZEROS and len(sinks[0].args) == 3)
        dims = self._dims(indices)
        _require(dims == [0] or prod(self.shape[1:]) == 1)
        for before, sink in pairwise(sinks):
            users = [node for node in self.nodes if before.outputs[0] in node.inputs]
            _require(sink.args[0] == Ref(before.outputs[0]))
            _require(all(id(node) in self.removed for node in users))
        rows, kind = self._rows(values, stack=False), self.types[sinks[-1].outputs[0]]
        _require(rows in self.rows.values() and self.types[rows.name].dtype == kind.dtype)
        top_k = prod(self.shape[1:])
        chosen = replace(kind, shape=(kind.shape[0], top_k, *kind.shape[1:]))
        (collected,) = self._add(COLLECT, (rows, self.order, self.ids), chosen)
        (summed,) = self._add("aten.sum.dim_IntList", (collected, (1,)), kind)
        args = (sinks[0].args[0], summed)
        self.new.append(replace(sinks[-1], op="aten.add.Tensor", args=args, kwargs=()))

    def _add(
        self, op: str, args: tuple[Any, ...], *kinds: TensorType, kwargs: Any = ()
    ) -> tuple[Ref, ...]:
        """Add a node, at the place of the last addition, and the types of its results."""
        names = tuple(f"{self.sinks[-1].outputs[0]}_{len(self.new)}_{i}" for i in range(len(kinds)))
        self.types.update(zip(names, kinds, strict=True))
        self.new.append(replace(self.sinks[-1], op=op, args=args, kwargs=kwargs, outputs=names))
        return tuple(map(Ref, names))


# ---------------------------------------------------------------- rows sorted by expert
_SAME_ORDER = ("view", "reshape", "flatten", "unsqueeze")


def _sizes_of_experts(
    nodes: Sequence[Node], types: Mapping[str, TensorType]
) -> dict[str, list[Ref]]:
    """Map ids to the plain numbers that count how often they choose each expert."""
    producers = {name: node for node in nodes for name in node.outputs}
    sizes: dict[str, list[Ref]] = {}
    for node in nodes:
        if node.op == SYMBOLIC and node.args[0] == "aten.item.default":
            (name,) = node.inputs
            counts = producers.get(name)
            if _op(counts) == "unbind" and counts is not None:
                row = sizes.setdefault(_counted_ids(counts.inputs[0], producers, types), [])
                row += [Ref(node.outputs[0])] if counts.outputs.index(name) == len(row) else []
    return {ids: row for ids, row in sizes.items() if ids}


def _counted_ids(name: str, producers: Mapping[str, Node], types: Mapping[str, TensorType]) -> str:
    """Return the ids if a value is their count for each expert: a sum of one-hot rows."""

    def producer(name: str) -> Node | None:
        while _op(node := producers.get(name)) == "to" and node is not None:
            name = node.inputs[0]
        return node

    total = producer(name)
    if total is None or _op(total) != "sum" or len(total.args) != 2:
        return ""
    hot, rank = producer(total.inputs[0]), len(types[total.inputs[0]].shape)
    if hot is None or sorted(dim % rank for dim in total.args[1]) != [*range(rank - 1)]:
        return ""
    if _op(hot) == "scatter" and _op(producers.get(hot.inputs[-1])) == "topk":
        start, dim, index, value = hot.args
        is_hot = _op(producers.get(start.name)) in _ZEROS and dim % rank == rank - 1 and value == 1
        return str(index.name) if is_hot else ""
    return _source(hot.inputs[0], producers) if _op(hot) == "one_hot" else ""


def _source(name: str, producers: Mapping[str, Node]) -> str:
    """Return the value of which a value has the same elements in the same order."""
    while _op(node := producers.get(name)) in _SAME_ORDER and node is not None:
        name = node.inputs[0]
    return name


class _SortedRows(_Loop):
    """Rows sorted by expert, of which each expert takes as many as counts say.

    `places` says what indices are: "order", the pairs of token and choice by expert; "tokens", the
    token of each; "inverse", the row of each pair.
    """

    def __init__(
        self, ids: str, sizes: list[Ref], nodes: list[Node], types: dict[str, TensorType]
    ) -> None:
        self.source, self.sizes, self.nodes, self.types = ids, sizes, nodes, types
        self.producers = {name: node for node in nodes for name in node.outputs}
        shape = types[ids].shape
        self.top_k = shape[-1] if len(shape) > 1 else 1
        self.shape = (prod(shape) // self.top_k, self.top_k)
        self.experts = [_Expert() for _ in sizes]
        self.new, self.rows = [], {}
        self.places: dict[str, str] = {}
        self.expert_of: dict[str, int] = {}  # values of one expert

    def merged(self) -> list[Node]:
        """Return all nodes, with those of sorted rows replaced."""
        for node in self.nodes:
            self.sinks = [node]
            if not self._replace(node):
                self.new.append(node)
        removed = self.producers.keys() - {name for node in self.new for name in node.outputs}
        _require(all(removed.isdisjoint(node.inputs) for node in self.new if node.op != SYMBOLIC))
        return self.new

    def _replace(self, node: Node) -> bool:
        """Add what replaces a node; return whether anything does."""
        inputs = set(node.inputs)
        if _op(node) in ("sort", "argsort"):
            return self._sort(node)
        if not inputs.isdisjoint(self.expert_of):
            self._follow_experts(node, {self.expert_of[n] for n in inputs & self.expert_of.keys()})
        elif not inputs.isdisjoint(self.places):
            self._use_indices(node)
        elif _op(node) == "split_with_sizes" and not inputs.isdisjoint(r.name for r in self.sizes):
            _require(list(node.args[1]) == self.sizes and bind(node)["dim"] == 0)
            _require(node.inputs[0] in self.rows)
            for number, (expert, part) in enumerate(zip(self.experts, node.outputs, strict=True)):
                self.expert_of[part] = number
                expert.names[part] = node.inputs[0]
        elif not inputs.isdisjoint(self.rows):
            self._compute(node)
        else:
            return False
        return True

    def _sort(self, node: Node) -> bool:
        """Sort the pairs by expert, or invert that order."""
        source, kind = node.inputs[0], TensorType(self.shape, torch.int64)
        inverts = self.places.get(source) == "order"
        if not inverts and _source(source, self.producers) != self.source:
            return False
        _require(len(self.types[source].shape) == 1 and not bind(node)["descending"])
        if "order" not in self.places.values():
            (self.ids,) = self._add("aten.view.default", (Ref(self.source), self.shape), kind)
            self._route()
        self.places[node.outputs[-1]] = "inverse" if inverts else "order"
        return True

    def _use_indices(self, node: Node) -> None:
        """Read rows of tokens, return rows to them, or compute the tokens of rows."""
        op, (source, *args) = _op(node), node.args
        if op in ("floor_divide", "div"):
            _require(op == "floor_divide" or bind(node)["rounding_mode"])
            _require(self.places.get(source.name) == "order" and args == [self.top_k])
            self.places[node.outputs[0]] = "tokens"
        elif op == "index_add":
            _require(args[0] == 0 and len(args) == 3 and not node.kwargs)
            self._return(node, args[2], self.places.get(args[1].name, "inverse"), source)
        else:
            _require(op == "index" and len(args[0]) == 1)
            place = self.places[args[0][0].name]
            if place == "inverse":
                self._return(node, source, "order")
                return
            top_k = self.top_k if place == "tokens" else 1
            _require(self.types[source.name].shape[0] == prod(self.shape) // top_k)
            call = (source, self.order, top_k)
            (self.rows[node.outputs[0]],) = self._add(DISPATCH, call, self._kind(node.outputs[0]))

    def _return(self, node: Node, values: Ref, place: str, start: Ref | None = None) -> None:
        """Return rows to their pairs or tokens, and add them to a value."""
        _require(values.name in self.rows and place != "inverse")
        rows, result = self.rows[values.name], self.types[node.outputs[0]]
        size = self.types[rows.name].shape[1:]
        chosen = replace(result, shape=(*self.shape, *size))
        (pairs,) = self._add(COLLECT, (rows, self.order, self.ids), chosen)
        args: tuple[Any, ...] = (pairs, 0, 1)
        op, count = "aten.flatten.using_ints", prod(self.shape)
        if place == "tokens":
            op, args, count = "aten.sum.dim_IntList", (pairs, (1,)), self.shape[0]
        _require(result == replace(self.types[rows.name], shape=(count, *size)))
        if start is not None:
            (summed,) = self._add(op, args, result)
            op, args = "aten.add.Tensor", (start, summed)
        self.new.append(replace(node, op=op, args=args, kwargs=()))

    def _follow_experts(self, node: Node, numbers: set[int]) -> None:
        """Note a node of one expert, or compute those of all where their rows are joined."""
        if _op(node) != "cat":
            _require(len(numbers) == 1)
            self.expert_of |= dict.fromkeys(node.outputs, *numbers)
            self.experts[numbers.pop()].nodes.append(node)
            return
        order = [self.expert_of.get(part.name) for part in node.args[0]]
        _require(order == [*range(len(self.experts))] and bind(node)["dim"] == 0)
        self._merge_nodes()
        for expert in self.experts:
            expert.nodes.clear()
        self.rows[node.outputs[0]] = self._rows(node.args[0], stack=False)

    def _compute(self, node: Node) -> None:
        """Compute all rows at once, each by itself."""
        rank = len(self.types[node.outputs[0]].shape)
        others = [self.types[name].shape for name in node.inputs if name not in self.rows]
        _require(all(len(shape) < rank or shape[0] == 1 for shape in others))
        _require(_op(node) not in _VIEWS[2:] and not any(word in node.op for word in _RANDOM))
        args, kwargs = map_refs((node.args, node.kwargs), lambda r: self.rows.get(r.name, r))
        results = self._add(node.op, args, *map(self._kind, node.outputs), kwargs=kwargs)
        _require(_separates_rows(self.new[-1], self.types))
        self.rows |= dict(zip(node.outputs, results, strict=True))
