"""Cells of a table of published measurements, as values.

Enters: text such as "8.0", "FSDP FULL_SHARD (ZeRO-3)" or "amp_bf16". Leaves: numbers, `Sharding`
and names; `Unusable` says why a cell cannot be used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Cells that say nothing.
_EMPTY = {"", "-", "--", "?", "n/a", "na", "nan", "none given", "unknown", "null", "unspecified"}
_NONE = {"none", "no", "false", "0", "0.0", "off", "disabled"}
_FULL = {
    "full",
    "yes",
    "true",
    "1",
    "1.0",
    "on",
    "all",
    "every_layer",
    "block",
    "uniform",
    "layer",
    "every",
    "enabled",
    "activation_checkpointing",
    "checkpoint_activations",
}
_SELECTIVE = {"selective", "attention", "core_attn", "core-attention", "core_attention"}
_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
}
# Beyond what any run has had, ten times or more: a cell in another unit, or of another column.
_MOST = {"layers": 10_000, "gpus_per_node": 1_024, "heads": 16_384, "gpus": 1 << 20}
_MOST_OF_ANY = 1 << 28
_GROUP = re.compile(r"(?:group[s]? of|within|over|across|shard)\s*=?\s*(\d+)")
_STAGE = re.compile(r"(?:zero|stage)[\s_-]*([0-3])|^([0-3])$")
_NODE = 8  # ranks of a hybrid's group, unless it says otherwise: a node's devices


class Unusable(ValueError):
    """A cell that cannot be used; the message is the row's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What data-parallel ranks share: ZeRO `level`, among `group` ranks (None: all of them).

    With `prefetch` new parameters are gathered while the next step's forward runs.
    """

    level: int
    group: int | None = None
    prefetch: bool = False


def is_empty(text: str | None) -> bool:
    """Whether a cell says nothing."""
    return text is None or text.strip().lower() in _EMPTY


def is_unsaid(text: str | None) -> bool:
    """Return the same where "none" is no value: a number, a name."""
    return text is None or is_empty(text) or text.strip().lower() == "none"


def number(name: str, text: str) -> float:
    """Return a positive number."""
    try:
        value = float(text.replace(",", "").replace("_", "").strip())
    except ValueError:
        raise Unusable(f"{name} is {text.strip()!r}, not a number") from None
    if not math.isfinite(value):
        raise Unusable(f"{name} is {text.strip()}, must be a finite number")
    if value <= 0:
        raise Unusable(f"{name} is {text.strip()}, must be above 0")
    return value


def whole(name: str, text: str) -> int:
    """Return a positive whole number; "8.0" is 8."""
    value = number(name, text)
    if value != round(value):
        raise Unusable(f"{name} is {text.strip()}, not a whole number")
    most = _MOST.get(name, _MOST_OF_ANY)
    if value > most:
        raise Unusable(f"{name} is {text.strip()}, more than {most:,}: not a training run")
    return round(value)


def rounding(text: str) -> float:
    """Half a unit of the last digit that a number shows; "8" and "8.0" may be 7.5 to 8.5.

    >>> rounding("1.16"), rounding("8.0")
    (0.005, 0.5)
    """
    _, _, digits = text.strip().partition(".")
    return 0.5 * 10.0 ** -len(digits.rstrip("0"))


def read_sharding(text: str) -> Sharding:
    """How a run's data-parallel ranks share parameters, gradients and optimizer state.

    >>> read_sharding("ZeRO-1 within group of 8")
    Sharding(level=1, group=8, prefetch=False)
    """
    low = text.lower().strip()
    # Megatron's: gathers are overlapped (its --overlap-param-gather, on in NVIDIA's recipes).
    prefetch = re.search(r"distributed[\s_-]?optimizer|distopt", low) is not None
    found = _GROUP.search(low)
    group = int(found[1]) if found else None
    stage = _STAGE.search(low)
    if any(word in low for word in ("hsdp", "hybrid", "mics")):
        return Sharding(level=2 if "zero2" in low else 3, group=group or _NODE)
    if stage:
        return Sharding(level=int(stage[1] or stage[2]), group=group, prefetch=prefetch)
    if "no_shard" in low or "unsharded" in low:
        return Sharding(level=0)
    if "grad_op" in low:
        return Sharding(level=2, group=group)
    # Alpa's "reduce-scatter preferred": gradients and optimizer state are shared; its table gives
    # the very memory of ZeRO-2 for it.
    if "auto-sharding" in low or "auto_sharding" in low:
        return Sharding(level=2, group=group)
    if any(word in low for word in ("fsdp", "full_shard", "fully_shard", "fully shard")):
        return Sharding(level=3, group=group)
    if prefetch or re.search(r"optimizer[\s_-]?(state|shard)|shard\w*[\s_-]optimizer", low):
        return Sharding(level=1, group=group, prefetch=prefetch)
    if low in _NONE or low == "dp" or "ddp" in low or "data parallel" in low or "replicat" in low:
        return Sharding(level=0)
    raise Unusable(f"zero_stage_or_sharding is {text.strip()!r}, which is not known")


def read_recompute(text: str) -> str:
    """One of "none", "full" and "selective", by the first word; some layers alone are not known.

    >>> read_recompute("full (uniform, 1 layer)")
    'full'
    """
    low = re.sub(r"\b(activation) (checkpoint)", r"\1_\2", text.lower().strip())
    first, *rest = re.findall(r"[a-z0-9._-]+", low) or [""]
    some = any(word[0].isdigit() and word != "1" for word in rest)
    for mode, words in (("none", _NONE), ("full", _FULL), ("selective", _SELECTIVE)):
        if first in words and not some:
            return mode
    raise Unusable(f"recompute is {text.strip()!r}: none, full and selective are known")


def read_precision(text: str) -> str:
    """Return the dtype that products are computed in; "fp16/bf16 mixed" is its first.

    Every source keeps float32 main parameters, with or without "amp" in the name.
    """
    words = re.split(r"[^a-z0-9]+", text.lower())
    if "fp8" in words or "mxfp8" in words or "float8" in words:
        return "float8"
    for word in words:
        if word in _DTYPES:
            return _DTYPES[word]
    raise Unusable(f"precision is {text.strip()!r}: bf16, fp16, fp32 and fp8 are known")
