"""`tune`: search for a plan with times measured on one of the machines it is for."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Unpack

from shardwise.cluster import Cluster
from shardwise.cost import OpTable
from shardwise.errors import InfeasiblePlan, RankError
from shardwise.ir import Graph
from shardwise.planner.figures import with_figures
from shardwise.planner.options import SearchOptions, known_options
from shardwise.planner.plan import plan
from shardwise.plans import Plan
from shardwise.simulation.estimate import simulate
from shardwise.tuning.measurement_server import (
    MeasurementServer,
    compute_factors,
    measure_plan,
    measurement_server,
)
from shardwise.tuning.race import can_race, plans_that_fit

KINDS: tuple[dict[str, int], ...] = (  # kinds of plans, the simplest first
    {"pp": 1, "tp": 1, "num_microbatches": 1},
    {"pp": 1, "tp": 1},
    {"pp": 1},
    {},
)
ROUNDS = 3  # of timing a plan's compute and planning again with the result
MARGIN = 0.03  # fraction of the step: the error between predictions of two kinds of plans
ZEROS = (0, 1, 2)  # levels that are raced, since they differ by less than predictions err
FAR = 1.5  # times the best prediction: slower plans are not raced
MAX_RACED = 12  # plans
EQUAL = 0.01  # fraction of the step: noise of the medians of a race
FITS, FITTED = 12, 0.005  # corrections of a prediction to a measured step, and their tolerance


@known_options("sw.tune")
def tune(
    graph: Graph,
    cluster: Cluster,
    *,
    table: OpTable | None = None,
    progress: bool = True,
    **options: Unpack[SearchOptions],
) -> Plan:
    """Return the fastest plan by times measured on this machine.

    For each kind of plan (`KINDS`), `tune` makes a plan, measures the operators it calls, plans
    again with these times, times the compute of the result, and repeats until a plan recurs.
    If all ranks of the cluster fit on this machine, the most promising plans are then raced with
    all their communication, and the fastest wins. Otherwise the plan with the best prediction
    wins, where one with more kinds of parallelism must be faster by `MARGIN`. Options are those of
    `plan`. Times measured on the way are added to `table`; `progress` prints every candidate.
    """
    table = OpTable() if table is None else table
    measured = OpTable()
    measured.merge(table)
    with measurement_server(graph, cluster) as server:

        def report(text: str) -> None:
            if progress:
                sys.stderr.write(f"{text}\n")

        tuning = _Tuning(server, {**options, "progress": progress, "all_devices": True}, report)
        for kind in KINDS:
            if not all(options.get(name, value) == value for name, value in kind.items()):
                continue
            try:
                measured = tuning.rounds(measured, kind)
            except InfeasiblePlan:
                if kind:  # more kinds of parallelism may fit
                    continue
                raise
        best = tuning.raced(measured) or tuning.predicted()
    tuned = tuning.reported(best, measured.with_programs(best.programs))
    table.merge(measured)
    table.programs = list(best.programs)
    return tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A plan, its predicted or measured step, and its programs' times relative to their calls.

    `cluster` is the user's, or the same without shared memory where the plan does not use it.
    """

    plan: Plan
    cluster: Cluster
    seconds: float
    programs: list[tuple[str, float, float]]

    @property
    def kind(self) -> tuple[int, ...]:
        """Return the pipeline- and tensor-parallel sizes and the number of micro-batches."""
        return tuple(getattr(self.plan.figures.best.config, name) for name in KINDS[0])

    @property
    def what(self) -> str:
        backends = dict.fromkeys(choice.uses for choice in self.plan.collectives)
        return ", ".join([self.plan.figures.best.what, *(f"{b} collectives" for b in backends)])


