"""Choose into how many chunks data are divided.

With T the time of all bytes, F the pipeline fill time without chunking, and c the cost to a rank of
the messages of one turn of all parts, k turns take about T + F/k + ck, which is minimal at k =
sqrt(F/c). A replay with a few turns reveals F; a second replay with the best k gives the final
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.collectives.lower import Message
from shardwise.collectives.network import Network
from shardwise.messages import Chunk

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
