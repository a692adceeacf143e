"""Build and check the twin of a plan: fewer layers, smaller sizes and fewer ranks, same decisions.

A size that cannot be scaled stays the same. The twin lists what changed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch

from shardwise.cluster import Mesh
from shardwise.equivalence.certificate import Certificate
from shardwise.equivalence.check import check
from shardwise.equivalence.reference import Reference, run_graph
from shardwise.equivalence.twin import scale
from shardwise.equivalence.twin.sizes import Key, Sizes, Unscalable, pinned, rewrite, size_keys
from shardwise.errors import PlanError, RuleError, VerifyError
from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import drop_blocks
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
from shardwise.sharding.placements import Placement, Shard, format_placement, parse_placement
from shardwise.shares import num_ranks

# The memory of a check in one process:
#
# 8 x parameters x (16 + ranks x (2 + 4 / (shards x groups)))    and    8 x activations x 12
#
# The reference stores the model, its state before and after the step, gradients and two moments,
# the same for changed weights, the noise of each, and all values and gradients with their noise.
# Every rank stores its shard of parameters, gradients and moments, and gathers all gradients and
# the state after the step. Each group of ranks that runs stages has about the same number of
# parameters. The activations of all ranks and micro-batches together are those of the model.


ITEM_BYTES = 8  # float64
REFERENCE_COPIES = 16
GATHERED_COPIES = 2
RANK_COPIES = 4
ACTIVATION_COPIES = 12
FREE_SHARE = 0.6  # of the free memory
ATTEMPTS = 200


def available_bytes() -> float:
    """Return the memory that a check may use on this machine."""
    return FREE_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parameter_bytes(count: int, plan: Plan) -> float:
    """Return the memory of `count` parameters, for the reference and all ranks."""
    meshes = {stage.ranks: stage.mesh for stage in plan.all_stages}
    copies = float(REFERENCE_COPIES)
    for mesh in meshes.values():
        sharded = [num_ranks(n) for axis, n in mesh.axes if plan.roles[axis] == "parameters"]
        copies += mesh.size * (GATHERED_COPIES + RANK_COPIES / (len(meshes) * prod(sharded)))
    return ITEM_BYTES * count * copies


def needed_bytes(graph: Graph, plan: Plan) -> float:
    """Return the memory of a check of the plan."""
    count = sum(graph.values[p.value].numel for p in graph.parameters)
    activations = sum(graph.values[name].numel for node in graph.nodes for name in node.outputs)
    return parameter_bytes(count, plan) + ITEM_BYTES * ACTIVATION_COPIES * activations


# ------------------------------------------------------------ the plan's decisions in new sizes
def scale_resolved(
    resolved: Resolved, scaled: Graph, facts: Facts, mesh: Mesh, sizes: Sizes
) -> Resolved:
    """Scale every choice and every placement of a program of one stage."""
    assignments = tuple(
        replace(
            old,
            ranks=mesh.axis_size(old.axis),
            nodes={n: _choose(resolved.graph, facts, n, c, sizes) for n, c in old.nodes.items()},
            parameters={v: _place(v, p, sizes) for v, p in old.parameters.items()},
        )
        for old in resolved.assignments
    )
    entries = scale_entries(resolved.graph, resolved.plan, sizes)
    plan = resolved.plan.with_(mesh=mesh, fingerprint=model_fingerprint(scaled), parameters=entries)
    return Resolved(graph=scaled, plan=plan, facts=facts, assignments=assignments)


def forced_choices(
    graph: Graph, facts: Facts, stages: Sequence[Resolved], sizes: Sizes
) -> dict[str, dict[str, str]]:
    """Return the choices that all stages agree on, as a plan's `nodes`."""
    choices: dict[tuple[str, str], set[str]] = {}
    for stage in stages:
        for assignment in stage.assignments:
            if stage.is_time(assignment.axis):
                continue
            for name, candidate in assignment.nodes.items():
                if name in facts.rules:  # lowering adds nodes without rules
                    choice = _choose(graph, facts, name, candidate, sizes).choice
                    choices.setdefault((name, assignment.axis), set()).add(str(choice))
    forced: dict[str, dict[str, str]] = {}
    for (name, axis), texts in choices.items():
        if len(texts) == 1:
            forced.setdefault(name, {})[axis] = texts.pop()
    return forced


def _choose(graph: Graph, facts: Facts, name: str, old: Candidate, sizes: Sizes) -> Candidate:
    rule, choice = facts.rules[name], old.choice
    if isinstance(choice, Pass):
        return pass_candidate(rule, choice.operands)
    if not isinstance(choice, ShardAxis):
        return same(rule)
    pattern = sizes.pattern(("axis", name, choice.axis), choice.pattern)
    candidate = shard_candidate(rule, choice.axis, pattern) if choice.axis in rule.axes else None
    if candidate is None:
        node = next(n for n in graph.nodes if n.name == name)
        raise Unscalable(size_keys(node, graph), f"{name} cannot {choice} in new sizes")
    return candidate


def _place(value: str, placement: Placement, sizes: Sizes) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    return Shard(placement.dim, sizes.pattern(("dim", value, str(placement.dim)), placement.of))


def scale_entries(graph: Graph, plan: Plan, sizes: Sizes) -> dict[str, ParameterEntry]:
    """Return the plan's parameter entries in the sizes of the twin."""
    entries: dict[str, ParameterEntry] = {}
    by_name = {n: p.value for p in graph.parameters for n in (p.name, *p.aliases)}
    for glob, entry in plan.parameters.items():
        value = next(value for name, value in by_name.items() if fnmatchcase(name, glob))
        shape = graph.values[value].shape
        layout = {
            axis: format_placement(_place(value, parse_placement(text, shape), sizes))
            for axis, text in entry.layout.items()
        }
        entries[glob] = ParameterEntry(layout=layout, zero=entry.zero)
    return entries


