"""Small models with different kinds of attention, over lengths that no number of ranks divides."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

WIDTH, HEADS, KEY_HEADS, VOCAB, LENGTH = 24, 6, 3, 29, 17


class Attention(nn.Module):
    """A causal model with a block of attention, whose keys may come from a memory."""

    def __init__(self, kind: str, causal: bool = True) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.memory = nn.LayerNorm(WIDTH), nn.Linear(7, WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * KEY_HEADS * WIDTH // HEADS)
        self.up, self.down = nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, memory: Tensor | None = None) -> Tensor:
        place = torch.arange(ids.shape[1])
        x = self.tokens(ids) + self.positions(place)
        y = self.norm(x)
        query = self.query(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        source = y if memory is None else self.memory(memory)
        key, value = (
            part.unflatten(-1, (KEY_HEADS, -1)).transpose(1, 2)
            for part in self.key_value(source).chunk(2, -1)
        )
        y = self.attend(query, key, value, place[:, None] - place)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(gelu(self.up(x)))
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, distance: Tensor) -> Tensor:
        hidden = (distance < 0) if self.causal else torch.zeros_like(distance).bool()
        if self.kind == "softcap":
            key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
            scores = 3 * torch.tanh(query @ key.transpose(-1, -2) / 6)
            return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        mask = None
        if self.kind == "window":
            mask = ~hidden & (distance.abs() < 5)
        elif self.kind == "alibi":
            slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=query.dtype)
            mask = -(distance.abs() * slopes[:, None, None]).masked_fill(hidden, torch.inf)
        causal = self.causal and self.kind == "grouped"
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, enable_gqa=True
        )


KINDS = ("grouped", "window", "alibi", "softcap", "cross")


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model of a kind, "full" if it is not causal, and two sequences."""
    torch.manual_seed(0)
    kind, _, full = name.partition("_")
    ids = torch.randint(VOCAB, (2, LENGTH))
    batch = {"ids": ids, "labels": ids.roll(-1, 1).index_fill(1, torch.tensor([LENGTH - 1]), -100)}
    if kind == "cross":
        batch["memory"] = torch.randn(2, 11, 7, dtype=torch.float64)
    return Attention(kind, not full).double(), batch
