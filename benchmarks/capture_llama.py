"""Time `capture` of Llama-3-8B on meta tensors, compared with plain `torch.export`.

    python benchmarks/capture_llama.py [--layers 32] [--tokens 8192] [--json result.json]

Both run alternately in the same process on the same model; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.frontend import capture


def llama(layers: int) -> LlamaForCausalLM:
    """Build Llama-3-8B without weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds and the result of a call."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens = torch.zeros(1, options.tokens, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    small = llama(1)
    torch.export.export(small, (), batch, strict=False)  # warm up imports and caches
    capture(small, batch)

    model = llama(options.layers)
    exports, captures = [], []
    for _ in range(options.repeats):
        exports.append(timed(lambda: torch.export.export(model, (), batch, strict=False))[0])
        seconds, graph = timed(lambda: capture(model, batch))
        captures.append(seconds)
    export_s, capture_s = statistics.median(exports), statistics.median(captures)
    result = {
        "layers": options.layers,
        "tokens": options.tokens,
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": len(graph.nodes),
        "export_s": export_s,
        "capture_s": capture_s,
        "ratio": capture_s / export_s,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(f"{'':24s}{'seconds':>10s}")
    print(f"{'torch.export (plain)':24s}{export_s:10.2f}")
    print(f"{'shardwise capture':24s}{capture_s:10.2f}")
    print(f"{'ratio (at most 1.2)':24s}{result['ratio']:10.2f}")
    print(f"{result['nodes']} nodes, {result['parameters'] / 1e9:.2f} B parameters")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
