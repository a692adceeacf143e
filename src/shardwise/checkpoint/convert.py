"""Convert a checkpoint: to a Hugging Face folder, a plain torch file, or a Shardwise checkpoint.

Tensors are read and written one by one, so that models larger than memory can be converted; only a
torch file needs all tensors at once.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.box_io import BOX_BYTES, Reader, Request
from shardwise.checkpoint.files import ToWrite, sync_folder, write_tensors
from shardwise.checkpoint.load import read_section, require_section
from shardwise.checkpoint.manifest import MANIFEST, MODEL, Manifest, StoredBox, StoredTensor, key_of
from shardwise.checkpoint.open import (
    HF_INDEX,
    HF_SINGLE,
    Checkpoint,
    open_checkpoint,
    with_previous,
)
from shardwise.checkpoint.shards import Box, LocalBox, split_box
from shardwise.checkpoint.write import partial_path, replaced_folder, require_free, write_text
from shardwise.errors import CheckpointError
from shardwise.files import read_json

SHARD_BYTES = 5_000_000_000
CONFIG = "config.json"
FORMS = ("hf", "torch", "shardwise")
# Other files of a model's folder to copy: texts and tables, neither code nor pickles.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    to: str,
    config: str | Path | None = None,
    section: str = MODEL,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Convert a checkpoint to the form "hf", "torch" or "shardwise"; return the files written.

    `section` selects the tensors that become the model's, such as "ema". Floating-point tensors are
    converted to `dtype`. A Hugging Face folder needs the model's `config`, as a file or a folder
    that has it, unless the checkpoint has it in `extra` as "hf_config".
    """
    if to not in FORMS:
        raise CheckpointError(f"unknown form {to!r}", hint=f"one of {', '.join(FORMS)}")
    checkpoint = open_checkpoint(source)
    require_section(checkpoint.manifest, section)
    conversion = _Conversion(checkpoint, Path(out), section, dtype)
    try:
        if to == "hf":
            return conversion.to_hf(config, shard_bytes)
        return conversion.to_torch() if to == "torch" else conversion.to_shardwise()
    except CheckpointError as error:
        raise with_previous(error, Path(source)) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint: {error.strerror or error}", where=str(out)
        ) from error


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that is renamed to `out` when it is complete."""
    out = Path(os.path.abspath(out))
    require_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = partial_path(out)
    folder.mkdir()
    try:
        yield folder
        sync_folder(folder)
        with replaced_folder(out):
            os.rename(folder, out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Conversion:
    """A section of a checkpoint, written to `out` with floating-point tensors of `dtype`."""

    checkpoint: Checkpoint
    out: Path
    section: str
    dtype: torch.dtype | None

    def _cast(self, stored: StoredTensor) -> StoredTensor:
        """Return a tensor as it is written, without boxes."""
        casts = self.dtype is not None and stored.dtype.is_floating_point
        dtype = self.dtype if self.dtype is not None and casts else stored.dtype
        return dataclasses.replace(stored, dtype=dtype, boxes=())

    def to_torch(self) -> list[Path]:
        """Write a file for `torch.load(file, weights_only=True)`, with all names."""
        state, out = read_section(self.checkpoint, self.section), self.out
        casts = {
            id(t): t.to(self.dtype) if self.dtype is not None and t.is_floating_point() else t
            for t in state.values()
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = partial_path(out)
        try:
            with open(temporary, "wb") as file:
                torch.save({name: casts[id(tensor)] for name, tensor in state.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)
        return [out]

    def to_hf(self, config: str | Path | None, shard_bytes: int) -> list[Path]:
        """Write a folder for `from_pretrained`, which ties tensors again: each has one name."""
        settings = _config(self.checkpoint, config)
        tensors = self.checkpoint.manifest.sections[self.section]
        stored = {name: self._cast(tensor) for name, tensor in tensors.items()}
        shards = _shards(stored, shard_bytes)
        names = [HF_SINGLE]
        if len(shards) > 1:
            total = len(shards)
            names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        with _new_folder(self.out) as folder:
            for file, shard in zip(names, shards, strict=True):
                write_tensors(folder / file, [self._full(name, stored[name]) for name in shard])
            if len(shards) > 1:
                weights = {
                    n: file for file, shard in zip(names, shards, strict=True) for n in shard
                }
                total_size = sum(stored[n].nbytes for n in weights)
                index = {"metadata": {"total_size": total_size}, "weight_map": weights}
                write_text(folder / HF_INDEX, json.dumps(index, indent=2))
            write_text(folder / CONFIG, json.dumps(settings, indent=2))
            if config is not None and Path(config).is_dir():
                for name in _COMPANIONS:
                    if (Path(config) / name).is_file():
                        shutil.copyfile(Path(config) / name, folder / name)
        return sorted(self.out.iterdir())

    def _full(self, name: str, stored: StoredTensor) -> ToWrite:
        def make() -> Tensor:
            return read_section(self.checkpoint, self.section, (name,))[name].to(stored.dtype)

        return ToWrite(key=name, shape=stored.shape, dtype=stored.dtype, make=make)

    def to_shardwise(self) -> list[Path]:
        """Write a checkpoint of one rank, with all sections, or with one of them as the model."""
        manifest, is_all = self.checkpoint.manifest, self.section == MODEL
        selected = manifest.sections if is_all else {MODEL: manifest.sections[self.section]}
        sections: dict[str, dict[str, StoredTensor]] = {target: {} for target in selected}
        files: dict[str, int] = {}
        with _new_folder(self.out) as folder, Reader(self.checkpoint.folder, manifest) as reader:
            for kind in dict.fromkeys(target.partition(".")[0] for target in selected):
                items: list[tuple[str, str, StoredTensor, list[tuple[Box, ToWrite]]]] = []
                for target in (t for t in selected if t.partition(".")[0] == kind):
                    source = target if is_all else self.section
                    for name, tensor in selected[target].items():
                        tensor = self._cast(tensor) if target == MODEL else tensor
                        boxes = [
                            (box, _box_to_write(reader, source, target, name, box, tensor))
                            for box in _boxes(tensor)
                        ]
                        items.append((target, name, tensor, boxes))
                file = f"{kind}-00000.safetensors"
                every = [item for *_, boxes in items for _, item in boxes]
                checksums = write_tensors(folder / file, every)
                files[file] = os.stat(folder / file).st_size
                for target, name, tensor, boxes in items:
                    stored = (StoredBox(b.offset, b.size, file, checksums[i.key]) for b, i in boxes)
                    sections[target][name] = dataclasses.replace(tensor, boxes=tuple(stored))
            converted: Manifest = dataclasses.replace(
                manifest,
                sections=sections,
                files=files,
                optimizer=manifest.optimizer if is_all else None,
            )
            write_text(folder / MANIFEST, converted.to_text())
        return sorted(self.out.iterdir())


def _config(checkpoint: Checkpoint, source: str | Path | None) -> Mapping[str, Any]:
    saved = checkpoint.manifest.extra.get("hf_config")
    if source is None and isinstance(saved, dict):
        return saved
    if source is None and checkpoint.is_hf:
        source = checkpoint.folder
    if source is None:
        raise CheckpointError(
            "a Hugging Face folder needs the model's config.json",
            hint="--config FOLDER, the model's or one with its config.json",
        )
    path = Path(source) / CONFIG if Path(source).is_dir() else Path(source)
    config = read_json(path, CheckpointError, what="config", free=True)
    if not isinstance(config, dict):
        raise CheckpointError("the config is not a mapping", where=str(path))
    return config


def _shards(stored: Mapping[str, StoredTensor], shard_bytes: int) -> list[list[str]]:
    """Return the names of each file, in order; only a file of one tensor may exceed the size."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, tensor in stored.items():
        size = tensor.nbytes
        if shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards


def _boxes(tensor: StoredTensor) -> list[Box]:
    """Return the boxes of the full tensor that are read and written at once."""
    if 0 in tensor.shape:
        return []
    view = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return [part.box for part in split_box(LocalBox(Box.full(tensor.shape), view), BOX_BYTES)]


def _box_to_write(
    reader: Reader, source: str, target: str, name: str, box: Box, tensor: StoredTensor
) -> ToWrite:
    """Return a box of section `source` to write into section `target`."""

    def make() -> Tensor:
        values = torch.empty(box.size, dtype=tensor.dtype)
        reader.fill([Request(section=source, name=name, targets=[LocalBox(box, values)])])
        return values

    key = key_of(target, name, box, tensor.shape)
    return ToWrite(key=key, shape=box.size, dtype=tensor.dtype, make=make)
