"""Capture every architecture of `transformers` that has a working tiny configuration.

    python benchmarks/capture_sweep.py [--kinds causal masked seq2seq image] [--only llama t5]

Prints one line per architecture: `ok` (loss and gradients equal in float64), `refused` with the
reason, `unbuilt` when the tiny configuration or the model itself fails, or `WRONG`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers.models.auto import modeling_auto as auto

from shardwise.errors import ShardwiseError
from shardwise.frontend import capture
from tests.support import zoo
from tests.support.capture import assert_captured

KINDS = {
    "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "AutoModelForCausalLM"),
    "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "AutoModelForMaskedLM"),
    "seq2seq": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "AutoModelForSeq2SeqLM"),
    "image": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "AutoModelForImageClassification"),
}
MAX_PARAMETERS = 60_000_000


class TooSlow(Exception):
    """A model exceeded its time limit."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise `TooSlow` inside the block after some seconds."""

    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


RETRIES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},  # equally many heads: latent attention
)


def build_any(kind: str, model_type: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Build the first tiny configuration that runs forward and backward."""
    for overrides in RETRIES:
        try:
            model, batch = build(kind, model_type, overrides)
            model(**batch).loss.backward()
            model.zero_grad()
            return model, batch
        except Exception:
            if overrides is RETRIES[-1]:
                raise
    raise AssertionError


def build(
    kind: str, model_type: str, overrides: dict[str, Any]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Build a tiny model and its batch; its size is checked on meta tensors first."""
    torch.manual_seed(0)
    name = KINDS[kind][1]
    with torch.device("meta"):
        sketch = getattr(transformers, name).from_config(zoo._config(model_type, overrides))
    count = sum(p.numel() for p in sketch.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} M parameters: the tiny configuration has no effect")
    if kind == "image":
        model, batch = zoo._image(model_type, auto=name, **overrides)
    else:
        model, batch = zoo._text(name, model_type, **overrides)
    model = model.to(torch.float64).train()
    return model, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def judge(kind: str, model_type: str) -> tuple[str, str]:
    """Return the status and reason of an architecture."""
    try:
        with at_most(60):
            model, batch = build_any(kind, model_type)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "unbuilt", f"{type(error).__name__}: {first_line(error)}"
    try:
        with at_most(120):
            graph = assert_captured(model, batch, tolerance=1e-8)
        warned = "; ".join(graph.warnings)
        return "ok", f"{len(graph.nodes)} nodes" + (f"; {warned}" if warned else "")
    except ShardwiseError as error:
        return "refused", first_line(error) + f" [{error.where}]"
    except TooSlow as error:
        return "refused", str(error)
    except Exception as error:
        return "WRONG", f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the message on one line, shortened."""
    return " ".join(str(error).split())[:160]


def main() -> None:
    """Sweep and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    capture(*zoo.build("mlp"))
    rows = []
    for kind in options.kinds:
        for model_type in KINDS[kind][0]:
            if options.only and model_type not in options.only:
                continue
            status, reason = judge(kind, model_type)
            rows.append({"kind": kind, "model": model_type, "status": status, "reason": reason})
            print(f"{kind:8s} {model_type:28s} {status:8s} {reason}", flush=True)
    counts = Counter(row["status"] for row in rows)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if counts["WRONG"] else 0)


if __name__ == "__main__":
    main()
