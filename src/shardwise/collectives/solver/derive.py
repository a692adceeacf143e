"""Convert solutions into the trees stored in a plan, and those trees into message programs.

`forest_of` turns the parts of a solution into a `Forest`. Every rank derives its program from the
plan alone, for any number of elements, without the cluster or the solver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.check import check
from shardwise.collectives.messages.choice import (
    CollectiveChoice,
    Forest,
    Tree,
    Wire,
    format_groups,
)
from shardwise.collectives.solver.lower import SMALLEST_CHUNK_BYTES, Lowered, Size, lower_parts
from shardwise.collectives.solver.network import NONE, Network
from shardwise.collectives.solver.spec import Demand
from shardwise.collectives.solver.trees import Part, load_time
from shardwise.errors import PlanError, ProgramError

WHOLE_CHUNK_BYTES = 16 << 20  # chunks reach their full size from this much data on
MOST_CHUNKS = 4_000  # per program
DIGITS = 9
WEIGHT_SLACK = 1e-6  # weights are rounded to `DIGITS`
MOST_PLAYED = 2_000  # elements in a checked program of several chunks per tree


def forest_of(network: Network, parts: Sequence[Part]) -> Forest:
    """Return the parts of a solution as a forest, with the links that they use."""
    trees = tuple(_tree(part) for part in parts)
    pairs = sorted(set().union(*(tree.edges for tree in trees)))
    edges = [int(network.edge[pair]) for pair in pairs]
    used = [[r for r in network.uses[edge].tolist() if r != NONE] for edge in edges]
    number = {r: i for i, r in enumerate(sorted({r for row in used for r in row}))}
    links = tuple(
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
        wires=links,
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
    """Return the messages for `numel` elements and their time;
    `counts` is as in `MessageProgram`.
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
    """Return the program for `numel` elements, or None if the library's collective is used."""
    forest = choice.forest(ranks)
    if forest is None or not numel or numel * item_bytes < choice.min_bytes:
        return None
    given = {"item_bytes": item_bytes, "chunk_bytes": choice.chunk_bytes}
    return lowered(forest, choice.operation, numel, counts=counts, **given).program(numel)


def verify(choice: CollectiveChoice) -> None:
    """Raise unless the trees compute the operation for data of every size.

    Each tree is checked for the halves that the operation needs and for reaching every rank.
    Programs of several sizes are then interpreted: enough elements for every tree to carry some, so
    few that most trees carry none, and several chunks per tree.
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
                f"the trees of {choice.operation} are wrong: {error}",
                where=f"forests[{number}] of ranks {format_groups(choice.groups)}",
                hint="sw.collectives.choose(plan, cluster) derives them again",
            ) from None


def _check_forest(forest: Forest, operation: str) -> None:
    """Raise unless every tree has the halves of the operation, and together they carry all data."""
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
    """Yield elements, the counts of each rank, and chunk bytes of the programs to interpret."""
    ranks = forest.num_ranks
    smallest = min(tree.weight for tree in forest.trees)
    every = math.ceil(2 / smallest) + 1  # enough for each tree to carry some
    if operation == "all_reduce":
        for numel in (1, ranks - 1, 7 * ranks, every):
            yield numel, (), numel
        yield (several := min(every, MOST_PLAYED)), (), max(1, several // (3 * len(forest.trees)))
        return
    for each in (1, 7, every):
        yield ranks * each, (each,) * ranks, ranks * each
    uneven = tuple(rank % 3 * (every + rank) for rank in range(ranks))  # some ranks have none
    if sum(uneven):
        yield sum(uneven), uneven, sum(uneven)
    several = min(every, MOST_PLAYED)
    yield ranks * several, (several,) * ranks, max(1, several // 3)


def chunk_of(num_bytes: int, chunk_bytes: int) -> int:
    """Return the chunk size in bytes.

    Filling the pipeline costs a chunk per hop and each chunk costs a message, so the best size
    grows with the square root of the data. A program has at most `MOST_CHUNKS` chunks.
    """
    share = math.sqrt(min(1.0, num_bytes / WHOLE_CHUNK_BYTES))
    smaller = max(round(chunk_bytes * share), min(chunk_bytes, SMALLEST_CHUNK_BYTES))
    return max(1, smaller, -(-num_bytes // MOST_CHUNKS))


def _network(forest: Forest) -> Network:
    """Return the links of a forest as a `Network`."""
    width = max((len(link.uses) for link in forest.wires), default=0)
    uses = [[*link.uses, *[NONE] * (width - len(link.uses))] for link in forest.wires]
    return Network(
        names=tuple(str(rank) for rank in range(forest.num_ranks)),
        resources=tuple(str(i) for i in range(len(forest.capacity))),
        capacity=np.array(forest.capacity, dtype=np.float64),
        source=np.array([link.source for link in forest.wires], dtype=np.int64),
        target=np.array([link.target for link in forest.wires], dtype=np.int64),
        uses=np.array(uses, dtype=np.int64).reshape(len(forest.wires), width),
        latency_s=np.array([link.latency_s for link in forest.wires], dtype=np.float64),
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
