"""Make a plan from the numbers of ranks along each axis: the common part of all strategies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod
from pathlib import Path

from shardwise.cluster import Cluster, Mesh
from shardwise.errors import InfeasiblePlan, PlanError, did_you_mean
from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import large_blocks
from shardwise.planner.options import Constraints, constrained_entries, known_options
from shardwise.planner.stage_balance import balance, find_places
from shardwise.planner.strategies import sequence
from shardwise.planner.strategies.experts import EXPERTS_AXIS, expert_entries
from shardwise.plans import (
    ParameterEntry,
    Plan,
    Precision,
    Resolved,
    Stage,
    Sync,
    model_fingerprint,
    resolve,
)
from shardwise.plans.plan import INPUT_ROLES, fold_entries
from shardwise.program.pipeline import check_micro_batches
from shardwise.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    default_schedule,
    make,
    schedule_kind,
)
from shardwise.sharding.candidates import ShardAxis
from shardwise.sharding.factors import Facts, analyze
from shardwise.sharding.placements import REPLICATED, Shard, format_placement
from shardwise.shares import axes_of, num_ranks
from shardwise.simulation.costs import ClusterCosts, Group

BATCH_AXES = ("dp", EXPERTS_AXIS)


def joined(syncs: Mapping[str, Sync], constraints: Constraints | None) -> Constraints:
    """Return a strategy's synchronization, as changed by the user's constraints, and these."""
    entries = constrained_entries(constraints)
    own = {glob: entries.get(glob, ParameterEntry()) for glob in syncs}
    both = {glob: replace(e, sync=syncs[glob].updated(e.sync)) for glob, e in own.items()}
    return {**both, **entries, **both}


@known_options("sw.strategies.make_plan")
def make_plan(
    name: str,
    graph: Graph,
    cluster: Cluster,
    *,
    dp: int | None = None,
    ep: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    sequence_parallel: bool = False,
    batch_dim: int | None = None,
    sequence_dim: sequence.SequenceDim = None,
    attention: str = "auto",
    rng: str = "exact",
    seed: int = 0,
    constraints: Constraints | None = None,
    num_microbatches: int = 1,
    per_microbatch: bool = False,
    schedule: str | Path | Schedule | None = None,
    virtual_stages: int | None = None,
    cuts: Sequence[str] | None = None,
    meshes: Sequence[Mesh] | None = None,
    shares: Mapping[str, Sequence[int]] | None = None,
    recompute: str | Sequence[str] = "none",
    precision: str | Precision | None = None,
    offload: str | Sequence[str] = (),
) -> Plan:
    """Make a plan for `pp` groups of `dp` x `ep` x `cp` x `tp` ranks.

    `dp` defaults to all ranks that remain. The batch is divided over `dp` and `ep`, experts over
    `ep`, the sequence over `cp`, other parameters over `tp`. With `sequence_parallel` the ranks of
    `tp` also divide the sequence between products. `sequence_dim` is the dim of the inputs, or of
    each by name, if it is not the one that attention implies. `attention` over a divided sequence
    gathers keys ("gather"), passes them around ("ring"), exchanges the sequence for heads ("heads")
    or does what sends least ("auto").

    A step is computed in `num_microbatches`; more than one without stages is gradient
    accumulation. `schedule` is a name, a `Schedule` or its file. Each group has `virtual_stages`
    (by default 1, and 2 for "interleaved" and "zb_v"), which begin at `cuts`, places of nodes or
    module paths, or where they are balanced. `meshes` gives each group its own mesh. With
    `shares={"dp": (2, 1)}` the ranks along an axis take unequal parts of what it shards.
    `precision` is a name such as "bf16", `recompute` "none", "full", "selective" or module globs.
    `constraints` maps globs of parameters to a placement ("0", "replicate"), to placements by mesh
    axis, or to a `ParameterEntry`, which may also set a ZeRO level.
    """
    if dp is None:  # so that options need not change with the number of ranks
        dp = max(1, cluster.num_ranks // max(1, ep * cp * tp * pp))
    _check_sizes(name, cluster, {"dp": dp, "ep": ep, "cp": cp, "tp": tp, "pp": pp}, meshes)
    if zero not in (0, 1, 2, 3):
        raise InfeasiblePlan(f"{name}: zero={zero}", hint="0, 1, 2 or 3")
    if num_microbatches < 1:
        raise InfeasiblePlan(f"{name}: num_microbatches={num_microbatches}", hint="1 or more")
    schedule = read_schedule(schedule)
    groups = len(meshes) if meshes is not None else pp
    num_stages = _num_stages(schedule, groups, virtual_stages)
    order, placement = _order(schedule, groups, num_stages, num_microbatches)
    is_scheduled = len(placement) > 1 or num_microbatches > 1
    facts = analyze(graph)
    context = sequence.context_axes(graph, cp, attention)
    same = (
        meshes or [_mesh(graph, facts, (dp, ep, tp), context, keep_one=not is_scheduled)] * groups
    )
    meshes = [_with_shares(name, mesh, shares or {}) for mesh in same]
    splits = num_microbatches > 1 or any(_batch_parts(mesh) != 1 for mesh in meshes)
    axes = {axis: ranks for mesh in meshes for axis, ranks in mesh.axes}
    context = {a: num_ranks(n) for a, n in axes.items() if axis_role(a) == "sequence"}
    rows = batch_inputs(graph, batch_dim)
    draft = Plan(
        name=name,
        model=graph.name,
        fingerprint=model_fingerprint(graph),
        mesh=meshes[0],
        roles={axis: axis_role(axis) for axis in axes},
        inputs=rows if splits else {},
        sequence=sequence.sequence_inputs(graph, rows, sequence_dim)
        if context or sequence_parallel
        else {},
        parameters={
            **fold_entries(expert_entries(graph, meshes, name)),
            **constrained_entries(constraints),
        },
        nodes=sequence.attention_choices(graph, facts, context, attention, free_heads=tp == 1),
        units=large_blocks(graph),
        stages=_stages(graph, facts, meshes, placement, cuts),
        schedule=order if is_scheduled else "",
        num_microbatches=num_microbatches,
        per_microbatch=per_microbatch,
        recompute=recompute if isinstance(recompute, str) else tuple(recompute),
        precision=Precision.of(precision),
        offload=(offload,) if isinstance(offload, str) else tuple(offload),
        rng=rng,
        seed=seed,
    )
    plan = _completed(graph, draft, facts, zero, sequence_parallel)
    first = plan.all_stages[0]
    shared = [axis for axis, role in plan.roles.items() if role in INPUT_ROLES]
    parts = plan.num_ranks // prod(first.mesh.axis_size(a) for a in shared if a in first.mesh.names)
    group, costs = Group(mesh=first.mesh, ranks=first.ranks), ClusterCosts(cluster)
    return plan.with_(bucket_mib=costs.bucket_mib(graph, plan.precision, group, shared, parts))


def axis_role(axis: str) -> str:
    """Return what the mesh axis of this name shards: `cp` and `cp1` the sequence, and so on."""
    name = axis.rstrip("0123456789")
    return {**dict.fromkeys(BATCH_AXES, "batch"), "cp": "sequence"}.get(name, "parameters")


def _batch_parts(mesh: Mesh) -> int:
    """Return the number of parts into which a mesh divides the batch."""
    return prod(num_ranks(ranks) for axis, ranks in mesh.axes if axis in BATCH_AXES)


def _completed(graph: Graph, draft: Plan, facts: Facts, zero: int, sequence_parallel: bool) -> Plan:
    """Return the draft, checked, with the layouts of its parameters."""
    _check_batch(graph, draft)
    _check_recompute(graph, draft)
    check_micro_batches(graph, draft)
    if sequence_parallel:
        tensor = [axis for axis, role in draft.roles.items() if role == "parameters"]
        full = draft.with_(nodes={**sequence.norm_choices(graph, facts, tensor), **draft.nodes})
        nodes: dict[str, dict[str, str]] = {}
        for on_mesh in _resolve(graph, full, facts).values():
            nodes |= sequence.sequence_choices(graph, on_mesh)
        draft = draft.with_(nodes={**nodes, **draft.nodes})
    resolved = _resolve(graph, draft, facts)
    entries = parameter_entries(graph, resolved, zero)
    for glob, entry in draft.parameters.items():  # after the others, so that they win
        own = entries.pop(glob, ParameterEntry())
        level = own.zero if entry.zero is None else entry.zero
        entries[glob] = replace(entry, layout={**own.layout, **entry.layout}, zero=level)
    return draft.with_(parameters=entries, notes=tuple(notes(next(iter(resolved.values())))))


def _mesh(
    graph: Graph,
    facts: Facts,
    sizes: tuple[int, int, int],
    context: Mapping[str, int],
    *,
    keep_one: bool,
) -> Mesh:
    """Return the mesh of a group; with `keep_one`, a single rank has an axis of size 1."""
    dp, ep, tp = sizes
    axes = [(axis, n) for axis, n in (("dp", dp), ("ep", ep), *context.items()) if n > 1]
    if not axes and tp == 1 and keep_one:
        axes = [("dp", 1)]
    if tp > 1:
        axes += [(f"tp{i}" if i else "tp", n) for i, n in enumerate(tensor_axes(graph, facts, tp))]
    return Mesh(axes=tuple(axes))


def _with_shares(name: str, mesh: Mesh, shares: Mapping[str, Sequence[int]]) -> Mesh:
    """Return the mesh with unequal shares along these axes."""
    ranks, unequal = dict(mesh.axes), axes_of(shares)
    for axis, weights in unequal.items():
        if num_ranks(ranks.get(axis, 0)) != num_ranks(weights):
            raise InfeasiblePlan(
                f"{name}: shares for {num_ranks(weights)} ranks along {axis}, {mesh} has "
                f"{num_ranks(ranks.get(axis, 0))}",
                hint=f"a weight for every rank along an axis of {mesh}, or meshes with shares",
            )
    return Mesh(axes=tuple({**ranks, **unequal}.items()))


def _stages(
    graph: Graph,
    facts: Facts,
    meshes: Sequence[Mesh],
    placement: tuple[int, ...],
    cuts: Sequence[str] | None,
) -> tuple[Stage, ...]:
    """Return the stages, on ranks that are numbered group by group; none for a single stage."""
    if cuts is not None and len(cuts) != len(placement) - 1:
        raise InfeasiblePlan(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, but the plan has {len(placement)}",
            hint=f"{len(placement) - 1} cuts, or none for balanced stages",
        )
    if len(placement) == 1:
        return ()
    if cuts is not None:
        starts = find_places(graph, cuts)
    else:
        starts = balance(graph, facts, [meshes[group].size for group in placement])
    places = list(node_keys(graph).values())
    ends = list(accumulate(mesh.size for mesh in meshes))
    return tuple(
        Stage(
            first=places[start] if start else "",
            ranks=tuple(range(ends[group] - meshes[group].size, ends[group])),
            mesh=meshes[group],
        )
        for start, group in zip(starts, placement, strict=True)
    )


def _resolve(graph: Graph, plan: Plan, facts: Facts) -> dict[Stage, Resolved]:
    """Resolve the full graph on the mesh of every stage."""
    by_mesh: dict[Mesh, Resolved] = {}
    for stage in plan.all_stages:
        if stage.mesh not in by_mesh:
            by_mesh[stage.mesh] = resolve(graph, plan.on_mesh(stage.mesh), facts)
            _check_split(by_mesh[stage.mesh])
    return {stage: by_mesh[stage.mesh] for stage in plan.all_stages}


def _check_sizes(
    name: str, cluster: Cluster, sizes: dict[str, int], meshes: Sequence[Mesh] | None
) -> None:
    total = cluster.num_ranks
    if meshes is not None:
        counts = [mesh.size for mesh in meshes]
        if sum(counts) != total:
            raise InfeasiblePlan(
                f"{name}: groups of {' + '.join(map(str, counts))} = {sum(counts)} ranks, the "
                f"cluster has {total}",
                hint=f"a cluster of {sum(counts)} ranks",
            )
        return
    sizes = {axis: n for axis, n in sizes.items() if n != 1 or axis in ("dp", "tp")}
    if any(size < 1 for size in sizes.values()):
        raise InfeasiblePlan(f"{name}: {_sizes(sizes)} need at least one rank each")
    if (count := prod(sizes.values())) != total:
        others = count // sizes["dp"]
        raise InfeasiblePlan(
            f"{name}: {_sizes(sizes, ' x ')} = {count} ranks, the cluster has {total}",
            hint=_sizes(sizes | {"dp": max(1, total // others)}),
        )


def _sizes(sizes: Mapping[str, int], between: str = ", ") -> str:
    return between.join(f"{axis}={size}" for axis, size in sizes.items())


def _check_batch(graph: Graph, plan: Plan) -> None:
    """Raise if there are fewer samples than parts of a batch."""
    if not plan.splits_time:
        return
    sizes = _input_rows(graph, plan)
    if not sizes:
        raise InfeasiblePlan(f"{plan.name}: no input of {graph.name} has a batch dim to shard")
    widest = max((stage.mesh for stage in plan.all_stages), key=_batch_parts)
    dp = _batch_parts(widest)
    if plan.num_microbatches * dp > sizes[0]:
        axes = " x ".join(f"{a}={num_ranks(n)}" for a, n in widest.axes if a in BATCH_AXES)
        ranks = f" on {axes} ranks each" if dp > 1 else ""
        maximum = sizes[0] // dp
        raise InfeasiblePlan(
            f"{plan.name}: num_microbatches={plan.num_microbatches}{ranks}, the batch has "
            f"{sizes[0]} samples",
            hint=f"num_microbatches={maximum}"
            if maximum
            else f"a batch of {plan.num_microbatches * dp}",
        )


def _check_recompute(graph: Graph, plan: Plan) -> None:
    globs = () if isinstance(plan.recompute, str) else plan.recompute
    modules = [*dict.fromkeys([*graph.module_classes, *(node.module for node in graph.nodes)])]
    for glob in globs:
        if not any(fnmatchcase(module, glob) for module in modules):
            raise PlanError(
                f"recompute {glob!r} matches none of the model's {len(modules)} modules"
                f"{did_you_mean(glob, modules)}"
            )


def _input_rows(graph: Graph, plan: Plan) -> list[int]:
    """Return the rows of each input with a batch dim."""
    shapes = {i.name: graph.values[i.value].shape for i in graph.inputs}
    return [shapes[name][dim] for name, dim in plan.inputs.items() if dim is not None]


def _check_split(resolved: Resolved) -> None:
    """Raise if a mesh axis shards nothing."""
    plan = resolved.plan
    for assignment in resolved.assignments:
        if assignment.ranks == 1:
            continue
        is_sharded = any(isinstance(c.choice, ShardAxis) for c in assignment.nodes.values())
        role = plan.roles[assignment.axis]
        rows = _input_rows(resolved.graph, plan)
        # A batch of one row cannot be sharded, but larger ones may be.
        if not is_sharded and not (role == "batch" and rows and max(rows) <= 1):
            what = f"{role.removesuffix('s')} dim"
            raise InfeasiblePlan(
                f"{plan.name}: no {what} of {resolved.graph.name} can be sharded over "
                f"{assignment.axis}={assignment.ranks}",
                hint="shardwise explain lists the choices of each node; register_rule adds a rule",
            )


# ---------------------------------------------------------------- the order of work
def read_schedule(schedule: str | Path | Schedule | None) -> str | Schedule | None:
    """Return the name or the schedule; text that is not a name may be the path of a file."""
    if isinstance(schedule, Path):
        return Schedule.load(schedule)
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        path = Path(schedule)
        return Schedule.load(path) if path.suffix or path.is_file() else schedule
    return schedule


def _num_stages(schedule: str | Schedule | None, groups: int, virtual_stages: int | None) -> int:
    """Return the number of stages of all groups."""
    if virtual_stages is None and isinstance(schedule, Schedule):
        return schedule.num_stages
    if virtual_stages is not None and virtual_stages < 1:
        raise InfeasiblePlan(f"virtual_stages={virtual_stages}", hint="1 or more per group")
    return groups * (virtual_stages or stages_per_group(schedule))


def stages_per_group(schedule: str | Schedule | None) -> int:
    """Return the default number of stages of each group."""
    if isinstance(schedule, Schedule):
        return max(1, schedule.num_stages // schedule.num_groups)
    return schedule_kind(schedule or "").default_stages_per_group


def _order(
    schedule: str | Schedule | None, groups: int, stages: int, num_microbatches: int
) -> tuple[str | tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Return the order of work, complete and free of deadlocks, and the group of each stage."""
    if isinstance(schedule, Schedule):
        _check_schedule(schedule, groups, stages, num_microbatches)
        schedule = _by_first_stage(schedule)
        check(schedule)
        rows = tuple(tuple(str(action) for action in actions) for actions in schedule.actions)
        return rows, schedule.placement
    name = schedule or default_schedule(stages, groups)
    generated = make(name, num_groups=groups, num_microbatches=num_microbatches, num_stages=stages)
    check(generated)
    return name, generated.placement


