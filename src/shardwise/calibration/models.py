"""A decoder-only transformer from its dims.

Enters: a `Row`. Leaves: `Shape`, the variant that has the row's number of parameters, and a module
and batch on meta tensors. Pre-norm; causal attention; either the GPT variant (layer norm, GELU,
biases, learned positions) or the Llama variant (RMS norm, gated SiLU, rotary positions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.calibration.devices import read_device
from shardwise.calibration.rows import Row


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
        """How many parameters it has.

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
    """Return the variant that has the row's number of parameters, as far as that number is rounded.

    Where several have it, GPT variants are tied and Llama variants are not. Without a number: Llama
    unless the inner dim is 4 times the outer one.
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
    """Whether attention is one kernel, which no column says.

    It is not where softmax is recomputed by itself, nor in float16: V100 has no such kernel, and
    the stacks that trained so are older than it (flash attention appeared in May 2022), as no
    device after A100 is.
    """
    old = row.dtype == "float16" or row.recompute == "selective"
    return not old or row.kv_heads != row.heads or not read_device(row.gpu).is_old


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and added to its input."""

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
            # Costs what a fused rotary kernel costs: one pass that keeps nothing for backward.
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
    """Token ids and labels to the mean loss; made on meta tensors, never run."""

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
    """RMS norm is a layer norm without its bias here: the same memory traffic, and always fused."""
    return nn.LayerNorm(shape.hidden, bias=not shape.gated)
