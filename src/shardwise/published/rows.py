"""Read a CSV table of published measurements.

Every line becomes an `Entry`: a `Row` that can be predicted, or the reason why it cannot. Unknown
columns are ignored, and an invalid row does not affect the others.
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.dtypes import DTYPES
from shardwise.errors import ShardwiseError
from shardwise.formatting import GIB

# ------------------------------------------------------------ cells
#
# Cells are such as "8.0", "FSDP FULL_SHARD (ZeRO-3)" or "amp_bf16".

# Placeholders for missing values.
_EMPTY = {"", "-", "--", "?", "n/a", "na", "nan", "none given", "unknown", "null", "unspecified"}
_NONE = {"none", "no", "false", "0", "0.0", "off", "disabled"}
_FULL = {
    "full", "yes", "true", "1", "1.0", "on", "all", "every_layer", "block", "uniform", "layer",
    "every", "enabled", "activation_checkpointing", "checkpoint_activations",
}  # fmt: skip
_SELECTIVE = {"selective", "attention", "core_attn", "core-attention", "core_attention"}
_SHORT = {dtype.short: name for name, dtype in DTYPES.items() if dtype.short}
_DTYPES = {**_SHORT, **{name: name for name in _SHORT.values()}, "half": "float16"}
# Ten times above any known run: larger numbers have another unit, or belong to another column.
_MAXIMUMS = {"layers": 10_000, "gpus_per_node": 1_024, "heads": 16_384, "gpus": 1 << 20}
_MAXIMUM = 1 << 28
_GROUP = re.compile(r"(?:group[s]? of|within|over|across|shard)\s*=?\s*(\d+)")
_STAGE = re.compile(r"(?:zero|stage)[\s_-]*([0-3])|^([0-3])$")
_NODE_DEVICES = 8  # default group of hybrid sharding
_OPTIMIZER = r"distributed[\s_-]?optimizer|distopt"  # Megatron's
# Names of shardings without a number, and their ZeRO levels; the first match wins. Alpa's
# "reduce-scatter preferred" (auto-sharding) shards gradients and optimizer state; its table gives
# exactly the memory of ZeRO-2 for it.
_LEVELS = (
    (r"no_shard|unsharded", 0),
    (r"grad_op|auto[-_]sharding", 2),
    (r"fsdp|full_shard|fully[_ ]shard", 3),
    (rf"{_OPTIMIZER}|optimizer[\s_-]?(state|shard)|shard\w*[\s_-]optimizer", 1),
    (r"^dp$|ddp|data parallel|replicat", 0),
)


class Unusable(ValueError):
    """A cell that cannot be used; the message is the row's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The ZeRO `level` of data-parallel ranks, sharded among `group` ranks (None: all of them).

    With `prefetch`, new parameters are gathered while the next step's forward runs.
    """

    level: int
    group: int | None = None
    prefetch: bool = False


def is_empty(text: str | None) -> bool:
    """Return whether a cell is empty or a placeholder."""
    return text is None or text.strip().lower() in _EMPTY


def is_missing(text: str | None) -> bool:
    """Return whether a cell for a number or a name is empty or "none"."""
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


def integer(name: str, text: str) -> int:
    """Return a positive integer; "8.0" is 8."""
    value = number(name, text)
    if value != round(value):
        raise Unusable(f"{name} is {text.strip()}, not a whole number")
    maximum = _MAXIMUMS.get(name, _MAXIMUM)
    if value > maximum:
        raise Unusable(f"{name} is {text.strip()}, must be at most {maximum:,}")
    return round(value)


def rounding(text: str) -> float:
    """Return half a unit of the last digit shown; "8" and "8.0" may be 7.5 to 8.5.

    >>> rounding("1.16"), rounding("8.0")
    (0.005, 0.5)
    """
    _, _, digits = text.strip().partition(".")
    return 0.5 * 10.0 ** -len(digits.rstrip("0"))


def read_sharding(text: str) -> Sharding:
    """Return the sharding of parameters, gradients and optimizer state over data-parallel ranks.

    >>> read_sharding("ZeRO-1 within group of 8")
    Sharding(level=1, group=8, prefetch=False)
    """
    low = text.lower().strip()
    # Gathers are overlapped (Megatron's --overlap-param-gather, on in NVIDIA's recipes).
    prefetch = re.search(_OPTIMIZER, low) is not None
    match = _GROUP.search(low)
    group = int(match[1]) if match else None
    stage = _STAGE.search(low)
    if re.search("hsdp|hybrid|mics", low):
        return Sharding(level=2 if "zero2" in low else 3, group=group or _NODE_DEVICES)
    if stage:
        return Sharding(level=int(stage[1] or stage[2]), group=group, prefetch=prefetch)
    for pattern, level in _LEVELS:
        if re.search(pattern, low):
            group = group if level else None
            return Sharding(level=level, group=group, prefetch=prefetch and level == 1)
    if low in _NONE:
        return Sharding(level=0)
    raise Unusable(f"zero_stage_or_sharding is {text.strip()!r}, which is not supported")


def read_recompute(text: str) -> str:
    """Return "none", "full" or "selective"; recomputation of some layers is not supported.

    >>> read_recompute("full (uniform, 1 layer)")
    'full'
    """
    low = re.sub(r"\b(activation) (checkpoint)", r"\1_\2", text.lower().strip())
    first, *others = re.findall(r"[a-z0-9._-]+", low) or [""]
    is_partial = any(word[0].isdigit() and word != "1" for word in others)
    for mode, words in (("none", _NONE), ("full", _FULL), ("selective", _SELECTIVE)):
        if first in words and not is_partial:
            return mode
    raise Unusable(f"recompute is {text.strip()!r}, must be none, full or selective")


def read_precision(text: str) -> str:
    """Return the dtype in which products are computed; of "fp16/bf16 mixed", the first.

    Every source keeps float32 main parameters, with or without "amp" in the name.
    """
    words = re.split(r"[^a-z0-9]+", text.lower())
    if "fp8" in words or "mxfp8" in words or "float8" in words:
        return "float8"
    for word in words:
        if word in _DTYPES:
            return _DTYPES[word]
    raise Unusable(f"precision is {text.strip()!r}, must be bf16, fp16, fp32 or fp8")


# ------------------------------------------------------------ rows
# Required columns: without any of these, step time or memory would be a guess.
_REQUIRED = (
    "layers", "hidden", "ffn_hidden", "heads", "vocab", "seq_len", "gpu", "precision",
    "zero_stage_or_sharding", "micro_batch", "global_batch", "recompute",
)  # fmt: skip
_INTEGERS = (
    "layers", "hidden", "ffn_hidden", "heads", "vocab", "seq_len", "micro_batch", "global_batch",
)  # fmt: skip
# Required columns in which "none" is a value.
_MAY_BE_NONE = ("zero_stage_or_sharding", "recompute")
# Columns that make a model a mixture of experts.
_EXPERTS = ("experts", "num_experts", "n_experts", "moe_experts", "num_moe_experts")
# Names of such models: Mixtral-8x7B, Qwen3-235B-A22B, GPT-MoE.
_MIXTURE = re.compile(r"\bmoe\b|mixtral|experts?\b|\d+x\d+(\.\d+)?b|\d+b-a\d", re.IGNORECASE)
# Columns in which a table reports that a run was out of memory.
_RESULTS = (
    "derived_step_time_s", "derived_tokens_per_s_per_gpu", "mem_gib_per_gpu", "status", "result",
    "outcome", "error", "oom", "notes",
)  # fmt: skip
_OUT_OF_MEMORY = re.compile(r"\boom\b|out[\s_-]of[\s_-]memory", re.IGNORECASE)
_MAX_FILE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration: a decoder-only transformer, its cluster and its parallelization."""

    row_id: str
    model: str
    params_b: float | None
    params_text: str = ""  # the cell's text if it is not a number
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
        """The dtype of everything except products in float8."""
        return "bfloat16" if self.dtype == "float8" else self.dtype

    @property
    def is_grouped(self) -> bool:
        """Whether states are sharded among fewer than all data-parallel ranks."""
        return self.sharding.group is not None and self.sharding.group < self.dp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the file: its `row`, or the `reason` why it has none, and the published values.

    `out_of_memory` marks a run that was published as such.
    """

    row_id: str
    row: Row | None
    reason: str
    model: str
    device: str
    step_time_s: float | None
    memory_bytes: int | None
    out_of_memory: bool = False


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Return all lines of a CSV file in order."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ShardwiseError(f"{path} has more than {_MAX_FILE_BYTES >> 20} MiB")
        # A byte that is not UTF-8 spoils only its own cell.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file, restkey="")
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            lines = [{k: v or "" for k, v in line.items() if k} for line in reader]
    except FileNotFoundError:
        raise ShardwiseError(f"no file {path}", hint="--csv published.csv") from None
    except (OSError, csv.Error) as error:
        raise ShardwiseError(f"{path} is not a readable CSV file: {error}") from error
    if not set(names) & set(_REQUIRED):
        raise ShardwiseError(
            f"{path} has none of the required columns; its first line is {', '.join(names)[:80]!r}",
            hint=f"columns such as row_id, {', '.join(_REQUIRED[:4])}, gpu, gpus, micro_batch",
        )
    return tuple(_entry(line, index) for index, line in enumerate(lines, start=1))


def _entry(line: Mapping[str, str], index: int) -> Entry:
    row_id = line.get("row_id", "").strip() or f"row {index}"
    row, reason = None, ""
    try:
        row = _row(row_id, line)
    except Unusable as error:
        reason = str(error)
    memory_gib = _optional_number(line, "mem_gib_per_gpu")
    return Entry(
        row_id=row_id,
        row=row,
        reason=reason,
        model=line.get("model", "").strip(),
        device=line.get("gpu", "").strip(),
        step_time_s=_step_time_s(line, row),
        memory_bytes=None if memory_gib is None else round(memory_gib * GIB),
        out_of_memory=any(_OUT_OF_MEMORY.search(line.get(name, "")) for name in _RESULTS),
    )


def _step_time_s(line: Mapping[str, str], row: Row | None) -> float | None:
    """Return the published step time, or the one implied by the published tokens per second."""
    seconds = _optional_number(line, "derived_step_time_s")
    tokens = _optional_number(line, "derived_tokens_per_s_per_gpu")
    if seconds is None and tokens is not None and row is not None:
        return row.global_batch * row.seq_len / (tokens * row.gpus)
    return seconds


def _row(row_id: str, line: Mapping[str, str]) -> Row:
    missing = [
        name
        for name in _REQUIRED
        if (is_empty if name in _MAY_BE_NONE else is_missing)(line.get(name))
    ]
    if missing:
        raise Unusable(f"missing {', '.join(missing)}")
    sizes = {axis: _or_one(line, axis) for axis in ("tp", "pp", "vpp", "cp")}
    for name in ("ep", *_EXPERTS):
        if not is_missing(line.get(name)) and line[name].strip() not in ("0", "0.0", "1", "1.0"):
            raise Unusable(f"{name} is {line[name].strip()}: only dense models are predicted")
    model = line.get("model", "").strip()
    if _MIXTURE.search(model):
        raise Unusable(f"{model} is a mixture of experts: only dense models are predicted")
    gpus, dp = _ranks(line, sizes)
    params, params_b = line.get("params_b", "").strip(), _optional_number(line, "params_b")
    row = Row(
        row_id=row_id,
        model=model,
        params_b=params_b,
        params_text="" if params_b is not None or is_missing(params) else params,
        params_tolerance_b=rounding(line.get("params_b", "")),
        **{name: integer(name, line[name]) for name in _INTEGERS},
        kv_heads=_optional_integer(line, "kv_heads") or integer("heads", line["heads"]),
        gpu=line["gpu"].strip(),
        gpus=gpus,
        gpus_per_node=_optional_integer(line, "gpus_per_node"),
        interconnect=line.get("interconnect", "").strip(),
        dtype=read_precision(line["precision"]),
        **sizes,
        dp=dp,
        sharding=read_sharding(line["zero_stage_or_sharding"]),
        recompute=read_recompute(line["recompute"]),
    )
    _check(row)
    return row


def _ranks(line: Mapping[str, str], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the numbers of GPUs and of data-parallel ranks; one implies the other."""
    inner = sizes["tp"] * sizes["pp"] * sizes["cp"]
    split = f"tp {sizes['tp']} x pp {sizes['pp']} x cp {sizes['cp']}"
    gpus, dp = _optional_integer(line, "gpus"), _optional_integer(line, "dp")
    if gpus is None and dp is None:
        raise Unusable("missing gpus, dp")
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
    """Raise for configurations that cannot have been run."""
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
    """Return the size of an axis; some tables have 0 for an axis that does not exist."""
    return 1 if line.get(name, "").strip() in ("0", "0.0") else _optional_integer(line, name) or 1


def _optional_integer(line: Mapping[str, str], name: str) -> int | None:
    text = line.get(name, "")
    return None if is_missing(text) else integer(name, text)


def _optional_number(line: Mapping[str, str], name: str) -> float | None:
    """Return a number or None; "OOM" as a step time is not a measurement."""
    try:
        return number(name, line.get(name, ""))
    except Unusable:
        return None
