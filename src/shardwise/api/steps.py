"""The named steps of a parallel module over the same parameters.

A parameter that several steps use is stored once: the programs of all steps, for the first batch
and for later ones, must use it in the same layout.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise import runtime as rt
from shardwise.api.batches import index_check
from shardwise.api.compile import PipelineProgram, Program, separate_batches
from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import BatchError, PlanError, PlanMismatch, ProgramError
from shardwise.frontend import capture
from shardwise.frontend.objective import Objective, StepFn, objective
from shardwise.ir import Graph, Ref
from shardwise.plans import Plan
from shardwise.plans.plan import INPUT_ROLES, ParameterEntry
from shardwise.program.program import Storage
from shardwise.runtime.compiled import Compile, compile_blocks, compile_module
from shardwise.runtime.loader import LoadedModule, LoadedPipeline
from shardwise.runtime.step import FindBroken, ModuleStep, PipelineStep
from shardwise.sharding.factors import gradient_carriers
from shardwise.sharding.placements import Shard, format_placement
from shardwise.shares import AxisSize, num_ranks

Plans = Plan | Mapping[str, Plan] | Callable[[Graph], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One step: an example batch, the objective that is computed from it, and its plan."""

    name: str
    batch: Any
    objective: Objective
    plan: Plan


def read_steps(
    model: nn.Module,
    batch: Any,
    plan: Plans,
    loss_fn: Objective,
    steps: Mapping[str, StepFn] | None,
    device: torch.device | None,
) -> dict[str, StepSpec]:
    """Return the steps by name; a model with a loss function is one step named ""."""
    objectives = _objectives(loss_fn, steps)
    batches = dict.fromkeys(objectives, batch)
    if steps is not None and isinstance(batch, Mapping) and set(batch) == set(steps):
        batches = dict(batch)
    if isinstance(plan, Mapping) and set(plan) != set(objectives):
        raise PlanError(
            f"the plans are for steps {sorted(plan)}, the steps are {sorted(objectives)}",
            hint="a plan for every step, one plan for all, or a function of a step's graph",
        )
    specs: dict[str, StepSpec] = {}
    stored: dict[str, Plan] = {}  # parameter -> the plan that decides how it is stored
    for name, chosen in objectives.items():
        own = plan[name] if isinstance(plan, Mapping) else plan
        if not isinstance(own, Plan):
            graph = capture(model, batches[name], chosen, training=True, device=device)
            own = _make_plan(own, graph, stored)
            for used in sorted(used_parameters(graph)):
                stored.setdefault(used, own)
        specs[name] = StepSpec(name=name, batch=batches[name], objective=chosen, plan=own)
    _require_equal(list(specs.values()))
    return specs


def _make_plan(make: object, graph: Graph, stored: Mapping[str, Plan]) -> Plan:
    """Return the plan for a step's graph, with parameters stored as in the plans of other steps."""
    if not callable(make):
        raise PlanError(f"a plan must be a Plan or a function of a graph, not {make!r}")
    plan = make(graph)
    if not isinstance(plan, Plan):
        raise PlanError(f"the function of a graph returned {plan!r}, not a Plan")
    fixed = {name: stored[name].entry(name) for name in used_parameters(graph) if name in stored}
    return plan.with_(parameters={**plan.parameters, **dict(sorted(fixed.items()))})


def _objectives(loss_fn: Objective, steps: Mapping[str, StepFn] | None) -> dict[str, Objective]:
    if steps is None:
        return {"": loss_fn}
    if not steps or not all(isinstance(name, str) and name for name in steps):
        raise PlanError(
            "steps must map names to functions", hint='steps={"d": d_step, "g": g_step}'
        )
    return {name: objective(loss_fn, step) for name, step in steps.items()}


def _require_equal(steps: list[StepSpec]) -> None:
    """Raise unless all plans have the same ranks, dtypes and other shared decisions."""
    first = steps[0]
    for other in steps[1:]:
        for aspect, read in _SHARED.items():
            a, b = read(first.plan), read(other.plan)
            if a != b:
                raise PlanError(
                    f"the plans of steps {first.name!r} and {other.name!r} differ in {aspect}: "
                    f"{a} and {b}",
                    hint="steps over the same modules run on the same ranks, in the same dtypes",
                )


_SHARED: dict[str, Callable[[Plan], Any]] = {
    "the ranks and mesh of their stages": lambda p: [(s.ranks, s.mesh) for s in p.all_stages],
    "micro-batches": lambda p: (p.num_microbatches, p.splits_time),
    "precision": lambda p: p.precision,
    "offload": lambda p: p.offload,
    "collectives": lambda p: p.collectives,
    "random numbers": lambda p: (p.rng, p.seed),
}


