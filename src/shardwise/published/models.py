"""Build a decoder-only transformer on meta tensors from its dims.

`Shape` is the variant that has the row's number of parameters. Blocks are pre-norm with causal
attention: either the GPT variant (layer norm, GELU, biases, learned positions) or the Llama variant
(RMS norm, gated SiLU, rotary positions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.cluster import Cluster, Mesh
from shardwise.frontend import capture
from shardwise.ir import Graph
from shardwise.planner import strategies
from shardwise.plans import Precision, resolve
from shardwise.published.machines import Float8, read_device
from shardwise.published.rows import Row
from shardwise.sharding.factors import Facts, analyze
from shardwise.shares import num_ranks
from shardwise.simulation import ExecutionConfig, FoldedGraph, Group, WorkloadModel
from shardwise.simulation.workload import FORWARD, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dims of a transformer; `positions` is the length of a learned table, 0 for rotary."""

    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    gated: bool
    tied: bool
    fused: bool = True  # attention is one kernel

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def num_parameters(self) -> int:
        """The number of parameters.

        >>> gpt2 = Shape(layers=12, hidden=768, ffn_hidden=3072, heads=12, kv_heads=12,
        ...              vocab=50257, positions=1024, gated=False, tied=True)
        >>> gpt2.num_parameters
        124439808
        """
        h, f, kv = self.hidden, self.ffn_hidden, self.kv_heads * self.head_dim
        if self.gated:
            layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
            final_norm = h
        else:
            layer = 2 * h * (h + 1) + 2 * kv * (h + 1) + f * (h + 1) + h * (f + 1) + 4 * h
            final_norm = 2 * h
        embeddings = (1 if self.tied else 2) * self.vocab * h + self.positions * h
        return self.layers * layer + final_norm + embeddings


def shape_of(row: Row) -> Shape:
    """Return the variant whose number of parameters matches the row's, within its rounding.

    If several match, GPT variants are tied and Llama variants are not. Without a number, it is
    Llama unless the inner dim is 4 times the outer one.
    """
    variants = [
        Shape(
            layers=row.layers,
            hidden=row.hidden,
            ffn_hidden=row.ffn_hidden,
            heads=row.heads,
            kv_heads=row.kv_heads,
            vocab=row.vocab,
            positions=0 if gated else row.seq_len,
            gated=gated,
            tied=tied,
            fused=_is_fused(row),
        )
        for gated, tied in ((False, True), (True, False), (False, False), (True, True))
    ]
    if row.params_b is None:
        return variants[row.ffn_hidden != 4 * row.hidden]
    wanted, tolerance = row.params_b * 1e9, row.params_tolerance_b * 1e9
    errors = [max(abs(v.num_parameters - wanted) - tolerance, 0.0) for v in variants]
    return variants[errors.index(min(errors))]


