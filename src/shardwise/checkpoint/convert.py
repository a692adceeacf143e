"""Convert a checkpoint: to a Hugging Face folder, a plain torch file, or a Shardwise checkpoint.

Tensors are read and written one by one, so that models larger than memory can be converted; only a
torch file needs all tensors at once.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
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
    forms: dict[str, Callable[[], list[Path]]] = {
        "hf": lambda: _to_hf(checkpoint, Path(out), config, section, dtype, shard_bytes),
        "torch": lambda: _to_torch(checkpoint, Path(out), section, dtype),
        "shardwise": lambda: _to_shardwise(checkpoint, Path(out), section, dtype),
    }
    if to not in forms:
        raise CheckpointError(f"unknown form {to!r}", hint=f"one of {', '.join(forms)}")
    checkpoint = open_checkpoint(source)
    require_section(checkpoint.manifest, section)
    try:
        return forms[to]()
    except CheckpointError as error:
        raise with_previous(error, Path(source)) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint: {error.strerror or error}", where=str(out)
        ) from error


def _to_torch(
    checkpoint: Checkpoint, out: Path, section: str, dtype: torch.dtype | None
) -> list[Path]:
    """Write a file for `torch.load(file, weights_only=True)`, with all names."""
    state = read_section(checkpoint, section)
    cast = {id(t): _cast(t, dtype) for t in state.values()}
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_path(out)
    try:
        with open(temporary, "wb") as file:
            torch.save({name: cast[id(tensor)] for name, tensor in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return [out]


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _cast_dtype(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype


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


def _to_hf(
    checkpoint: Checkpoint,
    out: Path,
    config: str | Path | None,
    section: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> list[Path]:
    """Write a folder for `from_pretrained`, which ties tensors again: each has one name there."""
    settings = _config(checkpoint, config)
    stored = checkpoint.manifest.sections[section]
    shards = _shards(stored, dtype, shard_bytes)
    names = [HF_SINGLE]
    if len(shards) > 1:
        total = len(shards)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    with _new_folder(out) as folder:
        for file, shard in zip(names, shards, strict=True):
            items = [_full_tensor(checkpoint, section, name, stored[name], dtype) for name in shard]
            write_tensors(folder / file, items)
        if len(shards) > 1:
            weights = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
            total_size = sum(_nbytes(stored[n], dtype) for n in weights)
            index = {"metadata": {"total_size": total_size}, "weight_map": weights}
            write_text(folder / HF_INDEX, json.dumps(index, indent=2))
        write_text(folder / CONFIG, json.dumps(settings, indent=2))
        if config is not None and Path(config).is_dir():
            for name in _COMPANIONS:
                if (Path(config) / name).is_file():
                    shutil.copyfile(Path(config) / name, folder / name)
    return sorted(out.iterdir())


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


def _nbytes(stored: StoredTensor, dtype: torch.dtype | None) -> int:
    return stored.nbytes // stored.dtype.itemsize * _cast_dtype(stored, dtype).itemsize


def _shards(
    stored: Mapping[str, StoredTensor], dtype: torch.dtype | None, shard_bytes: int
) -> list[list[str]]:
    """Return the names of each file, in order; only a file of one tensor may exceed the size."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, tensor in stored.items():
        size = _nbytes(tensor, dtype)
        if shards[-1] and total + size > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards


def _full_tensor(
    checkpoint: Checkpoint, section: str, name: str, stored: StoredTensor, dtype: torch.dtype | None
) -> ToWrite:
    return ToWrite(
        key=name,
        shape=stored.shape,
        dtype=_cast_dtype(stored, dtype),
        make=lambda: _cast(read_section(checkpoint, section, (name,))[name], dtype),
    )


def _to_shardwise(
    checkpoint: Checkpoint, out: Path, section: str, dtype: torch.dtype | None
) -> list[Path]:
    """Write a checkpoint of one rank, with all sections, or with one of them as the model."""
    manifest = checkpoint.manifest
    selected = manifest.sections if section == MODEL else {MODEL: manifest.sections[section]}
    sections: dict[str, dict[str, StoredTensor]] = {target: {} for target in selected}
    files: dict[str, int] = {}
    with _new_folder(out) as folder, Reader(checkpoint.folder, manifest) as reader:
        for kind in dict.fromkeys(target.partition(".")[0] for target in selected):
            items: list[tuple[str, str, StoredTensor, list[tuple[Box, ToWrite]]]] = []
            for target in (t for t in selected if t.partition(".")[0] == kind):
                source = target if section == MODEL else section
                for name, tensor in selected[target].items():
                    cast = _cast_dtype(tensor, dtype if target == MODEL else None)
                    tensor = dataclasses.replace(tensor, dtype=cast)
                    boxes = [
                        (box, _box_to_write(reader, source, target, name, box, tensor))
                        for box in _boxes(tensor)
                    ]
                    items.append((target, name, tensor, boxes))
            file = f"{kind}-00000.safetensors"
            checksums = write_tensors(folder / file, [i for *_, boxes in items for _, i in boxes])
            files[file] = os.stat(folder / file).st_size
            for target, name, tensor, boxes in items:
                stored = (StoredBox(b.offset, b.size, file, checksums[i.key]) for b, i in boxes)
                sections[target][name] = dataclasses.replace(tensor, boxes=tuple(stored))
        optimizer = manifest.optimizer if section == MODEL else None
        converted: Manifest = dataclasses.replace(
            manifest, sections=sections, files=files, optimizer=optimizer
        )
        write_text(folder / MANIFEST, converted.to_text())
    return sorted(out.iterdir())


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
