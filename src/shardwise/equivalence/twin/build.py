"""The twin of a plan: fewer layers, smaller sizes, fewer ranks, the same decisions.

Where a size cannot
be changed it stays; the twin says what changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from shardwise.cluster import Mesh
from shardwise.equivalence.certificate import Certificate
from shardwise.equivalence.check import check
from shardwise.equivalence.reference import Reference, run_graph_reference
from shardwise.equivalence.twin.scale import (
    Counts,
    begin_at,
    computed_indices,
    fewer_stages,
    make_batches,
    make_inputs,
    make_state,
    on_meshes,
)
from shardwise.equivalence.twin.sizes import Key, Sizes, Unscalable, pinned, rewrite, size_keys
from shardwise.errors import PlanError, RuleError, VerifyError
from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import drop_blocks
from shardwise.layouts.problem import Assignment
from shardwise.plans import ParameterEntry, Plan, Resolved, model_fingerprint, resolve
from shardwise.plans.plan import block_constraints
from shardwise.program import Pipeline, Program, build_pipeline, lower
from shardwise.sharding.candidates import (
    Candidate,
    Pass,
    ShardAxis,
    pass_candidate,
    same,
    shard_candidate,
)
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Placement, Shard, format_shard, parse_shard

# What a check in one process would need.
#
# 8 x parameters x (16 + ranks x (2 + 4 / (cut x groups)))    and    8 x activations x 12
#
# The reference holds the model, its state before and after, gradients and two moments, the same for
# other weights, and the noise of each; values and their gradients are kept, with their noise. Every
# rank holds its part of parameter, gradient and moments, and gathers all gradients and the state
# after the step. Each of the groups that run stages has about as many parameters. The activations
# of all ranks and micro-batches together are those of the model, where the plan cuts them.


ITEM = 8  # float64
HELD_BY_REFERENCE = 16
GATHERED = 2
HELD_BY_RANK = 4
ACTIVATIONS = 12
SHARE = 0.6  # of the memory that is free now


def available_bytes() -> float:
    """How much memory a check may take on this machine."""
    return SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parameter_bytes(count: int, plan: Plan) -> float:
    """What `count` parameters take, over the reference and all ranks."""
    meshes = {stage.ranks: stage.mesh for stage in plan.all_stages}
    held = 0.0
    for mesh in meshes.values():
        cut = len(meshes)
        for axis, size in mesh.axes:
            cut *= size if plan.roles[axis] == "parameters" else 1
        held += mesh.size * (GATHERED + HELD_BY_RANK / cut)
    return ITEM * count * (HELD_BY_REFERENCE + held)


def needed_bytes(graph: Graph, plan: Plan) -> float:
    """What a check of the plan would take."""
    count = sum(graph.values[p.value].numel for p in graph.parameters)
    made = sum(graph.values[name].numel for node in graph.nodes for name in node.outputs)
    return parameter_bytes(count, plan) + ITEM * ACTIVATIONS * made


# A plan's decisions in new sizes.


def scale_resolved(
    resolved: Resolved, scaled: Graph, facts: Facts, mesh: Mesh, sizes: Sizes
) -> Resolved:
    """Every choice and every placement of a program of one stage."""
    assignments = []
    for old in resolved.assignments:
        nodes = {
            name: _choose(resolved.graph, facts, name, candidate, sizes)
            for name, candidate in old.nodes.items()
        }
        parameters = {
            value: _place(("dim", value), placement, sizes)
            for value, placement in old.parameters.items()
        }
        assignments.append(
            Assignment(
                axis=old.axis,
                ranks=mesh.axis_size(old.axis),
                nodes=nodes,
                parameters=parameters,
                cost=old.cost,
            )
        )
    entries = scale_entries(resolved.graph, resolved.plan, sizes)
    plan = resolved.plan.with_(mesh=mesh, fingerprint=model_fingerprint(scaled), parameters=entries)
    return Resolved(graph=scaled, plan=plan, facts=facts, assignments=tuple(assignments))


def forced_choices(
    graph: Graph, facts: Facts, stages: Sequence[Resolved], sizes: Sizes
) -> dict[str, dict[str, str]]:
    """Return the choices of all stages as a plan's `nodes`; what stages choose differently is left
    out.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for stage in stages:
        for axis, name, candidate in _choices(stage):
            if name in facts.rules:  # not one that lowering added
                chosen = _choose(graph, facts, name, candidate, sizes).choice
                found.setdefault((name, axis), set()).add(str(chosen))
    forced: dict[str, dict[str, str]] = {}
    for (name, axis), texts in found.items():
        if len(texts) == 1:
            forced.setdefault(name, {})[axis] = texts.pop()
    return forced


