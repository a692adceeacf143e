"""How many ranks, micro-batches and rows a twin has, and what sizes it gets.

What divides over ranks or micro-batches in the
original does so in the twin, and what does not, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from shardwise.cluster import Mesh
from shardwise.equivalence.twin.sizes import Key, crop
from shardwise.ir import Graph, Node
from shardwise.ir.schema import bind, indexed_dim, op_name
from shardwise.plans import Plan, Stage
from shardwise.plans.resolve import input_cuts
from shardwise.schedules import Action, default_schedule, make
from shardwise.sharding.placements import Shard
from shardwise.shares import Shares, grain

# Fewer stages, ranks and micro-batches, in the same order of work.
#
# A listed schedule keeps its list, without the micro-batches that are left out; a schedule by name
# is made again for the new counts.


KEPT_MICROBATCHES = 4
MOST_STAGES = 16


def fewer_stages(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with about `MOST_STAGES` stages at most: some are part of the one before
    them.
    """
    stages, groups = plan.all_stages, len(plan.groups)
    each = max(1, len(stages) // groups)
    most = max(2, MOST_STAGES // each)
    if groups <= most:
        return plan, ()
    count = each * most
    kept = [stages[index * len(stages) // count] for index in range(count)]
    name = plan.schedule if isinstance(plan.schedule, str) else ""
    name = name or default_schedule(count, most)
    made = make(name, num_groups=most, num_microbatches=plan.num_microbatches, num_stages=count)
    owners = [kept[made.placement.index(group)].mesh for group in range(most)]
    ranks = _numbered([mesh.size for mesh in owners])
    fewer = tuple(
        Stage(first=stage.first, ranks=ranks[group], mesh=owners[group])
        for stage, group in zip(kept, made.placement, strict=True)
    )
    notes = [f"stages: {len(stages)} -> {count}, on {groups} -> {most} groups of ranks"]
    if not isinstance(plan.schedule, str):
        notes.append(f"schedule: the list of actions -> {name}")
    return plan.with_(stages=fewer, schedule=name, mesh=fewer[0].mesh), tuple(notes)


def few_microbatches(plan: Plan) -> int:
    """As many micro-batches as still bring every group to forwards and backwards in turn."""
    groups = len(plan.groups)
    if plan.num_microbatches <= KEPT_MICROBATCHES:
        return plan.num_microbatches
    rounds = len(plan.all_stages) > groups > 1  # stages of one group take turns
    enough = groups + 1
    if rounds:
        enough = 2 * groups + (plan.num_microbatches % groups != 0)
    return min(plan.num_microbatches, max(enough, KEPT_MICROBATCHES))


def on_meshes(plan: Plan, meshes: Mapping[Mesh, Mesh], count: int) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan on smaller meshes, in `count` micro-batches, and what that changed."""
    notes = []
    for old, new in meshes.items():
        for (axis, before), (_, after) in zip(old.axes, new.axes, strict=True):
            if before != after:
                notes.append(f"mesh axis {axis}: {before} ranks -> {after}")
    schedule = plan.schedule
    if count != plan.num_microbatches:
        notes.append(f"micro-batches: {plan.num_microbatches} -> {count}")
        if not isinstance(schedule, str):
            schedule = tuple(
                tuple(text for text in row if Action.parse(text).microbatch < count)
                for row in schedule
            )
            notes.append(f"schedule: the listed actions of micro-batches 0 to {count - 1}")
    groups = sorted(plan.groups)
    sizes = {stage.ranks: meshes[stage.mesh].size for stage in plan.stages}
    ranks = dict(zip(groups, _numbered([sizes.get(g, 0) for g in groups]), strict=True))
    stages = tuple(
        Stage(first=stage.first, ranks=ranks[stage.ranks], mesh=meshes[stage.mesh])
        for stage in plan.stages
    )
    smaller = plan.with_(
        mesh=meshes[plan.mesh], stages=stages, num_microbatches=count, schedule=schedule
    )
    return smaller, tuple(dict.fromkeys(notes))


def begin_at(plan: Plan, place: Callable[[str], str]) -> Plan:
    """Return the plan whose stages begin where `place` says."""
    stages = (
        Stage(first=stage.first and place(stage.first), ranks=stage.ranks, mesh=stage.mesh)
        for stage in plan.stages
    )
    return plan.with_(stages=tuple(stages))


def _numbered(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Ranks in order, for groups of these sizes."""
    found, start = [], 0
    for size in sizes:
        found.append(tuple(range(start, start + size)))
        start += size
    return found


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


# Weights and inputs for a twin: cut from real ones, or drawn.


IGNORED = -100


def make_state(graph: Graph, real: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters are drawn: small, none of them zero. Buffers are cut from real ones."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for parameter in graph.parameters:
        kind = graph.values[parameter.value]
        drawn = torch.randn(kind.shape, generator=generator, dtype=torch.float64)
        wide = len(kind.shape) > 1
        state[parameter.name] = drawn / kind.shape[-1] ** 0.5 if wide else 1 + drawn / 10
    for buffer in graph.buffers:
        kind = graph.values[buffer.value]
        given = real.get(buffer.name)
        if given is not None and not given.is_meta:
            state[buffer.name] = crop(given.detach().cpu(), kind.shape).to(kind.dtype)
        else:
            state[buffer.name] = _drawn_buffer(kind.shape, kind.dtype, generator)
    return state


def _drawn_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).add(0.5).to(dtype)
    if dtype == torch.bool:
        return (
            torch.ones(shape, dtype=dtype).tril()
            if len(shape) > 1
            else torch.ones(shape, dtype=dtype)
        )
    rows = torch.arange(shape[-1]) if shape else torch.tensor(0)
    return rows.expand(shape).clone().to(dtype)


def make_batches(
    graph: Graph, plan: Plan, real: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Inputs of a batch whose micro-batches are batches of their own, and those of each."""
    cuts = input_cuts(graph, plan) or {}
    dims = {i.name: cuts[i.value].dim for i in graph.inputs if isinstance(cuts.get(i.value), Shard)}  # type: ignore[union-attr]
    batches = []
    for k in range(plan.num_microbatches):
        parts = dict(real)
        for name, dim in dims.items():
            rows = real[name].shape[dim] // plan.num_microbatches
            parts[name] = real[name].narrow(dim, k * rows, rows)
        batches.append(make_inputs(graph, parts, seed=1 + k))
    whole = {
        name: torch.cat([b[name] for b in batches], dims[name]) if name in dims else given
        for name, given in batches[0].items()
    }
    return whole, [{n: b[n] if n in dims else whole[n] for n in b} for b in batches]


def make_inputs(
    graph: Graph, real: Mapping[str, torch.Tensor], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Inputs of the twin's shapes; integers are kept inside what they index."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for source in graph.inputs:
        kind, given = graph.values[source.value], real[source.name]
        bounds = list(index_bounds(graph, source.value))
        if not given.is_meta:
            data = crop(given.detach().cpu(), kind.shape).to(kind.dtype)
            if bounds and not kind.dtype.is_floating_point:
                data = torch.where(data >= 0, data % min(bounds), data)
        elif kind.dtype.is_floating_point:
            data = torch.randn(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype)
        elif bounds and kind.dtype != torch.bool:
            data = torch.randint(min(bounds), kind.shape, generator=generator, dtype=kind.dtype)
            if ignores_some(graph, source.value) and data.dim() > 1:
                for row in range(1, data.shape[0]):  # a ragged mean
                    data[row, : min(row, data.shape[1] - 1)] = IGNORED
        else:
            data = torch.ones(kind.shape, dtype=kind.dtype)
        found[source.name] = data
    return found


def _followed(graph: Graph, value: str) -> Iterator[tuple[Node, str]]:
    """Nodes that use an integer value, or what shape operators make of it."""
    names = {value}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            if name not in names:
                continue
            yield node, name
            kept = [o for o in node.outputs if graph.values[o].dtype == graph.values[value].dtype]
            names |= set(kept)


def index_bounds(graph: Graph, value: str) -> Iterator[int]:
    """Sizes of what a value indexes."""
    if graph.values[value].dtype.is_floating_point:
        return
    for node, name in _followed(graph, value):
        op, found = op_name(node), indexed_dim(node, name)
        if found is not None:
            table, dim = found
            yield graph.values[table].shape[dim]
        elif op in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"):
            scores = graph.values[bind(node)["self"].name].shape
            yield scores[1 if len(scores) > 1 else 0]
        elif op == "one_hot" and bind(node).get("num_classes", -1) > 0:
            yield bind(node)["num_classes"]


def ignores_some(graph: Graph, value: str) -> bool:
    """Whether a value holds classes of which a loss leaves some out."""
    return any(
        "cross_entropy" in node.op and bind(node).get("ignore_index", IGNORED) == IGNORED
        for node, _ in _followed(graph, value)
    )


# Which dims the integers of a graph index.


# What makes other numbers of indices, and what only arranges them.
ARITHMETIC = (
    *("add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "abs", "neg"),
    *("minimum", "maximum", "min", "max", "clamp", "clamp_min", "clamp_max"),
    *("where", "masked_fill", "bucketize", "cumsum", "sum"),
)
SHAPES = (
    *("view", "reshape", "flatten", "expand", "repeat", "unsqueeze", "squeeze"),
    *("transpose", "permute", "slice", "select"),
    *("to", "_to_copy", "clone", "contiguous", "detach", "alias"),
)


def computed_indices(graph: Graph) -> Iterator[Key]:
    """Dims of tables that are indexed by what is computed with constants."""
    producers = graph.producers
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            found = indexed_dim(node, name)
            while found is not None and name in producers and op_name(producers[name]) in SHAPES:
                name = producers[name].inputs[0]
            if found is not None and name in producers and op_name(producers[name]) in ARITHMETIC:
                table, dim = found
                yield ("dim", table, str(dim % max(1, len(graph.values[table].shape))))