def used_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that a step reads."""
    read = {name for node in graph.nodes for name in node.inputs}
    read |= {leaf.name for leaf in graph.outputs if isinstance(leaf, Ref)}
    read |= {b.mutation for b in graph.buffers if b.mutation} | {graph.loss or ""}
    return frozenset(p.name for p in graph.parameters if p.value in read)


def trained_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that get a gradient from the step's loss."""
    carriers, reached = gradient_carriers(graph), {graph.loss}
    for node in reversed(graph.nodes):
        if node.grad_enabled and any(n in reached and n in carriers for n in node.outputs):
            reached |= {name for name in node.inputs if name in carriers}
    return frozenset(p.name for p in graph.parameters if p.value in reached and p.requires_grad)


# ------------------------------------------------------------ running a program on this rank
def load_program(
    program: Program | PipelineProgram, mesh: rt.ProcessMesh, rng: rt.Rng, device: torch.device
) -> LoadedModule | LoadedPipeline:
    """Load the code that this rank runs."""
    if isinstance(program, PipelineProgram):
        return LoadedPipeline(program.text, program.graph, mesh, rng, device)
    return LoadedModule(program.source(mesh.rank), program.graph, mesh, rng, device)


def make_step(
    loaded: LoadedModule | LoadedPipeline,
    graph: Graph,
    plan: Plan,
    store: rt.ParameterStore,
    *,
    compiled: Compile = False,
    recorder: rt.Recorder | None = None,
) -> ModuleStep | PipelineStep:
    """Return the step of a loaded program, under `torch.compile` in a mode of `compiled`."""
    dtypes = {i.name: graph.values[i.value].dtype for i in graph.inputs}
    casts = plan.precision.compute and not plan.precision.autocast
    options = rt.StepOptions(
        check_indices=index_check(graph),
        find_broken=_find_broken(graph, plan),
        input_dtypes={n: d for n, d in dtypes.items() if casts and d.is_floating_point},
        offload_activations="activations" in plan.offload,
        trains=bool(trained_parameters(graph)),
        units=plan.units,
    )
    if isinstance(loaded, LoadedPipeline):
        if compiled:  # a pipeline calls the modules of its stages in any order
            compile_blocks(module for _, module in loaded.modules)
        return PipelineStep(loaded, store, options, recorder)
    run = compile_module(loaded.module, compiled)
    graphs = compiled == "cuda-graph"
    return ModuleStep(loaded, run, store.mesh, store.device, options, recorder, graphs=graphs)


