"""From parts and routes to a program of messages."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from shardwise.collectives.network import Network
from shardwise.collectives.routes import Route
from shardwise.collectives.spec import Demand
from shardwise.collectives.trees import Part
from shardwise.messages import Chunk, Instruction, MessageProgram

# The order of messages: when each would leave and arrive.
#
# A chunk's turn comes when its part would have sent the chunks before it at its planned rate: a
# part that starts with all it has would stand in the way of what others pass on.
#
# Ranks that list their instructions in this one order cannot wait for each other for ever: it is
# itself a run of all of them.


Message = tuple[int, int, str, int, int]  # sender, receiver, "reduce" or "receive", chunks
Entry = tuple[float, int, int, int]  # a moment, an order among equals, a chunk's way, a send of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The sends of a chunk. A gate opens when `waits` messages have come to it, and then lets the
    sends of `opens` go; a send is (sender, receiver, kind, the gate that it leads to).
    """

    sends: tuple[tuple[int, int, str, int], ...]
    waits: tuple[int, ...]
    opens: tuple[tuple[int, ...], ...]


class Released(NamedTuple):
    """A chunk that may take its way from a moment on."""

    moment: float
    way: Way
    chunk: int
    num_bytes: int


def tree_way(part: Part) -> Way:
    """Sums from the leaves to the root, then copies from there: a gate for each rank and half."""
    half = part.inward if part.inward is not None else part.outward
    count = 0 if half is None else len(half)
    sends: list[tuple[int, int, str, int]] = []
    waits = [0] * count + [1] * count
    opens: list[list[int]] = [[] for _ in range(2 * count)]
    if part.inward is not None:
        for rank, parent in enumerate(part.inward.tolist()):
            if parent >= 0:
                opens[rank].append(len(sends))
                waits[parent] += 1
                sends.append((rank, parent, "reduce", parent))
    if part.outward is not None:
        for rank, parent in enumerate(part.outward.tolist()):
            if parent >= 0:
                gate = part.root if parent == part.root else count + parent
                opens[gate].append(len(sends))
                sends.append((parent, rank, "receive", count + rank))
    return Way(sends=tuple(sends), waits=tuple(waits), opens=tuple(map(tuple, opens)))


