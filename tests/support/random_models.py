"""Small random models for property tests, described by data that prints as source code.

A `Recipe` is a tuple of layers with names and options; `build(recipe)` returns the model and a
batch. Sizes are small, odd and prime on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

Layer = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`kind` is "tokens", "vectors" or "image"; layers are tuples of a name and its options."""

    kind: str
    batch: int
    length: int  # tokens, or the side of an image
    heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    loss: str
    classes: int
    tied: bool = False
    frozen: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Attention(nn.Module):
    """Grouped-query attention with a fused projection."""

    def __init__(self, width: int, heads: int, kv_heads: int, fused: str, grouped: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.fused, self.grouped = heads, kv_heads, fused, grouped
        self.size = width // heads
        rows = (heads + 2 * kv_heads) * self.size
        self.qkv, self.out = nn.Linear(width, rows, bias=fused != "split"), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.qkv(x)
        if self.fused == "view":  # only with equally many heads and key heads
            q, k, v = y.view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            sizes = [self.heads * self.size, *2 * [self.kv_heads * self.size]]
            parts = y.chunk(3, -1) if self.fused == "chunk" else y.split(sizes, -1)
            q, k, v = (p.view(b, t, -1, self.size).transpose(1, 2) for p in parts)
        groups = self.heads // self.kv_heads
        if groups > 1 and self.grouped == "repeat":
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        elif groups > 1 and self.grouped == "expand":
            k, v = (
                u[:, :, None].expand(-1, -1, groups, -1, -1).reshape(b, self.heads, t, self.size)
                for u in (k, v)
            )
        a = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=groups > 1 and self.grouped == "gqa"
        )
        return self.out(a.transpose(1, 2).reshape(b, t, -1))


