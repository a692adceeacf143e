"""How many ranks, micro-batches and rows a twin has, and what sizes it gets.

Enters: a `Graph` and a `Plan`. Leaves: `Counts`. What divides over ranks or micro-batches in the
original does so in the twin, and what does not, does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.cluster import Mesh
from shardwise.equivalence.twin.schedule import few_microbatches
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.plans.resolve import input_cuts
from shardwise.sharding.placements import Shard
from shardwise.shares import Shares, grain

SMALL = 8  # sizes up to this are kept
FEW = 2  # rows where there are fewer rows than ranks
MOST_BATCH_RANKS = 3  # along an axis
MOST_PARAMETER_RANKS = (8, 4, 2)  # the first of these that is within `MOST_RANKS`
MOST_RANKS = 32  # of all stages together

Pairs = Sequence[tuple[int, int]]  # what ranks cut exactly, and what that becomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Meshes and micro-batches, and what each of them becomes."""

    rows: int
    few_rows: int | None  # what `rows` becomes where ranks outnumber them
    meshes: Mapping[Mesh, Mesh]
    num_microbatches: int
    ranks: Pairs
    shares: Pairs  # over which rows are cut

    @staticmethod
    def of(graph: Graph, plan: Plan) -> Counts:
        """Few of everything."""
        rows, times = input_rows(graph, plan), few_microbatches(plan)
        each = max(1, rows // plan.num_microbatches) if plan.splits_time else rows
        meshes = _small_meshes(plan, rows)
        time = [(plan.num_microbatches, times)] if plan.splits_time else []
        alike = [_pairs(a, b) for a, b in meshes.items()]
        batch = [_pairs(a, b, plan) for a, b in meshes.items()]
        most = max((n for mesh in meshes for n in _batch_ranks(mesh, plan)), default=1)
        few = most > each > 1 + (not time)
        return Counts(
            rows=rows,
            few_rows=min(each, FEW) * (times if time else 1) if few else None,
            meshes=meshes,
            num_microbatches=times,
            ranks=_with_products(alike),
            shares=_with_products([[*time, *p] for p in (batch if plan.is_scheduled else alike)]),
        )

    def size(self, size: int, above: int) -> int:
        """What a size becomes; larger than `above`."""
        if size != self.rows:
            return small_size(size, above, self.ranks)
        if self.few_rows is not None:
            return self.few_rows  # the twin's batch axes have one rank more
        return small_size(size, above, self.shares)


def input_rows(graph: Graph, plan: Plan) -> int:
    """Return the samples of a batch: the least size of all inputs along the dim that batch axes
    cut.
    """
    cuts = input_cuts(graph, plan) or {}
    shapes = [(graph.values[i.value].shape, cuts.get(i.value)) for i in graph.inputs]
    sizes = [shape[cut.dim] for shape, cut in shapes if isinstance(cut, Shard)]
    sizes = sizes or [shape[0] for shape, _ in shapes if shape]
    return min(sizes, default=1)


def _small_meshes(plan: Plan, rows: int) -> dict[Mesh, Mesh]:
    """Fewer ranks; a batch axis over which rows do not divide has 3, for even and odd rows."""
    groups = {stage.ranks: stage.mesh for stage in plan.all_stages}
    shares = plan.num_microbatches if plan.splits_time else 1
    found: dict[Mesh, Mesh] = {}
    for most in MOST_PARAMETER_RANKS:
        for mesh in groups.values():
            axes = []
            for axis, ranks in mesh.axes:
                batch = plan.roles[axis] == "batch"
                uneven = rows % (grain(ranks) * shares) != 0
                fewer = (FEW + 1 if uneven else FEW) if batch else most
                limit = MOST_BATCH_RANKS if batch else most
                axes.append((axis, _few(ranks, fewer if ranks > limit else int(ranks))))
            found[mesh] = Mesh(axes=tuple(axes))
        if not plan.stages or sum(found[mesh].size for mesh in groups.values()) <= MOST_RANKS:
            break
    return found


def _few(ranks: int, count: int) -> int:
    """`count` of these ranks; of unequal shares the largest and least, as small numbers.

    >>> _few(8, 2), _few(Shares(700, 350, 349), 3), _few(Shares(5, 4, 3, 2, 2), 3)
    (2, Shares(3, 2, 1), Shares(3, 2, 1))
    """
    if not isinstance(ranks, Shares):
        return count
    if grain(ranks) <= SMALL and count == int(ranks):
        return ranks
    chosen = sorted(range(ranks), key=lambda i: ranks.weights[i])
    kept = sorted(chosen[i * (ranks - 1) // max(count - 1, 1)] for i in range(count))
    weights = [ranks.weights[i] for i in kept]
    order = sorted({0, *weights})
    return Shares.of([order.index(weight) for weight in weights])


def _batch_ranks(mesh: Mesh, plan: Plan) -> list[int]:
    return [mesh.axis_size(axis) for axis in mesh.names if plan.roles[axis] == "batch"]


def _pairs(mesh: Mesh, smaller: Mesh, plan: Plan | None = None) -> list[tuple[int, int]]:
    """Return the axes before and after; of a plan those which cut the batch."""
    return [
        (grain(old), grain(new))
        for (axis, old), (_, new) in zip(mesh.axes, smaller.axes, strict=True)
        if plan is None or plan.roles[axis] == "batch"
    ]


def _with_products(several: Iterable[Pairs]) -> Pairs:
    """Return the pairs of every mesh, and of all ranks of each."""
    found: dict[tuple[int, int], None] = {}
    for pairs in several:
        cut = [(old, new) for old, new in pairs if old > 1]
        found |= dict.fromkeys([*cut, (prod(a for a, _ in cut), prod(b for _, b in cut))])
    return tuple(found)


def small_size(size: int, above: int, pairs: Pairs) -> int:
    """Return the least size that divides over the new ranks as the old one does over the
    old ones.
    """
    if size <= SMALL:
        return size
    least = max([above + 1, SMALL, *(new for old, new in pairs if size >= old)])
    most = max((new for _, new in pairs), default=1)
    for wanted in (pairs, [p for p in pairs if p[0] == p[1]], []):
        for n in range(least, least + 4 * most):
            alike = all((size % old == 0) == (n % new == 0) for old, new in wanted)
            if alike and n % 2 == size % 2:
                return n
    return size