def _check_schedule(schedule: Schedule, groups: int, stages: int, num_microbatches: int) -> None:
    own = (schedule.num_stages, schedule.num_groups, schedule.num_microbatches)
    if own != (stages, groups, num_microbatches):
        text = "{} stages on {} groups of ranks with {} micro-batches"
        raise InfeasiblePlan(
            f"schedule {schedule.name!r} has {text.format(*own)}, but the plan has "
            f"{text.format(stages, groups, num_microbatches)}",
            hint=f"pp={own[1]}, num_microbatches={own[2]}, and {own[0]} stages",
        )


def _by_first_stage(schedule: Schedule) -> Schedule:
    """Renumber groups as a plan does: by the first stage of each."""
    groups = list(dict.fromkeys(schedule.placement))
    return replace(
        schedule,
        placement=tuple(groups.index(group) for group in schedule.placement),
        actions=tuple[tuple[Action, ...], ...](schedule.actions[group] for group in groups),
    )


# ------------------------------------------------------------ fields of a plan
def batch_inputs(graph: Graph, batch_dim: int | None) -> dict[str, int | None]:
    """Return the batch dim of each input: `batch_dim`, where it has the most common size."""
    bags = [node for node in graph.nodes if node.op.startswith("aten.embedding_bag")]
    ragged = {name for node in bags for name in node.inputs}  # as long as all bags together
    shapes = {i.name: graph.values[i.value].shape for i in graph.inputs}
    dims = {i.name: len(shapes[i.name]) for i in graph.inputs if i.value not in ragged}
    dim = batch_dim or 0
    sizes = Counter(shapes[name][dim] for name, count in dims.items() if count > dim)
    if not sizes:
        return {}
    size = max(sizes, key=lambda s: (sizes[s], s))
    return {
        name: dim if dims.get(name, 0) > dim and shape[dim] == size else None
        for name, shape in shapes.items()
    }


