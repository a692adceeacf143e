"""From decisions to a program: local calls, moves between layouts, gradient synchronization.

1. Decide how sources are held: inputs as the shard all their uses agree on; parameters as the plan
   stores them, with a partial gradient on an axis where all their uses differ (`sync`).
2. Walk the nodes: bring every operand into the layout its node needs (one conversion serves all
   uses), then write the local call.
3. Bring the loss, changed buffers and outputs into whole values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.ir import Node, Ref, TensorType, map_refs, node_keys
from shardwise.layouts.moves import Move, plan_moves
from shardwise.plans import Resolved
from shardwise.program.program import (
    LocalInput,
    LocalValue,
    Program,
    RankProgram,
    Step,
    Storage,
    merge_equal,
    rank_classes,
)
from shardwise.program.recompute import deferred, mark_recompute, recompute_notes, refers
from shardwise.program.sources import Sources, find_sources
from shardwise.sharding.candidates import Choice, Cut, Pass
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Coordinate,
    Layout,
    Partial,
    Shard,
    local_pattern,
    local_shape,
)
from shardwise.sharding.rule import Local, LocalCall, MeshAxis, replace_arguments

# What one rank runs for a node: its call in local sizes.


def local_call(
    node: Node,
    facts: Facts,
    types: Mapping[str, TensorType],
    choices: Iterable[tuple[str, Choice]],
    needs: tuple[Layout, ...],
    gives: tuple[Layout, ...],
    coordinate: Coordinate,
) -> LocalCall:
    """Return the call of the rank at `coordinate`; `choices` are pairs of mesh axis and choice."""
    rule, call = facts.rules[node.name], facts.calls[node.name]
    results = tuple(
        local_shape(layout, types[name].shape, coordinate)
        for name, layout in zip(node.outputs, gives, strict=True)
    )
    if rule.localize is not None:
        cuts: dict[str, tuple[str, ...]] = {}
        partial: list[str] = []
        for axis, choice in choices:
            if isinstance(choice, Cut):
                cuts[choice.axis] = (*cuts.get(choice.axis, ()), axis)
            if isinstance(choice, Pass):
                partial.append(axis)
        local = Local(
            cuts=cuts,
            operands=tuple(
                local_shape(layout, types[name].shape, coordinate)
                for name, layout in zip(node.inputs, needs, strict=True)
            ),
            results=results,
            result_layouts=gives,
            operand_layouts=needs,
            coordinate=coordinate,
            partial=tuple(partial),
        )
        return rule.localize(call, local)
    if rule.size_arg is not None:
        return replace_arguments(node, call.arguments, {rule.size_arg: results[0]})
    return LocalCall(node.op, node.args, node.kwargs)


def lower(
    resolved: Resolved, *, borrowed: frozenset[str] = frozenset(), defer: bool = False
) -> Program:
    """Return the program of every class of ranks; in time, of ranks and micro-batches.

    `borrowed` are parameters whose home is another stage. With `defer` the gradients of weights
    can be computed later than those of inputs.
    """
    sources = find_sources(resolved)
    marked = replace(resolved, graph=mark_recompute(resolved.graph, resolved.plan))
    programs = merge_equal(
        _Lowering(marked, sources, ranks, borrowed, defer).run()
        for ranks in rank_classes(resolved, sources)
    )
    rules = resolved.facts.rules
    notes = recompute_notes(marked.graph, resolved.plan)
    notes += [
        f"{node.op} at {node.origin}: rule found by experiment"
        for node in resolved.graph.nodes
        if rules[node.name].discovered
    ]
    notes += [
        f"{node.op} at {node.origin} is left whole: {rules[node.name].whole}"
        for node in resolved.graph.nodes
        if rules[node.name].whole and resolved.facts.calls[node.name].operands
    ]
    program = Program(
        graph=resolved.graph,
        plan=resolved.plan,
        rank_programs=programs,
        notes=tuple(dict.fromkeys(notes)),
    )
    program.verify()
    return program


def lower_place(resolved: Resolved, place: int) -> RankProgram:
    """Return the program of one rank alone; on a mesh of many ranks `lower` would list them all."""
    marked = replace(resolved, graph=mark_recompute(resolved.graph, resolved.plan))
    return _Lowering(marked, find_sources(resolved), (place,), frozenset(), False).run()


class _Lowering:
    """One pass over the nodes for one class of ranks."""

    def __init__(
        self,
        resolved: Resolved,
        sources: Sources,
        ranks: tuple[int, ...],
        borrowed: frozenset[str],
        defer: bool,
    ) -> None:
        self.resolved, self.sources, self.ranks = resolved, sources, ranks
        self.borrowed, self.defer = borrowed, defer
        self.graph, self.facts = resolved.graph, resolved.facts
        mesh = resolved.plan.mesh
        self.sizes = dict(mesh.axes)
        place = mesh.coordinate(ranks[0])
        self.coordinate: Coordinate = {a: (place[a], n) for a, n in mesh.axes}
        whole = [(a, PARTIAL_GRAD if resolved.is_time(a) else REPLICATE) for a in mesh.names]
        self.whole = Layout(tuple(whole))
        self.values: dict[str, LocalValue] = {}
        self.steps: list[Step] = []
        self.converted: dict[tuple[str, Layout], str] = {}
        self.keys = node_keys(self.graph)

    def run(self) -> RankProgram:
        for value, layout in self.sources.layouts.items():
            self._define(value, value, layout)
        for node in self.graph.nodes:
            self._compute(node)
        mutations = tuple(
            (b.name, self._convert(b.mutation, self.whole, None))
            for b in self.graph.buffers
            if b.mutation
        )
        loss = None
        if self.graph.loss:
            term = [(a, PARTIAL if self.resolved.is_time(a) else p) for a, p in self.whole.axes]
            loss = self._convert(self.graph.loss, Layout(tuple(term)), self._last(self.graph.loss))
        sends = tuple(self._send(name) for name in self.graph.sends)
        steps, self.steps = tuple(self.steps), []
        outputs = map_refs(self.graph.outputs, lambda ref: Ref(self._output(ref.name)))
        return RankProgram(
            ranks=self.ranks,
            inputs=self._inputs(),
            parameters=self._parameters(),
            steps=steps,
            values=self.values,
            loss=loss,
            outputs=outputs,
            output_steps=tuple(self.steps),
            mutations=mutations,
            carries_grad=self.facts.carries_grad,
            sends=sends,
        )

    def _send(self, value: str) -> str:
        """Return the value as it leaves for another stage: shards as they are, sums completed."""
        held = self.values[value].layout
        sent = [
            (a, REPLICATE if isinstance(p, Partial) and not self.resolved.is_time(a) else p)
            for a, p in held.axes
        ]
        return self._convert(value, Layout(tuple(sent)), self._last(value))

    def _output(self, value: str) -> str:
        """Return an output as the user sees it: whole on the mesh, of this micro-batch in time."""
        held = self.values[value].layout
        shown = [(a, held[a] if self.resolved.is_time(a) else p) for a, p in self.whole.axes]
        return self._convert(value, Layout(tuple(shown)), None)

    def _last(self, value: str) -> Node | None:
        return self.graph.producers.get(value)

    def _define(self, name: str, value: str, layout: Layout) -> None:
        full = self.graph.values[value]
        shape = local_shape(layout, full.shape, self.coordinate)
        self.values[name] = LocalValue(
            value=value, layout=layout, type=TensorType(shape, full.dtype)
        )

    def _compute(self, node: Node) -> None:
        needs = self.resolved.operand_layouts(node.name)
        if not node.grad_enabled:
            needs = tuple(_as_same(layout) for layout in needs)
        needs = tuple(self._as_differing(node, layout) for layout in needs)
        names = [
            self._convert(value, needed, node)
            for value, needed in zip(node.inputs, needs, strict=True)
        ]
        for value, layout in zip(
            node.outputs, self.resolved.result_layouts(node.name), strict=True
        ):
            self._define(value, value, self.sources.stored(value, layout))
        call = self._local_call(node, needs)
        args, kwargs, order = _bind_operands(node, call, names)
        call = LocalCall(call.fn, args, kwargs)
        if self.defer and node.grad_enabled and node.autocast is None:
            weights = frozenset(p.value for p in self.graph.parameters)
            call = deferred(
                call, lambda arg: refers(arg, weights), lambda arg: len(self._shape(arg))
            )
        self.steps.append(
            _step(
                node,
                outputs=node.outputs,
                fn=call.fn,
                args=call.args,
                kwargs=call.kwargs,
                needs=tuple(needs[i] for i in order),
            )
        )

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        return self.values[ref.name].type.shape

    def _as_differing(self, node: Node, layout: Layout) -> Layout:
        """Mark replicated operands as differing along axes where the node's result differs."""
        differing = self.sources.differing
        return Layout(
            tuple(
                (a, PARTIAL_GRAD if p == REPLICATE and node.outputs[0] in differing[a] else p)
                for a, p in layout.axes
            )
        )

    def _local_call(self, node: Node, needs: tuple[Layout, ...]) -> LocalCall:
        """Return the node's call in local sizes; tensor operands keep their order."""
        call = local_call(
            node,
            self.facts,
            self.graph.values,
            [(a.axis, a.nodes[node.name].choice) for a in self.resolved.assignments],
            needs,
            tuple(self.values[name].layout for name in node.outputs),
            self.coordinate,
        )
        keyed = ((k, self.keys[node.name] if k == "key" else v) for k, v in call.kwargs)
        return LocalCall(call.fn, call.args, tuple(keyed))

    def _convert(self, value: str, needed: Layout, node: Node | None) -> str:
        """Return the name under which `value` is at hand in the needed layout, moving it if it is
        not.
        """
        name = value
        carries = value in self.facts.carries_grad
        for move in plan_moves(self.values[value].layout, needed, self.sizes, carries):
            key = (value, move.layout)
            if key not in self.converted:
                fresh = f"{value}_{move.fn.removeprefix('rt.')}_{'_'.join(move.axes)}"
                while fresh in self.values:
                    fresh += "_"
                self._define(fresh, value, move.layout)
                self.steps.append(self._move_step(move, name, fresh, node))
                self.converted[key] = fresh
            name = self.converted[key]
        return name

    def _move_step(self, move: Move, source: str, target: str, node: Node | None) -> Step:
        axis = move.axes[0]
        before, after = move.before[axis], move.layout[axis]
        kwargs: list[tuple[str, object]] = []
        if isinstance(before, Shard):
            kwargs += [
                ("dim", before.dim),
                ("of", local_pattern(move.before, axis, self.coordinate)),
            ]
            if isinstance(after, Shard):
                kwargs += [
                    ("to_dim", after.dim),
                    ("to_of", local_pattern(move.layout, axis, self.coordinate)),
                ]
        elif isinstance(after, Shard):
            kwargs += [
                ("dim", after.dim),
                ("of", local_pattern(move.layout, axis, self.coordinate)),
            ]
        elif move.fn == "rt.reduce" and getattr(before, "op", "sum") != "sum":
            kwargs.append(("op", before.op))  # type: ignore[union-attr]
        return _step(
            node,
            outputs=(target,),
            fn=move.fn,
            args=(Ref(source), MeshAxis(move.axes)),
            kwargs=tuple(kwargs),
            axes=move.axes,
            grad_enabled=True,
            autocast=None,
        )

    def _inputs(self) -> tuple[LocalInput, ...]:
        return tuple(
            LocalInput(
                value=i.value,
                name=i.name,
                path=i.path,
                layout=self.sources.layouts[i.value],
                shape=self.graph.values[i.value].shape,
                kind=i.kind,
            )
            for i in self.graph.inputs
        )

    def _zero(self, name: str, sync: tuple[str, ...]) -> int:
        return (self.resolved.plan.entry(name).zero or 0) if sync else 0

    def _parameters(self) -> tuple[Storage, ...]:
        storages = []
        for p in self.graph.parameters:
            full, local = self.graph.values[p.value], self.values[p.value]
            sync = self.sources.sync[p.value]
            storages.append(
                Storage(
                    value=p.value,
                    name=p.name,
                    aliases=p.aliases,
                    shape=full.shape,
                    local_shape=local.type.shape,
                    dtype=full.dtype,
                    layout=self.resolved.parameter_layout(p.value),
                    sync=sync,
                    zero=0 if p.value in self.borrowed else self._zero(p.name, sync),
                    unit=self.sources.units[p.value],
                    requires_grad=p.requires_grad,
                    borrowed=p.value in self.borrowed,
                )
            )
        return tuple(storages)


