"""From parts and routes to a program of messages.

Enters: parts of the data with their trees, or routes, the number of elements, and into how many
chunks they are cut. Leaves: `Lowered`: messages in the order in which they would leave and arrive
(`order.py`), the time that this takes, and the program of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwise.collectives.demand import Demand
from shardwise.collectives.network import Network
from shardwise.collectives.order import Message, Released, Way, in_order, route_way, tree_way
from shardwise.collectives.routes import Route
from shardwise.collectives.trees import Part
from shardwise.messages import Chunk, Instruction, MessageProgram

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
