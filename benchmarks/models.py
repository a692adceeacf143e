"""Models of the benchmarks: a plain GPT, an HF Llama, and a GPT of 1.3 billion parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            u.view(b, t, self.heads, -1).transpose(1, 2)
            for u in self.qkv(self.ln1(x)).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """A GPT that returns its loss; the head is tied to the embedding."""

    def __init__(self, *, layers: int, width: int, heads: int, length: int, vocab: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tok(input_ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def tokens(batch: int, length: int, vocab: int) -> dict[str, Tensor]:
    """Return a batch of random tokens with the next ones as labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (batch, length + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a GPT of 4 layers of 512, and a batch of 8 sequences of 256."""
    torch.manual_seed(0)
    model = GPT(layers=4, width=512, heads=8, length=256, vocab=8192)
    return model, tokens(8, 256, 8192)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a Hugging Face Llama of 4 layers of 512 with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    data = tokens(8, 256, 8192)
    return model, {"input_ids": data["input_ids"], "labels": data["input_ids"].clone()}


def gpt_1b() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a GPT of 24 layers of 2048 (1.3 billion parameters) for one GPU."""
    torch.manual_seed(0)
    model = GPT(layers=24, width=2048, heads=16, length=1024, vocab=50304)
    return model, tokens(8, 1024, 50304)


MODELS = {"gpt": gpt, "llama": llama, "gpt_1b": gpt_1b}


def block_modules(model: nn.Module) -> Any:
    """Return the repeated blocks, which FSDP2 wraps individually."""
    return model.blocks if hasattr(model, "blocks") else model.model.layers  # type: ignore[union-attr]


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output."""
    loss: Tensor = output.loss if hasattr(output, "loss") else output
    return loss
