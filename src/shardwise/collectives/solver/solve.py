"""Find the fastest program for an operation on a network.

Trees are packed by a linear program, then again with fewer hops as long as that costs nothing
noticeable at this size; classical algorithms compete. Each candidate is lowered and its messages
are simulated on the network; the shortest time wins. The resulting `Solution` includes lower bounds
that no program can beat.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.choice import Tree
from shardwise.collectives.solver import classical
from shardwise.collectives.solver.lower import (
    SMALLEST_CHUNK_BYTES,
    WORTH,
    Load,
    Lowered,
    Pace,
    Size,
    even_counts,
    lower_trees,
    max_chunks,
)
from shardwise.collectives.solver.network import Network, find_symmetry
from shardwise.collectives.solver.spec import Demand, cut_bound, demand_of, whole_number
from shardwise.collectives.solver.trees import SLACK, Packing, TreeProblem, load_time, max_depth_of
from shardwise.errors import ClusterError

PROVED = 1e-4  # a time within this gap of the bound counts as optimal
SHOWN = 4  # bottlenecks in a text
LIMIT_S = 20.0  # CPU seconds for the linear program; a gap that remains by then is reported
ROUNDS = 3  # of column generation per depth limit
FEW_HOPS = 2  # depths that are always tried because they save latency
MAX_TUNED = 3  # candidates whose full program is built


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A program with its times, for `numel` elements of `item_bytes`.

    `bandwidth_s` is the time of the busiest resource. `lp_bound_s` is a lower bound for any
    trees, `cut_bound_s` for any algorithm that moves sums and copies; neither includes latency.
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
    trees: tuple[Tree, ...] = field(default=(), compare=False)  # empty for rounds

    @property
    def num_bytes(self) -> int:
        return self.program.numel * self.item_bytes

    @property
    def gap(self) -> float:
        """The relative excess of the busiest resource's time over the better bound.

        Infinite if bytes take time but no bound is known, because some rank has no element.
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
            **{item.name: getattr(self, item.name) for item in fields(self) if item.compare},
            "num_bytes": self.num_bytes,
            "gap": self.gap if self.gap < math.inf else None,
            "proved": self.proved,
            "others": dict(self.others),
            "program": self.program.to_json(),
        }

    def proof(self) -> str:
        """Return a sentence about how far the program is proved optimal."""
        if self.gap == math.inf:
            return "not proved optimal: there is no bound for fewer elements than ranks"
        if not self.num_bytes or not max(self.lp_bound_s, self.cut_bound_s):
            return "nothing limits the bytes: only latencies count"
        if not self.proved:
            return f"not proved optimal: {self.gap:.2%} above the bound"
        if self.cut_bound_s >= self.lp_bound_s * (1 - 1e-4):
            return "proved: no algorithm uses the network better"
        apart = self.lp_bound_s / self.cut_bound_s - 1 if self.cut_bound_s else 1.0
        return f"proved for trees; the bound by cuts is {apart:.2%} lower"

    def __str__(self) -> str:
        program = self.program
        lines = [
            f"{program.operation} of {self.num_bytes:,} bytes on {program.num_ranks} ranks: "
            f"{self.name}",
            f"  predicted      {_ms(self.predicted_s)}",
            f"  busiest        {_ms(self.bandwidth_s)}   time of the busiest resource",
            f"  trees' bound   {_ms(self.lp_bound_s)}   lower bound for any trees",
            f"  cuts' bound    {_ms(self.cut_bound_s)}   lower bound for any algorithm",
            f"  {self.proof()}",
        ]
        if self.bottlenecks:
            more = len(self.bottlenecks) - SHOWN
            lines.append(
                f"  limited by {', '.join(self.bottlenecks[:SHOWN])}"
                + (f" and {more} more" if more > 0 else "")
            )
        lines.append(
            f"  {len(program.chunks)} chunks, {program.num_messages} messages; trees of at most "
            f"{self.depth} hops; solved once for {self.symmetry} symmetries"
        )
        if self.others:
            times = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in self.others)
            lines.append(f"  others: {times}")
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """An algorithm, lowered on demand for a pace; `load` is None if it cannot be chunked."""

    name: str
    lower: Callable[[Pace], Lowered]
    s_per_byte: float
    depth: int
    load: Load | None = None
    trees: tuple[Tree, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A candidate simulated with few chunks, and its expected time with more."""

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

    `counts` are the elements of each rank for reduce-scatter and all-gather, by default as equal as
    possible.

    >>> solution = solve(Network.of_cards([8e8, 8e8, 8e8, 2e8]), "all_reduce", 1_000_000)
    >>> round(solution.bandwidth_s * 1e3, 2), round(solution.cut_bound_s * 1e3, 2)
    (20.0, 20.0)
    """
    numel, item_bytes = whole_number(numel, "numel"), whole_number(item_bytes, "item_bytes")
    counts = None if counts is None else [whole_number(count, "a count") for count in counts]
    _check_size(network, operation, numel, item_bytes, counts)
    demand = demand_of(network, operation, root=root, shares=counts if numel else None)
    if demand.shares is not None and demand.root is None:
        even = even_counts(numel, demand.shares) if counts is None else tuple(counts)
        demand = replace(demand, counts=even)
    return _Solver(network, demand, numel, item_bytes, limit_s).solve()


class _Solver:
    """The state of one solve: the candidates, their times, and the best."""

    def __init__(
        self, network: Network, demand: Demand, numel: int, item_bytes: int, limit_s: float
    ) -> None:
        self.network, self.demand = network, demand
        self.symmetry = find_symmetry(network, demand.colors(network.num_ranks))
        self.numel, self.item_bytes, self.num_bytes = numel, item_bytes, numel * item_bytes
        self.limit_s = limit_s
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
        for trial in trials[1:MAX_TUNED]:
            if trial.expected_s < lowered.seconds * (1 - WORTH):
                finer = self.tuned(trial)
                if finer.seconds < lowered.seconds:
                    best, lowered = trial.candidate, finer
        bounded_bytes = self.num_bytes * self._rounding()
        return Solution(
            name=best.name,
            program=lowered.program(self.numel),
            item_bytes=self.item_bytes,
            predicted_s=lowered.seconds,
            bandwidth_s=best.s_per_byte * (self.num_bytes if best.load is None else bounded_bytes),
            lp_bound_s=self.bound * bounded_bytes,
            cut_bound_s=cut_bound(self.network, self.demand, self.symmetry) * bounded_bytes,
            bottlenecks=self.bottlenecks,
            depth=best.depth,
            symmetry=self.symmetry.order,
            others=tuple(
                (trial.candidate.name, trial.expected_s)
                for trial in trials
                if trial.candidate is not best
            ),
            trees=best.trees,
        )

    def trial(self, candidate: _Candidate) -> _Trial:
        """Simulate the candidate with few chunks."""
        load = candidate.load
        pace = Pace(turns=1, chunk_bytes=math.inf) if load is None else load.first()
        lowered = candidate.lower(pace)
        filling = 0.0 if load is None else load.filling_s(pace.turns, lowered.seconds)
        expected = lowered.seconds if load is None else load.expected_s(filling)
        expected = min(expected, lowered.seconds)
        return _Trial(candidate=candidate, lowered=lowered, filling_s=filling, expected_s=expected)

    def tuned(self, trial: _Trial) -> Lowered:
        """Lower the candidate with as many chunks as pay off."""
        load = trial.candidate.load
        if load is None or not self.num_bytes:
            return trial.lowered
        finer = trial.candidate.lower(load.best(trial.filling_s))
        worth = finer.seconds < trial.lowered.seconds * (1 + WORTH)
        return finer if worth else trial.lowered

    def candidates(self) -> Iterator[_Candidate]:
        if self.network.num_ranks == 1:
            tree = Tree(weight=1.0, root=0, inward=(-1,), outward=(-1,))
            yield self.trees("nothing to send", (tree,), 0.0, 0)
            return
        yield from self.packings()
        for name, trees in (
            ("ring", classical.best_ring(self.network, self.demand)),
            ("binomial tree", classical.binomial(self.network, self.demand)),
        ):
            if trees is not None:
                yield self.trees(name, trees, load_time(self.network, trees), max_depth_of(trees))
        for name, build in (
            ("recursive doubling", classical.recursive_doubling),
            ("halving and doubling", classical.halving_doubling),
        ):
            if (rounds := build(self.network, self.demand, self.numel)) is not None:
                yield self.in_rounds(name, rounds)

    # ------------------------------------------------------------ kinds of candidates
    def packings(self) -> Iterator[_Candidate]:
        """Yield packings, from few hops up to those that use the network best."""
        halves = self.demand.inward + self.demand.outward
        messages = halves * (self.network.num_ranks - 1)
        chunks = max_chunks(self.num_bytes, self.network.num_ranks, messages)
        problem = TreeProblem(self.network, self.demand, self.symmetry, max_chunks=chunks)
        optimum = problem.optimum(self.limit_s)
        self.bound = problem.bound
        self.bottlenecks = _bottlenecks(self.network, problem)
        low, high, best = 1, optimum.depth, optimum
        while low < high:
            depth = low if low <= FEW_HOPS else (low + high) // 2
            shallow = problem.within(depth, ROUNDS, self.useful(problem, optimum, depth))
            if shallow is not None and shallow.s_per_byte <= problem.bound * (1 + SLACK):
                high, best = depth, shallow
                continue
            if shallow is not None:
                yield self.packed(shallow)
            low = depth + 1
        yield self.packed(best)

    def useful(self, problem: TreeProblem, optimum: Packing, depth: int) -> float:
        """Return the seconds per byte above which trees of a depth cannot beat the optimum."""
        total = problem.filled(optimum.s_per_byte, optimum.depth)
        # An upper bound on the latency and message costs of the optimum: shallow trees save less.
        hop_s = float(self.network.latency_s.max(initial=0.0)) + self.network.message_s
        messages_s = 4 * len(optimum.trees) * self.network.message_s
        latency_s = 2 * optimum.depth * hop_s + messages_s * self.network.num_ranks
        return (total + latency_s / max(self.num_bytes, 1)) / problem.filled(1.0, depth)

    def packed(self, packing: Packing) -> _Candidate:
        """Return a packing as a candidate."""
        name = f"trees of depth {packing.depth}"
        return self.trees(name, packing.trees, packing.s_per_byte, packing.depth)

    def trees(self, name: str, trees: Sequence[Tree], s_per_byte: float, depth: int) -> _Candidate:
        """Return trees as a candidate."""

        def lower(pace: Pace) -> Lowered:
            return lower_trees(self.network, self.demand, self.size(pace, s_per_byte), trees)

        network, halves = self.network, self.demand.inward + self.demand.outward
        weights = [tree.weight for tree in trees]
        latency_s = float(np.median(network.latency_s)) if network.num_edges else 0.0
        load = Load(  # decides how the trees are chunked
            num_bytes=round(self.num_bytes * sum(weights)),
            num_trees=max(len(weights), 1),
            num_ranks=network.num_ranks,
            bytes_s=s_per_byte * self.num_bytes,
            hops=depth * halves,
            per_turn=max(len(trees) * halves * (network.num_ranks - 1), 1),
            largest_bytes=self.num_bytes * max(weights, default=1.0),
            message_s=network.message_s or latency_s or 1e-6,
            rate=float(np.median(network.bandwidth)) if network.num_edges else math.inf,
        )
        return _Candidate(
            name=name,
            lower=lower,
            s_per_byte=s_per_byte,
            depth=depth,
            load=load,
            trees=tuple(trees),
        )

    def in_rounds(self, name: str, rounds: classical.Rounds) -> _Candidate:
        """Return rounds of messages, which cannot be chunked, as a candidate."""
        return _Candidate(
            name=name,
            lower=lambda _: rounds.lowered(self.network, self.item_bytes),
            s_per_byte=rounds.load_time(self.network),
            depth=len(rounds.rounds),
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

    def _rounding(self) -> float:
        """Return the smallest ratio of a rank's actual elements to its share.

        Elements are indivisible, shares are not: times for shares multiplied by this ratio are
        lower bounds for the actual counts.
        """
        counts, shares = self.demand.counts, self.demand.shares
        if not counts or shares is None or not sum(counts):
            return 1.0
        pairs = zip(counts, shares, strict=True)
        return min(count / (sum(counts) * share) for count, share in pairs if share > 0)


def _bottlenecks(network: Network, problem: TreeProblem) -> tuple[str, ...]:
    """Return the resources with a nonzero price in the proof of the bound, scarcest first."""
    scarcity = problem.prices * problem.master.capacity
    names = []
    for number in np.argsort(-scarcity, kind="stable"):
        if scarcity[number] > 1e-3:
            members = np.flatnonzero(problem.orbit == number)
            more = f" and {len(members) - 1} equivalent" if len(members) > 1 else ""
            names.append(network.resources[int(members[0])] + more)
    return tuple(names)


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
