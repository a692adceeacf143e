"""Write one rank's part of a checkpoint, and join the parts on the first rank."""

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.box_io import Portion
from shardwise.checkpoint.files import ToWrite, sync_folder, write_tensors
from shardwise.checkpoint.manifest import MANIFEST, MODEL, Manifest, StoredBox, StoredTensor, key_of
from shardwise.checkpoint.optimizer_state import OPTIMIZER, Optimizers, save_optimizer
from shardwise.checkpoint.shards import State, TensorShards, state_of
from shardwise.checkpoint.sync_state import save_sync, sync_numbers
from shardwise.errors import CheckpointError
from shardwise.runtime import devices
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.rendezvous import Rendezvous

# ------------------------------------------------------------ one rank's contents
_LABEL = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """This rank's part of a checkpoint: tensors by section, and JSON."""

    sections: Mapping[str, list[TensorShards]]
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
    """Return this rank's contents, without copying values; without `frozen`, only trained ones."""
    state = state_of(module)
    excluded = set() if frozen else _frozen(module)
    tensors = [shards for shards in state.tensors() if shards.name not in excluded]
    sections: dict[str, list[TensorShards]] = {MODEL: tensors, **save_sync(state)}
    optimizer_json: dict[str, Any] | None = None
    if optimizer is not None:
        saved = save_optimizer(optimizer, state, rank)
        sections.update(saved.sections)
        optimizer_json = {"groups": saved.groups, "state": saved.values}
    sections.update(copied_sections(state, copies, replicas=False))
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"step is {step!r}, must be a non-negative integer")
    try:
        extra = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"`extra` cannot be written as JSON: {error}",
            hint="numbers, texts, lists and mappings; tensors in `copies`",
        ) from error
    return Contents(
        sections=sections,
        aliases={a: n for a, n in state.aliases.items() if n not in excluded},
        order=state.order,
        step=step,
        optimizer=optimizer_json,
        module={**state.metadata(), **sync_numbers(state)},
        extra=extra,
    )


def _frozen(module: nn.Module) -> set[str]:
    """Return the names of parameters that are not trained."""
    if isinstance(module, ParallelModule):
        return {e.spec.name for e in module.store.entries if not e.spec.requires_grad}
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def copied_sections(
    state: State, copies: Mapping[str, Mapping[str, Tensor]], *, replicas: bool
) -> dict[str, list[TensorShards]]:
    """Return the sections of copies, sharded as the parameters, with or without replicas."""
    sections = {}
    for label, tensors in copies.items():
        # Other names could be mistaken for other sections, or would not be file names.
        if not _LABEL.fullmatch(label) or label in (MODEL, OPTIMIZER):
            raise CheckpointError(
                f"{label!r} cannot be the name of a set of copies",
                hint='letters, digits and "_", other than "model" and "optimizer": {"ema": …}',
            )
        sections[label] = [
            state.sharded(name, tensor)
            for name, tensor in tensors.items()
            if replicas or not state.is_replica(name)
        ]
    return sections


# ------------------------------------------------------------ copying the state
# The state is copied so that training continues while it is written. Parameters and optimizer state
# change only when the optimizer steps: they may be copied during the next forward and backward, if
# that step waits for the copy. Buffers change in a forward and are copied immediately. A tensor
# that was changed in any other way meanwhile is detected by torch's version counter, and the save
# fails rather than mix two states.


