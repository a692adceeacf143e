"""All execution configs of a graph of up to 8 nodes, the plan of a layout, and its step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from shardwise.cluster import Mesh
from shardwise.ir import Graph
from shardwise.planner.stage_balance import unfit
from shardwise.plans import ParameterEntry, Plan, model_fingerprint
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.placements import format_placement
from shardwise.simulation.costs import ExecutionConfig, Group
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.workload import WorkloadModel, batch_rows

SCHEDULES = ("1f1b", "zb_h1")
RECOMPUTES = ("none", "selective", "full")


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, slots=True)
class Kind:
    """A division of the ranks and of the batch."""

    dp: int
    tp: int
    pp: int
    num_microbatches: int

    @property
    def groups(self) -> tuple[Group, ...]:
        axes = ((("dp", self.dp),) if self.dp > 1 else ()) + (
            (("tp", self.tp),) if self.tp > 1 else ()
        )
        size = self.dp * self.tp
        return tuple(
            Group(mesh=Mesh(axes=axes), ranks=tuple(range(g * size, (g + 1) * size)))
            for g in range(self.pp)
        )


def kinds(graph: Graph, ranks: int) -> Iterator[Kind]:
    """Yield every division of the ranks, with every number of micro-batches."""
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            for count in divisors(batch_rows(graph) // dp):
                yield Kind(dp, tp, pp, count)


def execution_configs(graph: Graph, kind: Kind, evaluator: Evaluator) -> Iterator[ExecutionConfig]:
    """Yield every execution of a step with this division, without recomputation."""
    places = [i for i in range(1, len(graph.nodes)) if i not in unfit(graph)]
    groups, count, pp = kind.groups, kind.num_microbatches, kind.pp
    for name, stages in _schedules(pp, count, len(places) + 1):
        schedule = evaluator.schedule(name, pp, count, stages) if pp > 1 or count > 1 else None
        placement = schedule.placement if schedule is not None else (0,)
        for later in combinations(places, stages - 1):
            for zero in (0, 1, 2, 3) if kind.dp * kind.tp > 1 else (0,):
                yield ExecutionConfig(
                    groups=groups, cuts=(0, *later), placement=placement,
                    schedule=schedule, num_microbatches=count, zero=zero,
                )  # fmt: skip


def _schedules(pp: int, count: int, max_stages: int) -> Iterator[tuple[str, int]]:
    """Yield the names of schedules and their numbers of stages."""
    if pp == 1:
        yield "1f1b", 1
        return
    for name in SCHEDULES:
        yield name, pp
    for stages in range(2 * pp, max_stages + 1, pp) if count >= pp else ():
        yield "interleaved", stages
    if 2 * pp <= max_stages:
        yield "zb_v", 2 * pp


def plan_of(graph: Graph, chosen: Sequence[Candidate], tp: int) -> Plan:
    """Return the plan of a layout; parameters are stored as their first use needs."""
    names = {p.value: p.name for p in graph.parameters}
    entries: dict[str, ParameterEntry] = {}
    for node, choice in zip(graph.nodes, chosen, strict=False):  # none is chosen on one rank
        for value, need in zip(node.inputs, choice.operands, strict=True):
            if value in names:
                cut = format_placement(need)
                entries.setdefault(names[value], ParameterEntry(layout={"tp": cut}))
    axes = (("dp", 2), ("tp", tp)) if tp > 1 else (("dp", 2),)
    return Plan(
        name="tried",
        model=graph.name,
        fingerprint=model_fingerprint(graph),
        mesh=Mesh(axes=axes),
        roles={a: "batch" if a == "dp" else "parameters" for a, _ in axes},
        inputs={"x": 0},
        parameters=entries,
        nodes={n.name: {"tp": str(c.choice)} for n, c in zip(graph.nodes, chosen, strict=False)},
    )


def fastest_recompute(
    evaluator: Evaluator,
    workloads: WorkloadModel,
    execution: ExecutionConfig,
    memory_bytes: float = inf,
) -> tuple[float, str]:
    """Return the step time with as little recomputation as fits, and the kind of recomputation."""
    for recompute in RECOMPUTES:
        estimate = evaluator.estimate(workloads, replace(execution, recompute=recompute))
        if estimate.fits and all(use.peak_bytes <= memory_bytes for use in estimate.memory):
            return estimate.step_time_s, recompute
    return inf, ""
