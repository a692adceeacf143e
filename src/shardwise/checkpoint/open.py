"""Open and verify a checkpoint: one of Shardwise, or a Hugging Face folder.

Only JSON and safetensors files are opened, never pickles that may be beside them
(`pytorch_model.bin`, `.metadata`).
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.box_io import Reader
from shardwise.checkpoint.files import TensorFile
from shardwise.checkpoint.manifest import MANIFEST, MODEL, Manifest, StoredBox, StoredTensor, key_of
from shardwise.checkpoint.shards import Box
from shardwise.checkpoint.write import replaced_path
from shardwise.errors import CheckpointError
from shardwise.files import read_json

HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint's folder and manifest; `is_hf` for a Hugging Face folder."""

    folder: Path
    manifest: Manifest
    is_hf: bool = False


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read and check the manifest; the error about a corrupt checkpoint names an earlier one."""
    folder = Path(path)
    try:
        return _open(folder)
    except CheckpointError as error:
        raise with_previous(error, folder) from error


def _open(folder: Path) -> Checkpoint:
    location = locate(folder)
    if os.path.isfile(location / MANIFEST):
        return Checkpoint(folder=location, manifest=Manifest.read(location))
    if not os.path.isdir(folder):
        raise CheckpointError("there is no such folder", where=str(folder))
    if any(folder.glob("*.safetensors*")):
        return Checkpoint(folder=folder, manifest=_hf_manifest(folder), is_hf=True)
    message = f"not a checkpoint: neither {MANIFEST} nor safetensors files"
    raise CheckpointError(message, where=str(folder), hint=_hint(folder))


def locate(folder: Path) -> Path:
    """Return where a checkpoint is, also if a save over it was killed between two renames."""
    replaced = replaced_path(folder)
    was_killed = not os.path.exists(folder) and os.path.isfile(replaced / MANIFEST)
    return replaced if was_killed else folder


def _hint(folder: Path) -> str | None:
    """Return the hint for a folder that contains checkpoints, or pickles."""
    if any(_STEP.fullmatch(p.name) for p in folder.iterdir()):
        return f"sw.CheckpointManager({str(folder)!r}).latest(), or one of the folders in it"
    if any(p.suffix in (".bin", ".pt", ".pth", ".distcp") for p in folder.iterdir()):
        return "pickled files are not opened; save the model as safetensors"
    return None


def with_previous(error: CheckpointError, folder: Path) -> CheckpointError:
    """Return the error with the previous checkpoint as its hint, if it is about this folder."""
    unrelated = error.where is not None and str(folder) not in error.where
    previous = None if unrelated else previous_checkpoint(folder)
    if error.hint is not None or previous is None:
        return error
    return CheckpointError(
        error.message, where=error.where, hint=f"the previous checkpoint, {previous}"
    )


def previous_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint before this one, by the step in its name or by time."""
    if not os.path.isdir(folder.parent):
        return None
    step = _STEP.fullmatch(folder.name)
    candidates: list[tuple[float, Path]] = []
    for other in folder.parent.iterdir():
        other_step = _STEP.fullmatch(other.name)
        if other == folder or not (other / MANIFEST).is_file():
            continue
        if step and other_step and int(other_step[1]) < int(step[1]):
            candidates.append((int(other_step[1]), other))
        elif not step and os.path.isdir(folder) and not other.name.startswith("."):
            candidates.append(((other / MANIFEST).stat().st_mtime, other))
    ordered = sorted(candidates, reverse=True)
    return next((other for _, other in ordered if is_complete(other)), None)


def is_complete(folder: Path) -> bool:
    """Return whether the manifest is valid and its files have the right sizes."""
    try:
        Manifest.read(locate(folder))
    except CheckpointError:
        return False
    return True


def _hf_manifest(folder: Path) -> Manifest:
    """Return the manifest that the headers of a Hugging Face folder's files describe."""
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    for file in _hf_files(folder):
        opened = TensorFile(folder / file)
        sizes[file] = (folder / file).stat().st_size
        for name, entry in opened.entries.items():
            if name in tensors:
                raise CheckpointError(f"{name} is in two files", where=str(folder / file))
            full = Box.full(entry.shape)
            boxes = (StoredBox(full.offset, full.size, file, None),) if entry.nbytes else ()
            tensors[name] = StoredTensor(shape=entry.shape, dtype=entry.dtype, boxes=boxes)
        opened.close()
    return Manifest(sections={MODEL: tensors}, files=sizes)


def _hf_files(folder: Path) -> list[str]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    path = folder / HF_INDEX if not indices or folder / HF_INDEX in indices else indices[0]
    if not path.is_file():
        plain = sorted(p.name for p in folder.glob("*.safetensors") if _is_plain(p.name))
        return [HF_SINGLE] if HF_SINGLE in plain else plain
    body = read_json(path, CheckpointError, what="index")
    weights = body.get("weight_map") if isinstance(body, dict) else None
    names = list(weights.values()) if isinstance(weights, dict) else []
    if not names or not all(isinstance(n, str) and _is_plain(n) for n in names):
        raise CheckpointError(f"{path.name} has no valid weight_map", where=str(path))
    missing = [n for n in dict.fromkeys(names) if not os.path.isfile(folder / n)]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing", where=str(folder / missing[0]))
    return list(dict.fromkeys(names))


def _is_plain(name: str) -> bool:
    """Return whether this is the name of a safetensors file in the folder itself."""
    return name.endswith(".safetensors") and name == Path(name).name and not name.startswith(".")


# ------------------------------------------------------------ verification
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The boxes of a checkpoint that were read, and the problems with them."""

    checkpoint: Checkpoint
    num_boxes: int
    num_unchecked: int
    bytes_read: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_checkpoint(path: str | Path) -> Verification:
    """Read a checkpoint in full; each box whose checksum differs is a problem.

    Files of Hugging Face have no checksums: only their headers are checked.
    """
    checkpoint = open_checkpoint(path)
    problems: list[str] = []
    num_boxes = num_unchecked = 0
    with Reader(checkpoint.folder, checkpoint.manifest) as reader:
        for section, tensors in checkpoint.manifest.sections.items():
            for name, tensor in tensors.items():
                for stored in tensor.boxes:
                    num_boxes += 1
                    num_unchecked += stored.crc32 is None
                    key = key_of(section, name, stored, tensor.shape)
                    try:
                        if stored.crc32 is not None:
                            reader.checked(tensor, stored, key)
                    except CheckpointError as error:
                        problems.append(error.message)
        return Verification(
            checkpoint=checkpoint,
            num_boxes=num_boxes,
            num_unchecked=num_unchecked,
            bytes_read=reader.bytes_read,
            problems=tuple(dict.fromkeys(problems)),
        )
