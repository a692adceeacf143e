"""A checkpoint in another form: a Hugging Face folder, a plain torch file, or one of ours anew.

Tensors are read and written one after the other, so that a model larger than the memory can
be converted; only a torch file needs all of it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.files import ToWrite, sync_folder, write_tensors
from shardwise.checkpoint.load import read_section
from shardwise.checkpoint.manifest import MANIFEST, MODEL, Manifest, StoredBox, StoredTensor, key_of
from shardwise.checkpoint.opening import HF_INDEX, HF_SINGLE, Opened, open_checkpoint, with_previous
from shardwise.checkpoint.shards import Box, Placed, split_box
from shardwise.checkpoint.transfer import BOX_BYTES, Reader, Request
from shardwise.checkpoint.write import replaced_folder, require_free, write_text
from shardwise.errors import CheckpointError
from shardwise.files import read_json

__all__ = ["convert_checkpoint"]


SHARD_BYTES = 5_000_000_000
CONFIG = "config.json"
# What else belongs to a model's folder: texts and tables, no code and no pickles.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


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
    """Write a checkpoint in the form `to`: "hf", "torch" or "shardwise"; the files written.

    `section` is the set of tensors to take as the model's, such as "ema". `dtype` is that of
    floating-point tensors. A Hugging Face folder needs a `config`, a folder or file that has it,
    unless the checkpoint's `extra` has it as "hf_config".
    """
    forms: dict[str, Callable[[], list[Path]]] = {
        "hf": lambda: _to_hf(opened, Path(out), config, section, dtype, shard_bytes),
        "torch": lambda: _to_torch(opened, Path(out), section, dtype),
        "shardwise": lambda: _to_ours(opened, Path(out), section, dtype),
    }
    if to not in forms:
        raise CheckpointError(f"{to!r} is no known form", hint=f"one of {', '.join(forms)}")
    opened = open_checkpoint(source)
    if section not in opened.manifest.sections:
        known = ", ".join(opened.manifest.sections)
        raise CheckpointError(f"no section {section!r} in the checkpoint, which has {known}")
    try:
        return forms[to]()
    except CheckpointError as error:
        raise with_previous(error, Path(source)) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error.strerror or error}", where=str(out)
        ) from error


def _to_torch(opened: Opened, out: Path, section: str, dtype: torch.dtype | None) -> list[Path]:
    """A file for `torch.load(file, weights_only=True)`, with all names."""
    state = read_section(opened, section)
    cast = {id(t): _cast(t, dtype) for t in state.values()}
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    try:
        with open(aside, "wb") as file:
            torch.save({name: cast[id(tensor)] for name, tensor in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return [out]


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _cast_type(stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder that gets the name `out` when all is written."""
    out = Path(os.path.abspath(out))
    require_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
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
    opened: Opened,
    out: Path,
    config: str | Path | None,
    section: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> list[Path]:
    """A folder that `from_pretrained` opens; tied tensors under one name, as it ties them again."""
    settings = _config(opened, config)
    stored = opened.manifest.sections[section]
    shards = _shards(stored, dtype, shard_bytes)
    names = [HF_SINGLE]
    if len(shards) > 1:
        total = len(shards)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    with _new_folder(out) as folder:
        for file, shard in zip(names, shards, strict=True):
            items = [_whole(opened, section, name, stored[name], dtype) for name in shard]
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


def _config(opened: Opened, given: str | Path | None) -> Mapping[str, Any]:
    kept = opened.manifest.extra.get("hf_config")
    if given is None and isinstance(kept, dict):
        return kept
    if given is None and opened.foreign:
        given = opened.folder
    if given is None:
        raise CheckpointError(
            "a Hugging Face folder needs the model's config.json",
            hint="--config FOLDER, of the model or with its config.json",
        )
    path = Path(given) / CONFIG if Path(given).is_dir() else Path(given)
    found = read_json(path, CheckpointError, what="config", free=True)
    if not isinstance(found, dict):
        raise CheckpointError("the config is no mapping", where=str(path))
    return found


def _nbytes(stored: StoredTensor, dtype: torch.dtype | None) -> int:
    return stored.nbytes // stored.dtype.itemsize * _cast_type(stored, dtype).itemsize


def _shards(
    stored: Mapping[str, StoredTensor], dtype: torch.dtype | None, shard_bytes: int
) -> list[list[str]]:
    """The names of each file, in order; a file exceeds the size by a single tensor alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in stored.items():
        size = _nbytes(tensor, dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _whole(
    opened: Opened, section: str, name: str, stored: StoredTensor, dtype: torch.dtype | None
) -> ToWrite:
    return ToWrite(
        key=name,
        shape=stored.shape,
        dtype=_cast_type(stored, dtype),
        make=lambda: _cast(read_section(opened, section, (name,))[name], dtype),
    )


def _to_ours(opened: Opened, out: Path, section: str, dtype: torch.dtype | None) -> list[Path]:
    """A checkpoint of one rank, with all sections, or with the chosen one as the model."""
    manifest = opened.manifest
    chosen = manifest.sections if section == MODEL else {MODEL: manifest.sections[section]}
    source = {name: name if section == MODEL else section for name in chosen}
    sections: dict[str, dict[str, StoredTensor]] = {name: {} for name in chosen}
    files: dict[str, int] = {}
    with _new_folder(out) as folder, Reader(opened.folder, manifest) as reader:
        kinds = dict.fromkeys(name.partition(".")[0] for name in chosen)
        for kind in kinds:
            file = f"{kind}-00000.safetensors"
            mine = [s for s in chosen if s.partition(".")[0] == kind]
            tasks = [
                (s, name, _retyped(tensor, dtype if s == MODEL else None), placed.box)
                for s in mine
                for name, tensor in chosen[s].items()
                for placed in _boxes(tensor)
            ]
            checksums = write_tensors(
                folder / file, [_part(reader, source[task[0]], *task) for task in tasks]
            )
            files[file] = os.stat(folder / file).st_size
            for s, name, tensor, box in tasks:
                key = key_of(s, name, box, tensor.shape)
                made = StoredBox(box=box, file=file, key=key, crc32=checksums[key])
                before = sections[s].get(name, dataclasses.replace(tensor, boxes=()))
                sections[s][name] = dataclasses.replace(before, boxes=(*before.boxes, made))
            for s in mine:
                for name, tensor in chosen[s].items():
                    sections[s].setdefault(name, dataclasses.replace(tensor, boxes=()))
        optimizer = manifest.optimizer if section == MODEL else None
        made_manifest: Manifest = dataclasses.replace(
            manifest, sections=sections, files=files, optimizer=optimizer
        )
        write_text(folder / MANIFEST, made_manifest.to_text())
    return sorted(out.iterdir())


def _retyped(tensor: StoredTensor, dtype: torch.dtype | None) -> StoredTensor:
    return dataclasses.replace(tensor, dtype=_cast_type(tensor, dtype))


def _boxes(tensor: StoredTensor) -> list[Placed]:
    """The whole tensor in boxes that are read and written at once."""
    if 0 in tensor.shape:
        return []
    shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return split_box(Placed(Box.whole(tensor.shape), shape), BOX_BYTES)


def _part(
    reader: Reader, source: str, section: str, name: str, tensor: StoredTensor, box: Box
) -> ToWrite:
    def make() -> Tensor:
        made = torch.empty(box.size, dtype=tensor.dtype)
        reader.fill([Request(section=source, name=name, wanted=[Placed(box, made)])])
        return made

    key = key_of(section, name, box, tensor.shape)
    return ToWrite(key=key, shape=box.size, dtype=tensor.dtype, make=make)
