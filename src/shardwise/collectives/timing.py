"""How long rounds of messages take.

Enters: a `Network` and messages in rounds; those of a round leave before any of them is used.
Leaves: seconds. A message begins when its chunks are there; its sender, and every resource on its
way, each work through what they have in the order of the rounds, never idle while something waits;
it arrives when the slowest of them is done, and its latency later. Sums cost nothing beside
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardwise.collectives.network import Network
from shardwise.collectives.order import Message
from shardwise.messages import Chunk

Rounds = Sequence[Sequence[Message]]


def rounds_s(network: Network, rounds: Rounds, chunks: Sequence[Chunk], item_bytes: int) -> float:
    """Seconds until the last message has arrived."""
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
