"""The models and clusters on which the planner is compared with a grid of configurations.

Models are built on meta tensors, in realistic sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from benchmarks.models import GPT
from shardwise.cluster import Cluster
from shardwise.ir import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its batch, and a cluster."""

    name: str
    graph: Callable[[], Graph]
    cluster: Callable[[], Cluster]


def captured(build: Callable[[], nn.Module], **batch: Tensor) -> Graph:
    """Return the graph of a model with bfloat16 parameters."""
    with torch.device("meta"):
        model = build().to(torch.bfloat16)
    return sw.capture(model, batch)


def texts(batch: int, length: int) -> Tensor:
    """Return token ids."""
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def gpt(batch: int = 256, length: int = 2048) -> Graph:
    """Return the GPT-3 of 6.7 billion parameters."""
    build = lambda: GPT(layers=32, width=4096, heads=32, length=length, vocab=50304)  # noqa: E731
    return captured(build, input_ids=texts(batch, length), labels=texts(batch, length))


def llama(layers: int, width: int, batch: int, length: int) -> Graph:
    """Return a Llama 3 of this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=width * 7 // 2,
        num_hidden_layers=layers, num_attention_heads=width // 128, num_key_value_heads=8,
        max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    ids = texts(batch, length)
    return captured(lambda: LlamaForCausalLM(config), input_ids=ids, labels=ids)


def t5(batch: int = 256) -> Graph:
    """Return T5-3B."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32,
        dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    source, target = texts(batch, 512), texts(batch, 128)
    batches = {"input_ids": source, "decoder_input_ids": target, "labels": target}
    return captured(lambda: T5ForConditionalGeneration(config), **batches)


def vit(batch: int = 1024) -> Graph:
    """Return ViT-g/14 with a billion parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1408, num_hidden_layers=40, num_attention_heads=16, intermediate_size=6144,
        image_size=224, patch_size=14, num_labels=1000, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    pixels = torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    labels = torch.zeros(batch, dtype=torch.long, device="meta")
    return captured(lambda: ViTForImageClassification(config), pixel_values=pixels, labels=labels)


class Bottleneck(nn.Module):
    """Three convolutions with group norms, and a shortcut."""

    def __init__(self, wide: int, narrow: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(wide, narrow, 1, bias=False)
        self.two = nn.Conv2d(narrow, narrow, 3, stride, padding=1, bias=False)
        self.three = nn.Conv2d(narrow, out, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, n) for n in (narrow, narrow, out))
        self.short = (
            nn.Conv2d(wide, out, 1, stride, bias=False) if wide != out or stride != 1 else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.one(x)))
        y = F.relu(self.norms[1](self.two(y)))
        y = self.norms[2](self.three(y))
        return F.relu(y + (x if self.short is None else self.short(x)))


class WideResNet(nn.Module):
    """ResNet-50 with wider convolutions: 1.9 billion parameters at a width of 384."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        layers, wide = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            narrow, out = width * 2**stage, 256 * 2**stage
            for index in range(count):
                stride = 2 if index == 0 and stage > 0 else 1
                layers.append(Bottleneck(wide, narrow, out, stride))
                wide = out
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(wide, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def resnet(batch: int = 256) -> Graph:
    """Return a wide ResNet-50."""
    images = torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    labels = torch.zeros(batch, dtype=torch.long, device="meta")
    return captured(lambda: WideResNet(384, 1024), images=images, labels=labels)


class HugeEmbedding(nn.Module):
    """An embedding of two million words of 2048, with nearly all parameters, and a small body."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2_000_000, 2048)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)
            )
            for _ in range(6)
        )
        self.head = nn.Linear(2048, 1024)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def embedding(batch: int = 512) -> Graph:
    """Return `HugeEmbedding` on texts of 128 words."""
    labels = torch.zeros(batch, dtype=torch.long, device="meta")
    return captured(HugeEmbedding, ids=texts(batch, 128), labels=labels)


def equal(kind: str, nodes: int, devices: int = 8) -> Callable[[], Cluster]:
    """Return a function that builds equal nodes of a preset."""
    return lambda: Cluster.preset(kind, nodes=nodes, devices_per_node=devices)


def slow_network() -> Cluster:
    """Return nodes with slow links, for which pure data parallelism is expensive."""
    return Cluster.preset("a100", nodes=8, devices_per_node=8, nic_gbit_per_s=100)


def unequal() -> Cluster:
    """Return a cluster of a node of H100 and one of A100."""
    new, old = (Cluster.preset(kind, nodes=1, devices_per_node=8) for kind in ("h100", "a100"))
    nodes = (*new.nodes, replace(old.nodes[0], name="old"))
    network = Cluster.preset("a100", nodes=2, devices_per_node=8).network
    return replace(new, name="h100+a100", nodes=nodes, network=network)


CASES = (
    Case(name="gpt", graph=gpt, cluster=equal("a100", 4)),
    Case(name="llama", graph=lambda: llama(32, 4096, 64, 8192), cluster=equal("h100", 4)),
    Case(name="t5", graph=t5, cluster=equal("a100", 2)),
    Case(name="vit", graph=vit, cluster=equal("a100", 2)),
    Case(name="resnet", graph=resnet, cluster=equal("v100", 2)),
    Case(name="embedding", graph=embedding, cluster=equal("h100", 1)),
    Case(name="long", graph=lambda: llama(16, 2048, 4, 131072), cluster=equal("h100", 2)),
    Case(name="small", graph=lambda: llama(32, 4096, 2, 4096), cluster=equal("h100", 2)),
    Case(name="slow-network", graph=lambda: gpt(64), cluster=slow_network),
    Case(name="unequal", graph=lambda: gpt(64), cluster=unequal),
)
