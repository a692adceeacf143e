"""Packed documents: attention that must not look into another document, written in several ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

KINDS = ("mask", "flex", "compiled", "scores", "varlen", "documents", "documents_with_scores")
WIDTH, HEADS, KEY_HEADS, VOCAB = 16, 4, 2, 31
compiled = torch.compile(flex_attention)


class Packed(nn.Module):
    """Causal attention with grouped heads within each document; "documents" is the reference.

    Kinds with scores add a learned bias by head and distance, and cap the result.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * KEY_HEADS * WIDTH // HEADS)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.bias = nn.Parameter(torch.randn(HEADS, 32))

    def forward(self, ids: Tensor, places: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(places)
        y = self.norm(x)
        query = self.query(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (KEY_HEADS, -1)).transpose(1, 2)
            for part in self.key_value(y).chunk(2, -1)
        )
        y = getattr(self, f"_{self.kind}")(query, key, value, ends)
        logits = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def _mask(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        at = torch.arange(query.shape[2], device=query.device)
        document = torch.searchsorted(ends, at.expand(ends.shape[0], -1).contiguous(), right=True)
        mask = (document.unsqueeze(2) == document.unsqueeze(1)) & (at.unsqueeze(1) >= at)
        mask = mask.unsqueeze(1)
        return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    def _flex(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, run=flex_attention):
        mask = self._block_mask(query, ends)
        return run(query, key, value, block_mask=mask, enable_gqa=True)

    def _compiled(self, *operands: Tensor) -> Tensor:
        return self._flex(*operands, run=compiled)

    def _scores(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 2 * torch.tanh((score + self.bias[h, (i - j).abs()]) / 2)

        mask = self._block_mask(query, ends)
        return flex_attention(query, key, value, biased, mask, enable_gqa=True)

    def _block_mask(self, query: Tensor, ends: Tensor):
        at = torch.arange(query.shape[2], device=query.device)
        document = torch.searchsorted(ends, at.expand(ends.shape[0], -1).contiguous(), right=True)

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (document[b, i] == document[b, j])

        size = query.shape[2]
        return create_block_mask(visible, query.shape[0], None, size, size, device=query.device)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        ends = nn.functional.pad(ends[0], (1, 0)).int()  # of a single row
        longest = query.shape[2]
        out = varlen_attn(*rows, ends, ends, longest, longest, window_size=(-1, 0), enable_gqa=True)
        return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2)

    def _documents(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, biased: bool = False
    ) -> Tensor:
        rows = []
        for row in range(query.shape[0]):
            parts, start = [], 0
            for end in ends[row].tolist():
                q, k, v = (x[row, :, start:end] for x in (query, key, value))
                k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (k, v))
                at = torch.arange(end - start)
                behind = at.unsqueeze(1) - at
                scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
                if biased:
                    scores = 2 * torch.tanh((scores + self.bias[:, behind.abs()]) / 2)
                scores = scores.masked_fill(behind < 0, -torch.inf)
                parts.append(scores.softmax(-1) @ v)
                start = end
            rows.append(torch.cat(parts, 1))
        return torch.stack(rows)

    def _documents_with_scores(self, *operands: Tensor) -> Tensor:
        return self._documents(*operands, biased=True)


def make(kind: str, rows: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model and rows of 11 tokens, each with three documents."""
    assert kind in KINDS
    torch.manual_seed(0)
    model = Packed(kind)
    ends = torch.tensor([[1, 7, 11], [5, 6, 11], [4, 10, 11]])[:rows]
    at = torch.arange(11)
    starts = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), ends], 1)
    document = (at.view(1, -1, 1) >= ends.unsqueeze(1)).sum(-1)
    ids = torch.randint(VOCAB, (rows, 11))
    labels = ids.roll(-1, 1)
    labels[:, :-1][document[:, 1:] != document[:, :-1]] = -100
    labels[:, -1] = -100
    return model, {
        "ids": ids,
        "places": at - starts.gather(1, document),
        "ends": ends,
        "labels": labels,
    }
