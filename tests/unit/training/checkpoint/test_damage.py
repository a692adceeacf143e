"""Corrupt, incomplete and hostile checkpoints, full disks, and retention."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import resource
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import verify_checkpoint
from shardwise.checkpoint import write as writing_module
from shardwise.errors import CheckpointError


def model_of(value: float = 1.0) -> nn.Module:
    torch.manual_seed(int(value))
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))


@pytest.fixture
def two(tmp_path: Path) -> sw.CheckpointManager:
    """Return a folder with the checkpoints of steps 1 and 2."""
    manager = sw.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, model_of(step), wait=True)
    return manager


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5)


def flip(file: Path, index: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[index] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model-00000.safetensors is truncated: it has .* bytes instead of"),
        (flip, "model-00000.safetensors is corrupt: checksum mismatch"),
        (Path.unlink, "model-00000.safetensors is missing"),
    ],
)
def test_a_corrupt_file_and_the_previous_checkpoint_are_named(
    two: sw.CheckpointManager, damage: Callable[[Path], None], message: str
) -> None:
    damage(two.path(2) / "model-00000.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        sw.load_checkpoint(two.path(2), model_of())
    assert str(two.path(1)) in str(caught.value.hint)
    sw.load_checkpoint(two.path(1), model_of())
    with pytest.raises(CheckpointError, match=message):
        sw.load_checkpoint(two.path(2))
    if damage is not flip:  # a flipped bit only shows when it is read
        assert two.latest() == two.path(1)


def test_every_flipped_bit_is_detected(two: sw.CheckpointManager) -> None:
    expected = sw.load_checkpoint(two.path(2)).state_dict
    for file in sorted(two.path(2).iterdir()):
        original = file.read_bytes()
        for index in range(0, len(original), 37):
            flip(file, index)
            loaded, message = expected, file.name
            try:  # padding, or a name in the header that nothing reads, does no harm
                loaded = sw.load_checkpoint(two.path(2)).state_dict
            except CheckpointError as error:
                message = str(error)
            assert file.name in message
            for name, tensor in expected.items():
                assert torch.equal(loaded[name], tensor), (file, index)
            file.write_bytes(original)


def test_verification_names_corrupt_files(two: sw.CheckpointManager) -> None:
    assert verify_checkpoint(two.path(2)).ok
    flip(two.path(2) / "model-00000.safetensors")
    verification = verify_checkpoint(two.path(2))
    assert not verification.ok
    assert len(verification.problems) == 1
    assert "model-00000.safetensors" in verification.problems[0]


class Bomb:
    """Create a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_pickles_beside_a_checkpoint_are_never_opened(
    two: sw.CheckpointManager, tmp_path: Path
) -> None:
    mark = tmp_path / "exploded"
    names = ["pytorch_model.bin", ".metadata", "__0_0.distcp", "checkpoint.pt", "optimizer.pkl"]
    for name in names:
        (two.path(2) / name).write_bytes(pickle.dumps(Bomb(mark)))
    sw.load_checkpoint(two.path(2), model_of())
    assert verify_checkpoint(two.path(2)).ok
    folder = tmp_path / "pickles"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(CheckpointError, match="not a checkpoint") as caught:
        sw.load_checkpoint(folder)
    assert "pickled files are not opened" in str(caught.value.hint)
    for name in ("checkpoint.json", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
        with pytest.raises(CheckpointError):
            sw.load_checkpoint(folder)
        (folder / name).unlink()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()  # unpickling would have been noticed


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as an attacker would, with a valid checksum."""
    path = folder / "checkpoint.json"
    body = json.loads(path.read_text())
    body.pop("crc32")
    change(body)
    body["crc32"] = zlib.crc32(json.dumps(body, separators=(",", ":")).encode())
    path.write_text(json.dumps(body, separators=(",", ":")))


def tensor_of(body: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = body["sections"]["model"]["0.weight"]
    return tensor


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda b: b.update(version=9), "version 9"),
    "unknown field": (lambda b: b.update(stepp=9), "unknown field 'stepp'; did you mean 'step'"),
    "step": (lambda b: b.update(step="1"), "step is '1'"),
    "sections": (lambda b: b.update(sections=[1]), "sections is a list"),
    "path upwards": (lambda b: b["files"].update({"../model-00000.safetensors": 5}), "'../model"),
    "absolute path": (lambda b: b["files"].update({"/etc/passwd": 5}), "'/etc"),
    "box in unknown file": (
        lambda b: tensor_of(b)["boxes"][0].update(file="x"),
        "a box in an unknown file 'x'",
    ),
    "dtype": (lambda b: tensor_of(b).update(dtype="object"), "'object'"),
    "negative shape": (lambda b: tensor_of(b).update(shape=[-16, -8]), "-16"),
    "huge shape": (lambda b: tensor_of(b).update(shape=[1 << 60, 8]), str(1 << 60)),
    "true as a number": (lambda b: tensor_of(b).update(shape=[True, 8]), "True"),
    "larger than its boxes": (lambda b: tensor_of(b).update(shape=[17, 8]), "of its 136 elements"),
    "box outside": (lambda b: tensor_of(b)["boxes"][0].update(at=[1, 0]), "not within"),
    "box twice": (lambda b: tensor_of(b)["boxes"].append(tensor_of(b)["boxes"][0]), "overlap"),
    "no boxes": (lambda b: tensor_of(b).update(boxes=[]), "have 0 of its"),
    "boxes not a list": (lambda b: tensor_of(b).update(boxes={}), "must be a list"),
    "checksum": (lambda b: tensor_of(b)["boxes"][0].update(crc32="0"), "crc32 is '0'"),
    "larger than its file": (
        lambda b: tensor_of(b).update(
            shape=[1 << 40, 8], boxes=[{**tensor_of(b)["boxes"][0], "size": [1 << 40, 8]}]
        ),
        "but its boxes need",
    ),
    "another shape of the same size": (
        lambda b: b["sections"]["model"].update({"other": b["sections"]["model"].pop("0.weight")}),
        "has no 0.weight",
    ),
    "aliases": (lambda b: b.update(aliases={"a": 3}), "aliases"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_are_refused(two: sw.CheckpointManager, case: str) -> None:
    change, message = HOSTILE[case]
    rewrite(two.path(2), lambda body: (change(body), None)[1])
    with pytest.raises(CheckpointError, match=re.escape(message)):
        sw.load_checkpoint(two.path(2), model_of())


def test_hostile_optimizer_state_is_refused(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    good = tmp_path / "good"
    sw.save_checkpoint(good, model, optimizer)
    for number, change in enumerate(
        (
            lambda o: o.update(groups=3),
            lambda o: o.update(state=[1]),
            lambda o: o["groups"][0].update(params=[[1]]),
            lambda o: o["groups"][0].update(options={"$tuple": 3}),
            lambda o: o["state"]["0.weight"].update(step={"$tensor": ["float32", "x"]}),
            lambda o: o["state"]["0.weight"].update(step={"$call": "os.system"}),
            lambda o: o["state"]["0.weight"].update(exp_avg={"$stored": "nothing"}),
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        rewrite(folder, lambda body, change=change: change(body["optimizer"]))  # type: ignore[misc]
        with pytest.raises(CheckpointError):
            sw.load_checkpoint(folder, model, optimizer)


def test_hostile_file_headers_are_refused(tmp_path: Path) -> None:
    def write(header: bytes, data: bytes = b"") -> None:
        text = len(header).to_bytes(8, "little") + header + data
        (tmp_path / "model.safetensors").write_bytes(text)

    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    cases: list[Any] = [
        [1],
        {"w": 3},
        {"w": {**entry, "data_offsets": [0, 8]}},
        {"w": {**entry, "data_offsets": [4, 0]}},
        {"w": {**entry, "shape": [-1]}},
        {"w": {**entry, "shape": [1 << 61, 1 << 61]}},
        {"w": {**entry, "dtype": "PICKLE"}},
    ]
    for case in cases:
        write(json.dumps(case).encode(), b"\0" * 4)
        with pytest.raises(CheckpointError):
            sw.load_checkpoint(tmp_path)
    write(b"[" * 200_000)
    with pytest.raises(CheckpointError):
        sw.load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((1 << 50).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="a header of"):
        sw.load_checkpoint(tmp_path)
    index = {"weight_map": {"w": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no valid weight_map"):
        sw.load_checkpoint(tmp_path)


def test_a_full_disk_keeps_the_old_checkpoint(
    two: sw.CheckpointManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    write, available = os.write, [300]

    def full(file: int, data: Any) -> int:
        if available[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        available[0] -= len(data)
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="no space for the checkpoint: No space") as caught:
        two.save(3, model_of(3), wait=True)
    assert "keep_last" in str(caught.value.hint)
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == before
    assert two.latest() == two.path(2)
    two.save(3, model_of(3), wait=True)
    assert two.latest() == two.path(3)


def test_a_file_size_limit_is_reported(two: sw.CheckpointManager, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="no space for the checkpoint: File too large"):
            two.save(3, model_of(3), wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.rglob("*")) == before


def test_named_pipes_do_not_block(two: sw.CheckpointManager) -> None:
    for name in ("model-00000.safetensors", "checkpoint.json"):
        (two.path(2) / name).unlink()
        os.mkfifo(two.path(2) / name)
        with pytest.raises(CheckpointError):
            sw.load_checkpoint(two.path(2))


def test_too_little_disk_space_is_detected_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="bytes needed, 10 available"):
        sw.save_checkpoint(tmp_path / "c", model_of())
    assert list(tmp_path.iterdir()) == []


def test_the_last_and_the_best_checkpoints_are_retained(tmp_path: Path) -> None:
    manager = sw.CheckpointManager(tmp_path, keep_last=2, keep_best=1, metric="loss")
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 5.0]):
        manager.save(step, model_of(), metrics={"loss": loss}, extra={"a": 1})
    manager.wait()
    assert [p.name for p in manager.all()] == ["step-00000001", "step-00000003", "step-00000004"]
    assert manager.best() == manager.path(1)
    assert manager.latest() == manager.path(4)
    assert sw.load_checkpoint(manager.path(1)).extra == {"a": 1, "metrics": {"loss": 1.0}}
    highest = sw.CheckpointManager(tmp_path, metric="loss", mode="max")
    assert highest.best() == manager.path(4)
    assert sw.CheckpointManager(tmp_path / "nothing").latest() is None
    with pytest.raises(CheckpointError, match="needs a metric"):
        sw.CheckpointManager(tmp_path, keep_best=1)


def test_a_wait_that_timed_out_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), writing_module.write_tensors

    def slow(*args: Any) -> dict[str, int]:
        assert go.wait(20)
        return write(*args)

    monkeypatch.setattr(writing_module, "write_tensors", slow)
    manager = sw.CheckpointManager(tmp_path)
    manager.save(1, model_of())
    with pytest.raises(CheckpointError, match="not complete after"):
        manager.wait(0.05)
    assert manager.latest() is None
    go.set()
    manager.wait(20)
    assert manager.latest() == manager.path(1)


def test_remains_of_killed_saves_are_removed(two: sw.CheckpointManager, tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.partial-ab12").mkdir()
    (tmp_path / "step-00000000").mkdir()
    assert two.latest() == two.path(2)
    two.save(4, model_of(), wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000004",
    ]


def test_a_save_killed_between_two_renames_loses_nothing(
    two: sw.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = os.rename, [0]

    def killed(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        rename(source, target)

    class NoCleanUp:
        def __getattr__(self, name: str) -> Any:
            return killed if name == "rename" else getattr(os, name)

    monkeypatch.setattr(writing_module, "os", NoCleanUp())
    monkeypatch.setattr(writing_module.Writer, "_clear", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        two.save(2, model_of(7), wait=True)
    rename(two.path(2), writing_module.replaced_path(two.path(2)))  # as a kill would leave it
    monkeypatch.undo()
    assert two.latest() == two.path(2)
    expected = model_of(2).state_dict()["0.weight"]
    assert torch.equal(sw.load_checkpoint(two.path(2)).state_dict["0.weight"], expected)