class Eager(nn.Module):
    """Explicit attention: a product, a mask and a softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        projected = (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in projected)
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers; "glu" gates by a chunk, "split" by unequal parts, "cat" concatenates."""

    def __init__(self, width: int, hidden: int, style: str) -> None:
        super().__init__()
        self.style, self.hidden = style, hidden
        inner = {"glu": 2 * hidden, "split": 2 * hidden + 1}.get(style, hidden)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(hidden + width if style == "cat" else hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.style == "glu":
            a, g = y.chunk(2, -1)
            y = a * F.silu(g)
        elif self.style == "split":
            a, g, s = y.split([self.hidden, self.hidden, 1], -1)
            y = a * torch.sigmoid(g) + s
        elif self.style == "cat":
            y = torch.cat([F.gelu(y), x], -1)
        else:
            y = F.gelu(y)
        return self.down(y)


class Uneven(nn.Module):
    """A fused projection, only some parts of which are viewed as heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fused, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.fused(x).chunk(3, -1)
        a = q.view(b, t, self.heads, -1) * k.view(b, t, self.heads, -1).softmax(-1)
        return self.out(a.reshape(b, t, d)) + self.out(v.relu())


class Rotate(nn.Module):
    """Rotary embedding of halves with a table of positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = nn.Parameter(torch.ones(width // heads))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        y = x.view(b, t, self.heads, -1)
        half = y.shape[-1] // 2
        turned = torch.cat([-y[..., half:], y[..., :half]], -1)
        angle = torch.arange(t, device=x.device).to(x.dtype)[:, None, None] * 0.3
        return (y * torch.cos(angle) + turned * torch.sin(angle) * self.scale).reshape(b, t, d)


class Mix(nn.Module):
    """Position mixing: means, shifts, slices and a linear layer over positions."""

    def __init__(self, width: int, length: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.line = nn.Linear(length, length) if style == "positions" else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "positions":
            return self.line(x.transpose(1, 2)).transpose(1, 2)
        if self.style == "mean":
            return x + self.line(x.mean(1, keepdim=True))
        if self.style == "shift":
            return self.line(F.pad(x[:, :-1], (0, 0, 1, 0)))
        if self.style == "roll":
            return torch.roll(self.line(x), 1, 1)
        return torch.cat([x[:, :1], self.line(x[:, 1:])], 1)  # "slice"


class Conv(nn.Module):
    """A convolution with a norm; "depth" is grouped, "down" halves the side."""

    def __init__(self, width: int, style: str, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            width,
            width,
            3,
            padding=1,
            stride=2 if style == "down" else 1,
            groups=width if style == "depth" else 1,
        )
        norms = {"batch": nn.BatchNorm2d(width), "group": nn.GroupNorm(1, width)}
        self.norm = norms.get(norm, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def make_layer(layer: Layer, recipe: Recipe) -> nn.Module:
    name, *options = layer
    width, heads = recipe.width, recipe.heads
    makers = {
        "linear": lambda: nn.Linear(width, width, *options),
        "norm": lambda: nn.LayerNorm(width),
        "rms": lambda: nn.RMSNorm(width),
        "gelu": nn.GELU,
        "attention": lambda: Attention(width, heads, *options),
        "eager": lambda: Eager(width, heads),
        "mlp": lambda: Mlp(width, *options),
        "rotate": lambda: Rotate(width, heads),
        "uneven": lambda: Uneven(width, heads),
        "mix": lambda: Mix(width, recipe.length, *options),
        "conv": lambda: Conv(width, *options),
    }
    return makers[name]()


class Model(nn.Module):
    """The layers in order; a layer that begins with "+" is added to its input."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        width, classes = recipe.width, recipe.classes
        if recipe.kind == "tokens":
            self.embed = nn.Embedding(classes, width)
            self.position = nn.Parameter(torch.randn(recipe.length, width) * 0.1)
        elif recipe.kind == "image":
            self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.residual = [layer[0] == "+" for layer in recipe.layers]
        self.layers = nn.ModuleList(
            make_layer(layer[layer[0] == "+" :], recipe) for layer in recipe.layers
        )
        self.head = nn.Linear(width, classes, bias=not recipe.tied)
        if recipe.tied and recipe.kind == "tokens":
            self.head.weight = self.embed.weight
        if recipe.frozen:
            self.head.requires_grad_(not any(True for _ in self.layers.parameters()))
            self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        recipe = self.recipe
        if recipe.kind == "tokens":
            x = self.embed(x) + self.position
        elif recipe.kind == "image":
            x = self.stem(x)
        for layer, residual in zip(self.layers, self.residual, strict=True):
            y = layer(x)
            x = x + y if residual else y
        if recipe.kind == "image":
            x = x.mean((2, 3)) if recipe.tied else F.adaptive_avg_pool2d(x, 1).flatten(1)
        logits = self.head(x)
        return loss_of(recipe.loss, logits, labels), logits


def loss_of(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    flat, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if name == "count":
        losses = F.cross_entropy(flat, target, reduction="none", ignore_index=-100)
        return losses.sum() / (target != -100).sum()
    if name in ("mean", "sum"):
        return F.cross_entropy(flat, target, reduction=name, ignore_index=-100)
    if name == "smooth":
        return F.cross_entropy(flat, target, ignore_index=-100, label_smoothing=0.1)
    if name == "shifted" and logits.dim() == 3:
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
        )
    if name == "square":
        return (logits - labels[..., None].to(logits.dtype)).pow(2).mean()
    if name == "logp":
        picked = flat.log_softmax(-1).gather(1, target.clamp(min=0)[:, None]).squeeze(1)
        weight = (target != -100).to(flat.dtype)
        return -(picked * weight).sum() / weight.sum()
    return flat.pow(2).sum()


def build(recipe: Recipe) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model in float64 and a batch with ragged labels."""
    torch.manual_seed(0)
    model = Model(recipe).double()
    batch, length = recipe.batch, recipe.length
    if recipe.kind == "tokens":
        x = torch.randint(0, recipe.classes, (batch, length))
    elif recipe.kind == "image":
        x = torch.randn(batch, 3, length, length, dtype=torch.float64)
    else:
        x = torch.randn(batch, length, recipe.width, dtype=torch.float64)
    shape = (batch,) if recipe.kind == "image" else (batch, length)
    labels = torch.randint(0, recipe.classes, shape)
    if recipe.kind != "image":
        for row in range(batch):
            labels[row, : row % length] = -100
        labels[-1, -1] = 1
    return model, {"x": x, "labels": labels}


@st.composite
def recipes(draw: Any, max_layers: int = 4) -> Recipe:
    """Draw a random recipe."""
    kind = draw(st.sampled_from(["tokens", "tokens", "vectors", "image"]))
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    layer = image_layers() if kind == "image" else layers(heads)
    losses = ["mean", "sum", "square", "logp", "smooth"]
    losses += [] if kind == "image" else ["count", "shifted", "total"]
    return Recipe(
        kind=kind,
        batch=draw(st.sampled_from([7, 5, 4, 3, 2, 6, 1])),
        length=draw(st.sampled_from([4, 6, 8] if kind == "image" else [2, 3, 4, 5])),
        heads=heads,
        head_dim=draw(st.sampled_from([2, 4])),
        layers=tuple(draw(st.lists(layer, min_size=1, max_size=max_layers))),
        loss=draw(st.sampled_from(losses)),
        classes=draw(st.sampled_from([5, 7, 11, 13])),
        tied=draw(st.booleans()),
        frozen=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def layers(draw: Any, heads: int) -> Layer:
    common = ["attention", "attention", "mlp", "mlp", "mix"]
    name = draw(
        st.sampled_from(["linear", "norm", "rms", "gelu", "eager", "rotate", "uneven", *common])
    )
    options: tuple[Any, ...] = ()
    if name == "linear":
        options = (draw(st.booleans()),)
    elif name == "attention":
        kv_heads = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
        fused = ["split", "chunk", "view"] if kv_heads == heads else ["split"]
        options = (
            kv_heads,
            draw(st.sampled_from(fused)),
            draw(st.sampled_from(["repeat", "expand", "gqa"])),
        )
    elif name == "mlp":
        options = (
            draw(st.sampled_from([3, 5, 8])),
            draw(st.sampled_from(["plain", "glu", "split", "cat"])),
        )
    elif name == "mix":
        options = (draw(st.sampled_from(["positions", "mean", "shift", "roll", "slice"])),)
    plus = draw(st.booleans()) if name != "gelu" else False
    return (*("+",) * plus, name, *options)


@st.composite
def image_layers(draw: Any) -> Layer:
    style = draw(st.sampled_from(["plain", "depth", "down"]))
    norm = draw(st.sampled_from(["batch", "group", "none"]))
    plus = style != "down" and draw(st.booleans())
    return (*("+",) * plus, "conv", style, norm)
