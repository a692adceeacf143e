"""Train a small Llama 3 from a Hugging Face config, or plan 8B with 128K tokens.

python examples/05_llama.py
torchrun --nproc-per-node 2 examples/05_llama.py --plan tensor
python examples/05_llama.py --size 8b-128k      # plans for and simulates 8 H100
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

SIZES = {  # width, inner width, layers, heads, key heads, vocabulary; rows and tokens of a batch
    "small": ((64, 224, 2, 4, 2, 256), (8, 64)),
    "8b-128k": ((4096, 14_336, 32, 32, 8, 128_256), (8, 131_072)),
}
ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def make(size: str = "small") -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Return the model (without weights if it is large), and a batch of consecutive numbers."""
    (width, inner, layers, heads, key_heads, vocabulary), (rows, tokens) = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=131_072,
        rope_parameters=ROPE,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cpu" if size == "small" else "meta"):
        model = LlamaForCausalLM(config)
        ids = (torch.arange(rows)[:, None] * 7 + torch.arange(tokens)) % vocabulary
    return model, {"input_ids": ids, "labels": ids}


def simulate(size: str) -> None:
    """Find the fastest plan for 8 H100 and print its estimate."""
    model, batch = make(size)
    cluster = sw.Cluster.preset("h100", nodes=1, devices_per_node=8)
    graph = sw.capture(model.to(torch.bfloat16), batch)
    plan = sw.plan(graph, cluster, precision="bf16")
    print(plan, sw.simulate(graph, plan, cluster), sep="\n")


def train(strategy: str, steps: int) -> None:
    """Train the small model on the available ranks."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model, batch = make()
    plan = getattr(sw.strategies, strategy)(sw.capture(model, batch), sw.Cluster.local(ranks))
    part = sw.parallelize(model, batch, plan)
    optimizer = sw.optimizer(part, torch.optim.AdamW, lr=3e-3)
    for step in range(steps):
        loss = part.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--plan", choices=["ddp", "fsdp", "tensor"], default="ddp")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    train(options.plan, options.steps) if options.size == "small" else simulate(options.size)