def tensor_axes(graph: Graph, facts: Facts, tp: int) -> tuple[int, ...]:
    """Return `tp` as one mesh axis, or as two if there are fewer key heads than ranks.

    With 2 key heads on 4 ranks, keys are sharded over the first axis of 2 and replicated on the
    second, which shards the query heads of each group.
    """
    for node in graph.nodes:
        if not node.op.startswith("aten.scaled_dot_product_attention"):
            continue
        heads = facts.dims[node.inputs[0]][-3]
        if len(heads) != 1 or len(heads[0]) != 2:
            continue
        groups, queries = heads[0]
        if groups < tp and tp % groups == 0 and queries % (tp // groups) == 0 and groups > 1:
            return (groups, tp // groups)
    return (tp,)


def parameter_entries(
    graph: Graph, resolved: Mapping[Stage, Resolved], zero: int
) -> dict[str, ParameterEntry]:
    """Return the entry of every parameter, with equal entries of numbered modules as one glob.

    A parameter is sharded as in the first stage that uses it; on mesh axes that this stage lacks,
    as in the next one.
    """
    stages = list(resolved.values())
    firsts = {stage.first: index for index, stage in enumerate(resolved)}
    first_use: dict[str, int] = {}  # value -> stage
    places, stage = node_keys(graph), 0
    for node in graph.nodes:
        stage = firsts.get(places[node.name], stage)
        for name in node.inputs:
            first_use.setdefault(name, stage)
    entries: dict[str, ParameterEntry] = {}
    for parameter in graph.parameters:
        layout: dict[str, str] = {}
        first = first_use.get(parameter.value, 0)
        for solved in (*stages[first:], *stages[:first]):
            for axis, placement in _layout(solved, parameter.value).items():
                layout.setdefault(axis, placement)
        entries[parameter.name] = ParameterEntry(layout=layout, zero=zero)
    return fold_entries(entries)


def _layout(resolved: Resolved, value: str) -> dict[str, str]:
    layout = resolved.parameter_layout(value)
    placements = {axis: format_placement(p) for axis, p in layout.axes if isinstance(p, Shard)}
    for assignment in resolved.assignments:
        if resolved.plan.roles[assignment.axis] == "parameters":
            placements.setdefault(assignment.axis, REPLICATED)
    return placements


def notes(resolved: Resolved) -> list[str]:
    """Return notes for readers of the plan: discovered rules, and operators that no rule shards."""
    texts: dict[str, None] = {}
    for node in resolved.graph.nodes:
        rule = resolved.facts.rules[node.name]
        if rule.discovered:
            texts.setdefault(f"{node.op}: rule found by experiment ({node.origin})")
        elif rule.replicated_because and resolved.facts.calls[node.name].operands:
            texts.setdefault(f"{node.op} is replicated: {rule.replicated_because}")
    return [*texts, *resolved.graph.warnings]
