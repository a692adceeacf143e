"""Lower a resolved plan to programs: local calls, redistributions, gradient synchronization.

1. Decide the layouts of sources: inputs are sharded as all their uses agree; parameters as the plan
   stores them. A replicated value whose uses all differ between the ranks of a mesh axis has a
   partial gradient; a parameter's is synchronized in buckets (`sync`) instead of inside backward.
   Values computed from parameters alone (a cast or scaled weight, a position bias) are R~ then, so
   that the reduction happens once, at the parameter.
2. Walk the nodes: redistribute every operand into the layout that its node needs (once for all uses
   that need the same), then write the local call.
3. Replicate the loss, changed buffers and outputs.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import PlanError
from shardwise.inexact import Inexact
from shardwise.ir import Input, Node, Parameter, Ref, TensorType, map_refs, node_keys
from shardwise.ir.ragged import row_counts
from shardwise.layouts.moves import Move, plan_moves, same_placement
from shardwise.layouts.problem import Assignment
from shardwise.plans import Resolved, Sync
from shardwise.plans.sync import applied_sync, check_inexact, operator_uses
from shardwise.program.program import (
    LocalInput,
    LocalValue,
    Program,
    RankProgram,
    Step,
    Storage,
    merge_equal,
)
from shardwise.program.recompute import deferred, mark_recompute, recompute_notes
from shardwise.sharding.candidates import Choice, Pass, Same, ShardAxis
from shardwise.sharding.factors import Facts
from shardwise.sharding.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Coordinate,
    Layout,
    Partial,
    Replicate,
    Shard,
    compatible,
    local_pattern,
    local_shape,
)
from shardwise.sharding.rule import Local, LocalCall, MeshAxis, replace_arguments
from shardwise.shares import lengths, num_ranks, part

# Calls with a gradient of rows.
SPARSE_CALLS = ("aten.embedding.default", "rt.embedding_rows", "rt.embedding_bag")


# ---------------------------------------------------------------- layouts of sources
@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Layouts of all graph sources, sync axes and gather units of parameters, and R~ values."""

    layouts: Mapping[str, Layout]
    sync: Mapping[str, tuple[str, ...]]
    units: Mapping[str, str]
    differing: Mapping[str, frozenset[str]]  # mesh axis -> values that are R~ on it

    def with_partial_grads(self, value: str, layout: Layout) -> Layout:
        """Return a layout with R~ instead of R where all uses of a value differ."""
        return Layout(
            tuple(
                (a, PARTIAL_GRAD if p == REPLICATE and value in self.differing[a] else p)
                for a, p in layout.axes
            )
        )


def replicated_layout(resolved: Resolved) -> Layout:
    """Return the layout of a value that every rank has in full, in any micro-batch."""
    axes = resolved.plan.mesh.names
    return Layout(tuple((a, PARTIAL_GRAD if resolved.is_time(a) else REPLICATE) for a in axes))


def find_sources(resolved: Resolved) -> Sources:
    """Return the layouts of all sources."""
    graph = resolved.graph
    # Micro-batches do different work with every value: all their gradients are partial sums.
    all_values = frozenset(graph.values)
    differing = {
        a.axis: all_values if resolved.is_time(a.axis) else _differing_values(resolved, a)
        for a in resolved.assignments
    }
    layouts: dict[str, Layout] = {}
    sync: dict[str, tuple[str, ...]] = {}
    for parameter in graph.parameters:
        stored = resolved.parameter_layout(parameter.value)
        axes = tuple(
            a
            for a, p in stored.axes
            if isinstance(p, Replicate)
            and parameter.value in differing[a]
            and parameter.requires_grad
            and not resolved.is_time(a)
        )
        sync[parameter.value] = axes
        layouts[parameter.value] = Layout(
            tuple(
                (a, PARTIAL_GRAD if a in axes or resolved.is_time(a) else p) for a, p in stored.axes
            )
        )
    replicated = replicated_layout(resolved)
    layouts |= dict.fromkeys((b.value for b in graph.buffers), replicated)
    layouts |= dict.fromkeys((c.value for c in graph.constants), replicated)
    layouts |= {i.value: _input_layout(resolved, i, replicated) for i in graph.inputs}
    units = _parameter_units(resolved)
    return Sources(layouts=layouts, sync=sync, units=units, differing=differing)