def _is_fused(row: Row) -> bool:
    """Return whether attention is one kernel, which no column states.

    It is not if softmax is recomputed separately, nor in float16: V100 has no such kernel, and
    stacks that trained in float16 predate it (flash attention appeared in May 2022), unlike every
    device after A100.
    """
    old = row.dtype == "float16" or row.recompute == "selective"
    return not old or row.kv_heads != row.heads or not read_device(row.gpu).is_old


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        h, kv = shape.hidden, shape.kv_heads * shape.head_dim
        bias = not shape.gated
        self.attention_norm = _norm(shape)
        self.query = nn.Linear(h, h, bias=bias)
        self.key = nn.Linear(h, kv, bias=bias)
        self.value = nn.Linear(h, kv, bias=bias)
        self.projection = nn.Linear(h, h, bias=bias)
        self.perceptron_norm = _norm(shape)
        self.up = nn.Linear(h, shape.ffn_hidden, bias=bias)
        self.gate = nn.Linear(h, shape.ffn_hidden, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.ffn_hidden, h, bias=bias)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self._attend(self.attention_norm(x), rotation)
        y = self.perceptron_norm(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        result: Tensor = x + self.down(inner)
        return result

    def _attend(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        shape = self.shape
        query = self.query(x).unflatten(-1, (shape.heads, shape.head_dim)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (shape.kv_heads, shape.head_dim)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (shape.kv_heads, shape.head_dim)).transpose(1, 2)
        if rotation is not None:
            # Costs as much as a fused rotary kernel: one pass that saves nothing for backward.
            query, key = query * rotation, key * rotation
        if shape.fused:
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=shape.kv_heads != shape.heads
            )
        else:  # scaling and mask are part of the softmax kernel
            mixed = torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value
        result: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return result


class Transformer(nn.Module):
    """Maps token ids and labels to the mean loss; built on meta tensors, never run."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        table = nn.Parameter(torch.empty(shape.positions, shape.hidden))
        self.positions = table if shape.positions else None
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embedding(ids)
        rotation = None
        if self.positions is None:
            rotation = torch.ones(length, self.shape.head_dim, device=ids.device, dtype=x.dtype)
        else:
            x = x + self.positions[:length]
        for layer in self.layers:
            x = layer(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(
    shape: Shape, *, batch: int, seq_len: int, dtype: torch.dtype
) -> tuple[Transformer, dict[str, Tensor]]:
    """Return the module and a batch, on meta tensors."""
    with torch.device("meta"):
        model = Transformer(shape).to(dtype)
        ids = torch.zeros(batch, seq_len, dtype=torch.long)
    return model, {"ids": ids, "labels": torch.zeros_like(ids)}


def _norm(shape: Shape) -> nn.Module:
    """Return a layer norm without bias for RMS norm: the same memory traffic, and always fused."""
    return nn.LayerNorm(shape.hidden, bias=not shape.gated)


# Prepare the model and layout of a row for simulation.
#
# Two layers are captured and stand for all. The work of a micro-batch is linear in its rows, so one
# capture serves every batch size.
#
# Context parallelism is modelled as a finer split of the batch: with balanced rings a rank
# computes, in every layer, what a fraction 1/cp of the rows costs, and the exchange of keys hides
# behind attention.


CAPTURED_LAYERS = 2
# Sizes of a micro-batch between which work is linear: primes, so that no product of them with a
# sequence length is one of the model's own dims.
ROWS = (11, 13)
# Norms and sums between the products of a block, where sequence parallelism shards the sequence.
_BETWEEN = ("layers.*norm.layer_norm_0", "layers.*.add_*", "norm.layer_norm_0")
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The inputs of an `Evaluator` for one row."""

    fold: FoldedGraph
    workloads: WorkloadModel
    execution: ExecutionConfig


class RowWorks(WorkloadModel):
    """The work of a few layers for micro-batches of any size, even a fraction of a row."""

    keeps_shards = (
        False  # save shards of gathered operands, as Megatron does with sharded sequences
    )
    float8: Float8 | None = None  # how products change, if they are computed in float8

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the work of `rows`; exact sizes lie on the same line."""
        low, high = (self._lowered(self.rows // each) for each in ROWS)
        work = low.between(high, rows)
        if self.keeps_shards:
            work = self._in_shards(work)
        return self.float8.change(work) if self.float8 is not None else work

    def _in_shards(self, work: Workload) -> Workload:
        """Return the work with operands regathered in backward, behind its products, instead of
        saved.
        """
        ranks = {a.axis: a.ranks for a in self.assignments}
        names = ("saved", "saved_selective", "freed", "freed_selective")
        changed = {name: getattr(work, name).copy() for name in names}
        for talk in work.collectives:
            if talk.op == "all_gather" and talk.phase == FORWARD and "dp" not in talk.axes:
                rest = talk.num_bytes * (1 - 1 / math.prod(num_ranks(ranks[a]) for a in talk.axes))
                for array in changed.values():
                    array[talk.node] -= min(rest, array[talk.node])
        return replace(work, **changed)


class Pieces(WorkloadModel):
    """The work of a model of many layers and a batch of `rows`, counted in fractions of a row."""

    def __init__(self, few: WorkloadModel, fold: FoldedGraph, *, rows: int, parts: int) -> None:
        self.few, self.fold, self.parts = few, fold, parts
        self.batch, self.rows = few.batch, rows * parts

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the work of `rows` fractions of a row."""
        return self.few.at(rows / self.parts)


def prepare(row: Row, *, num_microbatches: int) -> Prepared:
    """Return a step of the row's model with `num_microbatches` of its micro-batches."""
    shape = replace(shape_of(row), layers=CAPTURED_LAYERS)
    few, axes = _works(shape, row.seq_len, row.dtype, row.tp, _cuts_sequence(row, shape))
    fold = FoldedGraph.repeated(few.fold.graph, row.layers)
    workloads = Pieces(few, fold, rows=num_microbatches * row.dp * row.micro_batch, parts=row.cp)
    return Prepared(
        fold=fold, workloads=workloads, execution=_execution(row, fold, axes, num_microbatches)
    )


@lru_cache(maxsize=256)
def _works(
    shape: Shape, seq_len: int, dtype: str, tp: int, cuts_sequence: bool
) -> tuple[WorkloadModel, tuple[tuple[str, int], ...]]:
    """Return the work of a few layers, and the mesh axes of tensor parallelism."""
    float8 = dtype == "float8"
    graph, facts = _graph(shape, seq_len, "bfloat16" if float8 else dtype)
    cluster = Cluster.local(ROWS[0] * tp)
    plan = strategies.hybrid(graph, cluster, dp=ROWS[0], tp=tp)
    if cuts_sequence:
        axes = [axis for axis in plan.mesh.names if axis != "dp"]
        plan = plan.with_(nodes={place: dict.fromkeys(axes, "shard d1") for place in _BETWEEN})
    solved = resolve(graph, plan, facts)
    fold = FoldedGraph.repeated(graph, shape.layers)
    workloads = RowWorks(fold, facts, solved.assignments, dict(plan.roles))
    workloads.keeps_shards = cuts_sequence
    if float8:
        workloads.float8 = Float8(graph, fold.blocks, shape.hidden if cuts_sequence else None)
    return workloads, tuple((name, num_ranks(n)) for name, n in plan.mesh.axes if name != "dp")


@lru_cache(maxsize=64)
def _graph(shape: Shape, seq_len: int, dtype: str) -> tuple[Graph, Facts]:
    model, batch = build(
        shape, batch=ROWS[0] * ROWS[1], seq_len=seq_len, dtype=getattr(torch, dtype)
    )
    graph = capture(model, batch)
    return graph, analyze(graph)


def _cuts_sequence(row: Row, shape: Shape) -> bool:
    """Return whether tensor-parallel ranks shard activations between products, which no column
    states.

    Sequence parallelism appeared together with selective recomputation (Korthikanti et al., 2022)
    and is part of every later stack that computes in bfloat16.
    """
    modern = shape.fused or row.recompute == "selective"
    return row.tp > 1 and modern and row.seq_len % row.tp == 0


def _execution(
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
    """Return float32 main parameters and states; gradients keep the dtype they are computed in."""
    wide = Precision.of(_PRECISIONS[row.compute_dtype])
    return replace(wide, gradients=row.compute_dtype, reduce=row.compute_dtype)


def _zero(row: Row) -> int:
    """Return the ZeRO level that communicates as the row's stack does.

    Sharded optimizer states imply reduce-scattered gradients (level 2 of the simulation; its level
    1 all-reduces them) unless only some of the data-parallel ranks share them.
    """
    if row.sharding.level == 1:
        return 0 if row.is_grouped else 2
    return row.sharding.level


def _cuts(fold: FoldedGraph, layers: int, stages: int) -> tuple[int, ...]:
    """Return where stages of equally many layers begin;
    the first and last have one less if needed.
    """
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
