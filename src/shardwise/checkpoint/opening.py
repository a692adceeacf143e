"""A checkpoint by its path: one of ours, or a folder of Hugging Face.

Only JSON and safetensors files are opened;
pickles that may lie beside them (`pytorch_model.bin`, `.metadata`) never are.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files import TensorFile
from shardwise.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    Manifest,
    StoredBox,
    StoredTensor,
    full_name,
)
from shardwise.checkpoint.shards import Box
from shardwise.checkpoint.transfer import Reader
from shardwise.checkpoint.write import replaced_path
from shardwise.errors import CheckpointError
from shardwise.files import read_json

__all__ = [
    "Opened",
    "Verified",
    "is_complete",
    "located",
    "open_checkpoint",
    "previous_of",
    "verify_checkpoint",
]


HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint's folder and what its manifest says; `foreign` if Hugging Face's."""

    folder: Path
    manifest: Manifest
    foreign: bool = False


def open_checkpoint(path: str | Path) -> Opened:
    """Find and check the manifest; a damaged checkpoint is refused, and an earlier one offered."""
    folder = Path(path)
    try:
        return _open(folder)
    except CheckpointError as error:
        raise with_previous(error, folder) from error


def _open(folder: Path) -> Opened:
    found = located(folder)
    if os.path.isfile(found / MANIFEST):
        return Opened(folder=found, manifest=Manifest.read(found))
    if os.path.isdir(folder) and any(folder.glob("*.safetensors*")):
        return Opened(folder=folder, manifest=_foreign_manifest(folder), foreign=True)
    if not os.path.isdir(folder):
        raise CheckpointError("there is no such folder", where=str(folder))
    what = f"no checkpoint: neither {MANIFEST} nor safetensors files"
    raise CheckpointError(what, where=str(folder), hint=_inside(folder))


def located(folder: Path) -> Path:
    """Where a checkpoint is, also if a save over it was killed between two renames."""
    aside = replaced_path(folder)
    killed = not os.path.exists(folder) and os.path.isfile(aside / MANIFEST)
    return aside if killed else folder


def _inside(folder: Path) -> str | None:
    """What to type for a folder of checkpoints, or one with pickles."""
    if any(_STEP.fullmatch(p.name) for p in folder.iterdir()):
        return f"sw.CheckpointManager({str(folder)!r}).latest(), or one of the folders in it"
    if any(p.suffix in (".bin", ".pt", ".pth", ".distcp") for p in folder.iterdir()):
        return "pickled files are not opened; save the model as safetensors"
    return None


def with_previous(error: CheckpointError, folder: Path) -> CheckpointError:
    """The same error; if the folder is at fault, with the previous checkpoint as what to try."""
    elsewhere = error.where is not None and str(folder) not in error.where
    earlier = None if elsewhere else previous_of(folder)
    if error.hint is not None or earlier is None:
        return error
    return CheckpointError(
        error.message, where=error.where, hint=f"the previous checkpoint, {earlier}"
    )


def previous_of(folder: Path) -> Path | None:
    """The complete checkpoint before this one, by the step in the name, else by time."""
    if not os.path.isdir(folder.parent):
        return None
    own = _STEP.fullmatch(folder.name)
    found: list[tuple[float, Path]] = []
    for other in folder.parent.iterdir():
        named = _STEP.fullmatch(other.name)
        if other == folder or not (other / MANIFEST).is_file():
            continue
        if own and named and int(named[1]) < int(own[1]):
            found.append((int(named[1]), other))
        elif not own and os.path.isdir(folder) and not other.name.startswith("."):
            found.append(((other / MANIFEST).stat().st_mtime, other))
    for _, other in sorted(found, reverse=True):
        if is_complete(other):
            return other
    return None


def is_complete(folder: Path) -> bool:
    """Whether the manifest is sound, and its files are there with their sizes."""
    try:
        Manifest.read(located(folder))
    except CheckpointError:
        return False
    return True


def _foreign_manifest(folder: Path) -> Manifest:
    """What the headers of a Hugging Face folder's files say."""
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    for file in _foreign_files(folder):
        opened = TensorFile(folder / file)
        sizes[file] = (folder / file).stat().st_size
        for name, entry in opened.entries.items():
            if name in tensors:
                raise CheckpointError(f"{name} is in two files", where=str(folder / file))
            boxes = (
                (StoredBox(box=Box.whole(entry.shape), file=file, key=name, crc32=None),)
                if entry.nbytes
                else ()
            )
            tensors[name] = StoredTensor(shape=entry.shape, dtype=entry.dtype, boxes=boxes)
        opened.close()
    return Manifest(sections={MODEL: tensors}, files=sizes)


def _foreign_files(folder: Path) -> list[str]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    path = folder / HF_INDEX if not indices or folder / HF_INDEX in indices else indices[0]
    if not path.is_file():
        plain = sorted(p.name for p in folder.glob("*.safetensors") if _is_plain(p.name))
        return [HF_SINGLE] if HF_SINGLE in plain else plain
    body = read_json(path, CheckpointError, what="index")
    weights = body.get("weight_map") if isinstance(body, dict) else None
    names = list(weights.values()) if isinstance(weights, dict) else []
    if not names or not all(isinstance(n, str) and _is_plain(n) for n in names):
        raise CheckpointError(f"{path.name} has no sound weight_map", where=str(path))
    missing = [n for n in dict.fromkeys(names) if not os.path.isfile(folder / n)]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing", where=str(folder / missing[0]))
    return list(dict.fromkeys(names))


def _is_plain(name: str) -> bool:
    """Whether this is the name of a safetensors file in the folder itself."""
    return name.endswith(".safetensors") and name == Path(name).name and not name.startswith(".")


# Every byte of a checkpoint against its checksum.


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was read, and what is wrong with it."""

    opened: Opened
    num_boxes: int
    num_unchecked: int
    bytes_read: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_checkpoint(path: str | Path) -> Verified:
    """Read all of a checkpoint; each box that differs from what was written is a problem.

    Files of Hugging Face have no checksums: of them the headers are checked.
    """
    opened = open_checkpoint(path)
    problems: list[str] = []
    boxes = unchecked = 0
    with Reader(opened.folder, opened.manifest) as reader:
        for section, tensors in opened.manifest.sections.items():
            for name, tensor in tensors.items():
                for stored in tensor.boxes:
                    boxes += 1
                    unchecked += stored.crc32 is None
                    try:
                        if stored.crc32 is not None:
                            reader.check(tensor, stored, full_name(section, name))
                    except CheckpointError as error:
                        problems.append(error.message)
        read = reader.bytes_read
    return Verified(
        opened=opened,
        num_boxes=boxes,
        num_unchecked=unchecked,
        bytes_read=read,
        problems=tuple(dict.fromkeys(problems)),
    )
