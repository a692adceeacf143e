"""A byte-level GPT, trained from scratch on the sources of Python's standard library.

shardwise train examples/04_train_bytes/config.yaml --ranks 2
python examples/04_train_bytes/train_bytes.py runs/bytes "def "
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class ByteGPT(nn.Module):
    """Bytes in, logits out; with labels, the mean loss."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, length: int = 128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pieces of `length` bytes of the library's files; one file in ten is for evaluation."""

    def __init__(self, length: int = 128, evaluation: bool = False) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        chosen = [f for i, f in enumerate(files) if (i % 10 == 9) == evaluation]
        text = b"".join(file.read_bytes() for file in chosen)
        self.length, self.bytes = length, torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.bytes[index * self.length :][: self.length + 1].long()
        return {"ids": piece[:-1], "labels": piece[1:]}


def sample(run: str, text: str, count: int = 300, length: int = 128) -> str:
    """Continue a text with the newest checkpoint of a run, in plain PyTorch."""
    newest = sw.Checkpoints(Path(run) / "checkpoints").latest()
    assert newest is not None, f"no checkpoint in {run}"
    model = ByteGPT(length=length).eval()
    sw.load_checkpoint(newest, model)
    ids = torch.tensor([list(text.encode())])
    for _ in range(count):
        chances = (model(ids[:, -length:])[:, -1] / 0.8).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    print(sample(*sys.argv[1:3]))
