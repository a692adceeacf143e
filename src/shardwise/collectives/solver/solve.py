"""Find the fastest program for an operation on a network.

Trees are packed by a linear program (`trees.py`, `routes.py`), then again with fewer hops as long
as that costs nothing noticeable at this size; classical algorithms compete. Each candidate is
lowered and its messages are replayed on the network; the shortest time wins. The resulting
`Solution` includes lower bounds that no program can beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.arrays import Floats, Ints
from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.solver.classical import (
    Rounds,
    best_ring,
    binomial,
    halving_doubling,
    recursive_doubling,
)
from shardwise.collectives.solver.lower import (
    SMALLEST_CHUNK_BYTES,
    WORTH,
    Load,
    Lowered,
    Pace,
    Size,
    even_counts,
    lower_parts,
    lower_routes,
    most_chunks,
)
from shardwise.collectives.solver.network import Network, Symmetry, find_symmetry
from shardwise.collectives.solver.spec import Demand, cut_bound, demand_of, whole_number
from shardwise.collectives.solver.trees import (
    SLACK,
    Packing,
    Part,
    RouteProblem,
    Routing,
    TreeProblem,
    deepest,
    load_time,
)
from shardwise.errors import ClusterError

# Format a solution as text.


SHOWN = 4  # bottlenecks


def solution_text(solution: Solution) -> str:
    """Return lines with the time, the bounds, and what is proven."""
    program = solution.program
    lines = [
        f"{program.operation} of {solution.num_bytes:,} bytes on {program.num_ranks} ranks: "
        f"{solution.name}",
        f"  predicted      {_ms(solution.predicted_s)}",
        f"  busiest        {_ms(solution.bandwidth_s)}   time of the busiest resource",
        f"  trees' bound   {_ms(solution.lp_bound_s)}   lower bound for any trees or routes",
        f"  cuts' bound    {_ms(solution.cut_bound_s)}   lower bound for any algorithm",
        f"  {proof(solution)}",
    ]
    if solution.bottlenecks:
        more = len(solution.bottlenecks) - SHOWN
        lines.append(
            f"  limited by {', '.join(solution.bottlenecks[:SHOWN])}"
            + (f" and {more} more" if more > 0 else "")
        )
    lines.append(
        f"  {len(program.chunks)} chunks, {program.num_messages} messages; trees of at most "
        f"{solution.depth} hops; solved once for {solution.symmetry} symmetries"
    )
    if solution.others:
        times = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in solution.others)
        lines.append(f"  others: {times}")
    return "\n".join(lines)


def proof(solution: Solution) -> str:
    """Return a sentence about what is proven about the use of the network."""
    if solution.gap == math.inf:
        return "not proved optimal: there is no bound for fewer elements than ranks"
    if not solution.num_bytes or not max(solution.lp_bound_s, solution.cut_bound_s):
        return "nothing limits the bytes: only latencies count"
    if not solution.proved:
        return f"not proved optimal: {solution.gap:.2%} above the bound"
    if solution.cut_bound_s >= solution.lp_bound_s * (1 - 1e-4):
        return "proved: no algorithm uses the network better"
    apart = solution.lp_bound_s / solution.cut_bound_s - 1 if solution.cut_bound_s else 1.0
    return f"proved for trees and routes; the cuts that were tried are {apart:.2%} below"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


# The result of solving for a collective: a program, its times, and what is proven about them.


PROVED = 1e-4  # a time within this gap of the bound counts as optimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A program with its times, for `numel` elements of `item_bytes`.

    `bandwidth_s` is the time of the busiest resource. `lp_bound_s` is a lower bound for any trees
    or routes, `cut_bound_s` for any algorithm that moves sums and copies; neither includes latency.
    `predicted_s` is the total time with latencies and pipeline fill.
    """

    name: str
    program: MessageProgram
    item_bytes: int
    predicted_s: float
    bandwidth_s: float
    lp_bound_s: float
    cut_bound_s: float
    bottlenecks: tuple[str, ...]
    depth: int
    symmetry: int
    others: tuple[tuple[str, float], ...]
    parts: tuple[Part, ...] = field(default=(), compare=False)  # empty for rounds and routes

    @property
    def num_bytes(self) -> int:
        return self.program.numel * self.item_bytes

    @property
    def gap(self) -> float:
        """The relative excess of the busiest resource's time over the better bound.

        Infinite where bytes take time but nothing bounds it, because some rank has no element.
        """
        bound = max(self.lp_bound_s, self.cut_bound_s)
        if bound > 0:
            return max(0.0, self.bandwidth_s / bound - 1)
        return math.inf if self.num_bytes and self.bottlenecks else 0.0

    @property
    def proved(self) -> bool:
        """Whether no trees can use the network better."""
        return self.gap <= PROVED

    def to_json(self) -> dict[str, Any]:
        """Return the times and the program as JSON."""
        return {
            "name": self.name,
            "num_bytes": self.num_bytes,
            "item_bytes": self.item_bytes,
            "predicted_s": self.predicted_s,
            "bandwidth_s": self.bandwidth_s,
            "lp_bound_s": self.lp_bound_s,
            "cut_bound_s": self.cut_bound_s,
            "gap": self.gap if self.gap < math.inf else None,
            "proved": self.proved,
            "bottlenecks": list(self.bottlenecks),
            "depth": self.depth,
            "symmetry": self.symmetry,
            "others": dict(self.others),
            "program": self.program.to_json(),
        }

    def __str__(self) -> str:
        return solution_text(self)


