"""A row's model under a row's layout, ready to be timed.

Enters: a `Row`. Leaves: `Prepared`: the model as a `Fold`, what a rank does (`Works`), and the
`Setting` of its step. Two layers are captured and stand for all; the work of a micro-batch is
linear in its rows, so that one capture serves every batch size.

Context parallelism is a finer cut of the batch: with balanced rings a rank computes, for every
layer, what a fraction 1/cp of the rows costs; its exchange of keys hides behind attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardwise.calibration.models import Shape, build, shape_of
from shardwise.calibration.rows import Row
from shardwise.calibration.values import Unusable
from shardwise.cluster import Cluster, Mesh
from shardwise.frontend import capture
from shardwise.ir import Graph
from shardwise.planner import strategies
from shardwise.plans import Precision, resolve
from shardwise.sharding.factors import Facts, analyze
from shardwise.simulation import Fold, Group, Setting, Works
from shardwise.simulation.work import Work

CAPTURED_LAYERS = 2
# Sizes of a micro-batch between which work is linear: primes, so that no product of them with a
# sequence length is one of the model's own dims.
ROWS = (11, 13)
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What an `Evaluator` needs of a row."""

    fold: Fold
    works: Works
    setting: Setting


class RowWorks(Works):
    """The work of a few layers for micro-batches of any size, even of a part of a row."""

    def at(self, rows: float) -> Work:
        low, high = (self._lowered(self.rows // each) for each in ROWS)
        return low.between(high, rows)


class Pieces(Works):
    """The same for a model of many layers and a batch of `rows`, counted in parts of a row."""

    def __init__(self, few: Works, fold: Fold, *, rows: int, parts: int) -> None:
        self.few, self.fold, self.parts = few, fold, parts
        self.batch, self.rows = few.batch, rows * parts

    def at(self, rows: float) -> Work:
        return self.few.at(rows / self.parts)


def prepare(row: Row, *, microbatches: int) -> Prepared:
    """A step of the row's model with so many of its micro-batches."""
    if row.dtype not in _PRECISIONS:
        raise Unusable(f"precision {row.dtype} is not modelled; bf16, fp16 and fp32 are")
    shape = replace(shape_of(row), layers=CAPTURED_LAYERS)
    few, axes = _works(shape, row.seq_len, row.dtype, row.tp)
    fold = Fold.repeated(few.fold.graph, row.layers)
    works = Pieces(few, fold, rows=microbatches * row.dp * row.micro_batch, parts=row.cp)
    return Prepared(fold=fold, works=works, setting=_setting(row, fold, axes, microbatches))


@lru_cache(maxsize=256)
def _works(
    shape: Shape, seq_len: int, dtype: str, tp: int
) -> tuple[Works, tuple[tuple[str, int], ...]]:
    """The work of a few layers, and the mesh axes that tensor parallelism takes."""
    graph, facts = _graph(shape, seq_len, dtype)
    cluster = Cluster.local(ROWS[0] * tp)
    plan = strategies.hybrid(graph, cluster, dp=ROWS[0], tp=tp)
    solved = resolve(graph, plan, facts)
    fold = Fold.repeated(graph, shape.layers)
    works = RowWorks(fold, facts, solved.assignments, dict(plan.roles))
    return works, tuple((name, int(n)) for name, n in plan.mesh.axes if name != "dp")


@lru_cache(maxsize=64)
def _graph(shape: Shape, seq_len: int, dtype: str) -> tuple[Graph, Facts]:
    model, batch = build(
        shape, batch=ROWS[0] * ROWS[1], seq_len=seq_len, dtype=getattr(torch, dtype)
    )
    graph = capture(model, batch)
    return graph, analyze(graph)


def _setting(row: Row, fold: Fold, axes: tuple[tuple[str, int], ...], count: int) -> Setting:
    mesh = Mesh(axes=(("dp", row.dp * row.cp), *axes))
    size = mesh.size
    groups = tuple(
        Group(mesh=mesh, ranks=tuple(range(at * size, (at + 1) * size))) for at in range(row.pp)
    )
    stages = row.pp * row.vpp
    return Setting(
        groups=groups,
        cuts=_cuts(fold, row.layers, stages),
        placement=tuple(stage % row.pp for stage in range(stages)),
        microbatches=count,
        zero=_zero(row),
        recompute=row.recompute,
        precision=replace(Precision.of(_PRECISIONS[row.dtype]), reduce=row.dtype),
        prefetch=row.sharding.prefetch,
    )


def _zero(row: Row) -> int:
    """The level that communicates as the row's stack does.

    Shared optimizer states mean scattered gradients (the simulation's level 2; its level 1 sums
    them whole) unless only a part of the data-parallel ranks shares them.
    """
    if row.sharding.level == 1:
        return 0 if row.is_grouped else 2
    return row.sharding.level


def _cuts(fold: Fold, layers: int, stages: int) -> tuple[int, ...]:
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