def _choices(resolved: Resolved) -> Iterator[tuple[str, str, Candidate]]:
    for assignment in resolved.assignments:
        if not resolved.is_time(assignment.axis):
            for name, candidate in assignment.nodes.items():
                yield assignment.axis, name, candidate


def _choose(graph: Graph, facts: Facts, name: str, old: Candidate, sizes: Sizes) -> Candidate:
    rule, choice = facts.rules[name], old.choice
    if isinstance(choice, Pass):
        return pass_candidate(rule, choice.operands)
    if not isinstance(choice, ShardAxis):
        return same(rule)
    pattern = sizes.pattern(("axis", name, choice.axis), choice.pattern)
    found = shard_candidate(rule, choice.axis, pattern) if choice.axis in rule.axes else None
    if found is None:
        node = next(n for n in graph.nodes if n.name == name)
        raise Unscalable(size_keys(node, graph), f"{name} cannot {choice} in new sizes")
    return found


def _place(key: Key, placement: Placement, sizes: Sizes) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim, sizes.pattern((*key, str(placement.dim)), placement.of))


def scale_entries(graph: Graph, plan: Plan, sizes: Sizes) -> dict[str, ParameterEntry]:
    """Return the plan's entries of parameters, as they would be written for the twin."""
    entries: dict[str, ParameterEntry] = {}
    by_name = {n: p.value for p in graph.parameters for n in (p.name, *p.aliases)}
    for glob, entry in plan.parameters.items():
        value = by_name[matching(glob, list(by_name))[0]]
        layout = {
            axis: cut
            if cut == "whole"
            else _written(
                _place(("dim", value), parse_shard(cut, graph.values[value].shape), sizes)
            )
            for axis, cut in entry.layout.items()
        }
        entries[glob] = ParameterEntry(layout=layout, zero=entry.zero)
    return entries


def matching(glob: str, names: list[str]) -> list[str]:
    """Return the names that a glob of a plan means."""
    return [name for name in names if fnmatchcase(name, glob)]


def _written(placement: Placement) -> str:
    assert isinstance(placement, Shard)
    return format_shard(placement)


ATTEMPTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A program in smaller sizes, and what was made smaller."""

    program: Program | Pipeline
    scaled: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def plan(self) -> Plan:
        return self.program.plan


def build_twin(graph: Graph, plan: Plan) -> Twin:
    """Return the smallest twin that this module knows to make."""
    fewer, stages = fewer_stages(plan)
    small, layers, fewer = _drop_layers(graph, fewer)
    facts = analyze(small)
    decided: Resolved | Pipeline
    decided = build_pipeline(small, fewer) if fewer.is_scheduled else resolve(small, fewer, facts)
    counts = Counts.of(small, fewer)
    pins: set[Key] = {*pinned(small, facts.calls, facts.rules), *computed_indices(small)}
    why = ""
    for _ in range(ATTEMPTS):
        sizes = Sizes(small, facts.rules)
        sizes.freeze(pins)
        sizes.solve(counts.size)
        try:
            scaled = rewrite(small, facts.calls, facts.rules, sizes)
            program, notes = _decide(decided, scaled, counts, sizes)
        except Unscalable as error:
            why = str(error)
            fresh = (error.keys - pins) or (error.others - pins)
            if not fresh:
                break
            pins |= fresh
        else:
            what = [*layers, *_changes(small, sizes), *stages, *notes]
            if plan.stages and program.plan.num_ranks != plan.num_ranks:
                what.append(f"ranks: {plan.num_ranks} -> {program.plan.num_ranks}")
            return Twin(program=program, scaled=tuple(what))
    raise VerifyError(
        f"no smaller twin of {graph.name} could be made: {why}",
        hint="verify a smaller configuration of the model, or give max_bytes",
    )


def _drop_layers(graph: Graph, plan: Plan) -> tuple[Graph, tuple[str, ...], Plan]:
    """Fewer layers, and the plan for what is left: stages begin at the same nodes."""
    nodes = {place: name for name, place in node_keys(graph).items()}
    firsts = [nodes[stage.first] for stage in plan.stages if stage.first]
    small, notes = drop_blocks(graph, firsts, block_constraints(plan, graph))
    places, order = node_keys(small), [node.name for node in graph.nodes]

    def place(first: str) -> str:
        """Where the node is now, or the first one after it that is left."""
        later = order[order.index(nodes[first]) :]
        return next(places[name] for name in later if name in places)

    names = [n for p in small.parameters for n in (p.name, *p.aliases)]
    left = plan.with_(
        fingerprint=model_fingerprint(small),
        parameters={g: e for g, e in plan.parameters.items() if matching(g, names)},
        nodes={n: c for n, c in plan.choices(graph).items() if n in places},
    )
    return small, notes, begin_at(left, place)


def _decide(
    decided: Resolved | Pipeline, scaled: Graph, counts: Counts, sizes: Sizes
) -> tuple[Program | Pipeline, tuple[str, ...]]:
    """Return the program with all decisions in new sizes, and what changed but for sizes."""
    try:
        facts = analyze(scaled)
    except RuleError as error:
        raise VerifyError(f"the twin's rules: {error.message}", where=error.where) from error
    plan, notes = on_meshes(decided.plan, counts.meshes, counts.num_microbatches)
    if isinstance(decided, Resolved):
        return lower(scale_resolved(decided, scaled, facts, plan.mesh, sizes)), notes
    return _scaled_pipeline(decided, scaled, facts, plan, sizes, notes)


def _scaled_pipeline(
    decided: Pipeline,
    scaled: Graph,
    facts: Facts,
    plan: Plan,
    sizes: Sizes,
    notes: tuple[str, ...],
) -> tuple[Pipeline, tuple[str, ...]]:
    """Return the pipeline with the choices of every stage's nodes written into the plan."""
    resolved = [stage.resolved for stage in decided.stages]
    plan = plan.with_(
        fingerprint=model_fingerprint(scaled),
        parameters=scale_entries(decided.graph, plan, sizes),
        nodes=forced_choices(decided.graph, facts, resolved, sizes),
    )
    try:
        pipeline = build_pipeline(scaled, plan)
    except PlanError:
        pipeline = build_pipeline(scaled, plan.with_(nodes={}))
        notes = (*notes, "choices of nodes: made anew in these sizes")
    before = {(t.value, t.source, t.target) for t in decided.transfers}
    after = {(t.value, t.source, t.target) for t in pipeline.transfers}
    names = ", ".join(f"%{value}" for value in sorted({v for v, *_ in before - after}))
    if names:
        notes = (*notes, f"transfers: {names} computed again where it is used")
    return pipeline, notes


