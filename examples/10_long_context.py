"""Divide 131,072 tokens of Llama 3 8B over 8 or 64 H100, and compare ways to attend over them.

python examples/10_long_context.py
python examples/10_long_context.py --nodes 8
python examples/10_long_context.py --layers 2 --verify
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

TOKENS = 131_072


def make(rows: int, layers: int = 32) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Return the model without weights, and a batch of full sequences."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((rows, TOKENS), dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def main(nodes: int, layers: int, verify: bool = False) -> None:
    """Print the predicted time and memory of each plan; `verify` it on a smaller twin."""
    cluster = sw.Cluster.preset("h100", nodes=nodes, devices_per_node=8)
    model, batch = make(rows=nodes, layers=layers)
    graph = sw.capture(model, batch)
    plans = {
        f"cp=8, attention={attention}": {"cp": 8, "attention": attention}
        for attention in ("gather", "ring", "heads")
    }
    plans["cp=4, tp=2"] = {"cp": 4, "tp": 2, "sequence_parallel": True}
    plans["tp=8, sequence_parallel"] = {"tp": 8, "sequence_parallel": True}
    print(f"{nodes} x {TOKENS:,} tokens on {cluster.num_ranks} H100, fully recomputed")
    for text, options in plans.items():
        plan = sw.strategies.hybrid(
            graph, cluster, zero=3, recompute="full", precision="bf16", **options
        )
        estimate = sw.simulate(graph, plan, cluster)
        memory = estimate.peak.peak_bytes / 2**30
        print(f"  {text:25}{estimate.step_time_s:6.1f} s  {memory:5.1f} GiB", flush=True)
        if verify:
            print(str(sw.verify(model, batch, plan)).partition("\n")[0], flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--verify", action="store_true")
    options = parser.parse_args()
    main(options.nodes, options.layers, options.verify)
