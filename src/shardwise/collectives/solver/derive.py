"""Store the trees of a solution in a plan, and derive message programs from them.

Every rank derives its program from the plan alone, for any number of elements, without the cluster
or the solver.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.check import check
from shardwise.collectives.messages.choice import (
    CollectiveChoice,
    Edge,
    Forest,
    Tree,
    format_groups,
)
from shardwise.collectives.solver.lower import SMALLEST_CHUNK_BYTES, Lowered, Size, lower_trees
from shardwise.collectives.solver.network import NONE, Network, padded
from shardwise.collectives.solver.spec import Demand
from shardwise.collectives.solver.trees import load_time
from shardwise.errors import PlanError, ProgramError

FULL_CHUNK_BYTES = 16 << 20  # chunks reach their full size from this much data on
MAX_CHUNKS = 4_000  # per program
DIGITS = 9
WEIGHT_SLACK = 1e-6  # weights are rounded to `DIGITS`
MAX_CHECKED = 2_000  # elements in a checked program of several chunks per tree


def forest_of(network: Network, trees: Sequence[Tree]) -> Forest:
    """Return trees with the edges that they use; numbers are rounded as in files."""
    pairs = sorted(set().union(*(tree.pairs for tree in trees)))
    numbers = [int(network.edge[pair]) for pair in pairs]
    used = [[r for r in network.uses[number].tolist() if r != NONE] for number in numbers]
    index = {r: i for i, r in enumerate(sorted({r for row in used for r in row}))}
    edges = tuple(
        Edge(
            source=a,
            target=b,
            uses=tuple(index[r] for r in row),
            latency_s=_rounded(float(network.latency_s[number])),
        )
        for (a, b), number, row in zip(pairs, numbers, used, strict=True)
    )
    return Forest(
        num_ranks=network.num_ranks,
        trees=tuple(replace(tree, weight=_rounded(tree.weight)) for tree in trees),
        edges=edges,
        capacity=tuple(_rounded(float(network.capacity[r])) for r in index),
        message_s=_rounded(network.message_s),
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
    """Return the messages for `numel` elements; `counts` is as in `MessageProgram`."""
    network = _network(forest)
    num_bytes = numel * item_bytes
    chunk = max(1, chunk_of(num_bytes, chunk_bytes) // item_bytes)
    largest = max((tree.weight for tree in forest.trees), default=0.0)
    size = Size(
        numel=numel,
        item_bytes=item_bytes,
        chunk=chunk,
        span_s=load_time(network, forest.trees) * num_bytes,
        turns=max(1, round(largest * numel / chunk)),
        smallest=max(1, min(chunk_bytes, SMALLEST_CHUNK_BYTES) // item_bytes),
    )
    demand = Demand(operation=operation, shares=None, counts=tuple(counts))
    return lower_trees(network, demand, size, forest.trees)


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
    return lowered(
        forest,
        choice.operation,
        numel,
        item_bytes=item_bytes,
        chunk_bytes=choice.chunk_bytes,
        counts=counts,
    ).program(numel)


def verify(choice: CollectiveChoice) -> None:
    """Raise unless the trees compute the operation for data of every size.

    Each tree is checked for the halves that the operation needs and for reaching every rank.
    Programs of several sizes are then interpreted: enough elements for every tree to carry some, so
    few that most trees carry none, and several chunks per tree.
    """
    for number, forest in enumerate(choice.forests):
        try:
            _check_forest(forest, choice.operation)
            for numel, counts, chunk in _sizes(forest, choice.operation):
                messages = lowered(
                    forest, choice.operation, numel, item_bytes=1, chunk_bytes=chunk, counts=counts
                )
                check(messages.program(numel))
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
                raise ValueError(f"tree {number} has an {half} half, which {operation} cannot use")
            if needed and len(parents) != forest.num_ranks:
                raise ValueError(
                    f"tree {number} of weight {tree.weight:g} has no {half} half, which "
                    f"{operation} needs"
                )
    total = math.fsum(tree.weight for tree in forest.trees)
    if not abs(total - 1) <= WEIGHT_SLACK:
        raise ValueError(f"the weights of the trees add up to {total:.6g}, not to 1")
    missing = set(range(forest.num_ranks)) - {tree.root for tree in forest.trees}
    if operation != "all_reduce" and missing:
        raise ValueError(f"no tree has the root {min(missing)}, so none carries its elements")


def _sizes(forest: Forest, operation: str) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield the elements, the counts of each rank, and the chunk bytes of programs to check."""
    ranks = forest.num_ranks
    smallest = min(tree.weight for tree in forest.trees)
    enough = math.ceil(2 / smallest) + 1  # for every tree to carry some
    chunked = min(enough, MAX_CHECKED)
    if operation == "all_reduce":
        for numel in (1, ranks - 1, 7 * ranks, enough):
            yield numel, (), numel
        yield chunked, (), max(1, chunked // (3 * len(forest.trees)))
        return
    for count in (1, 7, enough):
        yield ranks * count, (count,) * ranks, ranks * count
    uneven = tuple(rank % 3 * (enough + rank) for rank in range(ranks))  # zero for some ranks
    if sum(uneven):
        yield sum(uneven), uneven, sum(uneven)
    yield ranks * chunked, (chunked,) * ranks, max(1, chunked // 3)


def chunk_of(num_bytes: int, chunk_bytes: int) -> int:
    """Return the chunk size in bytes.

    Filling the pipeline costs a chunk per hop and each chunk costs a message, so the best size
    grows with the square root of the data. A program has at most `MAX_CHUNKS` chunks.
    """
    share = math.sqrt(min(1.0, num_bytes / FULL_CHUNK_BYTES))
    smaller = max(round(chunk_bytes * share), min(chunk_bytes, SMALLEST_CHUNK_BYTES))
    return max(1, smaller, -(-num_bytes // MAX_CHUNKS))


def _network(forest: Forest) -> Network:
    """Return the edges of a forest as a `Network`."""
    edges = forest.edges
    return Network(
        names=tuple(str(rank) for rank in range(forest.num_ranks)),
        resources=tuple(str(i) for i in range(len(forest.capacity))),
        capacity=np.array(forest.capacity, dtype=np.float64),
        source=np.array([edge.source for edge in edges], dtype=np.int64),
        target=np.array([edge.target for edge in edges], dtype=np.int64),
        uses=padded([edge.uses for edge in edges]),
        latency_s=np.array([edge.latency_s for edge in edges], dtype=np.float64),
        message_s=forest.message_s,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