def _differing_values(resolved: Resolved, assignment: Assignment) -> frozenset[str]:
    """Return the values of parameters alone all of whose uses differ between ranks on this axis."""
    graph, carries = resolved.graph, resolved.facts.carries_grad
    pure = {p.value for p in graph.parameters}
    for node in graph.nodes:
        inputs = [n for n in node.inputs if n in carries]
        same = isinstance(assignment.nodes[node.name].choice, Same)
        if same and inputs and node.grad_enabled and all(n in pure for n in inputs):
            pure |= {n for n in node.outputs if n in carries}
    differs = dict.fromkeys(pure, False)  # becomes True at the first differing use
    equal = set(graph.visible)
    for node in reversed(graph.nodes):
        candidate = assignment.nodes[node.name]
        through = isinstance(candidate.choice, Same) and all(
            n in differs and differs[n] and n not in equal for n in node.outputs if n in carries
        )
        through = through and any(n in carries for n in node.outputs)
        if not through:  # either all results of a split are R~, or none
            equal |= {n for n in node.outputs if n in differs}
        for name, needed in zip(node.inputs, candidate.operands, strict=True):
            if name not in differs or not node.grad_enabled or name not in carries:
                continue
            if needed == PARTIAL_GRAD or isinstance(needed, Shard) or through:
                differs[name] = True
            else:
                equal.add(name)
    return frozenset(v for v, used in differs.items() if used and v not in equal)


def _input_layout(resolved: Resolved, source: Input, layout: Layout) -> Layout:
    """Shard an input on each axis where all its uses agree; `layout` replicates it.

    An input received from an earlier stage has the layout that the search chose.
    """
    value = source.value
    for assignment in resolved.assignments:
        if resolved.timed is not None and resolved.is_time(assignment.axis):
            layout = layout.with_axis(assignment.axis, resolved.timed.values[value])
            continue
        if source.kind == "received":
            decided = assignment.parameters.get(value, REPLICATE)
            layout = layout.with_axis(assignment.axis, decided)
            continue
        needs = [
            needed
            for node in resolved.graph.nodes
            for name, needed in zip(node.inputs, assignment.nodes[node.name].operands, strict=True)
            if name == value
        ]
        first = next(iter(needs), REPLICATE)
        agreed = all(same_placement(first, n, assignment.ranks) for n in needs)
        if not (isinstance(first, Shard) and agreed):
            continue
        if all(s.dim != first.dim or compatible(s.of, first.of) for _, s in layout.shards):
            layout = layout.with_axis(assignment.axis, first)
    return layout


def _parameter_units(resolved: Resolved) -> dict[str, str]:
    """Return each parameter's gather unit: a block if only that block uses it, else the root."""
    users: dict[str, set[str]] = {}
    for node in resolved.graph.nodes:
        for name in node.inputs:
            users.setdefault(name, set()).add(f"{node.module}.")
    units: dict[str, str] = {}
    for parameter in resolved.graph.parameters:
        unit = resolved.plan.unit(parameter.name)
        inside = all(m.startswith(f"{unit}.") for m in users.get(parameter.value, ()))
        units[parameter.value] = unit if unit and inside else ""
    return units


def rank_classes(resolved: Resolved, sources: Sources) -> list[tuple[int, ...]]:
    """Group the ranks by their local sizes, in rank order; in time, ranks and micro-batches."""
    mesh = resolved.plan.mesh
    extents: dict[str, set[int]] = {axis: set() for axis in mesh.names}
    layouts = list(sources.layouts.values())
    for node in resolved.graph.nodes:
        layouts += [*resolved.operand_layouts(node.name), *resolved.result_layouts(node.name)]
    for layout in layouts:
        for axis, shard in layout.shards:
            extents[axis] |= {size for _, size, _ in shard.of}
    earlier_lengths: set[int] = set()
    for axis, ranks in mesh.axes:  # later axes may split the parts that earlier ones leave
        extents[axis] |= earlier_lengths
        earlier_lengths |= {length for size in extents[axis] for length in lengths(size, ranks)}
    classes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        key = tuple(
            tuple(part(size, ranks, coordinate[axis])[1] for size in sorted(extents[axis]))
            for axis, ranks in mesh.axes
        )
        classes.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


