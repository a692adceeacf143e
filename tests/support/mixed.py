"""A hand-written model in any dtype: a root parameter, a scalar, and two blocks as units."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import ParameterSpec, declare
from shardwise.runtime.store import ParameterStore

SHAPES = {"embed": (5, 4), "blocks.0.w": (7, 4), "blocks.1.w": (3, 7), "scale": ()}


class Block(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__()
        declare(self, "w", shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w.t())


class Net(nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        declare(self, "embed", SHAPES["embed"], dtype)
        declare(self, "scale", (), dtype)
        self.blocks = nn.ModuleList([Block(SHAPES[f"blocks.{i}.w"], dtype) for i in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.embed * self.scale
        for block in self.blocks:
            h = block(h)
        return h.float().square().sum()


class Module:
    """The parts of a parallel module that an optimizer needs."""

    def __init__(
        self, mesh: ProcessMesh, zero: int, *, device: str = "cpu", **options: Any
    ) -> None:
        dtype = options.setdefault("dtype", "bfloat16")
        self.mesh, self.net = mesh, Net(dtype)
        specs = [
            ParameterSpec(
                name=name,
                shape=shape,
                sync=("dp",),
                zero=zero,
                unit=name[:8] if name.startswith("blocks") else "",
                **options,
            )
            for name, shape in SHAPES.items()
        ]
        self.store = ParameterStore(self.net, mesh, specs, device=device)
        self.store.load_state_dict(full_state())
        self.dtype = getattr(torch, dtype)

    def train_step(self, num_micro: int = 1, factor: float = 1.0) -> None:
        x = data()[self.mesh.rank :: self.mesh.size].to(self.store.device, self.dtype) * factor
        with self.store.step():
            for m, rows in enumerate(x.chunk(num_micro)):
                with self.store.forward():
                    loss = self.net(rows)
                with self.store.backward(last=m == num_micro - 1):
                    self.store.scaled(loss).backward()


def full_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def data(rows: int = 64) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))
