"""The order of messages: when each would leave and arrive.

Enters: a `Network`, and chunks with the ways they take and the moments at which they may start.
Leaves: `Ordered`: sends and receipts in the order of their moments, if each resource serves what
comes to it first come, first served, and no more than a window of messages is under way on an edge.
A chunk's turn comes when its part would have sent the chunks before it at its planned rate: a part
that starts with all it has would stand in the way of what others pass on.

Ranks that list their instructions in this one order cannot wait for each other for ever: it is
itself a run of all of them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.collectives.network import Network
from shardwise.collectives.trees import Part

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
