"""The fastest program for an operation on a network.

Enters: a `Network` or a cluster's, an operation, a number of elements and the bytes of each.
Leaves: `Solution`: the program, its predicted time, and what no program can be faster than.

Trees are packed by a linear program (`trees.py`, `routes.py`), then again with fewer hops as long
as this costs nothing that counts at this size; the known algorithms compete. Each candidate is
lowered and its messages are replayed on the network; the least time wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.collectives.bounds import cut_bound
from shardwise.collectives.demand import Demand, demand_of
from shardwise.collectives.known import (
    Rounds,
    best_ring,
    binomial,
    halving_doubling,
    recursive_doubling,
)
from shardwise.collectives.lower import Lowered, Size, even_counts, lower_parts, lower_routes
from shardwise.collectives.network import Floats, Ints, Network
from shardwise.collectives.routes import RouteProblem, Routing
from shardwise.collectives.solution import Solution
from shardwise.collectives.symmetry import Symmetry, find_symmetry
from shardwise.collectives.trees import SLACK, Packing, Part, TreeProblem, deepest, load_time
from shardwise.errors import ClusterError

LIMIT_S = 20.0  # CPU seconds for the linear program; what it has not proved by then is said
ROUNDS = 4  # of column generation for each limit of depth
SMALLEST_CHUNK_BYTES = 32 * 1024
# A window of chunks of 380 KB on three edges to one slow card overflows its queue (measured: 13 to
# 30% lost to TCP, 2% with 97 KB); a chunk should still take as long as this many messages cost.
GENTLE_CHUNK_BYTES = 96 * 1024
GENTLE_MESSAGES = 10
MOST_MESSAGES = 1_000  # of a rank in a program with several turns of chunks
CLOSE = 1.2  # times the best: candidates that smaller chunks could still make better
COMPARED = 1_000  # messages of a candidate while it is compared with others
WORTH = 0.01  # of the time: what smaller chunks must save


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A way to do it, and its lowering for a size of chunks."""

    name: str
    lower: Callable[[int], Lowered]
    s_per_byte: float
    depth: int
    per_turn: int  # messages if every part is one chunk
    largest: float  # the part of the data that is the largest without chunks
    chunked: bool = True
    parts: tuple[Part, ...] = ()


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
    """The fastest program that was found.

    `counts` are the elements of each rank for reduce-scatter, all-gather and all-to-all; as equal
    as can be if left out.

    >>> solution = solve(Network.of_cards([8e8, 8e8, 8e8, 2e8]), "all_reduce", 1_000_000)
    >>> round(solution.bandwidth_s * 1e3, 2), round(solution.cut_bound_s * 1e3, 2)
    (20.0, 20.0)
    """
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
    """One solve: the candidates, their times, and the best."""

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
        self.bound = 0.0  # seconds per byte
        self.bottlenecks: tuple[str, ...] = ()

    def solve(self) -> Solution:
        timed: list[tuple[_Candidate, Lowered]] = []
        for candidate in sorted(self.candidates(), key=lambda c: c.s_per_byte):
            quickest = min((found.seconds for _, found in timed), default=math.inf)
            if candidate.s_per_byte * self.num_bytes < quickest:  # else its bytes take longer
                timed.append((candidate, candidate.lower(self.chunk(candidate))))
        timed.sort(key=lambda row: row[1].seconds)
        best, lowered = timed[0][0], self.tuned(*timed[0])
        for other, coarse in timed[1:]:
            # Others had few chunks, too; those that could do better are given smaller ones.
            close = coarse.seconds < CLOSE * timed[0][1].seconds
            if close and other.s_per_byte * self.num_bytes < lowered.seconds * (1 - 4 * WORTH):
                finer = self.tuned(other, coarse)
                if finer.seconds < lowered.seconds:
                    best, lowered = other, finer
        return Solution(
            name=best.name,
            program=lowered.program(self.numel),
            item_bytes=self.item_bytes,
            predicted_s=lowered.seconds,
            bandwidth_s=best.s_per_byte * self.num_bytes,
            lp_bound_s=self.bound * self.num_bytes,
            cut_bound_s=cut_bound(self.network, self.demand, self.symmetry) * self.num_bytes,
            bottlenecks=self.bottlenecks,
            depth=best.depth,
            symmetry=self.symmetry.order,
            others=tuple((c.name, found.seconds) for c, found in timed if c is not best),
            parts=best.parts,
        )

    def tuned(self, candidate: _Candidate, lowered: Lowered) -> Lowered:
        """With smaller chunks, as long as this pays: what is lost is about as much as they are."""
        chunk, least = self.chunk(candidate), candidate.s_per_byte * self.num_bytes
        while candidate.chunked and lowered.seconds > (1 + 2 * WORTH) * least:
            lost = lowered.seconds / least - 1 if least > 0 else 0.0
            factor = max(
                WORTH / lost if lost else 1.0,
                lowered.num_messages / (MOST_MESSAGES * self.network.num_ranks),
                SMALLEST_CHUNK_BYTES / (chunk * self.item_bytes),
            )
            if factor > 0.75:
                break
            chunk = max(1, round(chunk * factor))
            before, finer = lowered, candidate.lower(chunk)
            if finer.seconds < before.seconds:
                lowered = finer
            else:  # too many messages; half of the way may be better
                halfway = candidate.lower(round(chunk / math.sqrt(factor)))
                lowered = min(lowered, halfway, key=lambda found: found.seconds)
            if finer.seconds > before.seconds * (1 - WORTH):
                break
        return self.gentle(candidate, lowered)

    def gentle(self, candidate: _Candidate, lowered: Lowered) -> Lowered:
        """With chunks that leave little waiting in switches, where that costs next to nothing."""
        largest = max((chunk.size for chunk in lowered.chunks), default=0)
        rate = float(np.median(self.network.bandwidth)) if self.network.num_edges else math.inf
        paying = GENTLE_MESSAGES * self.network.message_s * rate  # else messages take the time
        most = MOST_MESSAGES * self.network.num_ranks
        chunk = max(
            GENTLE_CHUNK_BYTES / self.item_bytes,
            paying / self.item_bytes,
            largest * lowered.num_messages / most,
        )
        if not candidate.chunked or chunk * 1.25 > largest:
            return lowered
        smaller = candidate.lower(math.ceil(chunk))
        return smaller if smaller.seconds < lowered.seconds * (1 + WORTH) else lowered

    def candidates(self) -> Iterator[_Candidate]:
        if self.demand.operation == "all_to_all":
            yield self.routes()
            return
        if self.network.num_ranks == 1:
            alone = np.array([-1])
            part = Part(weight=1.0, root=0, inward=alone, outward=alone)
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
        """Packings with few hops, up to those that use the network best."""
        problem = TreeProblem(self.network, self.demand, self.symmetry)
        optimum = problem.optimum([], self.limit_s)
        self.bound = problem.bound
        worth = problem.prices * problem.master.capacity
        self.bottlenecks = _bottlenecks(self.network, problem.orbit, worth)
        depth, useful = 1, optimum.s_per_byte + self._latency_s(optimum) / max(self.num_bytes, 1)
        while depth < optimum.depth:
            found = problem.within(depth, ROUNDS, useful)
            if found is not None:
                yield self.packed(found)
                if found.s_per_byte <= problem.bound * (1 + SLACK):
                    return
            depth = depth + 1 if depth < 4 else depth * 3 // 2
        yield self.packed(optimum)

    def packed(self, packing: Packing) -> _Candidate:
        """A solved packing."""
        name = f"trees of depth {packing.depth}"
        return self.trees(name, packing.parts, packing.s_per_byte, packing.depth)

    def trees(self, name: str, parts: Sequence[Part], s_per_byte: float, depth: int) -> _Candidate:
        """Parts with trees, in chunks."""

        def lower(chunk: int) -> Lowered:
            return lower_parts(
                self.network, self.demand, self.size(chunk, s_per_byte), parts, self.counts
            )

        halves = self.demand.inward + self.demand.outward
        per_turn = len(parts) * halves * (self.network.num_ranks - 1)
        return _Candidate(
            name=name,
            lower=lower,
            s_per_byte=s_per_byte,
            depth=depth,
            per_turn=max(per_turn, 1),
            largest=max((part.weight for part in parts), default=1.0),
            parts=tuple(parts),
        )

    def routes(self) -> _Candidate:
        """Routes of an all-to-all."""
        found = Routing(routes=(), s_per_byte=0.0, bound=0.0)
        if self.network.num_ranks > 1:
            problem = RouteProblem(self.network, self.demand, self.symmetry)
            found = problem.solve(self.limit_s)
            worth = problem.prices * problem.master.capacity
            self.bottlenecks = _bottlenecks(self.network, problem.orbit, worth)
        self.bound = found.bound

        def lower(chunk: int) -> Lowered:
            size = self.size(chunk, found.s_per_byte)
            return lower_routes(self.network, self.demand, size, found.routes, self.counts)

        hops = max((len(route.ranks) - 1 for route in found.routes), default=0)
        return _Candidate(
            name="direct sends" if hops <= 1 else f"routes of up to {hops} hops",
            lower=lower,
            s_per_byte=found.s_per_byte,
            depth=hops,
            per_turn=max(1, sum(len(route.ranks) - 1 for route in found.routes)),
            largest=max((route.weight for route in found.routes), default=1.0),
        )

    def fixed(self, name: str, rounds: Rounds) -> _Candidate:
        """Rounds of messages that are as they are."""
        return _Candidate(
            name=name,
            lower=lambda _: rounds.lowered(self.network, self.item_bytes),
            s_per_byte=rounds.load_time(self.network),
            depth=len(rounds.rounds),
            per_turn=1,
            largest=1.0,
            chunked=False,
        )

    # ------------------------------------------------------------ chunks

    def size(self, chunk: int, s_per_byte: float) -> Size:
        """The elements, in chunks of so many."""
        return Size(
            numel=self.numel,
            item_bytes=self.item_bytes,
            chunk=chunk,
            span_s=s_per_byte * self.num_bytes,
        )

    def chunk(self, candidate: _Candidate) -> int:
        """Elements of a chunk: small, so that pipelines fill soon, as far as messages pay.

        With T the time of all bytes, h hops and m messages per turn of all parts, k turns take
        about T + hT/k for filling and k m s for messages of s seconds: least at k = sqrt(hT / ms).
        """
        if not candidate.chunked or not self.num_bytes:
            return max(self.numel, 1)
        took = candidate.s_per_byte * self.num_bytes
        hops = 2 * candidate.depth if self.demand.operation == "all_reduce" else candidate.depth
        each = candidate.per_turn / self.network.num_ranks * 2 * self._message_s()
        turns = math.sqrt(hops * took / each) if each > 0 and took > 0 else 1.0
        turns = min(turns, max(1.0, COMPARED / candidate.per_turn))
        largest = self.num_bytes * candidate.largest
        bytes_each = max(largest / max(turns, 1.0), min(SMALLEST_CHUNK_BYTES, largest))
        return max(1, round(bytes_each / self.item_bytes))

    def _latency_s(self, packing: Packing) -> float:
        """What hops and messages of a packing cost beside bytes, at most; all that depth saves."""
        hop = float(self.network.latency_s.max(initial=0.0)) + self.network.message_s
        messages = 4 * len(packing.parts) * self.network.message_s
        filling = packing.s_per_byte * self.num_bytes * 0.1
        return 2 * packing.depth * hop + messages * self.network.num_ranks + filling

    def _message_s(self) -> float:
        typical = float(np.median(self.network.latency_s)) if self.network.num_edges else 0.0
        return self.network.message_s or typical or 1e-6


def _bottlenecks(network: Network, orbit: Ints, worth: Floats) -> tuple[str, ...]:
    """Resources that have a price where the bound was proved, the scarcest first."""
    found = []
    for number in np.argsort(-worth, kind="stable"):
        if worth[number] > 1e-3:
            members = np.flatnonzero(orbit == number)
            more = f" and {len(members) - 1} alike" if len(members) > 1 else ""
            found.append(network.resources[int(members[0])] + more)
    return tuple(found)


def _check_size(
    network: Network, operation: str, numel: int, item_bytes: int, counts: Sequence[int] | None
) -> None:
    if numel < 0 or item_bytes < 1:
        raise ClusterError(f"{numel} elements of {item_bytes} bytes", hint="numel of at least 0")
    if counts is not None and sum(counts) != numel:
        raise ClusterError(
            f"counts {list(counts)} of {operation} add up to {sum(counts)}, not {numel} elements",
            hint=f"{network.num_ranks} counts that do",
        )
