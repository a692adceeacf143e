"""Rows of published tables: values, and reasons why rows cannot be predicted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ShardwiseError
from shardwise.published.rows import (
    Entry,
    Sharding,
    Unusable,
    integer,
    read_entries,
    read_precision,
    read_recompute,
    read_sharding,
    rounding,
)

LINE = {
    "row_id": "a:1",
    "source": "somebody",
    "model": "tiny",
    "params_b": "1.3",
    "layers": "24",
    "hidden": "2048",
    "ffn_hidden": "8192",
    "heads": "16",
    "kv_heads": "16",
    "vocab": "50304",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "gpus": "16",
    "gpus_per_node": "8",
    "interconnect": "",
    "precision": "bf16",
    "tp": "2",
    "pp": "1",
    "vpp": "1",
    "cp": "1",
    "ep": "1",
    "dp": "8",
    "zero_stage_or_sharding": "none",
    "micro_batch": "4",
    "global_batch": "64",
    "recompute": "none",
    "derived_step_time_s": "1.5",
    "mem_gib_per_gpu": "40",
    "complete": "1",
}


def read(folder: Path, *changes: dict[str, str]) -> tuple[Entry, ...]:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(LINE))
        writer.writeheader()
        for change in changes:
            writer.writerow({**LINE, **change})
    return read_entries(path)


def test_row(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, {"micro_batch": "4.0", "kv_heads": "", "ep": "", "vpp": ""})
    assert entry.row is not None
    assert entry.row.micro_batch == 4
    assert entry.row.kv_heads == entry.row.heads
    assert entry.row.num_microbatches == 2
    assert entry.step_time_s == 1.5
    assert entry.memory_bytes == 40 * 2**30


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": ""}, "missing hidden"),
        ({"micro_batch": "", "recompute": "n/a"}, "missing micro_batch, recompute"),
        ({"layers": "2.5"}, "layers is 2.5, not a whole number"),
        ({"layers": "many"}, "layers is 'many', not a number"),
        ({"heads": "-4"}, "heads is -4, must be above 0"),
        ({"seq_len": "inf"}, "seq_len is inf, must be a finite number"),
        ({"dp": "3"}, "= 6, but gpus is 16"),
        ({"dp": "", "gpus": "15"}, "15 gpus cannot be divided"),
        ({"dp": "", "gpus": ""}, "missing gpus, dp"),
        ({"global_batch": "60"}, "cannot be divided by dp 8 x micro_batch 4 = 32"),
        ({"hidden": "2049"}, "cannot be divided by 16 heads"),
        ({"ep": "8"}, "ep is 8: only dense models"),
        ({"model": "Mixtral-8x7B"}, "Mixtral-8x7B is a mixture of experts"),
        ({"layers": "1e18"}, "layers is 1e18, must be at most 10,000"),
        ({"gpus": "1e400"}, "gpus is 1e400"),
        ({"zero_stage_or_sharding": "ZeRO-3 within group of 3"}, "into groups of 3"),
        ({"recompute": "sometimes"}, "recompute is 'sometimes'"),
        ({"zero_stage_or_sharding": "magic"}, "'magic'"),
        ({"precision": "int3"}, "precision is 'int3'"),
        ({"vpp": "40"}, "24 layers are fewer than"),
    ],
)
def test_reasons(tmp_path: Path, change: dict[str, str], reason: str) -> None:
    good, bad = read(tmp_path, {}, change)
    assert good.row is not None
    assert bad.row is None
    assert reason in bad.reason


def test_sizes_follow_from_each_other(tmp_path: Path) -> None:
    first, second = read(tmp_path, {"dp": ""}, {"gpus": ""})
    assert first.row is not None
    assert second.row is not None
    assert (first.row.dp, second.row.gpus) == (8, 16)


def test_missing_values_have_defaults(tmp_path: Path) -> None:
    """Accept "None" in a column of numbers, and 0 for an axis that does not exist."""
    explicit, *implied = read(
        tmp_path,
        {},
        {"kv_heads": "None", "vpp": "None", "ep": "none"},
        {"pp": "0", "vpp": "0", "cp": "0.0", "ep": "0"},
    )
    assert [entry.row for entry in implied] == [explicit.row, explicit.row]
    (lacking,) = read(tmp_path, {"micro_batch": "None"})
    assert lacking.reason == "missing micro_batch"


def test_runs_without_memory_and_tokens_per_second(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    line = LINE | {"derived_step_time_s": "", "mem_gib_per_gpu": ""}
    changes = (
        {"derived_step_time_s": "OOM"},
        {"Status": "CUDA out of memory"},
        {"derived_tokens_per_s_per_gpu": "4096"},
        {"Status": "boom"},
    )
    with path.open("w", encoding="latin-1", newline="") as file:
        names = [*LINE, "derived_tokens_per_s_per_gpu", "Status", "Bemerkung"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(line | {"Bemerkung": "größer"} | change for change in changes)
    entries = read_entries(path)
    assert [entry.out_of_memory for entry in entries] == [True, True, False, False]
    assert [entry.step_time_s for entry in entries] == [None, None, 64 * 2048 / 4096 / 16, None]
    assert all(entry.row is not None for entry in entries)


def test_files_without_a_table_raise(tmp_path: Path) -> None:
    for name, data in {"empty": b"", "binary": b"\xff\xfe\x00", "other": b"a,b\n1,2\n"}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ShardwiseError):
            read_entries(path)
    with pytest.raises(ShardwiseError, match="no file"):
        read_entries(tmp_path / "missing.csv")
    with pytest.raises(ShardwiseError):
        read_entries(tmp_path)


def test_odd_but_readable_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    header = ",".join([*LINE, "more"])
    line = ",".join([*LINE.values(), "x", "y"])
    path.write_bytes(f"\ufeff {header}\r\n{line}\r\nshort,line\r\n\r\n".encode())
    full, short = read_entries(path)
    assert full.row is not None
    assert short.reason.startswith("missing layers")


@given(st.dictionaries(st.sampled_from(list(LINE)), st.text(max_size=12), max_size=4))
def test_any_cell_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, change: dict[str, str]
) -> None:
    clean = {k: v.replace("\0", "") for k, v in change.items()}
    clean = {k: v.encode("utf-8", "ignore").decode() for k, v in clean.items()}
    for entry in read(tmp_path_factory.mktemp("rows"), clean, {}):
        assert (entry.row is None) == bool(entry.reason)


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("FSDP FULL_SHARD (ZeRO-3)", Sharding(level=3)),
        ("FSDP", Sharding(level=3)),
        ("FSDP SHARD_GRAD_OP", Sharding(level=2)),
        ("distributed optimizer (ZeRO-1)", Sharding(level=1, prefetch=True)),
        ("Megatron distributed optimizer", Sharding(level=1, prefetch=True)),
        ("ZeRO-1 within group of 8", Sharding(level=1, group=8)),
        ("ZeRO-1 over all DP", Sharding(level=1)),
        ("zero2", Sharding(level=2)),
        ("3", Sharding(level=3)),
        ("optimizer states", Sharding(level=1)),
        ("HSDP (shard 4, replicate 8)", Sharding(level=3, group=4)),
        ("FSDP HYBRID_SHARD", Sharding(level=3, group=8)),
        ("none", Sharding(level=0)),
        ("DDP", Sharding(level=0)),
        ("auto-sharding on logical mesh (dp,tp), reduce-scatter preferred", Sharding(level=2)),
    ],
)
def test_sharding(text: str, sharding: Sharding) -> None:
    assert read_sharding(text) == sharding


def test_other_spellings() -> None:
    for text in ("DistributedOptimizer", "use_distributed_optimizer", "distributed-optimizer"):
        assert read_sharding(text) == Sharding(level=1, prefetch=True)
    assert read_sharding("optimizer sharding") == Sharding(level=1)
    assert read_sharding("unsharded") == Sharding(level=0)
    assert read_recompute("activation checkpointing") == read_recompute("enabled") == "full"


def test_values() -> None:
    assert [read_precision(t) for t in ("amp_bf16", "fp16/bf16 mixed", "FP16", "fp8 (te)")] == [
        "bfloat16",
        "float16",
        "float16",
        "float8",
    ]
    assert [read_recompute(t) for t in ("False", "Full", "selective")] == [
        "none",
        "full",
        "selective",
    ]
    assert [read_recompute(t) for t in ("full (uniform, 1 layer)", "every layer")] == ["full"] * 2
    for some in ("full, 12 of 40 layers", "3 layers", ""):
        with pytest.raises(Unusable, match="recompute"):
            read_recompute(some)
    assert rounding("12.853955") == 0.5e-6
    with pytest.raises(Unusable):
        integer("tp", "0")
