"""A byte-level GPT, trained from scratch on the sources of Python's standard library.

shardwise train examples/04_train_bytes/config.yaml --ranks 2
python examples/04_train_bytes/train_bytes.py runs/bytes "def "
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

LENGTH, WIDTH, HEADS, LAYERS = 128, 96, 4, 3


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    """Bytes in, logits out; with labels, the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Windows:
    """Pieces of the library's files; one file in ten is for evaluation."""

    def __init__(self, evaluation: bool = False) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(f.read_bytes() for f in files if (f in files[9::10]) == evaluation)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.bytes[index * LENGTH :][: LENGTH + 1].long()
        return {"ids": piece[:-1], "labels": piece[1:]}


def sample(run: str, text: str, count: int = 300) -> str:
    """Continue a text with the newest checkpoint of a run, in plain PyTorch."""
    model = ByteGPT().eval()
    sw.load_checkpoint(sw.CheckpointManager(f"{run}/checkpoints").latest() or run, model)
    ids = torch.tensor([list(text.encode())])
    for _ in range(count):
        logits = model(ids[:, -LENGTH:])[:, -1] / 0.8
        ids = torch.cat([ids, logits.softmax(-1).multinomial(1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    print(sample(*sys.argv[1:3]))
