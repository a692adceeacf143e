"""Fold long loops that a trace has unrolled back into loops.

A Python loop over time steps is traced as the same nodes again and again. Nodes that repeat at
least `MIN_TRIPS` times, and differ only in values of the step before, in elements along a dim, and
in numbers that grow evenly, become one node. Nothing is assumed about the source: nodes that
are not exactly such a repetition stay as they are.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shardwise.ir import Graph, Node, Ref, TensorType, iter_refs, map_refs
from shardwise.ir.operators import is_random, operator, takes_device
from shardwise.scan import Scan, ScanBody, StepIndex

MIN_TRIPS = 64
MAX_PERIOD = 400  # nodes of one step
MAX_TRIES = 32  # loops and repetitions that are none
_JOINS = {"aten.stack.default": "stack", "aten.cat.default": "cat"}
_SELECT, _UNBIND = "aten.select.int", "aten.unbind.int"


class _Irregular(Exception):
    """The repeated nodes are not steps of a loop."""


def roll_loops(graph: Graph) -> Graph:
    """Return the graph with its long loops as nodes, inner ones first."""
    tried: set[tuple[int, int]] = set()
    while len(tried) < MAX_TRIES and (run := _longest_run(graph.nodes, tried)) is not None:
        start, period, length = run
        tried.add((len(graph.nodes), start))
        for offset in range(period):
            trips = (length - offset) // period
            if trips < MIN_TRIPS:
                break
            try:
                graph = _Steps(graph, start + offset, period, trips).rolled()
                break
            except _Irregular:
                continue
    return graph


def _longest_run(nodes: Sequence[Node], tried: set[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Return start, period and length of the longest repetition that was not tried."""
    if len(nodes) < MIN_TRIPS:
        return None
    numbers: dict[Any, int] = {}
    ids = np.array([numbers.setdefault(_shape_of(node), len(numbers)) for node in nodes])
    best: tuple[int, int, int] | None = None
    for period in range(1, min(MAX_PERIOD, len(nodes) // MIN_TRIPS) + 1):
        breaks = np.flatnonzero(ids[period:] != ids[:-period])
        edges = np.concatenate(([-1], breaks, [len(ids) - period]))
        gaps = np.diff(edges) - 1 + period
        for place in np.argsort(-gaps, kind="stable")[:4]:
            start, length = int(edges[place]) + 1, int(gaps[place])
            if length // period >= MIN_TRIPS and (len(nodes), start) not in tried:
                if best is None or length > best[2]:
                    best = start, period, length
                break
    return best


def _shape_of(node: Node) -> Any:
    """Return what the nodes of all steps have in common, as a key."""
    fixed = node.op, node.module, node.source, node.grad_enabled, node.autocast, node.recompute
    return *fixed, _without_numbers(node.args), _without_numbers(node.kwargs), len(node.outputs)


def _without_numbers(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(_without_numbers, arg))
    if isinstance(arg, Ref) or type(arg) is int:
        return type(arg).__name__
    return repr(arg)


class _Steps:
    """The nodes of a candidate loop: `trips` steps of `period` nodes each."""

    def __init__(self, graph: Graph, start: int, period: int, trips: int) -> None:
        self.graph, self.start, self.end = graph, start, start + period * trips
        nodes = graph.nodes[start : self.end]
        self.steps = [nodes[i : i + period] for i in range(0, len(nodes), period)]
        self.place: dict[str, tuple[int, tuple[int, int]]] = {
            out: (k, (i, j))
            for k, step in enumerate(self.steps)
            for i, node in enumerate(step)
            for j, out in enumerate(node.outputs)
        }
        self.unbound = {
            out: (node, number)
            for node in graph.nodes[:start]
            if node.op == _UNBIND
            for number, out in enumerate(node.outputs)
        }
        # Arguments of the body: by first and next value, by tensor and position, by value.
        self.carried: dict[tuple[str, tuple[int, int]], str] = {}
        self.elements: dict[tuple[str, int, StepIndex], str] = {}
        self.fixed: dict[str, str] = {}
        self.renamed: dict[str, str] = {}  # selected elements, which are arguments

    def rolled(self) -> Graph:
        """Return the graph with the loop as one node, or raise `_Irregular`."""
        first = self.steps[0]
        if any(not _can_repeat(node) for node in first) or len({n.recompute for n in first}) > 1:
            raise _Irregular
        for step in self.steps[1:]:
            types = [(a, b) for n, m in zip(first, step, strict=True)
                     for a, b in zip(n.outputs, m.outputs, strict=True)]  # fmt: skip
            if any(self.graph.values[a] != self.graph.values[b] for a, b in types):
                raise _Irregular
        nodes = [node for i in range(len(first)) if (node := self._merged(i)) is not None]
        return self._replaced(nodes)

    def _merged(self, position: int) -> Node | None:
        """Return a node of the body, or None for one that selects an element."""
        nodes = [step[position] for step in self.steps]
        args = self._common([node.args for node in nodes])
        kwargs = self._common([node.kwargs for node in nodes])
        node = nodes[0]
        is_fixed = node.op == _SELECT and args[0].name in self.fixed.values()
        if is_fixed and type(args[1]) is int and isinstance(args[2], StepIndex):
            (source,) = (name for name, own in self.fixed.items() if own == args[0].name)
            self.renamed[node.outputs[0]] = self._element(source, args[1], args[2])
            return None
        return replace(node, args=args, kwargs=kwargs)

    def _common(self, values: list[Any]) -> Any:
        """Return an argument that stands for those of all steps."""
        first = values[0]
        if isinstance(first, tuple):
            if len({len(value) for value in values}) > 1:
                raise _Irregular
            return tuple(self._common([v[i] for v in values]) for i in range(len(first)))
        if isinstance(first, Ref):
            return Ref(self._operand([value.name for value in values]))
        if all(repr(value) == repr(first) for value in values):
            return first
        if type(first) is not int:
            raise _Irregular
        return _even(values)

    def _operand(self, names: list[str]) -> str:
        """Return the value of the body that stands for these values of all steps."""
        places = [self.place.get(name) for name in names]
        here = places[0]
        if here is not None and all(p == (k, here[1]) for k, p in enumerate(places)):
            return self.renamed.get(names[0], names[0])
        if len(set(names)) == 1 and here is None:
            return self.fixed.setdefault(names[0], f"fixed_{len(self.fixed)}")
        if here is None and all(p is not None and p[0] == k for k, p in enumerate(places[1:])):
            updates = {p[1] for p in places[1:] if p is not None}
            if len(updates) == 1:
                key = (names[0], updates.pop())
                return self.carried.setdefault(key, f"carried_{len(self.carried)}")
        sources = [self.unbound.get(name) for name in names]
        if all(s is not None for s in sources) and len({id(s[0]) for s in sources if s}) == 1:
            node = sources[0][0]  # type: ignore[index]
            dim = int(node.args[1]) if len(node.args) > 1 else 0
            return self._element(node.args[0].name, dim, _even([s[1] for s in sources if s]))
        raise _Irregular

    def _element(self, source: str, dim: int, index: StepIndex) -> str:
        return self.elements.setdefault((source, dim, index), f"element_{len(self.elements)}")

    def _replaced(self, nodes: list[Node]) -> Graph:
        """Return the graph with a node for the loop."""
        graph, first, trips = self.graph, self.steps[0], len(self.steps)
        after = graph.nodes[self.end :]
        uses: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        ends = {name for node in after for name in node.inputs} | graph.visible
        for name in ends:
            if name in self.place:
                step, where = self.place[name]
                uses[where].add(step)
        name_of = {where: first[where[0]].outputs[where[1]] for where in {*uses}}
        name_of |= {key[1]: first[key[1][0]].outputs[key[1][1]] for key in self.carried}
        last = [where for where, steps in sorted(uses.items()) if steps == {trips - 1}]
        joins = {node.name: how for node in after if (how := self._join(node)) is not None}
        results: list[tuple[tuple[int, int], str, str, int]] = []  # of collected values
        values, extra = dict(graph.values), []
        for where in sorted(uses.keys() - set(last)):
            own = {n.name for n in after if n.name in joins and joins[n.name][0] == where}
            results += [(where, n.outputs[0], *joins[n.name][1:]) for n in after if n.name in own]
            others = {name for n in after if n.name not in own for name in n.inputs}
            places = [self.place[n] for n in others | graph.visible if n in self.place]
            single = sorted(step for step, place in places if place == where)
            if single:
                stacked = f"{name_of[where]}_steps"
                kind = graph.values[name_of[where]]
                values[stacked] = TensorType((trips, *kind.shape), kind.dtype)
                results.append((where, stacked, "stack", 0))
                for k in single:
                    out = self.steps[k][where[0]].outputs[where[1]]
                    extra.append(replace(
                        first[where[0]], name=f"select_{out}", op=_SELECT,
                        args=(Ref(stacked), 0, k), kwargs=(), outputs=(out,),
                    ))  # fmt: skip
        if not last and not results:
            raise _Irregular
        chosen = [*(where for _, where in self.carried), *last, *(r[0] for r in results)]
        inner = tuple(self.renamed.get(name_of[w], name_of[w]) for w in chosen)
        needed = _needed(nodes, inner)
        if not needed:  # a loop that only takes elements
            raise _Irregular
        used = {name for n in needed for name in n.inputs}.union(inner)
        elements = {key: name for key, name in self.elements.items() if name in used}
        fixed = {key: name for key, name in self.fixed.items() if name in used}
        arguments = (*self.carried.values(), *elements.values(), *fixed.values())
        body = ScanBody(needed, arguments, inner)
        scan = Scan(
            step=_interpreted(body), trips=trips, carried=len(self.carried),
            elements=tuple((dim, index) for _, dim, index in elements),
            last=len(last), collected=tuple((how, dim) for _, _, how, dim in results), body=body,
        )  # fmt: skip
        op = f"autograd_function.shardwise.scan.scan_{_digest(scan)}"
        operands = [*(first for first, _ in self.carried), *(key[0] for key in elements), *fixed]
        outputs = [self.steps[-1][i].outputs[j] for i, j in last] + [r[1] for r in results]
        taken = {node.name for node in graph.nodes}
        number = next(i for i in range(len(taken) + 1) if f"scan_{i}" not in taken)
        node = replace(
            first[0], name=f"scan_{number}", op=op, args=tuple(map(Ref, operands)), kwargs=(),
            outputs=tuple(outputs),
        )  # fmt: skip
        joined = {name for _, name, _, _ in results}
        rest = [n for n in after if not joined.intersection(n.outputs)]
        final = (*graph.nodes[: self.start], node, *extra, *rest)
        needed = {name for n in final for name in n.inputs} | graph.visible
        final = tuple(n for n in final if n.op != _UNBIND or needed.intersection(n.outputs))
        made = {name for n in graph.nodes for name in n.outputs}
        alive = {name for n in final for name in n.outputs}
        kinds = {name: kind for name, kind in values.items() if name not in made or name in alive}
        functions = {**graph.functions, op: scan}
        return replace(graph, nodes=final, values=kinds, functions=functions)

    def _join(self, node: Node) -> tuple[tuple[int, int], str, int] | None:
        """Return the place, kind and dim of a node that joins one value of all steps in order."""
        how = _JOINS.get(node.op)
        if how is None or not node.args or not isinstance(node.args[0], tuple):
            return None
        places = [self.place.get(ref.name) for ref in iter_refs(node.args[0])]
        here = places[0] if places else None
        if here is None or places != [(k, here[1]) for k in range(len(self.steps))]:
            return None
        return here[1], how, int(node.args[1]) if len(node.args) > 1 else 0


def _can_repeat(node: Node) -> bool:
    function = operator(node.op) if node.op.startswith("aten.") else None
    plain = function is not None and not is_random(node) and not takes_device(node.op)
    # Sizes in arguments, as of `view`, would fix the batch: such loops stay unrolled.
    has_sizes = any(isinstance(a, tuple) and len(a) > 1 and type(a[0]) is int for a in node.args)
    return plain and node.grad_enabled and node.autocast is None and not has_sizes


def _even(values: Sequence[int]) -> StepIndex:
    """Return numbers that grow by the same amount in each step."""
    stride = values[1] - values[0]
    if any(value != values[0] + stride * k for k, value in enumerate(values)):
        raise _Irregular
    return StepIndex(values[0], stride)


def _needed(nodes: Sequence[Node], results: Sequence[str]) -> tuple[Node, ...]:
    used, kept = set(results), []
    for node in reversed(nodes):
        if used.intersection(node.outputs):
            used |= set(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))


def _interpreted(body: ScanBody) -> Any:
    """Return the step function of a body, which runs its nodes one by one."""
    functions = [operator(node.op) for node in body.nodes]

    def step(t: int, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: dict[str, Any] = dict(zip(body.arguments, operands, strict=True))

        def given(arg: Any) -> Any:
            if isinstance(arg, StepIndex):
                return arg.at(t)
            return tuple(map(given, arg)) if isinstance(arg, tuple) else arg

        for node, function in zip(body.nodes, functions, strict=True):
            args, kwargs = map_refs((node.args, node.kwargs), lambda ref: values[ref.name])
            result = function(*given(args), **dict(given(kwargs)))
            results = result if isinstance(result, tuple | list) else (result,)
            values.update(zip(node.outputs, results, strict=True))
        return tuple(values[name] for name in body.results)

    return step


def _digest(scan: Scan) -> str:
    """Return a digest of everything that a scan computes, whatever its values are called."""
    body = scan.body
    assert body is not None
    made = (out for node in body.nodes for out in node.outputs)
    names = {name: Ref(str(number)) for number, name in enumerate((*body.arguments, *made))}
    nodes = map_refs([(n.op, n.args, n.kwargs) for n in body.nodes], lambda ref: names[ref.name])
    text = f"{replace(scan, step=print, body=None)} {nodes} {[names[r] for r in body.results]}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