def _find_broken(graph: Graph, plan: Plan) -> FindBroken | None:
    """Return the check of the graph's guards; separate micro-batches are checked one by one."""
    guards = graph.guards
    if guards is None:
        return None

    def find(inputs: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> str | None:
        missing = [b.name for b in guards.graph.buffers if b.name not in buffers]
        if missing:
            raise ProgramError(
                f"Python looks at a value that depends on buffer {missing[0]}, which only other "
                "pipeline stages have",
                where=guards.checks[0].source,
                hint="pass the value in the batch, or use a plan without stages",
            )
        parts = separate_batches(dict(inputs), plan)
        broken = (guards.find_broken(part, buffers) for part in parts)
        return next((guard.source for guard in broken if guard is not None), None)

    return find


# ------------------------------------------------------------ how parameters are stored
def storage_owners(programs: Mapping[str, Program | PipelineProgram]) -> dict[str, str]:
    """Return for every parameter the step whose program decides how it is stored.

    That is the first step that trains it, else the first that uses it, else the first.
    """
    storages: dict[str, dict[str, dict[tuple[int, ...], Storage]]] = {}
    for step, program in programs.items():
        own = storages[step] = {}
        for ranks, storage in _storages(program):
            own.setdefault(storage.name, {}).setdefault(ranks, storage)
    used = {step: used_parameters(program.graph) for step, program in programs.items()}
    trained = {step: trained_parameters(program.graph) for step, program in programs.items()}
    owners: dict[str, str] = {}
    for parameter in next(iter(programs.values())).graph.parameters:
        name = parameter.name
        users = [step for step in programs if name in used[step]]
        trainers = [step for step in programs if name in trained[step]]
        owners[name] = owner = (trainers or users or list(programs))[0]
        for step in users:
            _compare(name, owner, step, *(_places(storages[s][name]) for s in (owner, step)))
        for step in trainers:
            both = (storages[s][name].values() for s in (owner, step))
            zeros = (", ".join(f"zero {x.zero}" for x in stored if x.sync) for stored in both)
            _compare(name, owner, step, *zeros)
    return owners


def _storages(program: Program | PipelineProgram) -> Iterator[tuple[tuple[int, ...], Storage]]:
    """Yield how each group of ranks stores each of its parameters."""
    if isinstance(program, PipelineProgram):
        groups = [(stage.ranks, stage.program) for stage in program.lowered.stages]
    else:
        groups = [(tuple(range(program.plan.num_ranks)), program.lowered)]
    for ranks, lowered in groups:
        for storage in lowered.rank_programs[0].parameters:
            yield ranks, storage


def _places(storages: Mapping[tuple[int, ...], Storage]) -> str:
    return ", ".join(
        f"{str(storage.layout) or 'all of it'} on ranks {format_ranks(ranks)}"
        for ranks, storage in storages.items()
    )


def _compare(name: str, owner: str, step: str, one: str, other: str) -> None:
    if one and other and one != other:
        raise PlanMismatch(
            f"steps {owner!r} and {step!r} store the parameter differently: {one}; {other}",
            where=name,
            hint=f"fix its layout in both plans: parameters={{{name!r}: …}}; with pipeline stages, "
            "begin them at nodes of the same modules, or use a plan without stages",
        )


def fix_layouts(
    plan: Plan, programs: Mapping[str, Program | PipelineProgram], owners: Mapping[str, str]
) -> Plan:
    """Return the plan with every parameter in the layout of its owner's program."""
    entries = {
        name: ParameterEntry(layout=layout)
        for step, program in programs.items()
        for name, layout in _layouts(program, plan).items()
        if owners[name] == step
    }
    return plan.with_(parameters={**plan.parameters, **entries})


def has_fixed_layouts(program: Program | PipelineProgram, fixed: Plan) -> bool:
    """Return whether a program uses every parameter in the layout that `fix_layouts` fixed."""
    layouts = _layouts(program, fixed).items()
    return all(fixed.parameters[name].layout == layout for name, layout in layouts)


def _layouts(program: Program | PipelineProgram, plan: Plan) -> dict[str, dict[str, str]]:
    """Return the layout in which a program uses each parameter, in the notation of plans."""
    layouts: dict[str, dict[str, str]] = {}
    storages = [storage for _, storage in _storages(program)]
    for storage in sorted(storages, key=lambda s: s.borrowed):
        layout = {
            axis: format_placement(placement)
            for axis, placement in storage.layout.axes
            if plan.roles.get(axis) == "parameters" or isinstance(placement, Shard)
        }
        layouts[storage.name] = {**layout, **layouts.get(storage.name, {})}
    return layouts


def stored_specs(
    specs: Sequence[rt.ParameterSpec], plan: Plan, axes: Mapping[str, AxisSize]
) -> list[rt.ParameterSpec]:
    """Return the specs of parameters as stored for all programs, from those of the first.

    A parameter that is frozen, that the first batch does not use, or that it uses equally on every
    rank (one row), is still partitioned over the batch axes if the plan says so: a later step may
    train it.
    """
    batch = tuple(a for a, size in axes.items() if size != 1 and plan.roles.get(a) in INPUT_ROLES)
    stored = []
    for spec in specs:
        entry = plan.entry(spec.name)
        form = entry.sync if spec.requires_grad else None
        zero = 2 if form is not None and form.has_owners else entry.zero or 0
        if zero and not spec.sync and not spec.borrowed:
            sharded = {split.axis for split in spec.splits}
            sync = tuple(axis for axis in batch if axis not in sharded)
            spec = replace(spec, sync=sync, zero=zero if sync else 0)
            if sync and form is not None:
                ranks = math.prod(num_ranks(axes[axis]) for axis in sync)
                spec = replace(spec, owners=form.weights(ranks))
        stored.append(spec)
    return stored


def check_storage(
    store: rt.ParameterStore, specs: Sequence[rt.ParameterSpec], used: Collection[str]
) -> None:
    """Raise unless a program uses parameters in the layout in which they are stored."""
    stored = {e.spec.name: e.spec for e in store.entries}
    for spec in specs:
        known = stored.get(spec.name)
        if known is None and spec.name in used:
            raise BatchError(
                f"this batch uses {spec.name} on a pipeline stage that does not store it: "
                "the first batch did not use it there",
                where=spec.name,
                hint="call sw.parallelize with a batch, attributes and flags that use every layer",
            )
        if known is not None and (known.splits, known.shape) != (spec.splits, spec.shape):
            raise BatchError(
                f"this batch needs {spec.name} of shape {spec.shape} sharded as {spec.splits}; it "
                f"is stored with shape {known.shape}, sharded as {known.splits}",
                where=spec.name,
                hint=f"fix its layout in the plan: parameters[{spec.name!r}]",
            )
