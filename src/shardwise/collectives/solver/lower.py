"""Lower trees to messages, ordered by a simulation of when each leaves and arrives.

In the simulation, each resource serves messages first come, first served, with at most `WINDOW`
messages in flight on an edge. A chunk may start when its tree would have sent the chunks before it
at the planned rate: a tree that started with everything at once would block what others forward.
Ranks that list their instructions in this one order cannot deadlock, since the order itself is an
execution of all of them.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from shardwise.collectives.messages import Chunk, Instruction, MessageProgram
from shardwise.collectives.messages.choice import Tree
from shardwise.collectives.messages.program import SHARDED
from shardwise.collectives.solver.network import Network
from shardwise.collectives.solver.spec import Demand

WINDOW = 4  # messages in flight on an edge: enough to keep it busy while a rank sums

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
    """A chunk that may start along its path at time `start`."""

    start: float
    path: MessagePath
    chunk: int
    num_bytes: int


def tree_path(tree: Tree) -> MessagePath:
    """Return sums from the leaves to the root, then copies back: a gate for each rank and half."""
    count = len(tree.inward or tree.outward)
    sends: list[tuple[int, int, str, int]] = []
    waits = [0] * count + [1] * count
    opens: list[list[int]] = [[] for _ in range(2 * count)]
    for rank, parent in enumerate(tree.inward):
        if parent >= 0:
            opens[rank].append(len(sends))
            waits[parent] += 1
            sends.append((rank, parent, "reduce", parent))
    for rank, parent in enumerate(tree.outward):
        if parent >= 0:
            gate = tree.root if parent == tree.root else count + parent
            opens[gate].append(len(sends))
            sends.append((parent, rank, "receive", count + rank))
    return MessagePath(sends=tuple(sends), waits=tuple(waits), opens=tuple(map(tuple, opens)))


class Occupation:
    """The times at which the resources and ranks of a network are free again."""

    def __init__(self, network: Network) -> None:
        self.capacity, self.latency = network.capacity.tolist(), network.latency_s.tolist()
        self.uses = [[r for r in row if r >= 0] for row in network.uses.tolist()]
        self.message_s = network.message_s
        self.free = [0.0] * len(self.capacity)
        self.busy = [0.0] * network.num_ranks

    def send(self, time: float, a: int, b: int, edge: int, num_bytes: float) -> float:
        """Send a message that is ready at `time`; return when it arrives.

        It occupies both ranks, and every resource of its edge. It arrives one latency after the
        slowest of them is done.
        """
        free, busy = self.free, self.busy
        begin = busy[a] if busy[a] > time else time
        done = start = busy[a] = begin + self.message_s
        for resource in self.uses[edge]:
            begin = free[resource] if free[resource] > start else start
            free[resource] = begin = begin + num_bytes / self.capacity[resource]
            if begin > done:
                done = begin
        busy[b] += self.message_s
        arrives: float = done + self.latency[edge]
        return arrives


class _Simulation:
    """The queue of messages that may leave, while others occupy the network."""

    def __init__(self, network: Network, released: Sequence[Released]) -> None:
        self.released, self.count = released, network.num_ranks
        self.occupation = Occupation(network)
        edge = network.edge.tolist()
        paths = {id(item.path): item.path for item in released}
        self.edges = {key: [edge[a][b] for a, b, _, _ in path.sends] for key, path in paths.items()}
        self.waits = [list(item.path.waits) for item in released]
        self.opened = [[0.0] * len(item.path.waits) for item in released]
        self.queue: list[Entry] = []
        self.arrivals: list[list[float]] = [[] for _ in range(network.num_edges)]
        self.blocked: list[deque[Entry]] = [deque() for _ in range(network.num_edges)]
        self.messages: list[Message] = []
        self.times: list[float] = []  # when each message leaves, and when it arrives

    def run(self) -> None:
        """Send all messages."""
        for number, item in enumerate(self.released):
            for gate, waits in enumerate(item.path.waits):
                if not waits:
                    self.open_gate(number, gate, item.start)
        queue = self.queue
        while queue:
            entry = heapq.heappop(queue)
            time, _, number, send = entry
            edge = self.edges[id(self.released[number].path)][send]
            arrivals, blocked = self.arrivals[edge], self.blocked[edge]
            window_opens = arrivals[-WINDOW] if len(arrivals) >= WINDOW else 0.0
            if time >= window_opens:
                self.send(time, number, send, edge)
                if blocked and blocked[0] is entry:
                    blocked.popleft()
                    if blocked:
                        blocked[0] = (time, *blocked[0][1:])
                        heapq.heappush(queue, blocked[0])
            elif not blocked or blocked[0] is entry:
                # The window is full: the first waiting message retries when it advances.
                retry = (window_opens, *entry[1:])
                if blocked:
                    blocked[0] = retry
                else:
                    blocked.append(retry)
                heapq.heappush(queue, retry)
            else:
                blocked.append(entry)

    def open_gate(self, number: int, gate: int, time: float) -> None:
        """Queue the sends that a gate releases."""
        path = self.released[number].path
        for send in path.opens[gate]:
            a, b, _, _ = path.sends[send]
            # At equal times, do not let all ranks target the same rank first.
            heapq.heappush(self.queue, (time, (b - a) % self.count, number, send))

    def send(self, time: float, number: int, send: int, edge: int) -> None:
        """Send a message and deliver it to a gate."""
        _, path, chunk, num_bytes = self.released[number]
        a, b, kind, gate = path.sends[send]
        done = self.occupation.send(time, a, b, edge, num_bytes)
        self.arrivals[edge].append(done)
        self.messages.append((a, b, kind, chunk, chunk + 1))
        self.times += (time, done)
        opened = self.opened[number]
        if done > opened[gate]:
            opened[gate] = done
        waits = self.waits[number]
        waits[gate] -= 1
        if not waits[gate]:
            self.open_gate(number, gate, opened[gate])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A program as messages, with its expected seconds.

    `events` are in order of time: 2i means that message i leaves, 2i + 1 that it arrives.
    """

    demand: Demand
    num_ranks: int
    chunks: tuple[Chunk, ...]
    messages: tuple[Message, ...]
    events: tuple[int, ...]
    seconds: float

    def program(self, numel: int) -> MessageProgram:
        """Return per-rank instruction lists that follow the order of events."""
        lists: list[list[Instruction]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
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
            counts=self.demand.counts,
            root=-1 if self.demand.root is None else self.demand.root,
            window=WINDOW,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the data and of chunks.

    A chunk has at most `chunk` elements; `span_s` is the time of all bytes on the busiest resource.
    A tree sends at least `turns` chunks unless they would have fewer than `smallest` elements: a
    tree that carries little uses slow links, and chunks as large as those of other trees would fill
    them late.
    """

    numel: int
    item_bytes: int
    chunk: int
    span_s: float
    turns: int = 1
    smallest: int = 1

    def bounds(self, elements: int) -> list[int]:
        """Return the bounds of chunks that are as equal as possible."""
        fewest = -(-elements // max(self.chunk, 1))
        count = max(1, fewest, min(self.turns, elements // max(self.smallest, 1)))
        return [elements * i // count for i in range(count + 1)]


def lower_trees(network: Network, demand: Demand, size: Size, trees: Sequence[Tree]) -> Lowered:
    """Return the program of trees; each rank's elements are divided among the trees of its root."""
    shares = [(trees, 0, size.numel)]
    if demand.operation in SHARDED:
        ends = enumerate(pairwise(accumulate(demand.counts, initial=0)))
        shares = [([t for t in trees if t.root == root], *own) for root, own in ends]
    chunks: list[Chunk] = []
    released: list[Released] = []
    for tree, start, stop in (part for share in shares for part in _divided(*share)):
        path, bounds = tree_path(tree), size.bounds(stop - start)
        for turn, (low, high) in enumerate(pairwise(bounds)):
            start_s = size.span_s * turn / (len(bounds) - 1)
            num_bytes = (high - low) * size.item_bytes
            released.append(Released(start_s, path, len(chunks), num_bytes))
            chunks.append(Chunk(start + low, start + high))
    simulation = _Simulation(network, released)
    simulation.run()
    return Lowered(
        demand=demand,
        num_ranks=network.num_ranks,
        chunks=tuple(chunks),
        messages=tuple(simulation.messages),
        events=tuple(np.argsort(np.array(simulation.times), kind="stable").tolist()),
        seconds=max(simulation.times, default=0.0),
    )


def _divided(trees: Sequence[Tree], first: int, end: int) -> Iterator[tuple[Tree, int, int]]:
    """Divide the elements `first` to `end` among trees by weight."""
    if not trees and end > first:  # elements of a rank whose share was zero
        raise ValueError(f"no tree for {end - first} elements")
    weights = [tree.weight for tree in trees]
    counts = even_counts(end - first, weights, total=sum(weights) or 1.0)
    for tree, (low, high) in zip(trees, pairwise(accumulate(counts, initial=first)), strict=True):
        if high > low:
            yield tree, low, high


def even_counts(numel: int, shares: Sequence[float], total: float = 1.0) -> tuple[int, ...]:
    """Return the integer counts nearest to the shares of `numel` that add up to it."""
    ends = [round(numel * end / total) for end in accumulate(shares, initial=0.0)]
    ends[-1] = numel
    return tuple(high - low for low, high in pairwise(ends))


# ------------------------------------------------------------ chunking
SMALLEST_CHUNK_BYTES = 32 * 1024
# A window of chunks of 380 KB on three edges to one slow card overflows its queue (measured: 13 to
# 30% lost to TCP, 2% with 97 KB); a chunk should still take as long as this many messages cost.
GENTLE_CHUNK_BYTES = 96 * 1024
GENTLE_MESSAGES = 10
MAX_MESSAGES = 1_000  # per rank in a program with several turns
MAX_COMPARED = 1_000  # messages of a candidate while comparing
WORTH = 0.01  # fraction of the time that more chunks must save


def max_chunks(num_bytes: float, num_ranks: int, messages: int) -> float:
    """Return how many chunks a program may have, given its bytes and the messages per chunk."""
    by_messages = MAX_MESSAGES * num_ranks / max(messages, 1)
    return max(1.0, min(by_messages, num_bytes / SMALLEST_CHUNK_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The chunks of every tree (fewer if they would be tiny), and the bytes of the largest one."""

    turns: int
    chunk_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The traffic of a candidate.

    `bytes_s` is the time of its bytes alone. With one chunk for each tree, there are
    `per_turn` messages, and the largest chunk has `largest_bytes`.
    """

    num_bytes: int
    num_trees: int
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

    def first(self) -> Pace:
        """Return a pace for comparing candidates: a guess of the fill time, and few messages."""
        turns = self._best(self.hops * self.bytes_s)
        return Pace(turns=min(turns, max(1, MAX_COMPARED // self.per_turn)), chunk_bytes=math.inf)

    def filling_s(self, turns: int, seconds: float) -> float:
        """Return the fill time of the pipeline with one turn, given the time of several."""
        return max(0.0, seconds - self.bytes_s - turns * self.turn_s) * turns

    def expected_s(self, filling_s: float) -> float:
        """Return the seconds to expect with the best number of turns."""
        turns = self._best(filling_s)
        return self.bytes_s + filling_s / turns + turns * self.turn_s

    def best(self, filling_s: float) -> Pace:
        """Return the best number of turns, with chunks small enough not to queue in switches."""
        chunks = MAX_MESSAGES * self.num_ranks * self.num_trees / self.per_turn
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
        allowed = int(max_chunks(self.largest_bytes, self.num_ranks, self.per_turn))
        return max(1, min(allowed, math.ceil(min(saves, cheap))))
