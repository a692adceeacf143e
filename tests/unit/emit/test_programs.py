"""Programs with recomputed regions, with clashing member names, and comments about modules."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw


class Checkpointed(nn.Module):
    """A region that backward recomputes, with dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def region(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.up(x).relu(), 0.25)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.region, x, use_reentrant=False)
        return self.down(hidden).square().mean()


class Clashing(nn.Module):
    """Members with the names that generated code would use."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.device = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.dp, self.tp = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(6, device=x.device)
        x = self.tp(self.dp(x * self.rng + positions).relu())
        return nn.functional.dropout(x - self.device, 0.5).square().mean()


@pytest.mark.parametrize("model", [Checkpointed, Clashing])
@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {}), ("hybrid", {"dp": 2, "tp": 2})])
def test_equal_to_the_model(model: type[nn.Module], strategy: str, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    module, batch = model(), (torch.randn(5, 6),)
    graph = sw.capture(module, batch)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(4), **options)
    certificate = sw.verify(module, batch, plan)
    assert certificate.ok, certificate


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpointed_region_is_recomputed(strategy: str) -> None:
    graph = sw.capture(Checkpointed(), (torch.randn(5, 6),))
    program = sw.compile(graph, getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2)))
    assert "def recomputed_1(" in program.source()
    assert "= checkpoint(" in program.source()
    assert "backward recomputes checkpoint_0" in program.lowered.notes


class Blocks(nn.Module):
    """Equal blocks after an embedding with sharded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x


def test_every_comment_names_the_module_of_its_lines() -> None:
    """Moves before a block belong to the block, and a loss function belongs to no module."""
    batch = (torch.zeros(4, 3, dtype=torch.long),)
    graph = sw.capture(Blocks(), batch, lambda out, _: out.square().mean())
    source = sw.compile(graph, sw.strategies.tensor(graph, sw.Cluster.local(2))).source()
    assert "# blocks.0  (test_programs.py:" in source
    assert "# outside the model  (test_programs.py:" in source
    source = sw.compile(*planned_for_one_rank(Clashing())).source()
    assert re.search(r"def forward\(.*\):\n +# Clashing  \(test_programs.py:\d+\)\n", source)


def planned_for_one_rank(model: nn.Module) -> tuple[sw.Graph, sw.Plan]:
    graph = sw.capture(model, (torch.randn(5, 6),))
    return graph, sw.strategies.ddp(graph, sw.Cluster.local(1))
