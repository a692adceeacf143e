"""Between solutions and what plans hold of them.

Enters: the parts of a solution and its `Network`; or a `Forest`, and a number of elements. Leaves:
the `Forest`; or the program of it. Ranks do the second by themselves, from a plan alone: no cluster
and no solver take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.collectives.chunking import SMALLEST_CHUNK_BYTES
from shardwise.collectives.lower import Lowered, Size, lower_parts
from shardwise.collectives.network import NONE, Network
from shardwise.collectives.spec import Demand
from shardwise.collectives.trees import Part, load_time
from shardwise.errors import PlanError, ProgramError
from shardwise.messages import MessageProgram, check
from shardwise.messages.choice import CollectiveChoice, format_groups
from shardwise.messages.trees import Forest, Tree, Wire

WHOLE_CHUNK_BYTES = 16 << 20  # data from which on chunks have their full size
MOST_CHUNKS = 4_000  # of a program
DIGITS = 9
WEIGHT_SLACK = 1e-6  # weights are rounded to `DIGITS`
MOST_PLAYED = 2_000  # elements of a program of several chunks for each tree


def forest_of(network: Network, parts: Sequence[Part]) -> Forest:
    """Return the parts of a solution, with the wires that they use."""
    trees = tuple(_tree(part) for part in parts)
    pairs = sorted(set().union(*(tree.edges for tree in trees)))
    edges = [int(network.edge[pair]) for pair in pairs]
    used = [[r for r in network.uses[edge].tolist() if r != NONE] for edge in edges]
    number = {r: i for i, r in enumerate(sorted({r for row in used for r in row}))}
    wires = tuple(
        Wire(
            source=a,
            target=b,
            uses=tuple(number[r] for r in row),
            latency_s=_short(float(network.latency_s[edge])),
        )
        for (a, b), edge, row in zip(pairs, edges, used, strict=True)
    )
    return Forest(
        num_ranks=network.num_ranks,
        trees=trees,
        wires=wires,
        capacity=tuple(_short(float(network.capacity[r])) for r in number),
        message_s=_short(network.message_s),
    )


def lowered(
    forest: Forest,
    operation: str,
    numel: int,
    *,
    item_bytes: int,
    chunk_bytes: int,
    counts: Sequence[int] = (),
) -> Lowered:
    """Return the messages of so many elements, and their time;
    `counts` as of a `MessageProgram`.
    """
    network, parts = _network(forest), [_part(tree) for tree in forest.trees]
    num_bytes = numel * item_bytes
    chunk = max(1, chunk_of(num_bytes, chunk_bytes) // item_bytes)
    largest = max((tree.weight for tree in forest.trees), default=0.0)
    size = Size(
        numel=numel,
        item_bytes=item_bytes,
        chunk=chunk,
        span_s=load_time(network, parts) * num_bytes,
        turns=max(1, round(largest * numel / chunk)),
        smallest=max(1, min(chunk_bytes, SMALLEST_CHUNK_BYTES) // item_bytes),
    )
    demand = Demand(operation=operation, shares=None)
    return lower_parts(network, demand, size, parts, tuple(counts))


def derive(
    choice: CollectiveChoice,
    ranks: tuple[int, ...],
    numel: int,
    item_bytes: int,
    counts: Sequence[int] = (),
) -> MessageProgram | None:
    """What these ranks run for so many elements; None where the library does it."""
    forest = choice.forest(ranks)
    if forest is None or not numel or numel * item_bytes < choice.min_bytes:
        return None
    given = {"item_bytes": item_bytes, "chunk_bytes": choice.chunk_bytes}
    return lowered(forest, choice.operation, numel, counts=counts, **given).program(numel)


def verify(choice: CollectiveChoice) -> None:
    """Raise unless the trees do what the operation says, for data of every size.

    Each tree is checked as a tree: both halves that the operation needs are there and reach every
    rank. Programs of several sizes are then played: of so many elements that every tree carries
    some, of so few that most carry none, and of several chunks for each.
    """
    for number, forest in enumerate(choice.forests):
        try:
            _check_forest(forest, choice.operation)
            for numel, counts, chunk_bytes in _sizes(forest, choice.operation):
                given = {"item_bytes": 1, "chunk_bytes": chunk_bytes}
                program = lowered(forest, choice.operation, numel, counts=counts, **given)
                check(program.program(numel))
        except (ProgramError, ValueError, IndexError) as error:
            raise PlanError(
                f"the trees of {choice.operation} are not right: {error}",
                where=f"forests[{number}] of ranks {format_groups(choice.groups)}",
                hint="sw.collectives.choose(plan, cluster) makes them again",
            ) from None


def _check_forest(forest: Forest, operation: str) -> None:
    """Raise unless every tree has the halves of the operation, and the trees carry all data."""
    halves = {
        "inward": operation in ("all_reduce", "reduce_scatter"),
        "outward": operation in ("all_reduce", "all_gather"),
    }
    for number, tree in enumerate(forest.trees):
        for half, needed in halves.items():
            parents = getattr(tree, half)
            if not needed and parents:
                raise ValueError(f"tree {number} has an {half} half, which has no use")
            if needed and len(parents) != forest.num_ranks:
                raise ValueError(
                    f"tree {number} of weight {tree.weight:g} has no {half} half: its part of the "
                    f"data would reach {'the root' if half == 'inward' else 'no rank'} alone"
                )
    total = math.fsum(tree.weight for tree in forest.trees)
    if not abs(total - 1) <= WEIGHT_SLACK:
        raise ValueError(f"the weights of the trees add up to {total:.6g}, not to 1")
    missing = set(range(forest.num_ranks)) - {tree.root for tree in forest.trees}
    if operation != "all_reduce" and missing:
        raise ValueError(f"no tree has the root {min(missing)}, whose elements none would carry")


def _sizes(forest: Forest, operation: str) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Elements, the counts of each rank, and the bytes of a chunk, of programs to play."""
    ranks = forest.num_ranks
    smallest = min(tree.weight for tree in forest.trees)
    every = math.ceil(2 / smallest) + 1  # of which each tree carries some
    if operation == "all_reduce":
        for numel in (1, ranks - 1, 7 * ranks, every):
            yield numel, (), numel
        yield (several := min(every, MOST_PLAYED)), (), max(1, several // (3 * len(forest.trees)))
        return
    for each in (1, 7, every):
        yield ranks * each, (each,) * ranks, ranks * each
    uneven = tuple(rank % 3 * (every + rank) for rank in range(ranks))  # some have none
    if sum(uneven):
        yield sum(uneven), uneven, sum(uneven)
    several = min(every, MOST_PLAYED)
    yield ranks * several, (several,) * ranks, max(1, several // 3)


def chunk_of(num_bytes: int, chunk_bytes: int) -> int:
    """Bytes of a chunk: less where there is less data, since pipelines must fill, and no more
    chunks than a program may have.

    Filling costs a chunk for each hop, chunks cost messages: the best size goes with the root.
    """
    share = math.sqrt(min(1.0, num_bytes / WHOLE_CHUNK_BYTES))
    smaller = max(round(chunk_bytes * share), min(chunk_bytes, SMALLEST_CHUNK_BYTES))
    return max(1, smaller, -(-num_bytes // MOST_CHUNKS))


def _network(forest: Forest) -> Network:
    """Return the wires as the solver has them."""
    width = max((len(wire.uses) for wire in forest.wires), default=0)
    uses = [[*wire.uses, *[NONE] * (width - len(wire.uses))] for wire in forest.wires]
    return Network(
        names=tuple(str(rank) for rank in range(forest.num_ranks)),
        resources=tuple(str(i) for i in range(len(forest.capacity))),
        capacity=np.array(forest.capacity, dtype=np.float64),
        source=np.array([wire.source for wire in forest.wires], dtype=np.int64),
        target=np.array([wire.target for wire in forest.wires], dtype=np.int64),
        uses=np.array(uses, dtype=np.int64).reshape(len(forest.wires), width),
        latency_s=np.array([wire.latency_s for wire in forest.wires], dtype=np.float64),
        message_s=forest.message_s,
    )


def _tree(part: Part) -> Tree:
    return Tree(
        weight=_short(part.weight),
        root=part.root,
        inward=() if part.inward is None else tuple(part.inward.tolist()),
        outward=() if part.outward is None else tuple(part.outward.tolist()),
    )


def _part(tree: Tree) -> Part:
    inward, outward = (
        np.array(half, dtype=np.int64) if half else None for half in (tree.inward, tree.outward)
    )
    return Part(weight=tree.weight, root=tree.root, inward=inward, outward=outward)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
