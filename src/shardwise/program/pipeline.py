"""Build the program of a step with pipeline stages or micro-batches.

A `Pipeline` holds the program of every stage, the values sent between stages, and the schedule that
every group of ranks follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster import Mesh
from shardwise.errors import PlanError, ProgramError
from shardwise.ir import Graph, Ref, TensorType
from shardwise.layouts.microbatch_axis import MicrobatchAssignment, assign_microbatches
from shardwise.plans import TIME, ParameterEntry, Plan, Resolved
from shardwise.plans.resolve import input_shards, resolve_part
from shardwise.program.lower import lower
from shardwise.program.microbatches import extract_precomputed, restrict, separate_means
from shardwise.program.program import Program
from shardwise.program.stages import Part, partition, with_keys
from shardwise.schedules import Action, Schedule, check, default_schedule, make
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import Layout, Placement, format_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value sent from one stage to another; its gradient returns the other way."""

    value: str
    source: int
    target: int
    type: TensorType
    gradient: bool
    sent: Layout
    received: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """One stage: its ranks and mesh, its program, and that of its precomputed values."""

    index: int
    ranks: tuple[int, ...]
    mesh: Mesh
    resolved: Resolved
    program: Program
    precomputed: Program | None
    outputs: tuple[int, ...]  # positions of the model's output leaves that this stage computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The programs of all stages of one graph under one plan."""

    graph: Graph
    computed: Graph  # the graph that runs: mean losses as sums and counts
    plan: Plan
    stages: tuple[StageProgram, ...]
    transfers: tuple[Transfer, ...]
    schedule: Schedule
    tied: Mapping[str, tuple[int, ...]]  # parameter name -> its owner, then stages with a replica
    output_times: Mapping[int, Placement]  # output leaf -> how micro-batches hold it
    notes: tuple[str, ...] = ()

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        for stage in self.stages:
            if stage.program.graph.loss:
                return stage.index
        raise ProgramError("no stage computes a loss")

    def verify(self) -> None:
        """Raise unless every stage's program is consistent and the schedule can run."""
        for stage in self.stages:
            stage.program.verify()
        check(self.schedule, self.edges)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages between which values are sent."""
        return tuple(dict.fromkeys((t.source, t.target) for t in self.transfers))

    def __str__(self) -> str:
        lines = [f"{len(self.stages)} stages, {self.plan.num_microbatches} micro-batches"]
        for stage in self.stages:
            lines += [f"stage {stage.index} on ranks {stage.ranks}", str(stage.program)]
        lines += [
            f"transfer %{t.value}: stage {t.source} as {t.sent} -> stage {t.target} as {t.received}"
            for t in self.transfers
        ]
        return "\n".join([*lines, str(self.schedule)])


def build_pipeline(graph: Graph, plan: Plan) -> Pipeline:
    """Partition the graph into stages, choose their layouts and lower them."""
    plan.check(graph)
    original = graph
    graph = with_keys(graph)  # in the parts, nodes have the same keys as in the full graph
    timed: MicrobatchAssignment | None = None
    batch_graph: Graph | None = None
    if plan.splits_time:
        graph = separate_means(graph)
    facts, computed = analyze(graph), graph
    if plan.splits_time:
        shards = input_shards(graph, plan) or {}
        timed = assign_microbatches(graph, facts, TIME, plan.num_microbatches, shards)
        graph, facts, timed, batch_graph = extract_precomputed(graph, facts, timed)
    schedule = plan_schedule(plan)
    parts = partition(graph, plan, facts, [node.key for node in with_keys(original).nodes])
    resolved = _resolve(parts, plan, facts, timed)
    programs = [
        lower(r, borrowed=part.borrowed, defer=schedule.splits_backward)
        for r, part in zip(resolved, parts, strict=True)
    ]
    stages = tuple(
        StageProgram(
            index=part.index,
            ranks=stage.ranks,
            mesh=stage.mesh,
            resolved=solved,
            program=program,
            precomputed=_precomputed(batch_graph, part, plan.on_mesh(stage.mesh)),
            outputs=part.outputs,
        )
        for part, stage, solved, program in zip(
            parts, plan.all_stages, resolved, programs, strict=True
        )
    )
    pipeline = Pipeline(
        graph=original,
        computed=computed,
        plan=plan,
        stages=stages,
        transfers=_transfers(graph, parts, programs, facts),
        schedule=schedule,
        tied=_tied(parts),
        output_times={
            i: timed.values[leaf.name]
            for i, leaf in enumerate(graph.outputs)
            if timed is not None and isinstance(leaf, Ref)
        },
        notes=tuple(dict.fromkeys(note for program in programs for note in program.notes)),
    )
    pipeline.verify()
    return pipeline


def check_micro_batches(graph: Graph, plan: Plan) -> None:
    """Raise if the batch cannot be split into micro-batches; the error names the node."""
    if plan.splits_time:
        graph = separate_means(graph)
        shards = input_shards(graph, plan) or {}
        assign_microbatches(graph, analyze(graph), TIME, plan.num_microbatches, shards)


def plan_schedule(plan: Plan) -> Schedule:
    """Return the schedule that the plan names or lists."""
    groups = plan.groups
    placement = tuple(groups.index(stage.ranks) for stage in plan.all_stages)
    num_stages = len(placement)
    if not isinstance(plan.schedule, str):
        rows = tuple(tuple(Action.parse(text) for text in row) for row in plan.schedule)
        return Schedule(
            name="listed",
            num_stages=num_stages,
            num_microbatches=plan.num_microbatches,
            placement=placement,
            actions=rows,
        )
    name = plan.schedule or default_schedule(num_stages, len(groups))
    schedule = make(
        name, num_groups=len(groups), num_microbatches=plan.num_microbatches, num_stages=num_stages
    )
    if schedule.placement != placement:
        raise PlanError(
            f"schedule {name!r} places stages on groups {schedule.placement}, not {placement}",
            where="stages",
            hint="reorder the ranks of the stages to match, or list the actions",
        )
    return schedule


def _resolve(
    parts: tuple[Part, ...], plan: Plan, facts: Facts, timed: MicrobatchAssignment | None
) -> list[Resolved]:
    """Resolve stage by stage; stages on the same ranks store a parameter in one layout."""
    stages: list[Resolved] = []
    stored: dict[tuple[tuple[int, ...], str], ParameterEntry] = {}
    for part, stage in zip(parts, plan.all_stages, strict=True):
        stage_plan = plan.for_stage(part.index)
        entries = {
            p.name: stored[stage.ranks, p.name]
            for p in part.graph.parameters
            if (stage.ranks, p.name) in stored
        }
        stage_plan = stage_plan.with_(parameters={**stage_plan.parameters, **entries})
        resolved = resolve_part(part.graph, stage_plan, facts, timed)
        stages.append(resolved)
        for p in part.graph.parameters:
            axes = resolved.parameter_layout(p.value).axes
            layout = {a: format_placement(s) for a, s in axes if not resolved.is_time(a)}
            entry = ParameterEntry(layout=layout, zero=plan.entry(p.name).zero)
            stored[stage.ranks, p.name] = entry
    return stages


def _precomputed(batch_graph: Graph | None, part: Part, plan: Plan) -> Program | None:
    """Return the program of the values of the full batch that this stage needs."""
    values = {i.value for i in part.graph.inputs if i.kind == "precomputed"}
    if batch_graph is None or not values:
        return None
    leaves = (r.name for r in batch_graph.outputs if f"{r.name}_of_batch" in values)
    graph = restrict(batch_graph, tuple(leaves))
    return lower(resolve_part(graph, plan, analyze(graph)))


def _transfers(
    graph: Graph, parts: tuple[Part, ...], programs: list[Program], facts: Facts
) -> tuple[Transfer, ...]:
    """Return all transfers, ordered by receiving stage and then as in the graph."""
    transfers = []
    for part, program in zip(parts, programs, strict=True):
        layouts = {i.value: i.layout for i in program.rank_programs[0].inputs}
        for value, source in part.receives.items():
            ranks = programs[source].rank_programs[0]
            sent = ranks.values[ranks.sends[parts[source].graph.sends.index(value)]].layout
            transfers.append(
                Transfer(
                    value=value,
                    source=source,
                    target=part.index,
                    type=graph.values[value],
                    gradient=value in facts.carries_grad,
                    sent=sent,
                    received=layouts[value],
                )
            )
    return tuple(transfers)


def _tied(parts: tuple[Part, ...]) -> dict[str, tuple[int, ...]]:
    users: dict[str, list[int]] = {}
    for part in parts:
        for p in part.graph.parameters:
            users.setdefault(p.name, []).append(part.index)
    borrowed = {p.name for part in parts for p in part.graph.parameters if p.value in part.borrowed}
    return {name: tuple(stages) for name, stages in users.items() if name in borrowed}