LIMIT_S = 20.0  # CPU seconds for the linear program; what is unproven by then is reported
ROUNDS = 3  # of column generation per depth limit
FEW_HOPS = 2  # depths that are always tried because they save latency
TUNED = 3  # most candidates whose full program is built


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A way to implement the operation, lowered on demand for a pace; `load` is None if it cannot
    be chunked.
    """

    name: str
    lower: Callable[[Pace], Lowered]
    s_per_byte: float
    depth: int
    load: Load | None = None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A candidate replayed with few chunks, and its expected time with more."""

    candidate: _Candidate
    lowered: Lowered
    filling_s: float
    expected_s: float


def solve(
    network: Network,
    operation: str,
    numel: int,
    *,
    item_bytes: int = 4,
    root: int | None = None,
    counts: Sequence[int] | None = None,
    limit_s: float = LIMIT_S,
) -> Solution:
    """Return the fastest program.

    `counts` are the elements of each rank for reduce-scatter, all-gather and all-to-all, by default
    as equal as possible.

    >>> solution = solve(Network.of_cards([8e8, 8e8, 8e8, 2e8]), "all_reduce", 1_000_000)
    >>> round(solution.bandwidth_s * 1e3, 2), round(solution.cut_bound_s * 1e3, 2)
    (20.0, 20.0)
    """
    numel, item_bytes = whole_number(numel, "numel"), whole_number(item_bytes, "item_bytes")
    counts = None if counts is None else [whole_number(count, "a count") for count in counts]
    _check_size(network, operation, numel, item_bytes, counts)
    demand = demand_of(network, operation, root=root, shares=counts if numel else None)
    count = network.num_ranks
    given = (
        ()
        if demand.shares is None or demand.root is not None
        else (tuple(counts) if counts is not None else even_counts(numel, demand.shares))
    )
    symmetry = find_symmetry(network, demand.colors(count))
    work = _Work(network, demand, symmetry, numel, item_bytes, given, limit_s)
    return work.solve()


