"""The twin of a plan: fewer layers, smaller sizes, fewer ranks, the same decisions.

Enters: a `Graph` and a `Plan`. Leaves: a `Twin`: a program in which every node has the choice that
it has in the original, in new sizes, and every stage begins at the same node. Where a size cannot
be changed it stays; the twin says what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.equivalence.twin.counts import Counts
from shardwise.equivalence.twin.decide import (
    forced_choices,
    matching,
    scale_entries,
    scale_resolved,
)
from shardwise.equivalence.twin.indices import computed_indices
from shardwise.equivalence.twin.rewrite import pinned, rewrite
from shardwise.equivalence.twin.schedule import begin_at, fewer_stages, on_meshes
from shardwise.equivalence.twin.sizes import Key, Sizes, Unscalable
from shardwise.errors import PlanError, RuleError, VerifyError
from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import drop_blocks
from shardwise.plans import Plan, Resolved, model_fingerprint, resolve
from shardwise.plans.choices import block_constraints
from shardwise.program import Pipeline, Program, build_pipeline, lower
from shardwise.sharding.factors import Facts, analyze

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