# ------------------------------------------------------------ building the twin
@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A program in smaller sizes, and the list of what was made smaller."""

    program: Program | Pipeline
    scaled: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def plan(self) -> Plan:
        return self.program.plan


def build_twin(graph: Graph, plan: Plan) -> Twin:
    """Return a twin that is as small as possible."""
    fewer, stages = scale.fewer_stages(plan)
    small, layers, fewer = _drop_layers(graph, fewer)
    facts = analyze(small)
    decided: Resolved | Pipeline = (
        build_pipeline(small, fewer) if fewer.is_scheduled else resolve(small, fewer, facts)
    )
    counts = scale.Counts.of(small, fewer)
    pins: set[Key] = {*pinned(small, facts.calls, facts.rules), *scale.computed_indices(small)}
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
            changes = [*layers, *_changes(small, sizes), *stages, *notes]
            if plan.stages and program.plan.num_ranks != plan.num_ranks:
                changes.append(f"ranks: {plan.num_ranks} -> {program.plan.num_ranks}")
            return Twin(program=program, scaled=tuple(changes))
    raise VerifyError(
        f"cannot build a smaller twin of {graph.name}: {why}",
        hint="verify a smaller configuration of the model, or give max_bytes",
    )


def _drop_layers(graph: Graph, plan: Plan) -> tuple[Graph, tuple[str, ...], Plan]:
    """Drop repeated layers; stages of the plan begin at the same nodes as before."""
    nodes = {place: name for name, place in node_keys(graph).items()}
    firsts = [nodes[stage.first] for stage in plan.stages if stage.first]
    small, notes = drop_blocks(graph, firsts, block_constraints(plan, graph))
    places, order = node_keys(small), [node.name for node in graph.nodes]

    def place(first: str) -> str:
        """Return the new key of the node, or of the first remaining node after it."""
        later = order[order.index(nodes[first]) :]
        return next(places[name] for name in later if name in places)

    stages = [replace(stage, first=stage.first and place(stage.first)) for stage in plan.stages]
    remaining = plan.for_part(small, plan.choices(graph)).with_(stages=tuple(stages))
    return small, notes, remaining


def _decide(
    decided: Resolved | Pipeline, scaled: Graph, counts: scale.Counts, sizes: Sizes
) -> tuple[Program | Pipeline, tuple[str, ...]]:
    """Return the program with all decisions in new sizes, and notes on other changes."""
    try:
        facts = analyze(scaled)
    except RuleError as error:
        raise VerifyError(f"the twin's rules: {error.message}", where=error.where) from error
    plan, notes = scale.on_meshes(decided.plan, counts.meshes, counts.num_microbatches)
    if isinstance(decided, Resolved):
        return lower(scale_resolved(decided, scaled, facts, plan.mesh, sizes)), notes
    return _scaled_pipeline(decided, scaled, facts, plan, sizes, notes)


def _scaled_pipeline(
    decided: Pipeline, scaled: Graph, facts: Facts, plan: Plan, sizes: Sizes, notes: tuple[str, ...]
) -> tuple[Pipeline, tuple[str, ...]]:
    """Return the pipeline for a plan with the scaled choices of the nodes of all stages."""
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
        notes = (*notes, "choices of nodes: made again for these sizes")
    before = {(t.value, t.source, t.target) for t in decided.transfers}
    after = {(t.value, t.source, t.target) for t in pipeline.transfers}
    names = ", ".join(f"%{value}" for value in sorted({v for v, *_ in before - after}))
    if names:
        notes = (*notes, f"transfers: {names} recomputed where used")
    return pipeline, notes


def _changes(graph: Graph, sizes: Sizes) -> tuple[str, ...]:
    """Describe each changed size by one dim that has it."""
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


# ------------------------------------------------------------ checking the twin
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A twin that is ready for a check."""

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
    """Return the twin's program, data and reference: the captured graph in the twin's sizes."""
    plan.check(graph)
    twin = build_twin(graph, plan.with_(collectives=()))
    program, notes = _with_collectives(twin.program, plan)
    small = twin.graph
    needed = needed_bytes(small, twin.plan)
    if needed > max_bytes:
        raise VerifyError(
            f"the smallest twin of {graph.name} needs {needed / 2**30:.1f} GiB, "
            f"{max_bytes / 2**30:.1f} GiB are available",
            hint="verify a smaller configuration of the model",
        )
    state = scale.make_state(small, buffers)
    if twin.plan.per_microbatch and twin.plan.num_microbatches > 1:
        data, batches = scale.make_batches(small, twin.plan, inputs)
    else:
        data = scale.make_inputs(small, inputs)
        batches = [data]
    try:
        reference, _ = run_graph(small, twin.plan, state, batches)
    except (IndexError, RuntimeError) as error:
        raise VerifyError(f"the scaled twin of {graph.name} does not run: {error}") from error
    drawn = "weights: drawn; the reference is the captured graph in these sizes"
    return Prepared(
        program=program, reference=reference, inputs=data, scaled=(*twin.scaled, *notes, drawn)
    )


def _with_collectives(
    program: Program | Pipeline, plan: Plan
) -> tuple[Program | Pipeline, tuple[str, ...]]:
    """Run the plan's collectives in a twin on the same ranks; otherwise note that none runs."""
    if not plan.collectives:
        return program, ()
    small, full = ([(s.ranks, s.mesh) for s in p.all_stages] for p in (program.plan, plan))
    if small == full:
        return replace(program, plan=program.plan.with_(collectives=plan.collectives)), ()
    count = f"{len(plan.collectives)} of the plan"
    return program, (f"collectives: {count} checked as message programs, not run on fewer ranks",)


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
