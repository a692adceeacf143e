"""Rows of a table of published measurements.

Enters: a CSV file with a configuration per row. Leaves: `Entry`s: a `Row` that can be predicted,
or the reason why it cannot. Unknown columns are ignored; no row stops the others.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.calibration.values import (
    Sharding,
    Unusable,
    is_empty,
    is_unsaid,
    number,
    read_precision,
    read_recompute,
    read_sharding,
    rounding,
    whole,
)
from shardwise.errors import ShardwiseError
from shardwise.formatting import GIB

# What a row must say: without any of these, step time or memory would be a guess.
_NEEDED = (
    "layers",
    "hidden",
    "ffn_hidden",
    "heads",
    "vocab",
    "seq_len",
    "gpu",
    "precision",
    "zero_stage_or_sharding",
    "micro_batch",
    "global_batch",
    "recompute",
)
# Of these, the ones in which "none" says something.
_WORDS = ("zero_stage_or_sharding", "recompute")
# Columns that make a model a mixture of experts, where a table has one of them.
_EXPERTS = ("experts", "num_experts", "n_experts", "moe_experts", "num_moe_experts")
# Names of such models: Mixtral-8x7B, Qwen3-235B-A22B, GPT-MoE.
_MIXTURE = re.compile(r"\bmoe\b|mixtral|experts?\b|\d+x\d+(\.\d+)?b|\d+b-a\d", re.IGNORECASE)
# Where a table says that a run had too little memory.
_RESULTS = (
    "derived_step_time_s",
    "derived_tokens_per_s_per_gpu",
    "mem_gib_per_gpu",
    "status",
    "result",
    "outcome",
    "error",
    "oom",
    "notes",
)
_RAN_OUT = re.compile(r"\boom\b|out[\s_-]of[\s_-]memory", re.IGNORECASE)
_MAX_FILE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration: a decoder-only transformer, the machines, and how it was split."""

    row_id: str
    model: str
    params_b: float | None
    params_text: str = ""  # what stands there instead of a number
    params_tolerance_b: float
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    gpu: str
    gpus: int
    gpus_per_node: int | None
    interconnect: str
    dtype: str
    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    sharding: Sharding
    micro_batch: int
    global_batch: int
    recompute: str

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def compute_dtype(self) -> str:
        """Of everything but products in float8."""
        return "bfloat16" if self.dtype == "float8" else self.dtype

    @property
    def is_grouped(self) -> bool:
        """Whether optimizer states are shared by fewer than all data-parallel ranks."""
        return self.sharding.group is not None and self.sharding.group < self.dp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the file: its `row`, or the `reason` it has none, and what was published.

    `ran_out`: a run that is published as out of memory.
    """

    row_id: str
    row: Row | None
    reason: str
    model: str
    device: str
    step_time_s: float | None
    memory_bytes: int | None
    ran_out: bool = False


def read_entries(path: Path) -> tuple[Entry, ...]:
    """All lines of a CSV file, in its order."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ShardwiseError(f"{path} has more than {_MAX_FILE_BYTES >> 20} MiB")
        # A byte that is no UTF-8 spoils its own cell, not the file.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file, restkey="")
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            lines = [{k: v or "" for k, v in line.items() if k} for line in reader]
    except FileNotFoundError:
        raise ShardwiseError(f"no file {path}", hint="--csv published.csv") from None
    except (OSError, csv.Error) as error:
        raise ShardwiseError(f"{path} is not a readable CSV file: {error}") from error
    if not set(names) & set(_NEEDED):
        raise ShardwiseError(
            f"{path} has no column of configurations; its first line is {', '.join(names)[:80]!r}",
            hint=f"columns such as row_id, {', '.join(_NEEDED[:4])}, gpu, gpus, micro_batch",
        )
    return tuple(_entry(line, index) for index, line in enumerate(lines, start=1))


def _entry(line: Mapping[str, str], index: int) -> Entry:
    row_id = line.get("row_id", "").strip() or f"row {index}"
    row, reason = None, ""
    try:
        row = _row(row_id, line)
    except Unusable as unusable:
        reason = str(unusable)
    memory_gib = _optional_number(line, "mem_gib_per_gpu")
    return Entry(
        row_id=row_id,
        row=row,
        reason=reason,
        model=line.get("model", "").strip(),
        device=line.get("gpu", "").strip(),
        step_time_s=_step_time_s(line, row),
        memory_bytes=None if memory_gib is None else round(memory_gib * GIB),
        ran_out=any(_RAN_OUT.search(line.get(name, "")) for name in _RESULTS),
    )


def _step_time_s(line: Mapping[str, str], row: Row | None) -> float | None:
    """Return the published one, or that of the published tokens per second."""
    seconds = _optional_number(line, "derived_step_time_s")
    tokens = _optional_number(line, "derived_tokens_per_s_per_gpu")
    if seconds is None and tokens is not None and row is not None:
        return row.global_batch * row.seq_len / (tokens * row.gpus)
    return seconds