class Staging:
    """The boxes that one rank writes: first in the module's memory, then copied."""

    def __init__(self, portions: Sequence[Portion], *, immediately: bool) -> None:
        self._views: dict[int, Tensor] = {i: p.local.view for i, p in enumerate(portions)}
        self._names = [f"{p.shards.name} ({p.section})" for p in portions]
        self._copies: dict[int, Tensor] = {}
        self._versions = {i: _version(view) for i, view in self._views.items()}
        self._stream = _side_stream(self._views.values())
        self.finished = threading.Event()
        self._copy([i for i, p in enumerate(portions) if immediately or p.shards.volatile])

    def copy(self) -> None:
        """Copy all boxes that are not copied yet."""
        try:
            self._copy(list(self._views))
        finally:
            self._views.clear()
            self.finished.set()

    def _copy(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._copies[index] = _host_copy(self._views[index], self._stream)
        if self._stream is not None:
            self._stream.synchronize()
        for index in indices:
            if _version(self._views.pop(index)) != self._versions[index]:
                raise CheckpointError(
                    f"{self._names[index]} was changed while it was copied for a checkpoint, "
                    "not by a step of the optimizer",
                    hint="saving.staged() before the change, or save_checkpoint(…, wait=True)",
                )

    def take(self, index: int) -> Tensor:
        """Return a box, contiguous in host memory, and release the copy."""
        if index in self._copies:
            return self._copies.pop(index)
        return self._views[index].detach().cpu().contiguous()


def _version(view: Tensor) -> int:
    return 0 if view.is_inference() else view._version


def _side_stream(views: Iterable[Tensor]) -> Any:
    """Return a stream of the device that waits for all work submitted so far."""
    for view in views:
        if devices.has_streams(view.device):
            module = devices.module_of(view.device)
            stream = module.Stream(view.device)
            stream.wait_stream(module.current_stream(view.device))
            return stream
    return None


def _host_copy(view: Tensor, stream: Any) -> Tensor:
    if not devices.has_streams(view.device):
        return view.detach().clone(memory_format=torch.contiguous_format).cpu()
    host = torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
    with devices.module_of(view.device).stream(stream):
        return host.copy_(view.detach(), non_blocking=True)


# ------------------------------------------------------------ writing
_SHARED = "a folder on a file system that all ranks share"
_VISIBLE_S = 10.0  # within which a file of one rank must be visible to all


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes this rank's files; on the first rank, also completes the checkpoint."""

    path: Path  # absolute
    contents: Contents
    portions: Sequence[Portion]
    rendezvous: Rendezvous
    timeout_s: float

    def write(self, staging: Staging) -> None:
        """Write this rank's files, and wait until the checkpoint is complete."""
        rendezvous, folder = self.rendezvous, self._folder()
        try:
            part = self._write_files(folder, staging)
            with _disk_errors(folder):
                write_text(folder / _part_name(rendezvous.rank), part.to_text())
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
        """Return the hidden folder that all ranks write into; the first creates it."""
        rendezvous = self.rendezvous
        if rendezvous.rank == 0:
            folder = partial_path(self.path)
            require_free(self.path)
            with _disk_errors(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                for old in partial_folders(self.path):
                    shutil.rmtree(old, ignore_errors=True)
                folder.mkdir()
            rendezvous.publish("folder", folder.name)
            return folder
        (name,) = rendezvous.wait_for("folder", [0], self.timeout_s).values()
        folder = self.path.with_name(name)
        deadline = time.monotonic() + _VISIBLE_S
        while not folder.is_dir():  # network file systems show it with a delay
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rendezvous.rank} cannot see the folder that rank 0 created",
                    where=str(folder),
                    hint=_SHARED,
                )
            time.sleep(0.05)
        return folder

    def _write_files(self, folder: Path, staging: Staging) -> Manifest:
        """Write this rank's files; return the manifest of its part of the checkpoint."""
        by_file: dict[str, list[int]] = {}
        for index, portion in enumerate(self.portions):
            kind = portion.section.partition(".")[0]
            name = f"{kind}-{self.rendezvous.rank:05d}.safetensors"
            by_file.setdefault(name, []).append(index)
        needed = sum(p.local.view.nbytes for p in self.portions)
        stored = list(self._empty())
        sizes: dict[str, int] = {}
        with _disk_errors(folder):
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"{needed} bytes needed, {free} available")
            for name, indices in by_file.items():
                items = [self._item(i, staging) for i in indices]
                checksums = write_tensors(folder / name, items)
                sizes[name] = os.stat(folder / name).st_size
                for i, item in zip(indices, items, strict=True):
                    portion, box = self.portions[i], self.portions[i].local.box
                    written = StoredBox(box.offset, box.size, name, checksums[item.key])
                    stored.append(_stored(portion.section, portion.shards, written))
        return Manifest(
            sections=_by_section(stored),
            files=sizes,
            aliases=self.contents.aliases,
            optimizer=self.contents.optimizer,
        )

    def _empty(self) -> Iterator[tuple[str, str, StoredTensor]]:
        """Yield the tensors without elements, which are in no file."""
        for section, tensors in self.contents.sections.items():
            for shards in tensors:
                if 0 in shards.shape and shards.ranks[0] == self.rendezvous.rank:
                    yield _stored(section, shards)

    def _item(self, index: int, staging: Staging) -> ToWrite:
        portion = self.portions[index]
        shards, box = portion.shards, portion.local.box
        key = key_of(portion.section, shards.name, box, shards.shape)
        take = partial(staging.take, index)
        return ToWrite(key=key, shape=box.size, dtype=shards.dtype, make=take)

    def _complete(self, folder: Path) -> None:
        """Join the parts of all ranks, and rename the folder."""
        parts = []
        for rank in range(self.rendezvous.world):
            path = folder / _part_name(rank)
            parts.append(_read_part(path, rank))
            path.unlink()
        manifest = _join(parts, self.contents)
        with _disk_errors(folder):
            manifest.check_files(folder)
            text = manifest.to_text()
            Manifest.from_text(text)  # raises if the boxes of all ranks do not cover a tensor
            write_text(folder / MANIFEST, text)
            sync_folder(folder)
            with replaced_folder(self.path):
                os.rename(folder, self.path)
            sync_folder(self.path.parent)

    def _clear(self, folder: Path) -> None:
        """Remove this rank's files; on the first rank, the folder."""
        if self.rendezvous.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            for file in folder.glob(f"*-{self.rendezvous.rank:05d}.safetensors"):
                file.unlink()


