"""One rank's part in writing a checkpoint, and the first rank's: joining the parts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.files import ToWrite, dtype_named, sync_folder, write_tensors
from shardwise.checkpoint.manifest import MANIFEST, MODEL, Manifest, StoredBox, StoredTensor, key_of
from shardwise.checkpoint.optimizer_state import OPTIMIZER, Optimizers, save_optimizer
from shardwise.checkpoint.shards import Box, Held, State, state_of
from shardwise.checkpoint.transfer import Portion, join_plans, plan_from_json, plan_of, plan_to_json
from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.rendezvous import Rendezvous

__all__ = [
    "Contents",
    "Staging",
    "Writer",
    "check_label",
    "collect",
    "held_copies",
    "partial_folders",
    "replaced_folder",
    "replaced_path",
    "require_free",
    "write_text",
]


# All that one rank contributes to a checkpoint: tensors by section, and JSON.


_LABEL = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What this rank has of every section, and what it knows beside."""

    sections: Mapping[str, list[Held]]
    aliases: Mapping[str, str]
    order: Sequence[str]
    step: int | None
    optimizer: Mapping[str, Any] | None
    module: Mapping[str, Any]
    extra: Mapping[str, Any]


def collect(
    module: nn.Module,
    optimizer: Optimizers | None,
    rank: int,
    step: int | None,
    extra: Mapping[str, Any],
    copies: Mapping[str, Mapping[str, Tensor]],
    *,
    frozen: bool = True,
) -> Contents:
    """What this rank has; no value is copied yet. Without `frozen`, only what is trained."""
    state = state_of(module)
    left_out = set() if frozen else _frozen(module)
    tensors = [held for held in state.tensors() if held.name not in left_out]
    sections: dict[str, list[Held]] = {MODEL: tensors}
    kept: dict[str, Any] | None = None
    if optimizer is not None:
        saved = save_optimizer(optimizer, state, rank)
        sections.update(saved.sections)
        kept = {"groups": saved.groups, "state": saved.values}
    sections.update(held_copies(state, copies, borrowed=False))
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"a step is a whole number, not {step!r}")
    return Contents(
        sections=sections,
        aliases={a: n for a, n in state.aliases.items() if n not in left_out},
        order=state.order,
        step=step,
        optimizer=kept,
        module=state.facts(),
        extra=_json(extra),
    )


def _frozen(module: nn.Module) -> set[str]:
    """Parameters that no optimizer updates."""
    if isinstance(module, ParallelModule):
        return {e.spec.name for e in module.store.entries if not e.spec.requires_grad}
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def held_copies(
    state: State, copies: Mapping[str, Mapping[str, Tensor]], *, borrowed: bool
) -> dict[str, list[Held]]:
    """Further sets of tensors, cut as the parameters are; what is borrowed is not written."""
    found = {}
    for label, tensors in copies.items():
        check_label(label)
        found[label] = [
            state.cut(name, tensor)
            for name, tensor in tensors.items()
            if borrowed or not state.borrows(name)
        ]
    return found


def check_label(label: str) -> None:
    """Refuse names of sets that would be mistaken for other sections, or make no file name."""
    if not _LABEL.fullmatch(label) or label in (MODEL, OPTIMIZER):
        raise CheckpointError(
            f"{label!r} cannot be the name of a set of copies",
            hint='letters, digits and "_", other than "model" and "optimizer": {"ema": …}',
        )


def _json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what the user gave, as JSON has it."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"`extra` cannot be written as JSON: {error}",
            hint="numbers, texts, lists and mappings; tensors in `copies`",
        ) from error
    return found


# State copied aside, so that training goes on while it is written.
#
# Parameters and optimizer state change when the optimizer steps, and at no other time: they may be
# copied while the next forward and backward run, if that step waits for the copy. Buffers change in
# a forward and are copied at once. A tensor that was changed in another way while it was copied is
# noticed by torch's count of its changes, and the save fails rather than mix two states.


class Staging:
    """What one rank writes, first in the memory of the module, then copied aside."""

    def __init__(self, mine: Sequence[Portion], *, at_once: bool) -> None:
        self._views: dict[int, Tensor] = {i: p.placed.view for i, p in enumerate(mine)}
        self._names = [f"{p.held.name} ({p.section})" for p in mine]
        self._copies: dict[int, Tensor] = {}
        self._versions = {i: _version(view) for i, view in self._views.items()}
        self._stream = _side_stream(self._views.values())
        self.finished = threading.Event()
        chosen = [i for i, p in enumerate(mine) if at_once or p.held.volatile]
        self._copy(chosen)

    def copy(self) -> None:
        """Copy what is not copied yet."""
        try:
            self._copy(list(self._views))
        finally:
            self._views.clear()
            self.finished.set()

    def _copy(self, chosen: Sequence[int]) -> None:
        for index in chosen:
            self._copies[index] = _aside(self._views[index], self._stream)
        if self._stream is not None:
            self._stream.synchronize()
        for index in chosen:
            if _version(self._views.pop(index)) != self._versions[index]:
                raise CheckpointError(
                    f"{self._names[index]} was changed while it was copied for a checkpoint, "
                    "other than by a step of the optimizer",
                    hint="saving.staged() before the change, or save_checkpoint(…, wait=True)",
                )

    def take(self, index: int) -> Tensor:
        """A box in host memory, contiguous; it is given away."""
        if index in self._copies:
            return self._copies.pop(index)
        return self._views[index].detach().cpu().contiguous()


def _version(view: Tensor) -> int:
    return 0 if view.is_inference() else view._version


def _side_stream(views: Iterable[Tensor]) -> torch.cuda.Stream | None:
    """A stream beside the computation, behind all that was started so far."""
    for view in views:
        if view.is_cuda:
            stream = torch.cuda.Stream(view.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(view.device))
            return stream
    return None


def _aside(view: Tensor, stream: torch.cuda.Stream | None) -> Tensor:
    if not view.is_cuda:
        return view.detach().clone(memory_format=torch.contiguous_format)
    host = torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        return host.copy_(view.detach(), non_blocking=True)


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