def _changes(graph: Graph, sizes: Sizes) -> tuple[str, ...]:
    """Which sizes changed, in words, each by a dim that has it."""
    named: dict[tuple[int, int], str] = {}
    sources: Mapping[str, str] = {
        **{i.value: i.name for i in graph.inputs},
        **{p.value: p.name for p in graph.parameters},
        **{b.value: b.name for b in graph.buffers},
    }
    for value, name in sources.items():
        for index, size in enumerate(graph.values[value].shape):
            new = sizes.new(("dim", value, str(index)))
            if new != size:
                named.setdefault((size, new), f"dim {index} of {name}: {size} -> {new}")
    return tuple(named.values())


# A plan shown equal on a scaled twin.
#
# The reference is the captured graph itself in the twin's sizes, on one device.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A twin that is ready to be checked."""

    program: Program | Pipeline
    reference: Reference
    inputs: Mapping[str, torch.Tensor]
    scaled: tuple[str, ...]


def prepare_twin(
    graph: Graph,
    plan: Plan,
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    max_bytes: float = float("inf"),
) -> Prepared:
    """Return the twin's program, data and reference."""
    plan.check(graph)
    twin = build_twin(graph, plan)
    small = twin.graph
    needed = needed_bytes(small, twin.plan)
    if needed > max_bytes:
        raise VerifyError(
            f"the smallest twin of {graph.name} needs {needed / 2**30:.1f} GiB, "
            f"{max_bytes / 2**30:.1f} GiB are available",
            hint="verify a smaller configuration of the model",
        )
    state = make_state(small, buffers)
    if twin.plan.per_microbatch and twin.plan.num_microbatches > 1:
        data, (first, *more) = make_batches(small, twin.plan, inputs)
    else:
        data, more = make_inputs(small, inputs), []
        first = data
    try:
        reference = run_graph_reference(small, twin.plan, state, first, more=more)
    except (IndexError, RuntimeError) as error:
        raise VerifyError(f"the scaled twin of {graph.name} does not run: {error}") from error
    drawn = "weights: drawn; the reference is the captured graph in these sizes"
    return Prepared(
        program=twin.program,
        reference=reference,
        inputs=data,
        scaled=(*twin.scaled, drawn),
    )


def certify_twin(
    graph: Graph,
    plan: Plan,
    buffers: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    timeout_s: float,
    max_bytes: float = float("inf"),
) -> Certificate:
    """Check the plan on a scaled twin."""
    twin = prepare_twin(graph, plan, buffers, inputs, max_bytes)
    return check(twin.program, twin.reference, twin.inputs, timeout_s=timeout_s, scaled=twin.scaled)
