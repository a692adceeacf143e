"""What training takes on this machine over what its rates say: `training_factor`.

Enters: a measured cluster. Leaves: a number, by which all rates are corrected.

Rates are those of one call after the other on the same tensors. A training step finds its operands
out of the caches, runs Python between the calls, and waits for the slowest rank. Two small models
are trained here, on all ranks at once and without communication, to see what that costs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.cluster import Cluster, Curve, Device
from shardwise.cluster.device import Rates
from shardwise.profiling.fit import rounded

ROWS, POSITIONS, WIDTH, WORDS, HEADS = 8, 128, 256, 1024, 4
PIXELS, CHANNELS = 48, 32


class _Transformer(nn.Module):
    """Two blocks that compute much for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.attend = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(4 * WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for i in range(2):
            parts = self.attend[i](self.norms[2 * i](x)).chunk(3, -1)
            q, k, v = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class _Convolutions(nn.Module):
    """A few layers on images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.layers = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(CHANNELS, WORDS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.first(pixels))
        for layer in self.layers:
            x = F.relu(x + layer(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out.square().mean()


def training_factor(cluster: Cluster, report: Callable[[str], None] = lambda note: None) -> float:
    """Measured over computed seconds of training: the mean of two models, 1 where none runs.

    `report` is told why one did not run.
    """
    from shardwise.api.measured import rehearsed
    from shardwise.api.proving import proving_ground
    from shardwise.cost import OpTable
    from shardwise.frontend import capture
    from shardwise.planner.strategies import ddp

    rows = ROWS * cluster.num_ranks
    batches: list[tuple[nn.Module, Tensor]] = [
        (_Transformer(), torch.zeros(rows, POSITIONS, dtype=torch.int64)),
        (_Convolutions(), torch.zeros(rows, 3, PIXELS, PIXELS)),
    ]
    found, table = [], OpTable()
    graphs = [capture(model, (batch,)) for model, batch in batches]
    with contextlib.ExitStack() as stack:
        grounds = [stack.enter_context(proving_ground(graph, cluster)) for graph in graphs]
        for ground in grounds:
            found += rehearsed(ground, ddp(ground.graph, cluster), table)
    for note in table.notes:
        report(note)
    if not found:
        report("nothing was trained: rates are those of single calls, which programs do not reach")
    return math.prod(training for _, training, _ in found) ** (1 / len(found)) if found else 1.0


def at_training(device: Device, factor: float) -> Device:
    """Return the device with the rates that training reaches."""

    def slower(curve: Curve) -> Curve:
        return Curve(tuple((x, rounded(rate / factor)) for x, rate in curve.points))

    def rates(each: Rates) -> Rates:
        return tuple((dtype, slower(curve)) for dtype, curve in each)

    return replace(
        device,
        matmul_flops_per_s=rates(device.matmul_flops_per_s),
        attention_flops_per_s=rates(device.attention_flops_per_s),
        memory_bytes_per_s=slower(device.memory_bytes_per_s),
        overhead_s=rounded(device.overhead_s * factor),
    )