def route_way(ranks: Sequence[int]) -> Way:
    """One send after the other."""
    hops = range(len(ranks) - 1)
    return Way(
        sends=tuple((ranks[i], ranks[i + 1], "receive", i + 1) for i in hops),
        waits=(0, *(1 for _ in hops)),
        opens=(*((i,) for i in hops), ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Messages, and the order of 2i, message i leaves, and 2i + 1, it arrives; the last moment."""

    messages: tuple[Message, ...]
    order: tuple[int, ...]
    seconds: float


def in_order(network: Network, released: Sequence[Released], window: int) -> Ordered:
    """All sends and receipts, first what happens first."""
    run = _Run(network, released, window)
    run.play()
    order = np.argsort(np.array(run.moments), kind="stable")
    return Ordered(
        messages=tuple(run.messages),
        order=tuple(order.tolist()),
        seconds=max(run.moments, default=0.0),
    )


class _Run:
    """Messages that may leave, by moment; what resources and ranks are busy with."""

    def __init__(self, network: Network, released: Sequence[Released], window: int) -> None:
        self.released, self.window = released, window
        self.capacity, self.latency = network.capacity.tolist(), network.latency_s.tolist()
        self.each, self.count = network.message_s, network.num_ranks
        self.uses = [[r for r in row if r >= 0] for row in network.uses.tolist()]
        edge = network.edge.tolist()
        ways = {id(item.way): item.way for item in released}
        self.edges = {key: [edge[a][b] for a, b, _, _ in way.sends] for key, way in ways.items()}
        self.free = [0.0] * len(self.capacity)
        self.busy = [0.0] * self.count
        self.waits = [list(item.way.waits) for item in released]
        self.opened = [[0.0] * len(item.way.waits) for item in released]
        self.queue: list[Entry] = []
        self.arrivals: list[list[float]] = [[] for _ in range(network.num_edges)]
        self.held: list[deque[Entry]] = [deque() for _ in range(network.num_edges)]
        self.messages: list[Message] = []
        self.moments: list[float] = []  # when each leaves, and arrives

    def play(self) -> None:
        for number, item in enumerate(self.released):
            for gate, needed in enumerate(item.way.waits):
                if not needed:
                    self.let_go(number, gate, item.moment)
        queue, window = self.queue, self.window
        while queue:
            entry = heapq.heappop(queue)
            moment, _, number, send = entry
            edge = self.edges[id(self.released[number].way)][send]
            arrivals, held = self.arrivals[edge], self.held[edge]
            opens = arrivals[-window] if len(arrivals) >= window else 0.0
            if moment >= opens:
                self.leave(moment, number, send, edge)
                if held and held[0] is entry:
                    held.popleft()
                    if held:
                        held[0] = (moment, *held[0][1:])
                        heapq.heappush(queue, held[0])
            elif not held or held[0] is entry:
                # The window is full: the first to wait tries again when it moves.
                again = (opens, *entry[1:])
                if held:
                    held[0] = again
                else:
                    held.append(again)
                heapq.heappush(queue, again)
            else:
                held.append(entry)

    def let_go(self, number: int, gate: int, moment: float) -> None:
        """A gate has opened: its sends may leave."""
        way = self.released[number].way
        for send in way.opens[gate]:
            a, b, _, _ = way.sends[send]
            # Of one moment: not all ranks to the same one first.
            heapq.heappush(self.queue, (moment, (b - a) % self.count, number, send))

    def leave(self, moment: float, number: int, send: int, edge: int) -> None:
        """A message leaves, occupies what is on its way, and comes to a gate."""
        _, way, chunk, num_bytes = self.released[number]
        a, b, kind, gate = way.sends[send]
        free, busy = self.free, self.busy
        begin = busy[a] if busy[a] > moment else moment
        done = start = busy[a] = begin + self.each
        for resource in self.uses[edge]:
            begin = free[resource] if free[resource] > start else start
            free[resource] = begin = begin + num_bytes / self.capacity[resource]
            if begin > done:
                done = begin
        done += self.latency[edge]
        busy[b] += self.each
        self.arrivals[edge].append(done)
        self.messages.append((a, b, kind, chunk, chunk + 1))
        self.moments += (moment, done)
        opened = self.opened[number]
        if done > opened[gate]:
            opened[gate] = done
        waits = self.waits[number]
        waits[gate] -= 1
        if not waits[gate]:
            self.let_go(number, gate, opened[gate])


WINDOW = 4  # messages under way on an edge: enough to keep it busy while a rank adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Messages, the order in which they leave (2i) and arrive (2i + 1), and the seconds that they
    should take.
    """

    demand: Demand
    num_ranks: int
    counts: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    messages: tuple[Message, ...]
    order: tuple[int, ...]
    seconds: float

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    def program(self, numel: int) -> MessageProgram:
        """Lists that follow the order."""
        lists: list[list[Instruction]] = [[] for _ in range(self.num_ranks)]
        for event in self.order:
            a, b, kind, first, stop = self.messages[event >> 1]
            if event & 1:
                lists[b].append(Instruction(kind, a, first, stop))
            else:
                lists[a].append(Instruction("send", b, first, stop))
        return MessageProgram(
            operation=self.demand.operation,
            num_ranks=self.num_ranks,
            numel=numel,
            chunks=self.chunks,
            instructions=tuple(tuple(mine) for mine in lists),
            counts=self.counts,
            root=-1 if self.demand.root is None else self.demand.root,
            window=WINDOW,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many elements of how many bytes, at most how many of them in a chunk, and the time that
    the busiest resource takes for all.

    A part is sent in at least `turns`, unless chunks would have less than `smallest` elements: a
    small part takes slow links, and with chunks as large as those of others fills them late.
    """

    numel: int
    item_bytes: int
    chunk: int
    span_s: float
    turns: int = 1
    smallest: int = 1

    def bounds(self, elements: int) -> list[int]:
        """Return the bounds of the chunks of so many elements, which are as equal as can be."""
        fewest = -(-elements // max(self.chunk, 1))
        count = max(1, fewest, min(self.turns, elements // max(self.smallest, 1)))
        return [elements * i // count for i in range(count + 1)]


class _Builder:
    """Chunks, and the ways that they take."""

    def __init__(self, network: Network, demand: Demand, size: Size) -> None:
        self.network, self.demand, self.size = network, demand, size
        self.chunks: list[Chunk] = []
        self.released: list[Released] = []

    def add(self, way: Way, start: int, stop: int, *placed: int) -> None:
        """The elements `start` to `stop` along a way, in chunks; `placed` is of an all-to-all."""
        bounds = self.size.bounds(stop - start)
        for turn, (low, high) in enumerate(pairwise(bounds)):
            place = (*placed[:2], placed[2] + low) if placed else ()
            began = self.size.span_s * turn / (len(bounds) - 1)
            num_bytes = (high - low) * self.size.item_bytes
            self.released.append(Released(began, way, len(self.chunks), num_bytes))
            self.chunks.append(Chunk(start + low, start + high, *place))

    def lowered(self, counts: tuple[int, ...]) -> Lowered:
        """Return the program, in the order in which messages leave."""
        ordered = in_order(self.network, self.released, WINDOW)
        return Lowered(
            demand=self.demand,
            num_ranks=self.network.num_ranks,
            counts=counts,
            chunks=tuple(self.chunks),
            messages=ordered.messages,
            order=ordered.order,
            seconds=ordered.seconds,
        )


def lower_parts(
    network: Network, demand: Demand, size: Size, parts: Sequence[Part], counts: tuple[int, ...]
) -> Lowered:
    """Return the program of trees; each rank's elements are cut among the trees of its root."""
    builder = _Builder(network, demand, size)
    if demand.operation in ("reduce_scatter", "all_gather"):
        for root, (first, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            mine = [part for part in parts if part.root == root]
            _spread(builder, mine, first, count)
    else:
        _spread(builder, list(parts), 0, size.numel)
    return builder.lowered(counts)


def _spread(builder: _Builder, parts: list[Part], first: int, count: int) -> None:
    if not parts and count:  # elements of a rank that was said to have none
        raise ValueError(f"{count} elements and no tree for them")
    for part, (low, high) in zip(parts, pairwise(_bounds(parts, count)), strict=True):
        if high > low:
            builder.add(tree_way(part), first + low, first + high)


def lower_routes(
    network: Network, demand: Demand, size: Size, routes: Sequence[Route], counts: tuple[int, ...]
) -> Lowered:
    """Return the program of routes, and what each rank keeps for itself."""
    builder = _Builder(network, demand, size)
    of_pair: dict[tuple[int, int], list[Route]] = {}
    for route in routes:
        of_pair.setdefault((route.ranks[0], route.ranks[-1]), []).append(route)
    for b, (first, count) in enumerate(zip(_starts(counts), counts, strict=True)):
        for a in range(network.num_ranks):
            if a == b:
                builder.chunks.append(Chunk(first, first + count, a, a, a * count))
                continue
            mine = of_pair.get((a, b), [])
            for route, (low, high) in zip(mine, pairwise(_bounds(mine, count)), strict=True):
                if high > low:
                    way = route_way(route.ranks)
                    builder.add(way, first + low, first + high, a, b, a * count + low)
    return builder.lowered(counts)


def even_counts(numel: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole elements for shares: as near as can be, all of them given away."""
    ends = [round(numel * end) for end in accumulate(shares, initial=0.0)]
    ends[-1] = numel
    return tuple(high - low for low, high in pairwise(ends))


def _bounds(items: Sequence[Part] | Sequence[Route], count: int) -> list[int]:
    total = sum(item.weight for item in items) or 1.0
    weights = (item.weight for item in items)
    ends = [round(count * end / total) for end in accumulate(weights, initial=0.0)]
    return [*ends[:-1], count] if items else [0]


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