class _Work:
    """The state of one solve: the candidates, their times, and the best."""

    def __init__(
        self,
        network: Network,
        demand: Demand,
        symmetry: Symmetry,
        numel: int,
        item_bytes: int,
        counts: tuple[int, ...],
        limit_s: float,
    ) -> None:
        self.network, self.demand, self.symmetry = network, demand, symmetry
        self.numel, self.item_bytes, self.counts = numel, item_bytes, counts
        self.num_bytes = numel * item_bytes
        self.limit_s = limit_s
        self.whole = _whole(demand, counts)
        self.bound = 0.0  # seconds per byte
        self.bottlenecks: tuple[str, ...] = ()

    def solve(self) -> Solution:
        trials: list[_Trial] = []
        for candidate in sorted(self.candidates(), key=lambda c: c.s_per_byte):
            fastest = min((trial.expected_s for trial in trials), default=math.inf)
            if candidate.s_per_byte * self.num_bytes < fastest:  # else its bytes alone take longer
                trials.append(self.trial(candidate))
        trials.sort(key=lambda trial: trial.expected_s)
        best, lowered = trials[0].candidate, self.tuned(trials[0])
        for trial in trials[1:TUNED]:
            if trial.expected_s < lowered.seconds * (1 - WORTH):
                finer = self.tuned(trial)
                if finer.seconds < lowered.seconds:
                    best, lowered = trial.candidate, finer
        lower_bound = self.num_bytes * self.whole
        return Solution(
            name=best.name,
            program=lowered.program(self.numel),
            item_bytes=self.item_bytes,
            predicted_s=lowered.seconds,
            bandwidth_s=best.s_per_byte * (self.num_bytes if best.load is None else lower_bound),
            lp_bound_s=self.bound * lower_bound,
            cut_bound_s=cut_bound(self.network, self.demand, self.symmetry) * lower_bound,
            bottlenecks=self.bottlenecks,
            depth=best.depth,
            symmetry=self.symmetry.order,
            others=tuple(
                (trial.candidate.name, trial.expected_s)
                for trial in trials
                if trial.candidate is not best
            ),
            parts=best.parts,
        )

    def trial(self, candidate: _Candidate) -> _Trial:
        """Replay the candidate with few chunks."""
        load = candidate.load
        pace = Pace(turns=1, chunk_bytes=math.inf) if load is None else load.first()
        lowered = candidate.lower(pace)
        filling = 0.0 if load is None else load.filling_s(pace.turns, lowered.seconds)
        expected = lowered.seconds if load is None else load.expected_s(filling)
        return _Trial(
            candidate=candidate,
            lowered=lowered,
            filling_s=filling,
            expected_s=min(expected, lowered.seconds),
        )

    def tuned(self, trial: _Trial) -> Lowered:
        """Lower the candidate with as many chunks as pay off."""
        load = trial.candidate.load
        if load is None or not self.num_bytes:
            return trial.lowered
        finer = trial.candidate.lower(load.best(trial.filling_s))
        worth = finer.seconds < trial.lowered.seconds * (1 + WORTH)
        return finer if worth else trial.lowered

    def candidates(self) -> Iterator[_Candidate]:
        if self.demand.operation == "all_to_all":
            yield self.routes()
            return
        if self.network.num_ranks == 1:
            single = np.array([-1])
            part = Part(weight=1.0, root=0, inward=single, outward=single)
            yield self.trees("nothing to send", (part,), 0.0, 0)
            return
        yield from self.solved()
        for name, parts in (
            ("ring", best_ring(self.network, self.demand)),
            ("binomial tree", binomial(self.network, self.demand)),
        ):
            if parts is not None:
                yield self.trees(name, parts, load_time(self.network, parts), deepest(parts))
        for name, rounds in (
            ("recursive doubling", recursive_doubling(self.network, self.demand, self.numel)),
            (
                "halving and doubling",
                halving_doubling(self.network, self.demand, self.numel, self.counts),
            ),
        ):
            if rounds is not None:
                yield self.fixed(name, rounds)

    # ------------------------------------------------------------ kinds of candidates

    def solved(self) -> Iterator[_Candidate]:
        """Yield packings, from few hops up to those that use the network best."""
        halves = self.demand.inward + self.demand.outward
        messages = halves * (self.network.num_ranks - 1)
        problem = TreeProblem(
            self.network,
            self.demand,
            self.symmetry,
            most_chunks=most_chunks(self.num_bytes, self.network.num_ranks, messages),
        )
        optimum = problem.optimum([], self.limit_s)
        self.bound = problem.bound
        worth = problem.prices * problem.master.capacity
        self.bottlenecks = _bottlenecks(self.network, problem.orbit, worth)
        low, high, best = 1, optimum.depth, optimum
        while low < high:
            depth = low if low <= FEW_HOPS else (low + high) // 2
            packing_within = problem.within(depth, ROUNDS, self.useful(problem, optimum, depth))
            if packing_within is not None and packing_within.s_per_byte <= problem.bound * (
                1 + SLACK
            ):
                high, best = depth, packing_within
                continue
            if packing_within is not None:
                yield self.packed(packing_within)
            low = depth + 1
        yield self.packed(best)

    def useful(self, problem: TreeProblem, optimum: Packing, depth: int) -> float:
        """Return the seconds per byte above which trees of a depth cannot beat the optimum."""
        total = problem.filled(optimum.s_per_byte, optimum.depth)
        saved = self._latency_s(optimum) / max(self.num_bytes, 1)
        return (total + saved) / problem.filled(1.0, depth)

    def packed(self, packing: Packing) -> _Candidate:
        """Return a solved packing as a candidate."""
        name = f"trees of depth {packing.depth}"
        return self.trees(name, packing.parts, packing.s_per_byte, packing.depth)

    def trees(self, name: str, parts: Sequence[Part], s_per_byte: float, depth: int) -> _Candidate:
        """Return parts with trees as a candidate."""

        def lower(pace: Pace) -> Lowered:
            return lower_parts(
                self.network, self.demand, self.size(pace, s_per_byte), parts, self.counts
            )

        halves = self.demand.inward + self.demand.outward
        return _Candidate(
            name=name,
            lower=lower,
            s_per_byte=s_per_byte,
            depth=depth,
            load=self.load(
                [part.weight for part in parts],
                len(parts) * halves * (self.network.num_ranks - 1),
                s_per_byte,
                depth * halves,
            ),
            parts=tuple(parts),
        )

    def routes(self) -> _Candidate:
        """Return the routes of an all-to-all as a candidate."""
        routing = Routing(routes=(), s_per_byte=0.0, bound=0.0)
        if self.network.num_ranks > 1:
            problem = RouteProblem(self.network, self.demand, self.symmetry)
            routing = problem.solve(self.limit_s)
            worth = problem.prices * problem.master.capacity
            self.bottlenecks = _bottlenecks(self.network, problem.orbit, worth)
        self.bound = routing.bound

        def lower(pace: Pace) -> Lowered:
            size = self.size(pace, routing.s_per_byte)
            return lower_routes(self.network, self.demand, size, routing.routes, self.counts)

        hops = [len(route.ranks) - 1 for route in routing.routes]
        longest = max(hops, default=0)
        return _Candidate(
            name="direct sends" if longest <= 1 else f"routes of up to {longest} hops",
            lower=lower,
            s_per_byte=routing.s_per_byte,
            depth=longest,
            load=self.load(
                [route.weight for route in routing.routes], sum(hops), routing.s_per_byte, longest
            ),
        )

    def fixed(self, name: str, rounds: Rounds) -> _Candidate:
        """Return rounds of messages, which cannot be chunked, as a candidate."""
        return _Candidate(
            name=name,
            lower=lambda _: rounds.lowered(self.network, self.item_bytes),
            s_per_byte=rounds.load_time(self.network),
            depth=len(rounds.rounds),
        )

    # ------------------------------------------------------------ chunks

    def load(self, weights: Sequence[float], per_turn: int, s_per_byte: float, hops: int) -> Load:
        """Return the load that decides how a candidate is chunked."""
        num_edges = self.network.num_edges
        return Load(
            num_bytes=round(self.num_bytes * sum(weights)),
            num_parts=max(len(weights), 1),
            num_ranks=self.network.num_ranks,
            bytes_s=s_per_byte * self.num_bytes,
            hops=hops,
            per_turn=max(per_turn, 1),
            largest_bytes=self.num_bytes * max(weights, default=1.0),
            message_s=self._message_s(),
            rate=float(np.median(self.network.bandwidth)) if num_edges else math.inf,
        )

    def size(self, pace: Pace, s_per_byte: float) -> Size:
        """Return the sizes of the elements and chunks at a pace."""
        chunk = min(pace.chunk_bytes / self.item_bytes, max(self.numel, 1))
        return Size(
            numel=self.numel,
            item_bytes=self.item_bytes,
            chunk=max(1, round(chunk)),
            span_s=s_per_byte * self.num_bytes,
            turns=pace.turns,
            smallest=max(1, SMALLEST_CHUNK_BYTES // self.item_bytes),
        )

    def _latency_s(self, packing: Packing) -> float:
        """Return an upper bound on the latency and message cost of a packing: the most that depth
        saves.
        """
        hop = float(self.network.latency_s.max(initial=0.0)) + self.network.message_s
        messages = 4 * len(packing.parts) * self.network.message_s
        return 2 * packing.depth * hop + messages * self.network.num_ranks

    def _message_s(self) -> float:
        typical = float(np.median(self.network.latency_s)) if self.network.num_edges else 0.0
        return self.network.message_s or typical or 1e-6


def _bottlenecks(network: Network, orbit: Ints, worth: Floats) -> tuple[str, ...]:
    """Return the resources with a nonzero price in the proof of the bound, scarcest first."""
    names = []
    for number in np.argsort(-worth, kind="stable"):
        if worth[number] > 1e-3:
            members = np.flatnonzero(orbit == number)
            more = f" and {len(members) - 1} equivalent" if len(members) > 1 else ""
            names.append(network.resources[int(members[0])] + more)
    return tuple(names)


def _whole(demand: Demand, counts: Sequence[int]) -> float:
    """Return the smallest ratio of a rank's actual elements to its share.

    Elements are indivisible, shares are not: times for shares multiplied by this ratio are lower
    bounds for the actual counts.
    """
    if not counts or demand.shares is None or not sum(counts):
        return 1.0
    pairs = zip(counts, demand.shares, strict=True)
    return min(count / (sum(counts) * share) for count, share in pairs if share > 0)


def _check_size(
    network: Network, operation: str, numel: int, item_bytes: int, counts: Sequence[int] | None
) -> None:
    if numel < 0 or item_bytes < 1:
        raise ClusterError(f"{numel} elements of {item_bytes} bytes", hint="numel >= 0")
    if counts is not None and sum(counts) != numel:
        raise ClusterError(
            f"counts {list(counts)} of {operation} add up to {sum(counts)}, not {numel} elements",
            hint=f"{network.num_ranks} counts that do",
        )
