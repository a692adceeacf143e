"""A hand-written model: dense, and in the form of generated code for a dp x tp mesh.

It has difficult features: tied weights, an unused and a frozen parameter, uneven sizes, a rank
without batch rows, blocks as units, and a bias after a contraction.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime import redistribute as c
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import BufferSpec, ParameterSpec, declare, declare_buffer
from shardwise.runtime.splits import Split
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport.process_group import process_meshes

VOCAB, WIDTH, HIDDEN, LAYERS = 11, 4, 5, 3


def process_mesh(axes: dict[str, int]) -> ProcessMesh:
    """Return the mesh of all ranks of the default process group."""
    return process_meshes([(tuple(range(math.prod(axes.values()))), axes)])


def shapes() -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        result[f"blocks.{i}.w1.weight"] = (HIDDEN, WIDTH)
        result[f"blocks.{i}.w1.bias"] = (HIDDEN,)
        result[f"blocks.{i}.w2.weight"] = (WIDTH, HIDDEN)
        result[f"blocks.{i}.w2.bias"] = (WIDTH,)
        result[f"blocks.{i}.scale"] = (WIDTH,)
    return {**result, "norm.weight": (WIDTH,), "unused": (3,)}


def full_state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes().items()
    }
    return {**state, "offset": torch.randn(WIDTH, generator=generator, dtype=torch.float64)}


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (rows, 6), generator=generator)
    labels = torch.randint(VOCAB, (rows, 6), generator=generator)
    labels[0, :4] = -100
    return tokens, labels


def is_frozen(name: str) -> bool:
    return name.endswith("scale")


def dense_step(
    state: dict[str, Tensor], tokens: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss and gradients on one device."""
    p = {n: state[n].clone().requires_grad_(not is_frozen(n)) for n in shapes()}
    h = p["embed.weight"][tokens] + state["offset"]
    for i in range(LAYERS):
        b = f"blocks.{i}."
        a = F.gelu(F.linear(h * p[b + "scale"], p[b + "w1.weight"], p[b + "w1.bias"]))
        h = h + F.linear(a, p[b + "w2.weight"], p[b + "w2.bias"])
    logits = (h * p["norm.weight"]) @ p["embed.weight"].t()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return loss.detach(), {n: t.grad for n, t in p.items()}


class Block(nn.Module):
    def __init__(self, mesh: ProcessMesh, hidden: int) -> None:
        super().__init__()
        self.tp = mesh.axis("tp")
        for name, shape in (
            ("w1.weight", (hidden, WIDTH)),
            ("w1.bias", (hidden,)),
            ("w2.weight", (WIDTH, hidden)),
            ("w2.bias", (WIDTH,)),
        ):
            declare(self, name, shape, "float64")
        declare(self, "scale", (WIDTH,), "float64", requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        x = c.fanout(h * self.scale, self.tp)
        a = F.gelu(F.linear(x, self.w1.weight, self.w1.bias))
        return h + c.reduce(F.linear(a, self.w2.weight), self.tp) + self.w2.bias


class Toy(nn.Module):
    def __init__(self, mesh: ProcessMesh) -> None:
        super().__init__()
        self.dp = mesh.axis("dp")
        declare(self, "embed.weight", (VOCAB, WIDTH), "float64")
        hidden = mesh.axis("tp").length(HIDDEN)
        self.blocks = nn.ModuleList([Block(mesh, hidden) for _ in range(LAYERS)])
        declare(self, "norm.weight", (WIDTH,), "float64")
        declare(self, "head.weight", (VOCAB, WIDTH), "float64")
        declare(self, "unused", (3,), "float64")
        declare_buffer(self, "offset", (WIDTH,), "float64")

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        count = (labels != -100).sum()
        tokens = c.shard(tokens, self.dp, 0, tokens.shape[0])
        labels = c.shard(labels, self.dp, 0, labels.shape[0])
        h = F.embedding(tokens, self.embed.weight) + self.offset
        for block in self.blocks:
            h = block(h)
        logits = (h * self.norm.weight) @ self.head.weight.t()
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return c.reduce(loss / count, self.dp)


def specs(zero: int) -> list[ParameterSpec]:
    result = []
    for name, shape in shapes().items():
        of: dict[str, int] = {"w1.weight": 0, "w1.bias": 0, "w2.weight": 1}
        dim = next((d for end, d in of.items() if name.endswith(end)), None)
        splits = () if dim is None else (Split(axis="tp", dim=dim, of=((1, HIDDEN, 1),)),)
        result.append(
            ParameterSpec(
                name=name,
                shape=shape,
                dtype="float64",
                aliases=("head.weight",) if name == "embed.weight" else (),
                splits=splits,
                sync=("dp",),
                zero=zero,
                unit=".".join(name.split(".")[:2]) if name.startswith("blocks") else "",
                requires_grad=not is_frozen(name),
            )
        )
    return result


def make(mesh: ProcessMesh, zero: int, seed: int = 0) -> tuple[Toy, ParameterStore]:
    toy = Toy(mesh)
    buffers = [BufferSpec(name="offset", shape=(WIDTH,), dtype="float64")]
    store = ParameterStore(toy, mesh, specs(zero), buffers)
    store.load_state_dict(full_state(seed))
    return toy, store


def train_step(toy: Toy, store: ParameterStore, tokens: Tensor, labels: Tensor) -> Tensor:
    with store.step(tokens.shape):
        loss = toy(tokens, labels)
        loss.backward()
    return loss.detach()
