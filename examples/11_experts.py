"""Train a small mixture of experts, with its 6 experts divided over 4 ranks.

torchrun --nproc-per-node 4 examples/11_experts.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, silu

import shardwise as sw
from shardwise.routing import collect, dispatch, grouped_linear, route

VOCAB, WIDTH, EXPERTS, TOP_K, STEPS = 64, 48, 6, 2, 60


class Experts(nn.Module):
    """Send every token to two of six experts, balanced by a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / (2 * WIDTH) ** 0.5)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("balance", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).sigmoid()
        ids = (scores + self.balance).topk(TOP_K).indices
        load = one_hot(ids, EXPERTS).sum((0, 1)).to(scores.dtype)
        self.balance += 0.01 * (load.mean() - load).sign()  # over the batch of all ranks
        order, counts = route(ids, EXPERTS)
        rows = silu(grouped_linear(dispatch(tokens, order, TOP_K), self.up, counts))
        rows = grouped_linear(rows, self.down, counts)
        routed = (collect(rows, order, ids) * scores.gather(1, ids).unsqueeze(-1)).sum(1)
        return x + self.shared(x) + routed.view_as(x)


class Model(nn.Module):
    """Predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> dict[str, Tensor]:
    """Return 16 sequences in which each token follows from the one before it."""
    first = torch.randint(VOCAB, (16, 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": (first + 7 * torch.arange(33)) % VOCAB}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, cluster = Model(), sw.Cluster.local(dist.get_world_size())
    plan = sw.strategies.expert(sw.capture(model, batch(0)), cluster)
    pm = sw.parallelize(model, batch(0), plan=plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    for step in range(STEPS):
        loss = pm.train_step(batch(step))
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()
