"""Build the transformer of a row on meta tensors, and prepare its step for simulation.

`Shape` is the variant that has the row's number of parameters. Blocks are pre-norm with causal
attention: either the GPT variant (layer norm, GELU, biases, learned positions) or the Llama variant
(RMS norm, gated SiLU, rotary positions).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.kernels import Kernel
from shardwise.frontend import capture
from shardwise.ir import Graph
from shardwise.planner import strategies
from shardwise.plans import Precision, resolve
from shardwise.published.machines import FLOAT8, read_device
from shardwise.published.rows import Row
from shardwise.sharding.factors import Facts, analyze
from shardwise.shares import num_ranks
from shardwise.simulation import ExecutionConfig, FoldedGraph, Group, WorkloadModel
from shardwise.simulation.workload import FORWARD, WEIGHT, Launch, Workload


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


_SHARED = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")  # with rows


def shape_of(row: Row) -> Shape:
    """Return the variant whose number of parameters matches the row's, within its rounding.

    If several match, GPT variants are tied and Llama variants are not. Without a number, it is
    Llama unless the inner dim is 4 times the outer one.
    """
    variants = [
        Shape(
            **{name: getattr(row, name) for name in _SHARED},
            positions=0 if gated else row.seq_len,
            gated=gated,
            tied=tied,
            fused=_is_fused(row),
        )
        for gated, tied in ((False, True), (True, False), (False, False), (True, True))
    ]
    if row.params_b is None:
        return variants[row.ffn_hidden != 4 * row.hidden]
    published, tolerance = row.params_b * 1e9, row.params_tolerance_b * 1e9
    errors = [max(abs(v.num_parameters - published) - tolerance, 0.0) for v in variants]
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
            # Costs the same as a fused rotary kernel: one pass that saves nothing for backward.
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
    """Map token ids and labels to the mean loss; only built on meta tensors, never run."""

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
    """Return a layer norm, without bias for RMS norm: the same memory traffic, always fused."""
    return nn.LayerNorm(shape.hidden, bias=not shape.gated)


# ------------------------------------------------------------ float8
#
# As in Transformer Engine on Hopper, every operand of a layer's products is converted to float8,
# and copied once more in transposed form for the weight gradient. Norms write float8 directly, and
# operands are converted before they are gathered. The last product and all sums keep bfloat16.

# Bytes per element: read in bfloat16 and written twice; or read in float8 and written once.
_CONVERTED_BYTES = 2 + 1 + 1
_COPIED_BYTES = 1 + 1


class Float8:
    """Convert the products of a graph's layers; `blocks` names each node's layer, or ""."""

    def __init__(self, graph: Graph, blocks: tuple[str, ...], gathered: int | None) -> None:
        self.graph, self.blocks = graph, blocks
        self.gathered = gathered  # gathered columns of gradients, if any
        self.norms = {node.name for node in graph.nodes if "norm" in node.op}

    def convert(self, workload: Workload) -> Workload:
        """Return the workload in float8; operands are sent in float8, sums keep their dtype."""
        converted: set[str] = set()
        return replace(
            workload,
            launches=tuple(
                new for old in workload.launches for new in self._launches(old, converted)
            ),
            collectives=tuple(
                replace(collective, num_bytes=collective.num_bytes / 2)
                if collective.op == "all_gather"
                else collective
                for collective in workload.collectives
            ),
        )

    def _launches(self, launch: Launch, converted: set[str]) -> Iterator[Launch]:
        kernel = launch.kernel
        if kernel.kind != "matmul" or kernel.shape[0] > 1 or not self.blocks[launch.node]:
            yield launch
            return
        _, m, n, k = kernel.shape
        num_bytes = self._conversion_bytes(launch, converted)
        if num_bytes:
            conversion = Kernel(
                op="to_float8", bytes=float(num_bytes), dtype=kernel.dtype, shape=(m, k)
            )
            yield replace(launch, kernel=conversion, product=False)
        moved = float(m * k + k * n + 2 * m * n)
        yield replace(launch, kernel=replace(kernel, dtype=FLOAT8, bytes=moved))

    def _conversion_bytes(self, launch: Launch, converted: set[str]) -> int:
        """Return the bytes that converting the operand moves; weights are converted once a step."""
        _, rows, _, columns = launch.kernel.shape
        if launch.phase == WEIGHT:
            return 0  # the other two products have converted both operands
        if launch.phase != FORWARD:
            only_copied = columns == self.gathered
        else:
            operand = self.graph.nodes[launch.node].inputs[0]
            if operand in converted:
                return 0
            converted.add(operand)
            only_copied = operand in self.norms
        return rows * columns * (_COPIED_BYTES if only_copied else _CONVERTED_BYTES)


# ------------------------------------------------------------ steps
#
# Two layers are captured and stand for all. The workload of a micro-batch is linear in its rows, so
# one capture serves every batch size.
#
# Context parallelism is modelled as a finer split of the batch: with balanced rings, a rank
# computes a fraction 1/cp of the rows in every layer, and the exchange of keys hides behind
# attention.


CAPTURED_LAYERS = 2
# Sizes of a micro-batch between which the workload is linear: primes, so that no product of them
# with a sequence length equals a dim of the model.
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


class CapturedWorkload(WorkloadModel):
    """The workload of a few layers for micro-batches of any size, even a fraction of a row."""

    # Whether to save shards of gathered operands, as Megatron does with sharded sequences.
    saves_shards = False
    float8: Float8 | None = None

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the workload of `rows`; exact sizes lie on the same line."""
        low, high = (self._lowered(self.rows // size) for size in ROWS)
        workload = low.between(high, rows)
        if self.saves_shards:
            workload = self._saving_shards(workload)
        return workload if self.float8 is None else self.float8.convert(workload)

    def _saving_shards(self, workload: Workload) -> Workload:
        """Return the workload with operands that backward gathers again instead of saving them."""
        ranks = {a.axis: num_ranks(a.ranks) for a in self.assignments}
        names = ("saved", "saved_selective", "freed", "freed_selective")
        changed = {name: getattr(workload, name).copy() for name in names}
        for gather in workload.collectives:
            if gather.op == "all_gather" and gather.phase == FORWARD and "dp" not in gather.axes:
                remote = gather.num_bytes * (1 - 1 / math.prod(ranks[a] for a in gather.axes))
                for array in changed.values():
                    array[gather.node] -= min(remote, array[gather.node])
        return replace(workload, **changed)


class FractionalWorkload(WorkloadModel):
    """The workload of all layers and a batch of `rows`, counted in fractions of a row."""

    def __init__(
        self, captured: WorkloadModel, fold: FoldedGraph, *, rows: int, parts: int
    ) -> None:
        self.captured, self.fold, self.parts = captured, fold, parts
        self.batch, self.rows = captured.batch, rows * parts

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """Return the workload of `rows` fractions of a row."""
        return self.captured.at(rows / self.parts)


def prepare(row: Row, *, num_microbatches: int) -> Prepared:
    """Return a step of the row's model with `num_microbatches` of its micro-batches."""
    shape = replace(shape_of(row), layers=CAPTURED_LAYERS)
    shards_sequence = _shards_sequence(row, shape)
    captured, axes = _captured(shape, row.seq_len, row.dtype, row.tp, shards_sequence)
    fold = FoldedGraph.repeated(captured.fold.graph, row.layers)
    rows = num_microbatches * row.dp * row.micro_batch
    return Prepared(
        fold=fold,
        workloads=FractionalWorkload(captured, fold, rows=rows, parts=row.cp),
        execution=_execution(row, fold, axes, num_microbatches),
    )


@lru_cache(maxsize=256)
def _captured(
    shape: Shape, seq_len: int, dtype: str, tp: int, shards_sequence: bool
) -> tuple[WorkloadModel, tuple[tuple[str, int], ...]]:
    """Return the workload of a few layers, and the mesh axes of tensor parallelism."""
    float8 = dtype == "float8"
    graph, facts = _graph(shape, seq_len, "bfloat16" if float8 else dtype)
    cluster = Cluster.local(ROWS[0] * tp)
    plan = strategies.hybrid(graph, cluster, dp=ROWS[0], tp=tp)
    if shards_sequence:
        axes = [axis for axis in plan.mesh.names if axis != "dp"]
        plan = plan.with_(nodes={place: dict.fromkeys(axes, "shard d1") for place in _BETWEEN})
    resolved = resolve(graph, plan, facts)
    fold = FoldedGraph.repeated(graph, shape.layers)
    workload = CapturedWorkload(fold, facts, resolved.assignments, dict(plan.roles))
    workload.saves_shards = shards_sequence
    if float8:
        workload.float8 = Float8(graph, fold.blocks, shape.hidden if shards_sequence else None)
    return workload, tuple((name, num_ranks(n)) for name, n in plan.mesh.axes if name != "dp")


@lru_cache(maxsize=64)
def _graph(shape: Shape, seq_len: int, dtype: str) -> tuple[Graph, Facts]:
    model, batch = build(
        shape, batch=ROWS[0] * ROWS[1], seq_len=seq_len, dtype=getattr(torch, dtype)
    )
    graph = capture(model, batch)
    return graph, analyze(graph)


def _shards_sequence(row: Row, shape: Shape) -> bool:
    """Return whether tensor-parallel ranks shard activations between products.

    No column states it. Sequence parallelism appeared together with selective recomputation
    (Korthikanti et al., 2022) and is part of every later stack that computes in bfloat16.
    """
    modern = shape.fused or row.recompute == "selective"
    return row.tp > 1 and modern and row.seq_len % row.tp == 0


def _execution(
    row: Row, fold: FoldedGraph, axes: tuple[tuple[str, int], ...], count: int
) -> ExecutionConfig:
    mesh = Mesh(axes=(("dp", row.dp * row.cp), *axes))
    size = mesh.size
    groups = tuple(
        Group(mesh=mesh, ranks=tuple(range(i * size, (i + 1) * size))) for i in range(row.pp)
    )
    stages = row.pp * row.vpp
    return ExecutionConfig(
        groups=groups,
        cuts=_stage_starts(fold, row.layers, stages),
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
    1 all-reduces them), unless states are sharded among only some of the data-parallel ranks.
    """
    if row.sharding.level == 1:
        return 0 if row.is_grouped else 2
    return row.sharding.level


def _stage_starts(fold: FoldedGraph, layers: int, stages: int) -> tuple[int, ...]:
    """Return the first node of each stage; stages have equally many layers.

    If the division has a remainder, the last stage and then the first ones have one layer less.
    """
    first_nodes: dict[str, int] = {}
    for node, block in enumerate(fold.blocks):
        if block:
            first_nodes.setdefault(block, node)
    counts = [layers // stages + 1] * stages
    order = [stages - 1, *range(stages - 1)]
    for stage in order[: stages * counts[0] - layers]:
        counts[stage] -= 1
    starts = list(first_nodes.values())
    return (0, *(starts[before] for before in accumulate(counts[:-1])))
