"""Files are read with limits and written atomically."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwise as sw
from shardwise import files
from shardwise.cost import OpTable
from shardwise.errors import ConfigError, PlanError, ShardwiseError
from shardwise.files import compose_yaml, parse_json, read_json, read_text, write_text
from shardwise.schedules import make
from shardwise.schema import parse_yaml
from tests.support.forked import in_child

PLAN = sw.Plan(name="a", model="m", fingerprint="f", mesh=sw.Mesh.of(dp=2), roles={"dp": "batch"})
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested"),
        ("[" * 500 + "]" * 500, "nested more than 64 deep"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested more than 64 deep"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        ("[1e999]", "1e999 is not finite"),
        ("9" * 5000, "too large"),
        (str(2**65), "too large"),
        ('["\\ud800"]', "not Unicode"),
        ('{"\\ud800": 1}', "not Unicode"),
        ("[1,]", "not JSON"),
        ("", "not JSON"),
        ("[" + "1," * 5_000_000 + "1]", "values, more than"),
    ],
)
def test_invalid_json_is_refused(text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(PlanError, match=message) as caught:
        parse_json(text, PlanError, where="plan.json")
    assert "plan.json" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - began < 5


def test_valid_json_is_read() -> None:
    assert parse_json('{"a": [1, -2.5, "\\ud83d\\ude00"]}', where="x") == {"a": [1, -2.5, "😀"]}
    assert parse_json("[NaN, 1e999]", where="x", free=True)[1] == float("inf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "with aliases expanded"),
        ("a: &a [*a]", "no anchor before it"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested"),
        ("a: " + "{a: " * 5000, "nested"),
        ("\n".join(" " * n + "a:" for n in range(3000)), "nested"),
        ('a: "\\ud800"', "Unicode|not plain YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not plain YAML"),
        ("a: !!int x", "not plain YAML"),
        ("a: !!timestamp x", "not plain YAML"),
        ("a: 2001-99-99", "not plain YAML"),
        ("a: 1\na: 2", "duplicate"),
        ("a:\n" + "- &x [1, 2, 3]\n- *x\n" * 20_000, "with aliases expanded"),
    ],
)
def test_invalid_yaml_is_refused(text: str, message: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(text, ConfigError, where="config.yaml", max_values=20_000)
    assert "config.yaml" in str(caught.value)
    assert time.process_time() - began < 5


def test_small_aliases_are_read() -> None:
    text = "base: &base {lr: 1e-3}\nother:\n  <<: *base\n  momentum: 0.9\n"
    data, lines = parse_yaml(text, ConfigError, where="config.yaml", max_values=20_000)
    assert data["other"] == {"lr": 1e-3, "momentum": 0.9}
    assert lines["other", "momentum"] == 4


def test_an_alias_bomb_in_a_cluster_file_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="alias"):
        sw.Cluster.from_yaml(BOMB, "c.yaml")
    with pytest.raises(ShardwiseError, match="nested"):
        compose_yaml("[" * 100_000, ShardwiseError, where="c.yaml", loader=yaml.CSafeLoader)


def test_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WAIT_S", 0.2)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    os.mkfifo(tmp_path / "silent")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for name, message in (
        ("large", "more than"),
        ("silent", "no data"),
        ("binary", "byte 2 is 0xff"),
        ("none", "there is no file"),
        (".", "is a folder"),
    ):
        with pytest.raises(PlanError, match=message):
            read_text(tmp_path / name, PlanError)
    with pytest.raises(PlanError, match="cannot read"):
        read_text("a\0b", PlanError)
    with pytest.raises(PlanError, match="more than"):
        read_text("/dev/zero", PlanError, max_bytes=1 << 20)


def test_pipes_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"a": 1}',), daemon=True)
    writer.start()
    time.sleep(0.1)
    assert read_json(pipe) == {"a": 1}
    (tmp_path / "mark").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "mark") == [1]


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_text(path, "one")
    path.chmod(0o640)
    write_text(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "link"
    link.symlink_to(path)
    write_text(link, "three")
    assert link.is_symlink()
    assert path.read_text() == "three"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    with pytest.raises(PlanError, match="Is a directory"):
        write_text(tmp_path / "new", "x", PlanError)
    with pytest.raises(PlanError, match=r"(?s)No space left.*bytes free.*free some space"):
        write_text("/dev/full", "x", PlanError)


def test_saves_on_a_full_disk_keep_the_old_file(tmp_path: Path) -> None:
    """Every save reports the error of the disk, and leaves the old file."""
    table = OpTable()
    for size in range(20):
        table.add(f"aten.relu.default(float32[{size}])", "cpu", 1e-6, 2e-6)
    plan = replace(PLAN, notes=("x" * 500,))
    savable: dict[str, Any] = {
        "plan": plan,
        "cluster": sw.Cluster.local(2),
        "schedule": make("1f1b", num_groups=4, num_microbatches=64),
        "table": table,
    }
    old = {"plan": "old", "cluster": "old", "schedule": "old"}
    for name, text in old.items():
        (tmp_path / name).write_text(text)

    def save_all() -> list[str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        messages = []
        for name, value in savable.items():
            with pytest.raises(ShardwiseError) as caught:
                value.save(tmp_path / name)
            messages.append(f"{caught.value.message} {caught.value.hint}")
        return messages

    messages = in_child(save_all)
    assert messages.count("File too large") == len(savable), messages
    assert messages.count("free some space") == len(savable), messages
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == old


def test_errors_escape_control_characters_and_are_limited() -> None:
    error = PlanError("a\x1b[2Jb\r" + "x" * 10**6, where="\x07", hint="\u202e")
    assert len(str(error)) < 11_000
    assert str(error).isprintable() or "\x1b" not in str(error)
    assert "\\x1b[2J" in str(error)
    assert "\\u202e" in str(error)


def test_an_absurdly_large_mesh_or_schedule_is_refused() -> None:
    plan = PLAN.to_json()
    for change, message in (
        ({"mesh": {"dp": 2**31}}, "2,147,483,648 ranks"),
        ({"mesh": {f"a{i}": 4 for i in range(40)}}, "axes"),
        ({"num_microbatches": 10**6}, "num_microbatches=1,000,000"),
        ({"num_microbatches": 2**70}, "num_microbatches"),
        ({"mesh": {"dp": [1] * 10}, "name": "a\nb"}, "name"),
        ({"name": "x" * 10**6}, "name"),
        ({"schedule": [["0F0"], "0F1"]}, "schedule"),
        ({"schedule": [1]}, "schedule"),
    ):
        began = time.process_time()
        with pytest.raises(PlanError, match=message):
            sw.Plan.from_json(json.loads(json.dumps({**plan, **change})))
        assert time.process_time() - began < 2
    with pytest.raises(PlanError, match="more than"):
        make("zb_v", num_groups=512, num_microbatches=65_536)


def test_a_read_only_mount_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda path: Mount)
    with pytest.raises(PlanError, match="Read-only file system"):
        PLAN.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())
