"""Choose the form of synchronization of each large parameter by its predicted time.

Forms are chosen for plans that shard the batch alone, and only if the simulated step is shorter by
more than the slack for simpler plans. They are exact, except for those that the user allows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from shardwise.cost.sync import link_rates, step_rows, sync_messages, sync_seconds
from shardwise.dtypes import dtype_name
from shardwise.errors import PlanError
from shardwise.formatting import seconds as in_seconds
from shardwise.formatting import size as in_bytes
from shardwise.ir import Graph, Parameter
from shardwise.planner.search import SIMPLER_SLACK, Candidate, Search, SearchOutcome
from shardwise.planner.search_space import matched
from shardwise.plans import Sync
from shardwise.plans.sync import applied_sync, operator_uses
from shardwise.runtime.parameters import BUCKET_BYTES

TRIED = 2  # candidates for which forms are chosen
GAIN = 0.9  # of the time of an all-reduce, below which another form is worth its complexity


Allowed = tuple[str, Sync, set[str]]  # a glob, its form, and parameters of the folded graph


def allowed_forms(
    graph: Graph, search: Search, allowed: Mapping[str, Sync | Sequence[Sync]] | None
) -> Iterator[Allowed]:
    """Yield the forms that the user allows, each for folded parameters that only stand for such."""
    folded, uses = search.fold.graph, operator_uses(search.fold.graph)
    first = search.fold.parameter_uses(graph)
    for glob, syncs in (allowed or {}).items():
        forms = [syncs] if isinstance(syncs, Sync) else list(syncs)
        if not all(isinstance(form, Sync) for form in forms):
            raise PlanError(f"allowed_syncs[{glob!r}]={syncs!r}", hint="[sw.Sync(every=50)]")
        inside = {value for _, value in matched(graph, glob)}
        refused = {name for value, (_, name) in first.items() if value not in inside}
        rest = [p for p in folded.parameters if p.requires_grad and p.name not in refused]
        for sync in forms:
            yield glob, sync, {p.name for p in rest if applied_sync(folded, p, sync, uses) == sync}


def with_syncs(
    outcome: SearchOutcome, search: Search, fixed: Mapping[str, Sync], allowed: Sequence[Allowed]
) -> tuple[SearchOutcome, tuple[str, ...]]:
    """Return the outcome with the best candidate's forms of synchronization, and the reasons.

    `fixed` are those that the user requires, by parameter. Each of the `allowed` forms is tried on
    top of those before it.
    """
    best: Candidate = outcome.best
    notes: tuple[str, ...] = ()
    if fixed and _shards_batch(best):
        best = _simulated(best, search, dict(fixed))
    for candidate in _candidates(outcome, search):
        syncs, reasons = _SyncChoice(candidate, search).choose(set(fixed))
        if not syncs and not allowed:
            continue
        other = _simulated(candidate, search, {**syncs, **fixed})
        exact, used = other.estimate.step_time_s, dict[str, Sync]()
        for glob, sync, names in allowed:
            chosen = dict.fromkeys(names - fixed.keys(), sync)
            tried = _simulated(candidate, search, {**other.execution.syncs, **chosen})
            if _is_better(tried, other):
                other, used[glob] = tried, sync
        if used:
            times = [in_seconds(t) for t in (other.estimate.step_time_s, exact)]
            listed = "; ".join(f"{glob}: {sync}" for glob, sync in used.items())
            reasons.append(f"{listed}: as you allow, predicted step {' instead of '.join(times)}")
        if _is_better(other, best):
            best, notes = other, tuple(reasons)
    rest = tuple(c for c in outcome.feasible if c.config != best.config)
    return replace(outcome, feasible=(best, *rest)), notes


def _is_better(other: Candidate, best: Candidate) -> bool:
    """Return whether a candidate fits in memory and is faster by more than the slack."""
    limit = best.estimate.step_time_s / (1 + SIMPLER_SLACK)
    return other.estimate.fits and other.estimate.step_time_s < limit


def _candidates(outcome: SearchOutcome, search: Search) -> Iterator[Candidate]:
    """Yield the fastest configurations that shard the batch alone, also if others are faster."""
    bounds = sorted(outcome.bounds, key=lambda bound: bound.seconds)
    shared = (b.config for b in bounds if b.memory <= 1 and b.config.dp > 1)
    for config in islice((c for c in shared if c.tp == c.pp == 1 and not c.zero), TRIED):
        candidate = search.simulate(config, all_groups=True)
        if _shards_batch(candidate):
            yield candidate


def _shards_batch(candidate: Candidate) -> bool:
    """Return whether ranks hold equal parameters, of which each may have its own form."""
    groups, config = candidate.execution.groups, candidate.config
    return (
        len(groups) == 1 and groups[0].mesh.names == ("dp",) and not config.zero and config.dp > 1
    )


def _simulated(candidate: Candidate, search: Search, syncs: Mapping[str, Sync]) -> Candidate:
    ranks = candidate.execution.groups[0].ranks
    rates = link_rates(search.evaluator.cluster, ranks)
    execution = replace(candidate.execution, syncs=syncs, link_rates=rates)
    estimate = search.evaluator.estimate(candidate.layouts.workloads, execution)
    return replace(candidate, execution=execution, estimate=estimate)


class _SyncChoice:
    """The forms for the parameters of one candidate."""

    def __init__(self, candidate: Candidate, search: Search) -> None:
        self.graph, self.execution = search.fold.graph, candidate.execution
        self.costs, self.devices = search.evaluator.costs, search.evaluator.devices
        self.group = self.execution.groups[0]
        self.groups = self.group.along(("dp",))
        self.num_ranks = int(self.groups.shape[-1])
        self.rates = link_rates(search.evaluator.cluster, self.group.ranks)
        self.rows, self.uses = step_rows(self.graph), operator_uses(self.graph)
        nodes = search.evaluator.cluster.machines()
        counts = {node.count for node in nodes}
        self.node_ranks = counts.pop() if len(nodes) > 1 and len(counts) == 1 else 1

    def choose(self, fixed: set[str]) -> tuple[dict[str, Sync], list[str]]:
        """Return the forms that are faster than an all-reduce, and why."""
        syncs, reasons = {}, []
        for parameter in self.graph.parameters:
            kind = self.graph.values[parameter.value]
            if parameter.name in fixed or kind.num_bytes < BUCKET_BYTES:
                continue
            base = self.seconds(parameter, Sync())
            times = {form: self.seconds(parameter, form) for form in self._forms(parameter)}
            form = min(times, key=lambda form: times[form], default=Sync())
            if form in times and times[form] < GAIN * base:
                syncs[parameter.name] = form
                reasons.append(
                    f"{parameter.name} ({in_bytes(kind.num_bytes)}): {form}, predicted "
                    f"{in_seconds(times[form])} instead of {in_seconds(base)} for an all-reduce"
                )
        return syncs, reasons

    def _forms(self, parameter: Parameter) -> Iterator[Sync]:
        """Yield the forms that suit a parameter."""
        partitioned = Sync(kind="partitioned", dim=0)
        forms = [Sync(sparse="gather"), replace(partitioned, sparse="rows"), Sync(factors=True)]
        if 1 < self.node_ranks < self.num_ranks:
            forms.append(Sync(hierarchical=self.node_ranks))
        for form in forms:
            if applied_sync(self.graph, parameter, form, self.uses) == form:
                yield form

    def seconds(self, parameter: Parameter, form: Sync) -> float:
        """Return the predicted time of one parameter's messages, and of additional products."""
        kind = self.graph.values[parameter.value]
        item, rows = kind.dtype.itemsize, self.rows.get(parameter.value, 0)
        reduced = self.execution.reduced_item_bytes(item)
        messages = sync_messages(form, kind.shape, item, reduced, rows, self.num_ranks, self.rates)
        spent = sync_seconds(
            messages,
            self.groups,
            lambda op, rows, size: self.costs.collective(op, rows).seconds(size),
        )
        if form.factors:
            repeated = rows * (self.num_ranks - 1) / self.num_ranks
            n, m = kind.shape
            name = dtype_name(kind.dtype)
            rate = min(d.matmul_rate(name, n, m, rows) * d.speed for d in self.devices)
            spent += 2 * math.prod(kind.shape) * repeated / rate
        return spent
