"""A published row's model with its layouts and execution config, ready to be timed.

Two layers are captured and stand for all; the workload of a micro-batch is linear in its rows, so
that one capture serves every batch size.

Context parallelism is a finer split of the batch: with balanced rings a rank computes, for every
layer, what a fraction 1/cp of the rows costs; its exchange of keys hides behind attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardwise.calibration.float8 import Float8
from shardwise.calibration.models import Shape, build, shape_of
from shardwise.calibration.rows import Row
from shardwise.cluster import Cluster, Mesh
from shardwise.frontend import capture
from shardwise.ir import Graph
from shardwise.planner import strategies
from shardwise.plans import Precision, resolve
from shardwise.sharding.factors import Facts, analyze
from shardwise.simulation import ExecutionConfig, FoldedGraph, Group, WorkloadModel
from shardwise.simulation.work import FORWARD, Workload

CAPTURED_LAYERS = 2
# Sizes of a micro-batch between which work is linear: primes, so that no product of them with a
# sequence length is one of the model's own dims.
ROWS = (11, 13)
# Norms and sums between the products of a block: where sequence parallelism cuts the sequence.
_BETWEEN = ("layers.*norm.layer_norm_0", "layers.*.add_*", "norm.layer_norm_0")
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What an `Evaluator` needs of a row."""

    fold: FoldedGraph
    works: WorkloadModel
    setting: ExecutionConfig


class RowWorks(WorkloadModel):
    """The work of a few layers for micro-batches of any size, even of a part of a row."""

    keeps_shards = False  # of what is gathered for products, as Megatron does with cut sequences
    float8: Float8 | None = None  # how products change

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the work of `rows`; exact sizes are on the line, too."""
        low, high = (self._lowered(self.rows // each) for each in ROWS)
        work = low.between(high, rows)
        if self.keeps_shards:
            work = self._in_shards(work)
        return self.float8.change(work) if self.float8 is not None else work

    def _in_shards(self, work: Workload) -> Workload:
        """With operands gathered again in backward, behind its products, instead of kept."""
        ranks = {a.axis: a.ranks for a in self.assignments}
        names = ("saved", "saved_selective", "held", "held_selective")
        kept = {name: getattr(work, name).copy() for name in names}
        for talk in work.collectives:
            if talk.op == "all_gather" and talk.phase == FORWARD and "dp" not in talk.axes:
                rest = talk.num_bytes * (1 - 1 / math.prod(ranks[a] for a in talk.axes))
                for array in kept.values():
                    array[talk.node] -= min(rest, array[talk.node])
        return replace(work, **kept)


class Pieces(WorkloadModel):
    """The same for a model of many layers and a batch of `rows`, counted in parts of a row."""

    def __init__(self, few: WorkloadModel, fold: FoldedGraph, *, rows: int, parts: int) -> None:
        self.few, self.fold, self.parts = few, fold, parts
        self.batch, self.rows = few.batch, rows * parts

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the work of `rows` parts of a row."""
        return self.few.at(rows / self.parts)


def prepare(row: Row, *, num_microbatches: int) -> Prepared:
    """Return a step of the row's model with so many of its micro-batches."""
    shape = replace(shape_of(row), layers=CAPTURED_LAYERS)
    few, axes = _works(shape, row.seq_len, row.dtype, row.tp, _cuts_sequence(row, shape))
    fold = FoldedGraph.repeated(few.fold.graph, row.layers)
    works = Pieces(few, fold, rows=num_microbatches * row.dp * row.micro_batch, parts=row.cp)
    return Prepared(fold=fold, works=works, setting=_setting(row, fold, axes, num_microbatches))


@lru_cache(maxsize=256)
def _works(
    shape: Shape, seq_len: int, dtype: str, tp: int, cuts_sequence: bool
) -> tuple[WorkloadModel, tuple[tuple[str, int], ...]]:
    """Return the work of a few layers, and the mesh axes that tensor parallelism takes."""
    float8 = dtype == "float8"
    graph, facts = _graph(shape, seq_len, "bfloat16" if float8 else dtype)
    cluster = Cluster.local(ROWS[0] * tp)
    plan = strategies.hybrid(graph, cluster, dp=ROWS[0], tp=tp)
    if cuts_sequence:
        axes = [axis for axis in plan.mesh.names if axis != "dp"]
        plan = plan.with_(nodes={place: dict.fromkeys(axes, "cut d1") for place in _BETWEEN})
    solved = resolve(graph, plan, facts)
    fold = FoldedGraph.repeated(graph, shape.layers)
    works = RowWorks(fold, facts, solved.assignments, dict(plan.roles))
    works.keeps_shards = cuts_sequence
    if float8:
        works.float8 = Float8(graph, fold.blocks, shape.hidden if cuts_sequence else None)
    return works, tuple((name, int(n)) for name, n in plan.mesh.axes if name != "dp")


@lru_cache(maxsize=64)
def _graph(shape: Shape, seq_len: int, dtype: str) -> tuple[Graph, Facts]:
    model, batch = build(
        shape, batch=ROWS[0] * ROWS[1], seq_len=seq_len, dtype=getattr(torch, dtype)
    )
    graph = capture(model, batch)
    return graph, analyze(graph)


def _cuts_sequence(row: Row, shape: Shape) -> bool:
    """Whether tensor-parallel ranks share what lies between products, which no column says.

    Sequence parallelism came with selective recomputation (Korthikanti et al., 2022) and is part of
    every stack that computes in bfloat16 since.
    """
    modern = shape.fused or row.recompute == "selective"
    return row.tp > 1 and modern and row.seq_len % row.tp == 0


def _setting(
    row: Row, fold: FoldedGraph, axes: tuple[tuple[str, int], ...], count: int
) -> ExecutionConfig:
    mesh = Mesh(axes=(("dp", row.dp * row.cp), *axes))
    size = mesh.size
    groups = tuple(
        Group(mesh=mesh, ranks=tuple(range(at * size, (at + 1) * size))) for at in range(row.pp)
    )
    stages = row.pp * row.vpp
    return ExecutionConfig(
        groups=groups,
        cuts=_cuts(fold, row.layers, stages),
        placement=tuple(stage % row.pp for stage in range(stages)),
        num_microbatches=count,
        zero=_zero(row),
        recompute=row.recompute,
        precision=_precision(row),
        prefetch=row.sharding.prefetch,
        whole_units=True,
    )


def _precision(row: Row) -> Precision:
    """Float32 main parameters and states; gradients stay in the type they are computed in."""
    wide = Precision.of(_PRECISIONS[row.compute_dtype])
    return replace(wide, gradients=row.compute_dtype, reduce=row.compute_dtype)


def _zero(row: Row) -> int:
    """Return the level that communicates as the row's stack does.

    Shared optimizer states mean scattered gradients (the simulation's level 2; its level 1 sums
    them whole) unless only a part of the data-parallel ranks shares them.
    """
    if row.sharding.level == 1:
        return 0 if row.is_grouped else 2
    return row.sharding.level


def _cuts(fold: FoldedGraph, layers: int, stages: int) -> tuple[int, ...]:
    """Where stages of equally many layers begin; the last and first have one less where needed."""
    starts: dict[str, int] = {}
    for at, block in enumerate(fold.blocks):
        if block:
            starts.setdefault(block, at)
    counts = [layers // stages + 1] * stages
    order = [stages - 1, *range(stages - 1)]
    for stage in order[: stages * counts[0] - layers]:
        counts[stage] -= 1
    firsts = list(starts.values())
    cuts, before = [0], 0
    for have in counts[:-1]:
        before += have
        cuts.append(firsts[before])
    return tuple(cuts)
