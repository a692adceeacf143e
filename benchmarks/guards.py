"""Time the check of Python state and flags before every step: `python -m benchmarks.guards`.

Prints the microseconds of a check, the minimum of many short repetitions, and its share of a
training step on one rank, for a GPT of 12 blocks, a Hugging Face Llama of 12 layers and an MLP.
"""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.models import GPT, tokens


def gpt() -> tuple[nn.Module, Any, Any]:
    """Return a GPT of 12 blocks of width 64."""
    return GPT(layers=12, width=64, heads=4, length=64, vocab=211), tokens(2, 32, 211), None


def llama() -> tuple[nn.Module, Any, Any]:
    """Return a Llama of 12 layers of width 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
    config = LlamaConfig(vocab_size=211, num_attention_heads=4, use_cache=False, **sizes)
    ids = tokens(2, 32, 211)["input_ids"]
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}, None


def mlp() -> tuple[nn.Module, Any, Any]:
    """Return an MLP of two layers."""

    def loss(y: Tensor, batch: Any) -> Tensor:
        return y.square().mean()

    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (torch.ones(8, 16),), loss


def best_us(call: Callable[[], Any], number: int, repeat: int) -> float:
    """Return the shortest time of a call; longer ones include other processes."""
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def main() -> None:
    """Measure and print the times."""
    torch.set_num_threads(1)
    for make in (gpt, llama, mlp):
        torch.manual_seed(0)
        model, batch, loss = make()
        plan = sw.strategies.ddp(sw.capture(model, batch, loss), sw.Cluster.local(1))
        pm = sw.parallelize(model, batch, plan, loss)
        pm.train_step(batch)
        check = best_us(pm.world, 20, 200)
        step = best_us(lambda pm=pm, batch=batch: pm.train_step(batch), 2, 30)  # type: ignore[misc]
        size = f"{len(list(model.modules()))} modules, {len(list(model.parameters()))} parameters"
        print(
            f"{make.__name__:6} {check:7.1f} us of {step / 1e3:7.2f} ms: {check / step:.2%}, {size}"
        )


if __name__ == "__main__":
    main()
