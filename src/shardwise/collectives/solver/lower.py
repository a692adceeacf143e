"""x"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from shardwise.collectives.messages import Chunk, Instruction, MessageProgram
from shardwise.collectives.solver.network import Network
from shardwise.collectives.solver.spec import Demand
from shardwise.collectives.solver.trees import Part, Route

# Order messages by when each would leave and arrive.
#
# Each resource serves messages first come, first served, with at most a window of messages in
# flight on an edge. A chunk may start when its part would have sent the chunks before it at the
# planned rate: a part that started with everything at once would block what others forward.
#
# Ranks that list their instructions in this one order cannot deadlock, since the order itself is an
# execution of all of them.


Message = tuple[int, int, str, int, int]  # sender, receiver, "reduce" or "receive", chunks
Entry = tuple[float, int, int, int]  # time, tie-breaker, chunk, index of the send


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePath:
    """The sends of a chunk.

    A gate opens when `waits` messages have arrived and then releases the sends in `opens`; a send
    is (sender, receiver, kind, the gate it leads to).
    """

    sends: tuple[tuple[int, int, str, int], ...]
    waits: tuple[int, ...]
    opens: tuple[tuple[int, ...], ...]


class Released(NamedTuple):
    """A chunk that may start along its path from a given time on."""

    moment: float
    path: MessagePath
    chunk: int
    num_bytes: int


def tree_path(part: Part) -> MessagePath:
    """Return sums from the leaves to the root, then copies back: a gate for each rank and half."""
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
    return MessagePath(sends=tuple(sends), waits=tuple(waits), opens=tuple(map(tuple, opens)))


def route_path(ranks: Sequence[int]) -> MessagePath:
    """Return one send after the other."""
    hops = range(len(ranks) - 1)
    return MessagePath(
        sends=tuple((ranks[i], ranks[i + 1], "receive", i + 1) for i in hops),
        waits=(0, *(1 for _ in hops)),
        opens=(*((i,) for i in hops), ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Messages, the order of events (2i: message i leaves, 2i + 1: it arrives),
    and the final time.
    """

    messages: tuple[Message, ...]
    order: tuple[int, ...]
    seconds: float


def in_order(network: Network, released: Sequence[Released], window: int) -> Ordered:
    """Return all sends and receipts in order of time."""
    run = _Run(network, released, window)
    run.play()
    order = np.argsort(np.array(run.moments), kind="stable")
    return Ordered(
        messages=tuple(run.messages),
        order=tuple(order.tolist()),
        seconds=max(run.moments, default=0.0),
    )


class _Run:
    """The state of the simulation: messages that may leave by time, and when resources are free."""

    def __init__(self, network: Network, released: Sequence[Released], window: int) -> None:
        self.released, self.window = released, window
        self.capacity, self.latency = network.capacity.tolist(), network.latency_s.tolist()
        self.each, self.count = network.message_s, network.num_ranks
        self.uses = [[r for r in row if r >= 0] for row in network.uses.tolist()]
        edge = network.edge.tolist()
        paths = {id(item.path): item.path for item in released}
        self.edges = {key: [edge[a][b] for a, b, _, _ in path.sends] for key, path in paths.items()}
        self.free = [0.0] * len(self.capacity)
        self.busy = [0.0] * self.count
        self.waits = [list(item.path.waits) for item in released]
        self.opened = [[0.0] * len(item.path.waits) for item in released]
        self.queue: list[Entry] = []
        self.arrivals: list[list[float]] = [[] for _ in range(network.num_edges)]
        self.blocked: list[deque[Entry]] = [deque() for _ in range(network.num_edges)]
        self.messages: list[Message] = []
        self.moments: list[float] = []  # when each message leaves and arrives

    def play(self) -> None:
        for number, item in enumerate(self.released):
            for gate, needed in enumerate(item.path.waits):
                if not needed:
                    self.let_go(number, gate, item.moment)
        queue, window = self.queue, self.window
        while queue:
            entry = heapq.heappop(queue)
            moment, _, number, send = entry
            edge = self.edges[id(self.released[number].path)][send]
            arrivals, blocked = self.arrivals[edge], self.blocked[edge]
            opens = arrivals[-window] if len(arrivals) >= window else 0.0
            if moment >= opens:
                self.leave(moment, number, send, edge)
                if blocked and blocked[0] is entry:
                    blocked.popleft()
                    if blocked:
                        blocked[0] = (moment, *blocked[0][1:])
                        heapq.heappush(queue, blocked[0])
            elif not blocked or blocked[0] is entry:
                # The window is full: the first waiting message retries when it advances.
                again = (opens, *entry[1:])
                if blocked:
                    blocked[0] = again
                else:
                    blocked.append(again)
                heapq.heappush(queue, again)
            else:
                blocked.append(entry)

    def let_go(self, number: int, gate: int, moment: float) -> None:
        """Release the sends of a gate that has opened."""
        path = self.released[number].path
        for send in path.opens[gate]:
            a, b, _, _ = path.sends[send]
            # At equal times, do not let all ranks target the same rank first.
            heapq.heappush(self.queue, (moment, (b - a) % self.count, number, send))

    def leave(self, moment: float, number: int, send: int, edge: int) -> None:
        """Send a message: occupy the resources on its path and deliver it to a gate."""
        _, path, chunk, num_bytes = self.released[number]
        a, b, kind, gate = path.sends[send]
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