# ---------------------------------------------------------------- programs
def local_call(
    node: Node,
    facts: Facts,
    types: Mapping[str, TensorType],
    choices: Iterable[tuple[str, Choice]],
    needs: tuple[Layout, ...],
    gives: tuple[Layout, ...],
    coordinate: Coordinate,
) -> LocalCall:
    """Return the node's call in local sizes; `choices` are pairs of mesh axis and choice."""
    rule, call = facts.rules[node.name], facts.calls[node.name]
    results = tuple(
        _local_type(layout, types[name], coordinate).shape
        for name, layout in zip(node.outputs, gives, strict=True)
    )
    if rule.localize is not None:
        sharded: dict[str, tuple[str, ...]] = {}
        partial: list[str] = []
        for axis, choice in choices:
            if isinstance(choice, ShardAxis):
                sharded[choice.axis] = (*sharded.get(choice.axis, ()), axis)
            elif isinstance(choice, Pass):
                partial.append(axis)
        local = Local(
            sharded=sharded,
            operands=tuple(
                _local_type(layout, types[name], coordinate).shape
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
        is_ragged = types[node.outputs[0]].ragged > 1  # the number of rows is known at run time
        size = (-1, *results[0][1:]) if is_ragged else results[0]
        return replace_arguments(node, {rule.size_arg: size})
    return LocalCall(node.op, node.args, node.kwargs)


def _local_type(layout: Layout, kind: TensorType, coordinate: Coordinate) -> TensorType:
    return replace(kind, shape=local_shape(layout, kind.shape, coordinate)).expected


def lower(
    resolved: Resolved, *, borrowed: frozenset[str] = frozenset(), defer: bool = False
) -> Program:
    """Return the program of every class of ranks (and micro-batches, if the plan splits time).

    `borrowed` are parameters that another stage owns. With `defer`, weight gradients can be
    computed later than input gradients.
    """
    sources = find_sources(resolved)
    marked = replace(resolved, graph=mark_recompute(resolved.graph, resolved.plan))
    programs = merge_equal(
        _Lowering(marked, sources, ranks, borrowed, defer).run()
        for ranks in rank_classes(resolved, sources)
    )
    notes = recompute_notes(marked.graph, resolved.plan)
    ruled = [(node, resolved.facts.rules[node.name]) for node in resolved.graph.nodes]
    notes += [
        f"{node.op} at {node.origin}: rule found by experiment"
        for node, rule in ruled
        if rule.discovered
    ]
    notes += [
        f"{node.op} at {node.origin} is not sharded: {rule.replicated_because}"
        for node, rule in ruled
        if rule.replicated_because and resolved.facts.calls[node.name].operands
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
    """Return the program of one rank; for a mesh of many ranks, `lower` would list them all."""
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
        self.replicated = replicated_layout(resolved)
        self.values: dict[str, LocalValue] = {}
        self.steps: list[Step] = []
        self.converted: dict[tuple[str, Layout], str] = {}
        self.keys, self.producers = node_keys(self.graph), self.graph.producers
        self.weights = frozenset(p.value for p in self.graph.parameters)
        self.counts = row_counts(self.graph)
        self.uses = operator_uses(self.graph)
        self.forms = {p.value: self._form(p) for p in self.graph.parameters}

    def run(self) -> RankProgram:
        for value, layout in self.sources.layouts.items():
            self._define(value, value, layout)
        for node in self.graph.nodes:
            self._compute(node)
        mutations = tuple(
            (b.name, self._convert(b.mutation, self.replicated, None))
            for b in self.graph.buffers
            if b.mutation
        )
        loss = None
        if self.graph.loss:
            # The loss of a micro-batch is one term of the batch's loss.
            axes = self.replicated.axes
            term = Layout(tuple((a, PARTIAL if self.resolved.is_time(a) else p) for a, p in axes))
            loss = self._convert(self.graph.loss, term, self.producers.get(self.graph.loss))
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
        """Prepare a value for another stage: shards stay, partial sums are completed."""
        sent = [
            (a, REPLICATE if isinstance(p, Partial) and not self.resolved.is_time(a) else p)
            for a, p in self.values[value].layout.axes
        ]
        return self._convert(value, Layout(tuple(sent)), self.producers.get(value))

    def _output(self, value: str) -> str:
        """Replicate an output over the mesh; in time, it is that of this micro-batch."""
        layout, axes = self.values[value].layout, self.replicated.axes
        replicated = Layout(
            tuple((a, layout[a] if self.resolved.is_time(a) else p) for a, p in axes)
        )
        return self._convert(value, replicated, None)

    def _define(self, name: str, value: str, layout: Layout) -> None:
        local = _local_type(layout, self.graph.values[value], self.coordinate)
        self.values[name] = LocalValue(value=value, layout=layout, type=local)

    def _compute(self, node: Node) -> None:
        needs = self.resolved.operand_layouts(node.name)
        if not node.grad_enabled:
            needs = tuple(_without_partial_grads(layout) for layout in needs)
        # Where the node's result is R~, so are its operands.
        needs = tuple(self.sources.with_partial_grads(node.outputs[0], need) for need in needs)
        names = [
            self._convert(value, needed, node)
            for value, needed in zip(node.inputs, needs, strict=True)
        ]
        results = self.resolved.result_layouts(node.name)
        for value, layout in zip(node.outputs, results, strict=True):
            self._define(value, value, self.sources.with_partial_grads(value, layout))
        call = self._local_call(node, needs)
        args, kwargs, order = _bind_operands(node, call, names)
        call = self._synchronized(LocalCall(call.fn, args, kwargs), names)
        if self.defer and node.grad_enabled and node.autocast is None:
            call = deferred(call, {n: len(self.values[n].type.shape) for n in self.weights})
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

    def _local_call(self, node: Node, needs: tuple[Layout, ...]) -> LocalCall:
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
        """Return the local value of `value` in the needed layout; redistribute it if needed."""
        name = value
        carries = value in self.facts.carries_grad
        kind = self.graph.values[value]
        for move in plan_moves(self.values[value].layout, needed, self.sizes, carries, kind):
            key = (value, move.layout)
            if key not in self.converted:
                target = f"{value}_{move.fn.removeprefix('rt.')}_{'_'.join(move.axes)}"
                while target in self.values:
                    target += "_"
                self._define(target, value, move.layout)
                self.steps.append(self._move_step(move, name, target, node))
                self.converted[key] = target
            name = self.converted[key]
        return name

    def _move_step(self, move: Move, source: str, target: str, node: Node | None) -> Step:
        axis = move.axes[0]
        before, after = move.before[axis], move.layout[axis]
        args: tuple[object, ...] = (Ref(source), MeshAxis(move.axes))
        kwargs: list[tuple[str, object]] = []
        if move.fn in ("rt.to_experts", "rt.to_tokens"):
            value = self.values[target].value
            args += (Ref(self.counts[value]),)
            kwargs.append(("experts", self.graph.values[value].ragged))
        else:
            shards = [
                (placement.dim, local_pattern(layout, axis, self.coordinate))
                for placement, layout in ((before, move.before), (after, move.layout))
                if isinstance(placement, Shard)
            ]
            for names, shard in zip((("dim", "of"), ("to_dim", "to_of")), shards, strict=False):
                kwargs += zip(names, shard, strict=True)
        if move.fn == "rt.reduce" and isinstance(before, Partial) and before.op != "sum":
            kwargs.append(("op", before.op))
        return _step(
            node,
            outputs=(target,),
            fn=move.fn,
            args=args,
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

    def _parameters(self) -> tuple[Storage, ...]:
        storages = []
        for p in self.graph.parameters:
            form = self.forms[p.value]
            full, local = self.graph.values[p.value], self.values[p.value]
            sync, borrowed = self.sources.sync[p.value], p.value in self.borrowed
            # Owners keep gradients as in zero 2.
            level = 2 if form.has_owners else self.resolved.plan.entry(p.name).zero or 0
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
                    zero=level if sync and not borrowed else 0,
                    form=form,
                    unit=self.sources.units[p.value],
                    requires_grad=p.requires_grad,
                    borrowed=borrowed,
                    inexact=None if borrowed else self._inexact(p),
                )
            )
        return tuple(storages)

    def _form(self, parameter: Parameter) -> Sync:
        """Return the synchronization of a parameter whose gradient this mesh sums."""
        plan = self.resolved.plan
        sync = plan.entry(parameter.name).sync
        if sync is None or parameter.value in self.borrowed:
            return Sync()
        ranks = math.prod(num_ranks(self.sizes[a]) for a in self.sources.sync[parameter.value])
        if ranks > 1:
            sync.check_ranks(ranks, parameter.name)
        else:
            sync = Sync(sparse="gather" if sync.sparse else "")
        return applied_sync(self.graph, parameter, sync, self.uses)

    def _synchronized(self, call: LocalCall, names: list[str]) -> LocalCall:
        """Return a call whose weight gradient has the form that its synchronization sends."""
        forms = [form for name in names if (form := self.forms.get(name)) is not None]
        if any(form.factors for form in forms) and call.fn == "aten.linear.default":
            return LocalCall("rt.linear_factors", call.args, call.kwargs)
        if any(form.sparse for form in forms) and call.fn in SPARSE_CALLS:
            args = call.args[:4] if call.fn == SPARSE_CALLS[0] else call.args  # the fifth is False
            return LocalCall(call.fn, args, (*call.kwargs, ("sparse", True)))
        return call

    def _inexact(self, parameter: Parameter) -> Inexact | None:
        """Return how a parameter is synchronized inexactly, if several ranks sum its gradient."""
        plan, summed = self.resolved.plan, self.sources.sync[parameter.value]
        sync = plan.entry(parameter.name).sync
        trained = parameter.requires_grad and any(num_ranks(self.sizes[a]) > 1 for a in summed)
        if sync is None or not sync.inexact or not trained:
            return None
        kind = self.graph.values[parameter.value]
        check_inexact(parameter.name, kind, sync, plan.entry(parameter.name).zero or 0)
        split = [axis for axis, _ in self.resolved.parameter_layout(parameter.value).shards]
        mixed = [axis for axis in summed if plan.roles.get(axis) == "parameters"]
        if sync.compression is not None and split:
            raise PlanError(
                f"sync ({sync}) of a parameter that mesh axis {split[0]!r} shards",
                where=parameter.name,
                hint="no compression for it, or a plan that replicates it",
            )
        if sync.every > 1 and mixed:
            raise PlanError(
                f"sync ({sync}): mesh axis {mixed[0]!r} computes parts of one gradient, which have "
                "to be summed in every step",
                where=parameter.name,
                hint="every=1 for it, or a layout that shards it along this axis",
            )
        return sync.inexact


def _bind_operands(node: Node, call: LocalCall, names: list[str]) -> tuple[Any, Any, list[int]]:
    """Return the call's arguments with local names, and the operand index of each tensor argument.

    A value that a node uses twice may have two local names: uses are matched in order.
    """
    waiting: dict[str, list[int]] = {}
    for index, value in enumerate(node.inputs):
        waiting.setdefault(value, []).append(index)
    order: list[int] = []

    def bind(ref: Ref) -> Ref:
        indices = waiting[ref.name]
        index = indices.pop(0) if len(indices) > 1 else indices[0]
        order.append(index)
        return Ref(names[index])

    args, kwargs = map_refs((call.args, call.kwargs), bind)
    return args, kwargs, order


def _without_partial_grads(layout: Layout) -> Layout:
    """Return a layout with R instead of R~: inside `no_grad` there are no gradients."""
    return Layout(tuple((a, REPLICATE if p == PARTIAL_GRAD else p) for a, p in layout.axes))


def _step(node: Node | None, **fields: object) -> Step:
    """Return a step with the provenance of the node it serves."""
    origin: Mapping[str, object] = {}
    if node is not None:
        origin = {
            "node": node.name,
            "module": node.module,
            "module_class": node.module_class,
            "source": node.source,
            "grad_enabled": node.grad_enabled,
            "autocast": node.autocast,
            "recompute": node.recompute,
        }
    return Step(**{**origin, **fields})  # type: ignore[arg-type]
