"""Choose the ranks, micro-batches, sizes, weights and inputs of a twin.

Sizes that are divisible by ranks or micro-batches in the original are divisible in the twin, and
others are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from shardwise.cluster import Mesh
from shardwise.equivalence.trial import IGNORED
from shardwise.equivalence.twin.sizes import Key, crop
from shardwise.ir import Graph, Node
from shardwise.ir.operators import bind, index_ranges, indexed_dim, op_name
from shardwise.plans import Plan, Stage
from shardwise.plans.resolve import input_shards
from shardwise.schedules import Action, default_schedule, make
from shardwise.sharding.placements import Shard
from shardwise.shares import AxisSize, Shares, grain, num_ranks

# A schedule that is a list of actions keeps its order, without the actions of dropped
# micro-batches; a named schedule is generated again for the new counts.


MIN_MICROBATCHES = 4
MAX_STAGES = 16


def fewer_stages(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """Merge stages into the ones before them until about `MAX_STAGES` are left."""
    stages, groups = plan.all_stages, len(plan.groups)
    stages_per_group = max(1, len(stages) // groups)
    num_groups = max(2, MAX_STAGES // stages_per_group)
    if groups <= num_groups:
        return plan, ()
    count = stages_per_group * num_groups
    remaining = [stages[index * len(stages) // count] for index in range(count)]
    name = plan.schedule if isinstance(plan.schedule, str) else ""
    name = name or default_schedule(count, num_groups)
    placement = make(
        name, num_groups=num_groups, num_microbatches=plan.num_microbatches, num_stages=count
    ).placement
    meshes = [remaining[placement.index(group)].mesh for group in range(num_groups)]
    ranks = _numbered([mesh.size for mesh in meshes])
    fewer = tuple(
        Stage(first=stage.first, ranks=ranks[group], mesh=meshes[group])
        for stage, group in zip(remaining, placement, strict=True)
    )
    notes = [f"stages: {len(stages)} -> {count}, on {groups} -> {num_groups} groups of ranks"]
    if not isinstance(plan.schedule, str):
        notes.append(f"schedule: the list of actions -> {name}")
    return plan.with_(stages=fewer, schedule=name, mesh=fewer[0].mesh), tuple(notes)


def few_microbatches(plan: Plan) -> int:
    """Return a number of micro-batches with which every group alternates forward and backward."""
    groups = len(plan.groups)
    enough = groups + 1
    if len(plan.all_stages) > groups > 1:  # virtual stages take turns
        enough = 2 * groups + (plan.num_microbatches % groups != 0)
    return min(plan.num_microbatches, max(enough, MIN_MICROBATCHES))


def on_meshes(plan: Plan, meshes: Mapping[Mesh, Mesh], count: int) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan on smaller meshes with `count` micro-batches, and notes on the changes."""
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