WINDOW = 4  # messages in flight on an edge: enough to keep it busy while a rank sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Messages, the order in which they leave (2i) and arrive (2i + 1),
    and their expected seconds.
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
        """Return per-rank instruction lists that follow the order."""
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
            instructions=tuple(tuple(instructions) for instructions in lists),
            counts=self.counts,
            root=-1 if self.demand.root is None else self.demand.root,
            window=WINDOW,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number and bytes of elements, the most elements of a chunk, and the time of all bytes on
    the busiest resource.

    A part is sent in at least `turns` chunks unless chunks would have fewer than `smallest`
    elements: a small part uses slow links, and chunks as large as those of other parts would fill
    them late.
    """

    numel: int
    item_bytes: int
    chunk: int
    span_s: float
    turns: int = 1
    smallest: int = 1

    def bounds(self, elements: int) -> list[int]:
        """Return the bounds of the chunks of `count` elements, as equal as possible."""
        fewest = -(-elements // max(self.chunk, 1))
        count = max(1, fewest, min(self.turns, elements // max(self.smallest, 1)))
        return [elements * i // count for i in range(count + 1)]


class _Builder:
    """Chunks and the paths they take."""

    def __init__(self, network: Network, demand: Demand, size: Size) -> None:
        self.network, self.demand, self.size = network, demand, size
        self.chunks: list[Chunk] = []
        self.released: list[Released] = []

    def add(self, path: MessagePath, start: int, stop: int, *placed: int) -> None:
        """Add the elements `start` to `stop` along a path, in chunks; `placed` is for an
        all-to-all.
        """
        bounds = self.size.bounds(stop - start)
        for turn, (low, high) in enumerate(pairwise(bounds)):
            place = (*placed[:2], placed[2] + low) if placed else ()
            began = self.size.span_s * turn / (len(bounds) - 1)
            num_bytes = (high - low) * self.size.item_bytes
            self.released.append(Released(began, path, len(self.chunks), num_bytes))
            self.chunks.append(Chunk(start + low, start + high, *place))

    def lowered(self, counts: tuple[int, ...]) -> Lowered:
        """Return the program in the order in which messages leave."""
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
    """Return the program of trees; each rank's elements are divided among the trees of its root."""
    builder = _Builder(network, demand, size)
    if demand.operation in ("reduce_scatter", "all_gather"):
        for root, (first, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            rooted = [part for part in parts if part.root == root]
            _spread(builder, rooted, first, count)
    else:
        _spread(builder, list(parts), 0, size.numel)
    return builder.lowered(counts)


def _spread(builder: _Builder, parts: list[Part], first: int, count: int) -> None:
    if not parts and count:  # elements of a rank whose share was zero
        raise ValueError(f"{count} elements and no tree for them")
    for part, (low, high) in zip(parts, pairwise(_bounds(parts, count)), strict=True):
        if high > low:
            builder.add(tree_path(part), first + low, first + high)


def lower_routes(
    network: Network, demand: Demand, size: Size, routes: Sequence[Route], counts: tuple[int, ...]
) -> Lowered:
    """Return the program of routes, including what each rank keeps for itself."""
    builder = _Builder(network, demand, size)
    of_pair: dict[tuple[int, int], list[Route]] = {}
    for route in routes:
        of_pair.setdefault((route.ranks[0], route.ranks[-1]), []).append(route)
    for b, (first, count) in enumerate(zip(_starts(counts), counts, strict=True)):
        for a in range(network.num_ranks):
            if a == b:
                builder.chunks.append(Chunk(first, first + count, a, a, a * count))
                continue
            routes_of_pair = of_pair.get((a, b), [])
            for route, (low, high) in zip(
                routes_of_pair, pairwise(_bounds(routes_of_pair, count)), strict=True
            ):
                if high > low:
                    path = route_path(route.ranks)
                    builder.add(path, first + low, first + high, a, b, a * count + low)
    return builder.lowered(counts)


def even_counts(numel: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return integer element counts nearest to the shares that add up to the total."""
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


SMALLEST_CHUNK_BYTES = 32 * 1024
# A window of chunks of 380 KB on three edges to one slow card overflows its queue (measured: 13 to
# 30% lost to TCP, 2% with 97 KB); a chunk should still take as long as this many messages cost.
GENTLE_CHUNK_BYTES = 96 * 1024
GENTLE_MESSAGES = 10
MOST_MESSAGES = 1_000  # per rank in a program with several turns
COMPARED = 1_000  # messages of a candidate while comparing
WORTH = 0.01  # fraction of the time that more chunks must save


def most_chunks(num_bytes: int, num_ranks: int, messages: int) -> float:
    """Return how many chunks a program may have, given its bytes and the messages per chunk."""
    by_messages = MOST_MESSAGES * num_ranks / max(messages, 1)
    return max(1.0, min(by_messages, num_bytes / SMALLEST_CHUNK_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The turns of every part, unless chunks fall below `SMALLEST_CHUNK_BYTES`, and the largest
    chunk.
    """

    turns: int
    chunk_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a candidate sends.

    `bytes_s` is the time of its bytes alone, `per_turn` its messages if every part is one chunk,
    the largest of which has `largest_bytes`.
    """

    num_bytes: int
    num_parts: int
    num_ranks: int
    bytes_s: float
    hops: int
    per_turn: int
    largest_bytes: float
    message_s: float
    rate: float  # bytes per second of a typical send

    @property
    def turn_s(self) -> float:
        """Per-rank overhead of one turn of chunks; sends and receives do not overlap."""
        return 2 * self.per_turn / self.num_ranks * self.message_s

    @property
    def most_turns(self) -> int:
        """The largest number of turns that the messages and bytes allow."""
        by_messages = MOST_MESSAGES * self.num_ranks / self.per_turn
        by_bytes = self.largest_bytes / SMALLEST_CHUNK_BYTES
        return max(1, int(min(by_messages, by_bytes)))

    def first(self) -> Pace:
        """Return a pace for comparing candidates: a guess of the fill time, and few messages."""
        turns = self._best(self.hops * self.bytes_s)
        few = max(1, COMPARED // self.per_turn)
        return Pace(turns=min(turns, few), chunk_bytes=math.inf)

    def filling_s(self, turns: int, seconds: float) -> float:
        """Return the pipeline fill time F, given the seconds that `turns` turns took."""
        return max(0.0, seconds - self.bytes_s - turns * self.turn_s) * turns

    def expected_s(self, filling_s: float) -> float:
        """Return the seconds to expect with the best number of turns."""
        turns = self._best(filling_s)
        return self.bytes_s + filling_s / turns + turns * self.turn_s

    def best(self, filling_s: float) -> Pace:
        """Return the best number of turns, with chunks small enough not to queue in switches."""
        chunks = MOST_MESSAGES * self.num_ranks * self.num_parts / self.per_turn
        gentle = max(
            GENTLE_CHUNK_BYTES,
            GENTLE_MESSAGES * self.message_s * self.rate,  # else message overhead dominates
            self.num_bytes / max(chunks, 1.0),
        )
        return Pace(turns=self._best(filling_s), chunk_bytes=gentle)

    def _best(self, filling_s: float) -> int:
        if filling_s <= 0:
            return 1
        saves = filling_s / (WORTH * self.bytes_s) if self.bytes_s > 0 else 1.0
        cheap = math.sqrt(filling_s / self.turn_s) if self.turn_s > 0 else math.inf
        return max(1, min(self.most_turns, math.ceil(min(saves, cheap))))


# Simulate how long rounds of messages take.
#
# All messages of a round leave before any of them is used. A message starts when its chunks are
# available; its sender and every resource on its path process their messages in the order of the
# rounds, never idling while one waits. It arrives one latency after the slowest of them is done.
# Summation is free compared to messages.


Rounds = Sequence[Sequence[Message]]


def rounds_s(network: Network, rounds: Rounds, chunks: Sequence[Chunk], item_bytes: int) -> float:
    """Return the seconds until the last message has arrived."""
    uses = [[r for r in row if r >= 0] for row in network.uses.tolist()]
    capacity, latency = network.capacity.tolist(), network.latency_s.tolist()
    edge, each = network.edge.tolist(), network.message_s
    free = [0.0] * len(capacity)
    busy = [0.0] * network.num_ranks
    there: dict[tuple[int, int], float] = {}
    ends = list(accumulate((chunk.size for chunk in chunks), initial=0))
    last = 0.0
    for messages in rounds:
        ready = [_ready(there, a, range(i, j)) for a, _, _, i, j in messages]
        for begin, (a, b, _, first, stop) in zip(ready, messages, strict=True):
            number = edge[a][b]
            num_bytes = (ends[stop] - ends[first]) * item_bytes
            done = start = busy[a] = max(busy[a], begin) + each
            for resource in uses[number]:
                free[resource] = max(free[resource], start) + num_bytes / capacity[resource]
                done = max(done, free[resource])
            done += latency[number]
            busy[b] += each
            for chunk in range(first, stop):
                there[b, chunk] = max(there.get((b, chunk), 0.0), done)
            last = max(last, done)
    return last


def _ready(there: dict[tuple[int, int], float], rank: int, chunks: Sequence[int]) -> float:
    return max(there.get((rank, chunk), 0.0) for chunk in chunks)
