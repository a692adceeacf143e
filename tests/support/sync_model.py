"""A small model with every kind of parameter, trained under a plan and on one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS = 3


class Words(nn.Module):
    """Two tables of words, linear layers of several shapes, and a norm."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(23, 6, sparse=sparse)
        self.places = nn.Embedding(5, 6, padding_idx=0, sparse=sparse)
        self.up = nn.Linear(6, 31)
        self.norm = nn.LayerNorm(31)
        self.down = nn.Linear(31, 7, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x) + self.places(x % 5)
        out = self.down(self.norm(torch.tanh(self.up(h))))
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


def make_model(sparse: bool = False) -> Words:
    torch.manual_seed(0)
    return Words(sparse).double()


def make_batches(rows: int = 10) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [
        {"x": torch.randint(0, 23, (rows, 3)), "y": torch.randint(0, 7, (rows, 3))}
        for _ in range(STEPS)
    ]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.3}),
}


def reference(optimizer: str, clip: float = 0.0) -> dict[str, Any]:
    """Train on one process, with dense gradients."""
    model = make_model()
    cls, options = OPTIMIZERS[optimizer]
    opt = cls(model.parameters(), **options)
    losses, grads = [], {}
    for batch in make_batches():
        opt.zero_grad()
        loss = model(**batch)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)
        opt.step()
        losses.append(loss.item())
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "grads": grads, "state": state, "norm": norm.item()}


def make_plan(graph: sw.Graph, ranks: int, entries: Mapping[str, Any], **options: Any) -> sw.Plan:
    return sw.strategies.make_plan(
        "sync", graph, sw.Cluster.local(ranks), constraints=entries, **options
    )


def train(
    entries: Mapping[str, Any],
    optimizer: str = "adamw",
    clip: float = 0.0,
    checkpoint: str = "",
    sparse: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train under a plan, on every rank; with a checkpoint, continue from it after two steps."""
    ranks = torch.distributed.get_world_size()
    model, batches = make_model(sparse), make_batches()
    plan = make_plan(sw.capture(model, batches[0]), ranks, entries, **options)
    plan = sw.Plan.from_json(plan.to_json())
    pm = sw.parallelize(model, batches[0], plan, record=True)
    cls, arguments = OPTIMIZERS[optimizer]
    opt = sw.optimizer(pm, cls, **arguments)
    losses, grads, norm = [], {}, torch.zeros(())
    for step, batch in enumerate(batches):
        if checkpoint and step == 2:
            sw.save_checkpoint(Path(checkpoint), pm, opt)
            pm = sw.parallelize(make_model(sparse), batches[0], plan)
            opt = sw.optimizer(pm, cls, **arguments)
            sw.load_checkpoint(Path(checkpoint), pm, opt)
        opt.zero_grad()
        losses.append(pm.train_step(batch).item())
        grads = pm.gather_gradients()
        norm = sw.clip_grad_norm_(pm, clip or 1e9)
        opt.step()
    pieces = {e.spec.name: e.piece.numel() for e in pm.store.entries}
    return {
        "losses": losses,
        "grads": grads,
        "state": pm.gather_state_dict(),
        "norm": norm.item(),
        "pieces": pieces,
    }


def assert_equal(result: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare losses, gradients, norm and parameters of one rank with one process."""
    torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(result["norm"], expected["norm"], rtol=1e-11, atol=1e-12)
    for kind in ("grads", "state"):
        for name, value in expected[kind].items():
            torch.testing.assert_close(result[kind][name], value, rtol=1e-10, atol=1e-11)
