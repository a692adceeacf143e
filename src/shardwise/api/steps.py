"""Several named steps over the same modules: what each computes, and how parameters are stored.

A parameter that several steps use is stored once, so their programs must store it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise import runtime as rt
from shardwise.api.batches import BatchIndices
from shardwise.api.compile import PipelineProgram, Program
from shardwise.collectives.messages.program import format_ranks
from shardwise.errors import PlanError, PlanMismatch
from shardwise.frontend import capture
from shardwise.frontend.objective import Objective, StepFn, objective
from shardwise.ir import Graph, Ref
from shardwise.plans import Plan
from shardwise.program.program import Storage
from shardwise.sharding.factors import gradient_carriers

MakePlan = Callable[[Graph], Plan]
Plans = Plan | Mapping[str, Plan] | MakePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One step: an example batch, what is computed from it, and its plan."""

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
    """Return the plan for a step's graph, with parameters of earlier steps as those store them."""
    if not callable(make):
        raise PlanError(f"a plan is a Plan or a function of a graph, not {make!r}")
    made = make(graph)
    if not isinstance(made, Plan):
        raise PlanError(f"the function of a graph returned {made!r}, not a Plan")
    fixed = {name: stored[name].entry(name) for name in used_parameters(graph) if name in stored}
    return made.with_(parameters={**made.parameters, **dict(sorted(fixed.items()))})


def _objectives(loss_fn: Objective, steps: Mapping[str, StepFn] | None) -> dict[str, Objective]:
    if steps is None:
        return {"": loss_fn}
    if not steps or not all(isinstance(name, str) and name for name in steps):
        raise PlanError(
            "steps is a mapping from names to functions", hint='steps={"d": d_step, "g": g_step}'
        )
    return {name: objective(loss_fn, step) for name, step in steps.items()}


def _require_equal(steps: list[StepSpec]) -> None:
    """Raise unless all plans have the same ranks, dtypes and other shared decisions."""
    first = steps[0]
    for other in steps[1:]:
        for what, read in _SHARED.items():
            a, b = read(first.plan), read(other.plan)
            if a != b:
                raise PlanError(
                    f"the plans of steps {first.name!r} and {other.name!r} differ in {what}: "
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


def step_options(graph: Graph, plan: Plan) -> rt.StepOptions:
    """Return how a step of this graph runs under a plan."""
    dtypes = {i.name: graph.values[i.value].dtype for i in graph.inputs}
    cast = plan.precision.compute and not plan.precision.autocast
    return rt.StepOptions(
        check_indices=BatchIndices(graph).check,
        input_dtypes={n: d for n, d in dtypes.items() if cast and d.is_floating_point},
        offload_activations="activations" in plan.offload,
        trains=bool(trained_parameters(graph)),
        units=plan.units,
    )


def storage_homes(programs: Mapping[str, Program | PipelineProgram]) -> dict[str, str]:
    """Return for every parameter the step whose program decides how it is stored.

    That is the first step that trains it, else the first that uses it, else the first.
    """
    holdings = {step: _holdings(program) for step, program in programs.items()}
    used = {step: used_parameters(program.graph) for step, program in programs.items()}
    trained = {step: trained_parameters(program.graph) for step, program in programs.items()}
    homes: dict[str, str] = {}
    for parameter in next(iter(programs.values())).graph.parameters:
        name = parameter.name
        users = [step for step in programs if name in used[step]]
        trainers = [step for step in programs if name in trained[step]]
        homes[name] = home = (trainers or users or list(programs))[0]
        for step in users:
            _compare(name, home, step, *(_places(holdings[s][name]) for s in (home, step)))
        for step in trainers:
            _compare(name, home, step, *(_zeros(holdings[s][name]) for s in (home, step)))
    return homes


def _holdings(program: Program | PipelineProgram) -> dict[str, dict[tuple[int, ...], Storage]]:
    """Return how each group of ranks stores each of its parameters."""
    if isinstance(program, PipelineProgram):
        stages = [(s.ranks, s.program.rank_programs[0]) for s in program.lowered.stages]
    else:
        stages = [(tuple(range(program.plan.num_ranks)), program.lowered.rank_programs[0])]
    holdings: dict[str, dict[tuple[int, ...], Storage]] = {}
    for ranks, ran in stages:
        for storage in ran.parameters:
            holdings.setdefault(storage.name, {}).setdefault(ranks, storage)
    return holdings


def _places(storages: Mapping[tuple[int, ...], Storage]) -> str:
    return ", ".join(
        f"{storage.layout} on ranks {format_ranks(ranks)}" for ranks, storage in storages.items()
    )


def _zeros(storages: Mapping[tuple[int, ...], Storage]) -> str:
    return ", ".join(f"zero {storage.zero}" for storage in storages.values() if storage.sync)


def _compare(name: str, home: str, step: str, one: str, other: str) -> None:
    if one and other and one != other:
        raise PlanMismatch(
            f"steps {home!r} and {step!r} store the parameter differently: {one}; {other}",
            where=name,
            hint=f"fix its layout in both plans: parameters={{{name!r}: …}}; with pipeline stages, "
            "begin them at nodes of the same modules, or use a plan without stages",
        )