def _stored(section: str, shards: TensorShards, *boxes: StoredBox) -> tuple[str, str, StoredTensor]:
    tensor = StoredTensor(shape=shards.shape, dtype=shards.dtype, boxes=boxes)
    return section, shards.name, tensor


# ------------------------------------------------------------ folders
def partial_path(path: Path) -> Path:
    """Return a new hidden path for writing what is renamed to `path` when it is complete."""
    return path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")


def replaced_path(path: Path) -> Path:
    """Return the path of a checkpoint while another one replaces it."""
    return path.with_name(f".{path.name}.replaced")


def require_free(path: Path) -> None:
    """Refuse to overwrite anything that is not a checkpoint."""
    if not path.exists() and not path.is_symlink():
        return
    is_folder = path.is_dir() and not path.is_symlink()
    if not is_folder or not ((path / MANIFEST).is_file() or not any(path.iterdir())):
        raise CheckpointError(
            "path exists and is not a checkpoint; refusing to overwrite it",
            where=str(path),
            hint="another path, or remove it",
        )


def partial_folders(path: Path) -> list[Path]:
    """Return the folders that unfinished saves to this path have left."""
    prefix = f".{path.name}.partial-"
    return [p for p in path.parent.iterdir() if p.name.startswith(prefix) and p.is_dir()]


@contextlib.contextmanager
def replaced_folder(path: Path) -> Iterator[None]:
    """Move the folder at `path` away while another one replaces it; restore it on failure.

    After a crash in between, `open_checkpoint` finds it at its temporary path.
    """
    old = replaced_path(path)
    require_free(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    try:
        yield
    except BaseException:
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------ joining the parts
def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def write_text(path: Path, text: str) -> None:
    """Write a new file and sync it to the disk."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_part(path: Path, rank: int) -> Manifest:
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            return Manifest.from_text(path.read_text(encoding="utf-8"), str(path), is_part=True)
        except (OSError, ValueError, CheckpointError) as error:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 cannot see the files written by rank {rank}",
                    where=str(path),
                    hint=_SHARED,
                ) from error
            time.sleep(0.05)


def _join(parts: Sequence[Manifest], first: Contents) -> Manifest:
    """Return the manifest of all ranks' parts."""
    tensors = [
        (section, name, tensor)
        for part in parts
        for section, named in part.sections.items()
        for name, tensor in named.items()
    ]
    order = {name: number for number, name in enumerate(first.order)}
    tensors.sort(key=lambda item: order.get(item[1], len(order)))
    return Manifest(
        sections={**{section: {} for section in first.sections}, **_by_section(tensors)},
        files={name: size for part in parts for name, size in part.files.items()},
        step=first.step,
        aliases={a: n for part in parts for a, n in part.aliases.items()},
        optimizer=_join_optimizers([part.optimizer for part in parts]),
        module=first.module,
        extra=first.extra,
    )


def _by_section(
    tensors: Iterable[tuple[str, str, StoredTensor]],
) -> dict[str, dict[str, StoredTensor]]:
    """Join the boxes of each tensor; of those that several stages wrote, the first one is used."""
    boxes: dict[tuple[str, str], dict[tuple[int, ...], StoredBox]] = {}
    sections: dict[str, dict[str, StoredTensor]] = {}
    for section, name, tensor in tensors:
        joined = boxes.setdefault((section, name), {})
        joined |= {box.offset: box for box in tensor.boxes if box.offset not in joined}
        sections.setdefault(section, {}).setdefault(name, tensor)
    return {
        section: {
            name: replace(tensor, boxes=tuple(b for _, b in sorted(boxes[section, name].items())))
            for name, tensor in named.items()
        }
        for section, named in sections.items()
    }


def _join_optimizers(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the groups of all ranks, by number, and the non-tensor state of all parameters."""
    if all(part is None for part in parts):
        return None
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for part in (part for part in parts if part is not None):
        for number, group in enumerate(part["groups"]):
            if number == len(groups):
                groups.append({"options": group["options"], "params": []})
            groups[number]["params"] += group["params"]
        for name, values in part["state"].items():
            state.setdefault(name, values)
    for group in groups:
        group["params"] = list(dict.fromkeys(group["params"]))
    return {"groups": groups, "state": state}


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Explain errors of the file system."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"the checkpoint cannot be written: {error.strerror or error}",
                where=str(folder.parent),
            ) from error
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(folder.parent).free / 2**20:.0f} MiB"
        raise CheckpointError(
            f"no space for the checkpoint: {error.strerror} ({free} free)",
            where=str(folder.parent),
            hint="free some space, or keep fewer checkpoints: keep_last=1",
        ) from error