def _numbered(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return consecutive ranks for groups of these sizes."""
    ends = list(accumulate(sizes))
    return [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


# ------------------------------------------------------------ sizes
SMALL = 8  # smaller sizes stay the same
FEW = 2  # rows if there are fewer rows than ranks
MAX_BATCH_RANKS = 3  # along an axis
MAX_PARAMETER_RANKS = (8, 4, 2)  # along an axis: the first that respects `MAX_RANKS`
MAX_RANKS = 32  # of all stages together

Pairs = Sequence[tuple[int, int]]  # divisors in the original and in the twin


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The meshes, micro-batches and rows of the twin."""

    rows: int  # of the original
    few_rows: int | None  # of the twin, if the original has more ranks than rows
    meshes: Mapping[Mesh, Mesh]  # from the original to the twin
    num_microbatches: int
    ranks: Pairs
    shares: Pairs  # into which rows are split

    @staticmethod
    def of(graph: Graph, plan: Plan) -> Counts:
        """Choose small counts for the twin of a plan."""
        rows, count = input_rows(graph, plan), few_microbatches(plan)
        local_rows = max(1, rows // plan.num_microbatches) if plan.splits_time else rows
        meshes = _small_meshes(plan, rows)
        time = [(plan.num_microbatches, count)] if plan.splits_time else []
        ranks = [_pairs(a, b) for a, b in meshes.items()]
        batch = [_pairs(a, b, plan) for a, b in meshes.items()]
        batch_ranks = [
            mesh.axis_size(axis)
            for mesh in meshes
            for axis in mesh.names
            if plan.roles[axis] == "batch"
        ]
        few = max(batch_ranks, default=1) > local_rows > 1 + (not time)
        return Counts(
            rows=rows,
            few_rows=min(local_rows, FEW) * (count if time else 1) if few else None,
            meshes=meshes,
            num_microbatches=count,
            ranks=_with_products(ranks),
            shares=_with_products([[*time, *p] for p in (batch if plan.is_scheduled else ranks)]),
        )

    def size(self, size: int, above: int) -> int:
        """Return the size in the twin, larger than `above`, of a size of the original."""
        if size != self.rows:
            return small_size(size, above, self.ranks)
        if self.few_rows is not None:
            return self.few_rows  # fewer than the ranks of the twin's batch axes
        return small_size(size, above, self.shares)


def input_rows(graph: Graph, plan: Plan) -> int:
    """Return the rows of a batch: the smallest size along the dims that batch axes shard."""
    cuts = input_shards(graph, plan) or {}
    shapes = [(graph.values[i.value].shape, cuts.get(i.value)) for i in graph.inputs]
    sizes = [shape[cut.dim] for shape, cut in shapes if isinstance(cut, Shard)]
    sizes = sizes or [shape[0] for shape, _ in shapes if shape]
    return min(sizes, default=1)


def _small_meshes(plan: Plan, rows: int) -> dict[Mesh, Mesh]:
    """Return a smaller mesh for each mesh of the plan.

    A batch axis that does not divide the rows gets 3 ranks, which can be uneven for any parity.
    """
    groups = {stage.ranks: stage.mesh for stage in plan.all_stages}
    shares = plan.num_microbatches if plan.splits_time else 1
    meshes: dict[Mesh, Mesh] = {}
    for max_ranks in MAX_PARAMETER_RANKS:
        for mesh in groups.values():
            axes = []
            for axis, ranks in mesh.axes:
                is_batch = plan.roles[axis] == "batch"
                is_uneven = rows % (grain(ranks) * shares) != 0
                fewer = (FEW + 1 if is_uneven else FEW) if is_batch else max_ranks
                limit = MAX_BATCH_RANKS if is_batch else max_ranks
                count = num_ranks(ranks)
                axes.append((axis, _few(ranks, fewer if count > limit else count)))
            meshes[mesh] = Mesh(axes=tuple(axes))
        if not plan.stages or sum(meshes[mesh].size for mesh in groups.values()) <= MAX_RANKS:
            break
    return meshes


def _few(ranks: AxisSize, count: int) -> AxisSize:
    """Return `count` ranks; of unequal shares, the extremes and those between, as small numbers.

    >>> _few(8, 2), _few(Shares(700, 350, 349), 3), _few(Shares(5, 4, 3, 2, 2), 3)
    (2, Shares(3, 2, 1), Shares(3, 2, 1))
    """
    if not isinstance(ranks, Shares):
        return count
    if grain(ranks) <= SMALL and count == len(ranks):
        return ranks
    by_weight = sorted(range(len(ranks)), key=lambda i: ranks.weights[i])
    chosen = sorted(by_weight[i * (len(ranks) - 1) // max(count - 1, 1)] for i in range(count))
    weights = [ranks.weights[i] for i in chosen]
    order = sorted({0, *weights})
    return Shares.of([order.index(weight) for weight in weights])


def _pairs(mesh: Mesh, smaller: Mesh, plan: Plan | None = None) -> list[tuple[int, int]]:
    """Return the axis sizes before and after, only of the batch axes if a plan is given."""
    return [
        (grain(old), grain(new))
        for (axis, old), (_, new) in zip(mesh.axes, smaller.axes, strict=True)
        if plan is None or plan.roles[axis] == "batch"
    ]


def _with_products(several: Iterable[Pairs]) -> Pairs:
    """Return the pairs of every mesh and their products."""
    divisors: dict[tuple[int, int], None] = {}
    for pairs in several:
        split = [(old, new) for old, new in pairs if old > 1]
        divisors |= dict.fromkeys([*split, (prod(a for a, _ in split), prod(b for _, b in split))])
    return tuple(divisors)


def small_size(size: int, above: int, pairs: Pairs) -> int:
    """Return the smallest size that the new ranks divide exactly if the old ones divide `size`."""
    if size <= SMALL:
        return size
    minimum = max([above + 1, SMALL, *(new for old, new in pairs if size >= old)])
    stop = minimum + 4 * max((new for _, new in pairs), default=1)
    for required in (pairs, [p for p in pairs if p[0] == p[1]], []):
        for n in range(minimum, stop):
            is_equal = all((size % old == 0) == (n % new == 0) for old, new in required)
            if is_equal and n % 2 == size % 2:
                return n
    return size


# ------------------------------------------------------------ weights and inputs
def make_state(graph: Graph, real: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draw small nonzero parameters; crop buffers from real ones if there are any."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for parameter in graph.parameters:
        kind = graph.values[parameter.value]
        drawn = torch.randn(kind.shape, generator=generator, dtype=torch.float64)
        wide = len(kind.shape) > 1
        state[parameter.name] = drawn / kind.shape[-1] ** 0.5 if wide else 1 + drawn / 10
    for buffer in graph.buffers:
        kind = graph.values[buffer.value]
        tensor = real.get(buffer.name)
        if tensor is not None and not tensor.is_meta:
            state[buffer.name] = crop(tensor.detach().cpu(), kind.shape).to(kind.dtype)
        else:
            state[buffer.name] = _drawn_buffer(kind.shape, kind.dtype, generator)
    return state


def _drawn_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).add(0.5).to(dtype)
    if dtype == torch.bool:
        mask = torch.ones(shape, dtype=dtype)
        return mask.tril() if len(shape) > 1 else mask
    rows = torch.arange(shape[-1]) if shape else torch.tensor(0)
    return rows.expand(shape).clone().to(dtype)


def make_batches(
    graph: Graph, plan: Plan, real: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the inputs of all micro-batches together and of each, if they are separate batches."""
    cuts = input_shards(graph, plan) or {}
    dims = {i.name: cuts[i.value].dim for i in graph.inputs if isinstance(cuts.get(i.value), Shard)}  # type: ignore[union-attr]
    batches = []
    for k in range(plan.num_microbatches):
        parts = dict(real)
        for name, dim in dims.items():
            rows = real[name].shape[dim] // plan.num_microbatches
            parts[name] = real[name].narrow(dim, k * rows, rows)
        batches.append(make_inputs(graph, parts, seed=1 + k))
    full = {
        name: torch.cat([b[name] for b in batches], dims[name]) if name in dims else tensor
        for name, tensor in batches[0].items()
    }
    return full, [{n: b[n] if n in dims else full[n] for n in b} for b in batches]


def make_inputs(
    graph: Graph, real: Mapping[str, torch.Tensor], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Return inputs in the shapes of the twin, with indices in range."""
    generator = torch.Generator().manual_seed(seed)
    result: dict[str, torch.Tensor] = {}
    for source in graph.inputs:
        kind, tensor = graph.values[source.value], real[source.name]
        bounds = list(index_bounds(graph, source.value))
        if not tensor.is_meta:
            data = crop(tensor.detach().cpu(), kind.shape).to(kind.dtype)
            if bounds and not kind.dtype.is_floating_point:
                data = torch.where(data >= 0, data % min(bounds), data)
        elif kind.dtype.is_floating_point:
            data = torch.randn(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype)
        elif bounds and kind.dtype != torch.bool:
            data = torch.randint(min(bounds), kind.shape, generator=generator, dtype=kind.dtype)
            if ignores_some(graph, source.value) and data.dim() > 1:
                for row in range(1, data.shape[0]):  # rows with different numbers of targets
                    data[row, : min(row, data.shape[1] - 1)] = IGNORED
        else:
            data = torch.ones(kind.shape, dtype=kind.dtype)
        result[source.name] = data
    return result


def _uses(graph: Graph, value: str) -> Iterator[tuple[Node, str]]:
    """Yield the nodes that use an integer value, or values of its dtype derived from it."""
    names = {value}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            if name not in names:
                continue
            yield node, name
            dtype = graph.values[value].dtype
            names |= {output for output in node.outputs if graph.values[output].dtype == dtype}


def index_bounds(graph: Graph, value: str) -> Iterator[int]:
    """Yield the sizes of the dims that a value indexes."""
    for node, name in _uses(graph, value):
        yield from (size for used, _, size, _ in index_ranges(graph, node) if used == name)


def ignores_some(graph: Graph, value: str) -> bool:
    """Return whether a value has targets for a loss that ignores some of them."""
    return any(
        "cross_entropy" in node.op and bind(node).get("ignore_index", IGNORED) == IGNORED
        for node, _ in _uses(graph, value)
    )


# Operators that compute new indices, and operators that only rearrange them.
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
    """Yield the dims of tables that computed indices refer to."""
    producers = graph.producers
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            indexed = indexed_dim(node, name)
            if indexed is None:
                continue
            while name in producers and op_name(producers[name]) in SHAPES:
                name = producers[name].inputs[0]
            if name in producers and op_name(producers[name]) in ARITHMETIC:
                table, dim = indexed
                yield ("dim", table, str(dim % max(1, len(graph.values[table].shape))))
