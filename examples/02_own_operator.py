"""Register a sharding rule for a custom operator in one line.

python examples/02_own_operator.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwise as sw


@torch.library.custom_op("mylib::scores", mutates_args=())
def scores(x: Tensor, w: Tensor) -> Tensor:
    """Multiply each row of `x` with each row of `w`, with a custom kernel."""
    return x @ w.t()


@scores.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both operands."""
    x, w = ctx.saved_tensors
    return grad @ w, grad.t() @ x


scores.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

# b and n may be sharded freely; sharding k (marked by `+`) leaves partial sums to be reduced.
sw.register_rule("mylib::scores", "b k+, n k+ -> b n")


class Ranker(nn.Module):
    """A model with two layers of the operator."""

    def __init__(self, width: int = 16, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(hidden, width) / 4)
        self.down = nn.Parameter(torch.randn(classes, hidden) / 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores(scores(x, self.up).relu(), self.down), labels)


def make() -> tuple[Ranker, dict[str, Tensor]]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return Ranker(), {"x": torch.randn(12, 16), "labels": torch.randint(0, 10, (12,))}


def main() -> None:
    """Plan, verify, and print the generated code."""
    model, batch = make()
    graph = sw.capture(model, batch)
    plan = sw.strategies.tensor(graph, sw.Cluster.local(3))
    print(plan)
    print(sw.verify(model, batch, plan))
    source = sw.compile(graph, plan).source(0)
    print(source[source.index("    def forward") :])


if __name__ == "__main__":
    main()