def _row(row_id: str, line: Mapping[str, str]) -> Row:
    said = {name: line.get(name) for name in _NEEDED}
    missing = [n for n, text in said.items() if (is_empty if n in _WORDS else is_unsaid)(text)]
    if missing:
        raise Unusable(f"lacks {', '.join(missing)}")
    sizes = {axis: _or_one(line, axis) for axis in ("tp", "pp", "vpp", "cp")}
    for name in ("ep", *_EXPERTS):
        if not is_unsaid(line.get(name)) and line[name].strip() not in ("0", "0.0", "1", "1.0"):
            raise Unusable(f"{name} is {line[name].strip()}: only dense models are predicted")
    model = line.get("model", "").strip()
    if _MIXTURE.search(model):
        raise Unusable(f"{model} is a mixture of experts: only dense models are predicted")
    gpus, dp = _ranks(line, sizes)
    heads = whole("heads", line["heads"])
    params, params_b = line.get("params_b", "").strip(), _optional_number(line, "params_b")
    row = Row(
        row_id=row_id,
        model=model,
        params_b=params_b,
        params_text="" if params_b is not None or is_unsaid(params) else params,
        params_tolerance_b=rounding(line.get("params_b", "")),
        layers=whole("layers", line["layers"]),
        hidden=whole("hidden", line["hidden"]),
        ffn_hidden=whole("ffn_hidden", line["ffn_hidden"]),
        heads=heads,
        kv_heads=_optional_whole(line, "kv_heads") or heads,
        vocab=whole("vocab", line["vocab"]),
        seq_len=whole("seq_len", line["seq_len"]),
        gpu=line["gpu"].strip(),
        gpus=gpus,
        gpus_per_node=_optional_whole(line, "gpus_per_node"),
        interconnect=line.get("interconnect", "").strip(),
        dtype=read_precision(line["precision"]),
        tp=sizes["tp"],
        pp=sizes["pp"],
        vpp=sizes["vpp"],
        cp=sizes["cp"],
        dp=dp,
        sharding=read_sharding(line["zero_stage_or_sharding"]),
        micro_batch=whole("micro_batch", line["micro_batch"]),
        global_batch=whole("global_batch", line["global_batch"]),
        recompute=read_recompute(line["recompute"]),
    )
    _check(row)
    return row


def _ranks(line: Mapping[str, str], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of GPUs and of data-parallel ranks; either follows from the other."""
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    split = f"tp {sizes['tp']} x pp {sizes['pp']} x cp {sizes['cp']}"
    gpus, dp = _optional_whole(line, "gpus"), _optional_whole(line, "dp")
    if gpus is None and dp is None:
        raise Unusable("lacks gpus, dp")
    if gpus is None:
        assert dp is not None
        return inner * dp, dp
    if dp is None:
        if gpus % inner:
            raise Unusable(f"{gpus} gpus cannot be divided by {split} = {inner}")
        return gpus, gpus // inner
    if inner * dp != gpus:
        raise Unusable(f"{split} x dp {dp} = {inner * dp}, but gpus is {gpus}")
    return gpus, dp


def _check(row: Row) -> None:
    """What no run can have been."""
    if row.hidden % row.heads:
        raise Unusable(f"hidden {row.hidden} cannot be divided by {row.heads} heads")
    if row.heads % row.kv_heads:
        raise Unusable(f"{row.heads} heads cannot be divided by {row.kv_heads} kv_heads")
    share = row.dp * row.micro_batch
    if row.global_batch % share:
        raise Unusable(
            f"global_batch {row.global_batch} cannot be divided by "
            f"dp {row.dp} x micro_batch {row.micro_batch} = {share}"
        )
    if row.layers < row.pp * row.vpp:
        raise Unusable(f"{row.layers} layers are fewer than pp {row.pp} x vpp {row.vpp} stages")
    if row.seq_len % row.cp:
        raise Unusable(f"seq_len {row.seq_len} cannot be divided by cp {row.cp}")
    if row.is_grouped and row.dp * row.cp % (row.sharding.group or 1):
        raise Unusable(
            f"dp {row.dp} x cp {row.cp} cannot be divided into groups of {row.sharding.group}"
        )


def _or_one(line: Mapping[str, str], name: str) -> int:
    """Return the size of an axis; 0 is what some tables have for one that is not there."""
    return 1 if line.get(name, "").strip() in ("0", "0.0") else _optional_whole(line, name) or 1


def _optional_whole(line: Mapping[str, str], name: str) -> int | None:
    text = line.get(name, "")
    return None if is_unsaid(text) else whole(name, text)


def _optional_number(line: Mapping[str, str], name: str) -> float | None:
    """Return a number, or None where there is none: "OOM" for a step time is no measurement."""
    try:
        return number(name, line.get(name, ""))
    except Unusable:
        return None
