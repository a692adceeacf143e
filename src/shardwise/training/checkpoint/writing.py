"""One rank's part in writing a checkpoint, and the first rank's: joining the parts.

Enters: what this rank writes, and the rendezvous of all ranks. Leaves: the folder under its final
name, or an error on every rank and no trace but what was there before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError
from shardwise.runtime.rendezvous import Rendezvous
from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.contents import Contents
from shardwise.training.checkpoint.files import ToWrite, sync_folder, write_tensors
from shardwise.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredBox,
    StoredTensor,
    key_of,
)
from shardwise.training.checkpoint.plan import (
    Portion,
    join_plans,
    plan_from_json,
    plan_of,
    plan_to_json,
)
from shardwise.training.checkpoint.staging import Staging
from shardwise.training.checkpoint.types import dtype_named

__all__ = [
    "Writer",
    "partial_folders",
    "replaced_folder",
    "replaced_path",
    "require_free",
    "write_text",
]

_SEEN_S = 10.0  # until a folder that one rank made must be seen by all


class Writer:
    """Writes what falls to this rank, and on the first rank the rest."""

    def __init__(
        self,
        path: Path,
        contents: Contents,
        mine: Sequence[Portion],
        rendezvous: Rendezvous,
        timeout_s: float,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.contents, self.mine = contents, mine
        self.rendezvous, self.timeout_s = rendezvous, timeout_s

    def write(self, staging: Staging) -> None:
        """Write, wait for the others, and for the first rank to complete it."""
        rendezvous, folder = self.rendezvous, self._folder()
        try:
            report = self._write_files(folder, staging)
            _write_json(folder / _report_name(rendezvous.rank), report)
            rendezvous.publish("written")
            if rendezvous.rank == 0:
                rendezvous.wait_for("written", range(rendezvous.world), self.timeout_s)
                self._complete(folder)
                rendezvous.publish("outcome")
            else:
                rendezvous.wait_for("outcome", [0], self.timeout_s)
        except BaseException as error:
            rendezvous.fail(error)
            self._clear(folder)
            raise

    def _folder(self) -> Path:
        """The hidden folder that all ranks write into: the first makes it and says its name."""
        rendezvous = self.rendezvous
        if rendezvous.rank == 0:
            folder = self.path.with_name(f"{_partial(self.path)}{secrets.token_hex(4)}")
            require_free(self.path)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                for old in partial_folders(self.path):
                    shutil.rmtree(old, ignore_errors=True)
                folder.mkdir()
            except OSError as error:
                raise _disk_error(error, self.path.parent) from error
            rendezvous.publish("folder", folder.name)
            return folder
        (name,) = rendezvous.wait_for("folder", [0], self.timeout_s).values()
        folder = self.path.with_name(name)
        deadline = time.monotonic() + _SEEN_S
        while not folder.is_dir():  # network file systems take their time
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rendezvous.rank} does not see the folder that rank 0 made",
                    where=str(folder),
                    hint="a folder on a file system that all ranks share",
                )
            time.sleep(0.05)
        return folder

    def _write_files(self, folder: Path, staging: Staging) -> dict[str, Any]:
        """Write this rank's files; what is in them, for the first rank."""
        by_file: dict[str, list[int]] = {}
        for index, portion in enumerate(self.mine):
            kind = portion.section.partition(".")[0]
            name = f"{kind}-{self.rendezvous.rank:05d}.safetensors"
            by_file.setdefault(name, []).append(index)
        needed = sum(p.placed.view.nbytes for p in self.mine)
        places: dict[str, list[Any]] = {}
        sizes: dict[str, int] = {}
        try:
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free")
            for name, indices in by_file.items():
                items = [self._item(i, staging) for i in indices]
                checksums = write_tensors(folder / name, items)
                sizes[name] = os.stat(folder / name).st_size
                places |= {key: [name, crc32] for key, crc32 in checksums.items()}
        except OSError as error:
            raise _disk_error(error, folder) from error
        return {
            "plan": plan_to_json(plan_of(self.mine)),
            "places": [places[_key(p)] for p in self.mine],
            "sections": [p.section for p in self.mine],
            "files": sizes,
            "empty": self._empty(),
            "aliases": dict(self.contents.aliases),
            "optimizer": self.contents.optimizer,
        }

    def _item(self, index: int, staging: Staging) -> ToWrite:
        portion = self.mine[index]
        return ToWrite(
            key=_key(portion),
            shape=portion.placed.box.size,
            dtype=portion.held.dtype,
            make=lambda: staging.take(index),
        )

    def _empty(self) -> list[list[Any]]:
        """Tensors without elements, which no file has."""
        return [
            [section, held.name, list(held.shape), dtype_name(held.dtype)]
            for section, tensors in self.contents.sections.items()
            for held in tensors
            if 0 in held.shape and held.holders[0] == self.rendezvous.rank
        ]

    def _complete(self, folder: Path) -> None:
        """Join what all ranks wrote, and give the folder its name."""
        reports = []
        for rank in range(self.rendezvous.world):
            path = folder / _report_name(rank)
            reports.append(_read_report(path, rank))
            path.unlink()
        manifest = _joined(reports, self.contents)
        try:
            manifest.check_files(folder)
            text = manifest.to_text()
            Manifest.from_text(text)  # what would be refused when it is read is not written
            write_text(folder / MANIFEST, text)
            sync_folder(folder)
            with replaced_folder(self.path):
                os.rename(folder, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise _disk_error(error, folder) from error

    def _clear(self, folder: Path) -> None:
        """Remove what this rank wrote, on the first rank everything."""
        if self.rendezvous.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            for file in folder.glob(f"*-{self.rendezvous.rank:05d}.safetensors"):
                file.unlink()


def _key(portion: Portion) -> str:
    held = portion.held
    return key_of(portion.section, held.name, portion.placed.box, held.shape)


def _partial(path: Path) -> str:
    return f".{path.name}.partial-"


def replaced_path(path: Path) -> Path:
    """Where a checkpoint is while another takes its place."""
    return path.with_name(f".{path.name}.replaced")


def require_free(path: Path) -> None:
    """Refuse to write over what is no checkpoint."""
    if not path.exists() and not path.is_symlink():
        return
    plain = path.is_dir() and not path.is_symlink()
    if not plain or not ((path / MANIFEST).is_file() or not any(path.iterdir())):
        raise CheckpointError(
            "there is something that is no checkpoint; it is not overwritten",
            where=str(path),
            hint="another name, or remove it",
        )


def partial_folders(path: Path) -> list[Path]:
    """What unfinished saves to this path have left."""
    prefix = _partial(path)
    return [p for p in path.parent.iterdir() if p.name.startswith(prefix) and p.is_dir()]


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[None]:
    """Put what is at a path aside while another takes its place; it comes back on failure.

    After a crash in between, `open_checkpoint` finds it where it is put here.
    """
    aside = replaced_path(path)
    require_free(path)
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
    try:
        yield
    except BaseException:
        if aside.exists() and not path.exists():
            os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _report_name(rank: int) -> str:
    return f"report-{rank:05d}.json"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    try:
        write_text(path, json.dumps(value, separators=(",", ":")))
    except OSError as error:
        raise _disk_error(error, path.parent) from error


def write_text(path: Path, text: str) -> None:
    """Write a new file, and have it on the disk."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_report(path: Path, rank: int) -> dict[str, Any]:
    deadline = time.monotonic() + _SEEN_S
    while True:
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"what rank {rank} wrote is not to be seen from rank 0",
                    where=str(path),
                    hint="a folder on a file system that all ranks share",
                ) from error
            time.sleep(0.05)


def _joined(reports: Sequence[Mapping[str, Any]], first: Contents) -> Manifest:
    """One manifest of all ranks' parts."""
    places: dict[tuple[str, tuple[int, ...]], tuple[str, str, int]] = {}
    for report in reversed(reports):
        rows = zip(report["plan"], report["sections"], report["places"], strict=True)
        for row, section, (file, crc32) in rows:
            places[row[0], tuple(row[3])] = section, file, crc32
    plans = join_plans([plan_from_json(report["plan"]) for report in reports])
    shapes: dict[tuple[str, str], tuple[Any, Any]] = {}
    boxes: dict[tuple[str, str], list[StoredBox]] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        assert data is not None, item
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        section, file, crc32 = places[item.index.fqn, box.offset]
        name = item.index.fqn.removeprefix(f"{section}:")
        key = key_of(section, name, box, data.size)
        shapes[section, name] = tuple(data.size), data.properties.dtype
        stored = StoredBox(box=box, file=file, key=key, crc32=crc32)
        boxes.setdefault((section, name), []).append(stored)
    for section, name, shape, kind in (row for report in reports for row in report["empty"]):
        shapes.setdefault((section, name), (tuple(shape), dtype_named(kind, name)))
    sections: dict[str, dict[str, StoredTensor]] = {s: {} for s in first.sections}
    place = {name: number for number, name in enumerate(first.order)}
    for section, name in sorted(shapes, key=lambda label: place.get(label[1], len(place))):
        shape, dtype = shapes[section, name]
        found = sorted(boxes.get((section, name), []), key=lambda b: b.box.offset)
        tensor = StoredTensor(shape=shape, dtype=dtype, boxes=tuple(found))
        sections.setdefault(section, {})[name] = tensor
    return Manifest(
        sections=sections,
        files={name: size for report in reports for name, size in report["files"].items()},
        step=first.step,
        aliases={a: n for report in reports for a, n in report["aliases"].items()},
        optimizer=_joined_optimizer([report["optimizer"] for report in reports]),
        module=first.module,
        extra=first.extra,
    )


def _joined_optimizer(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The groups of all ranks, by their number, and the plain state of all parameters."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for part in found:
        for number, group in enumerate(part["groups"]):
            if number == len(groups):
                groups.append({"options": group["options"], "params": []})
            groups[number]["params"] += group["params"]
        for name, values in part["state"].items():
            state.setdefault(name, values)
    for group in groups:
        group["params"] = list(dict.fromkeys(group["params"]))
    return {"groups": groups, "state": state}


def _disk_error(error: OSError, folder: Path) -> CheckpointError:
    """What the disk said, in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(folder.parent).free / 2**20:.0f} MiB"
        return CheckpointError(
            f"no space for the checkpoint: {error.strerror} ({free} free)",
            where=str(folder.parent),
            hint="free some space, or keep fewer: CheckpointManager(…, keep_last=1)",
        )
    return CheckpointError(
        f"the checkpoint cannot be written: {error.strerror or error}", where=str(folder.parent)
    )