class _Tuning:
    """Collect and compare candidate plans of one model on one cluster."""

    def __init__(
        self, server: MeasurementServer, options: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        self.server, self.options, self.report = server, options, report
        self.graph, self.cluster = server.graph, server.cluster
        self.candidates: list[_Candidate] = []

    def rounds(self, table: OpTable, kind: Mapping[str, int]) -> OpTable:
        """Add plans of one kind, each the best by the measured times of the one before it."""
        programs = table.programs
        for _ in range(ROUNDS):
            best, table = self._measured_plan(table.with_programs(programs), kind)
            if any(_same(best, candidate.plan) for candidate in self.candidates):
                break
            programs = self._add(best, table).programs
        return table

    def _add(self, plan: Plan, table: OpTable) -> _Candidate:
        num_notes = len(table.notes)
        programs = compute_factors(self.server, plan, table)
        step = simulate(self.graph, plan, self.cluster, table=table.with_programs(programs))
        candidate = _Candidate(
            plan=plan, cluster=self.cluster, seconds=step.step_time_s, programs=programs
        )
        self.report(f"{candidate.what}: {candidate.seconds * 1e3:.3g} ms predicted")
        for note in table.notes[num_notes:]:
            self.report(note)
        self.candidates.append(candidate)
        return candidate

    def _measured_plan(self, table: OpTable, kind: Mapping[str, int]) -> tuple[Plan, OpTable]:
        """Return the best plan by measured times of the calls of a first one."""
        options = {**self.options, **kind}
        first = plan(self.graph, self.cluster, table=table, **options)
        measured = measure_plan(self.graph, first, self.cluster, table=table, server=self.server)
        if len(measured.entries) == len(table.entries):  # nothing was new
            return first, measured
        return plan(self.graph, self.cluster, table=measured, **options), measured

    def timed(self) -> list[_Candidate]:
        """Return the candidates whose compute was timed, or all if none could be.

        A candidate that failed looks faster than it is, since only its calls were timed.
        """
        return [c for c in self.candidates if c.programs] or self.candidates

    def predicted(self) -> _Candidate:
        """Return the candidate with the best prediction."""
        best, *others = self.timed()
        for candidate in others:
            limit = best.seconds if candidate.kind == best.kind else (1 - MARGIN) * best.seconds
            best = candidate if candidate.seconds < limit else best
        return best

    # ------------------------------------------------------------ run against each other
    def raced(self, table: OpTable) -> _Candidate | None:
        """Return the winner of a race here; None if plans cannot run here, or there is only one."""
        if not can_race(self.cluster):
            return None
        entrants = [*self.timed()]
        for variant in self._variants(table):
            if not any(_same(variant.plan, candidate.plan) for candidate in entrants):
                entrants.append(variant)
        entrants += [self._by_library(c, table) for c in entrants if c.plan.collectives]
        fastest = min(c.seconds for c in entrants)
        entrants = _in_turns([c for c in entrants if c.seconds <= FAR * fastest])[:MAX_RACED]
        plans = plans_that_fit([c.plan for c in entrants], self.cluster)
        if len(plans) < 2:
            return None
        try:
            seconds = self.server.race_plans(plans)
        except RankError as error:
            self.report(f"plans were not raced: {error.message}")
            return None
        # The last entrants may not have fitted in memory beside the others.
        finished = [replace(c, seconds=s) for c, s in zip(entrants, seconds, strict=False)]
        for candidate in finished:
            self.report(f"{candidate.what}: {candidate.seconds * 1e3:.3g} ms measured")
        best = _fastest(finished)
        return replace(best, programs=self._fitted(best, table))

    def _variants(self, table: OpTable) -> Iterator[_Candidate]:
        """Yield the simplest and the most promising kind with each ZeRO level that is allowed.

        They compute the same as the best plan of their kind, so their compute is not timed again.
        """
        zero = self.options.get("zero")
        levels = ZEROS if zero is None else (zero,)
        simplest = tuple(KINDS[0].values())
        kinds = dict.fromkeys((simplest, self.predicted().kind))
        for kind, level in product(kinds, levels):
            same_kind = [c for c in self.timed() if c.kind == kind]
            if not same_kind:
                continue
            best = min(same_kind, key=lambda c: c.seconds)
            times = table.with_programs(best.programs)
            options = {**self.options, **dict(zip(KINDS[0], kind, strict=True)), "zero": level}
            try:
                variant = plan(self.graph, self.cluster, table=times, **options)
            except InfeasiblePlan:
                continue
            yield self._predicted(best, variant, self.cluster, times)

    def _by_library(self, candidate: _Candidate, table: OpTable) -> _Candidate:
        """Return the same plan with the library's collectives."""
        times = table.with_programs(candidate.programs)
        variant = candidate.plan.with_(collectives=())
        return self._predicted(candidate, variant, _without_shared_memory(self.cluster), times)

    def _predicted(
        self, original: _Candidate, variant: Plan, cluster: Cluster, table: OpTable
    ) -> _Candidate:
        step = simulate(self.graph, variant, self.cluster, table=table)
        return replace(original, plan=variant, cluster=cluster, seconds=step.step_time_s)

    def _fitted(self, best: _Candidate, table: OpTable) -> list[tuple[str, float, float]]:
        """Return factors of the programs with which the prediction equals the measured step.

        They account for contention of messages and for ranks that wait for each other, which the
        timing of compute alone does not show.
        """
        programs = best.programs or [(self.cluster.device(0).name, 1.0, 1.0)]
        for _ in range(FITS):
            times = table.with_programs(programs)
            predicted = simulate(self.graph, best.plan, self.cluster, table=times)
            ratio = best.seconds / predicted.step_time_s
            if abs(ratio - 1) < FITTED:
                break
            programs = [(device, ratio * t, ratio * u) for device, t, u in programs]
        return programs

    def reported(self, best: _Candidate, table: OpTable) -> Plan:
        """Return the best plan with the figures of a search by measured times.

        If a search with its configuration finds another plan, the plan is simulated by itself and
        has no runners-up.
        """
        config = best.plan.figures.best.config
        assert config is not None
        names = ["dp", "tp", "pp", "schedule", "num_microbatches", "recompute", "offload"]
        names += ["zero"] if config.outer is None else []  # one level for all
        fixed = {n: v for n in names if (v := getattr(config, n)) not in (None, "")}
        searched = plan(self.graph, best.cluster, table=table, **{**self.options, **fixed})
        if _same(searched, best.plan):
            figures = searched.figures
            cluster = replace(figures.cluster, fingerprint=self.cluster.fingerprint)
            return searched.with_(search=replace(figures, cluster=cluster))
        simulated = with_figures(self.graph, best.plan, self.cluster, table)
        named = replace(simulated.figures.best, what=best.plan.figures.best.what, config=config)
        return simulated.with_(search=replace(simulated.figures, best=named))


def _in_turns(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the most promising candidate of every kind, then the second of every kind, and so on.

    Predictions of one kind err in the same direction: a kind that looks too fast must not take all
    places of the race.
    """
    num_faster: Counter[tuple[int, ...]] = Counter()  # candidates of each kind
    turns: list[tuple[int, _Candidate]] = []
    for candidate in sorted(candidates, key=lambda c: c.seconds):
        turns.append((num_faster[candidate.kind], candidate))
        num_faster[candidate.kind] += 1
    return [candidate for _, candidate in sorted(turns, key=lambda turn: turn[0])]


def _fastest(candidates: Sequence[_Candidate]) -> _Candidate:
    """Return the fastest candidate, or the simplest of those that are equally fast."""
    fastest = min(c.seconds for c in candidates)
    equal = [c for c in candidates if c.seconds <= (1 + EQUAL) * fastest]
    return min(equal, key=lambda c: (c.kind, c.seconds))


def _without_shared_memory(cluster: Cluster) -> Cluster:
    """Return the cluster with ranks that exchange everything as messages."""
    nodes = tuple(
        replace(node, link=replace(node.link, shared=())) if node.link else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _same(one: Plan, other: Plan) -> bool:
    return one.with_(search=None) == other.with_(search=None)