def _bind_operands(node: Node, call: LocalCall, names: list[str]) -> tuple[Any, Any, list[int]]:
    """Return the local call's arguments over local names, and which operand each tensor argument
    is.

    A value that a node uses twice may be at hand under two names: uses are matched in order.
    """
    waiting: dict[str, list[int]] = {}
    for index, value in enumerate(node.inputs):
        waiting.setdefault(value, []).append(index)
    order: list[int] = []

    def bound(ref: Ref) -> Ref:
        places = waiting[ref.name]
        index = places.pop(0) if len(places) > 1 else places[0]
        order.append(index)
        return Ref(names[index])

    args, kwargs = map_refs((call.args, call.kwargs), bound)
    return args, kwargs, order


def _as_same(layout: Layout) -> Layout:
    """Inside `no_grad` both kinds of whole are one."""
    return Layout(
        tuple((a, REPLICATE if p == REPLICATE or str(p) == "R~" else p) for a, p in layout.axes)
    )


def _step(node: Node | None, **fields: object) -> Step:
    """Return a step with the provenance of the node it serves."""
    origin: Mapping[str, object] = {}
    if node is not None:
        origin = {
            "node": node.name,
            "module": node.module,
            "module_class": node.module_class,
            "source": node.source,
            "source_text": node.source_text,
            "grad_enabled": node.grad_enabled,
            "autocast": node.autocast,
            "recompute": node.recompute,
        }
    return Step(**{**origin, **fields})  # type: ignore[arg-type]
