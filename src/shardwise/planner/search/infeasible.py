"""Nothing fits: by how much, what takes the memory, and what would help.

Enters: the search's bounds. Leaves: an `InfeasiblePlan` with figures.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import InfeasiblePlan
from shardwise.planner.search.search import Candidate, Found, Search
from shardwise.planner.search.space import Fixed, Limits, points
from shardwise.simulation.memory import MemoryUse, peak_of

TRIED = 12
GIB = 2**30


def infeasible(found: Found, search: Search, fixed: Fixed, limits: Limits) -> InfeasiblePlan:
    """The error that says why no point fits."""
    cluster = search.evaluator.cluster
    nearest = _nearest(found, search)
    if nearest is None:
        return InfeasiblePlan(
            f"no plan of {search.fold.graph.name} for {cluster.num_ranks} ranks keeps to what is "
            f"fixed: {fixed}",
            hint="leave some of it to the planner",
        )
    use = peak_of(nearest.estimate.memory)
    lines = [
        f"no plan fits: the smallest needs {_gib(use.peak_bytes)} of {_gib(use.limit_bytes)} on "
        f"a device of {cluster.name}, {_gib(use.peak_bytes - use.limit_bytes)} too much",
        f"  smallest: {nearest.point}",
        f"  it holds {_parts(use)}, highest in {use.when}",
    ]
    changes = _changes(search, fixed, limits, use)
    lines += [f"  would fit: {change}" for change in changes]
    return InfeasiblePlan("\n".join(lines), hint=changes[0] if changes else None)


def _nearest(found: Found, search: Search) -> Candidate | None:
    """The simulated point that exceeds its memory least."""
    by_memory = sorted(found.bounds, key=lambda b: (b.memory, b.seconds))
    simulated = [search.simulate(bound.point) for bound in by_memory[:TRIED]]
    simulated += found.infeasible
    return min(simulated, key=_excess, default=None)


def _excess(candidate: Candidate) -> float:
    use = peak_of(candidate.estimate.memory)
    return use.peak_bytes / use.limit_bytes


def _changes(search: Search, fixed: Fixed, limits: Limits, use: MemoryUse) -> list[str]:
    """The nearest changes with which something fits."""
    changes = [f"{_gib(use.peak_bytes)} of memory per device"]
    for name in fixed.__slots__:
        value = getattr(fixed, name)
        if value is None:
            continue
        freed = replace(fixed, **{name: None})
        candidate = _first_fit(search, limits, freed)
        if candidate is not None:
            seconds = candidate.estimate.step_time_s
            changes.append(
                f"{name} other than {value}: {candidate.point} "
                f"({_gib(peak_of(candidate.estimate.memory).peak_bytes)}, step {seconds:.3g} s)"
            )
    static = sum(v for k, v in use.parts.items() if k in ("parameters", "gradients", "optimizer"))
    moving = use.peak_bytes - static
    if static < use.limit_bytes and moving > 0:
        share = (use.limit_bytes - static) / moving
        rows = int(search.bank.rows * share)
        if 0 < rows < search.bank.rows:
            changes.append(f"a batch of about {rows} rows instead of {search.bank.rows}")
    factor = use.peak_bytes / use.limit_bytes
    needed = 1 << max(1, int(factor - 1e-9).bit_length())
    changes.append(f"about {needed * limits.ranks} devices of this kind, with zero 3")
    return changes


def _first_fit(search: Search, limits: Limits, fixed: Fixed) -> Candidate | None:
    found = search.run(points(limits, fixed))
    return found.best if found.feasible else None


def _parts(use: MemoryUse) -> str:
    shown = sorted(use.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in shown if size > 0)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
