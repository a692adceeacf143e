"""Load a checkpoint into any plan: `load_checkpoint(path, module, optimizer)`.

Each rank reads the boxes that overlap its shards. Names and shapes are those of a single device,
whatever plan the checkpoint was written under.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.box_io import Reader, Request
from shardwise.checkpoint.manifest import MODEL, Manifest, full_name
from shardwise.checkpoint.open import Checkpoint, open_checkpoint, with_previous
from shardwise.checkpoint.optimizer_state import Optimizers, load_optimizer
from shardwise.checkpoint.shards import Box, LocalBox, State, TensorShards, state_of
from shardwise.checkpoint.sync_state import fill_boxes, load_sync
from shardwise.checkpoint.write import copied_sections
from shardwise.errors import CheckpointError, did_you_mean
from shardwise.runtime.rendezvous import Rendezvous, open_rendezvous

# ------------------------------------------------------------ matching names
# Tied tensors have several names, any of which a file may have. Files of Hugging Face may lack the
# prefix of the base model (`model.`), or have it although the module has not.

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The names of a module, aliases included, with those in the file, and unmatched names."""

    stored: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def require(self, where: str, *, is_hf: bool) -> None:
        """Refuse a checkpoint that lacks tensors or, unless of Hugging Face, has further ones."""
        if self.missing:
            close = did_you_mean(self.missing[0], self.unexpected)
            raise CheckpointError(
                f"the checkpoint has no {_listed(self.missing)}{close}",
                where=where,
                hint="load_checkpoint(…, strict=False) leaves them unchanged",
            )
        if self.unexpected and not is_hf:
            raise CheckpointError(
                f"the module has no {_listed(self.unexpected)}, which the checkpoint has",
                where=where,
                hint="load_checkpoint(…, strict=False) ignores them",
            )


def match_names(names: Iterable[str], state: State, checkpoint: Checkpoint) -> Match:
    """Find the tensors of a module, `names` on this rank, among those of a checkpoint."""
    manifest, local_names = checkpoint.manifest, list(dict.fromkeys(names))
    synonyms = {name: [name] for name in local_names}
    for alias, name in state.aliases.items():
        synonyms.setdefault(name, [name]).append(alias)
    module_names = {n for group in synonyms.values() for n in group} | state.remote_names
    saved = {**{n: n for n in manifest.sections.get(MODEL, {})}, **manifest.aliases}
    if checkpoint.is_hf:
        saved = _with_prefix(saved, module_names)
    stored: dict[str, str] = {}
    for group in synonyms.values():
        saved_name = next((saved[n] for n in group if n in saved), None)
        if saved_name is not None:
            stored.update(dict.fromkeys(group, saved_name))
    missing = tuple(name for name in local_names if name not in stored)
    unexpected = tuple(name for name in saved if name not in module_names)
    return Match(stored=stored, missing=missing, unexpected=unexpected)


def _with_prefix(saved: Mapping[str, str], module_names: Collection[str]) -> dict[str, str]:
    """Add or remove a prefix of the saved names if more of them then match the module's."""
    prefixes = {name.partition(".")[0] + "." for name in (*saved, *module_names) if "." in name}
    best, num_matches = dict(saved), sum(name in module_names for name in saved)
    for prefix in sorted(prefixes):
        longer = {prefix + n if prefix + n in module_names else n: s for n, s in saved.items()}
        shorter = {
            short if (short := n.removeprefix(prefix)) in module_names else n: s
            for n, s in saved.items()
        }
        for renamed in (longer, shorter):
            matches = sum(name in module_names for name in renamed)
            if matches > num_matches and len(renamed) == len(saved):
                best, num_matches = renamed, matches
    return best


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_MAX_SHOWN])
    more = len(names) - _MAX_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


# ------------------------------------------------------------ loading
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The contents of a checkpoint besides the state of module and optimizer.

    `state_dict` is that of the full model if no module was given. `missing` and `unexpected` are
    names that only the module or only the checkpoint has; for a module on the meta device,
    `missing` includes buffers that no checkpoint has.
    """

    path: Path
    step: int | None
    extra: Mapping[str, Any]
    names: tuple[str, ...]
    state_dict: Mapping[str, Tensor] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_checkpoint(
    path: str | Path,
    module: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    *,
    copies: Mapping[str, Mapping[str, Tensor]] | None = None,
    strict: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Loaded:
    """Fill a module, its optimizer and further `copies` from the folder `path`.

    The folder is one that `save_checkpoint` wrote under any plan, or a Hugging Face folder with
    safetensors files. All ranks call this for a parallel module; a plain one may be loaded on any.
    Without a module, the result has the full `state_dict`. With `strict`, the checkpoint must have
    all tensors of module and optimizer.

    No code in a checkpoint is ever executed. An error names the corrupt file and the previous
    checkpoint; the module may then be partly filled.
    """
    if module is None and (optimizer is not None or copies):
        raise CheckpointError(
            "optimizer state and copies belong to a module", hint="load_checkpoint(path, module, …)"
        )
    if module is None:
        checkpoint = open_checkpoint(path)
        return _loaded(checkpoint, state_dict=read_section(checkpoint))
    state = state_of(module)
    rendezvous = open_rendezvous("load", CheckpointError) if state.collective else Rendezvous()

    def load() -> Loaded:
        checkpoint = open_checkpoint(path)
        with Reader(checkpoint.folder, checkpoint.manifest) as reader:
            return fill_from(checkpoint, reader.fill, state, optimizer, copies or {}, strict=strict)

    loaded: Loaded = rendezvous.run(load, timeout_s)
    return loaded


def fill_from(
    checkpoint: Checkpoint,
    fill: Callable[[list[Request]], None],
    state: State,
    optimizer: Optimizers | None,
    copies: Mapping[str, Mapping[str, Tensor]],
    *,
    strict: bool = True,
) -> Loaded:
    """Fill the state from a checkpoint, whose `fill` writes values into the requested boxes."""
    manifest, path = checkpoint.manifest, checkpoint.folder
    targets = [(MODEL, shards) for shards in state.targets()]
    match = match_names((shards.name for _, shards in targets), state, checkpoint)
    if strict:
        match.require(str(path), is_hf=checkpoint.is_hf)
    targets = [(section, shards) for section, shards in targets if shards.name in match.stored]
    if optimizer is not None:
        targets += _optimizer_targets(checkpoint, state, optimizer, match, strict)
    for section, copied in copied_sections(state, copies, replicas=True).items():
        if section not in manifest.sections:
            raise CheckpointError(f"the checkpoint has no copies {section!r}", where=str(path))
        targets += [(section, shards) for shards in copied]
    synchronized, finish = load_sync(state, manifest, match.stored)
    targets += synchronized
    requests, merges = [], [finish]
    for section, shards in targets:
        request, merge = _request(manifest, section, shards, match)
        requests.append(request)
        merges.insert(0, merge)
    try:
        fill(requests)
        for merge in merges:
            merge()
    except CheckpointError as error:
        raise with_previous(error, path) from error
    finally:
        state.finish_loading()
    state.mark_initialized(match.stored)
    state.load_metadata(manifest.module)
    missing = (*match.missing, *state.uninitialized())
    return _loaded(checkpoint, missing=missing, unexpected=match.unexpected)


def _request(
    manifest: Manifest, section: str, shards: TensorShards, match: Match
) -> tuple[Request, Callable[[], None]]:
    name = match.stored.get(shards.name, shards.name)
    stored = manifest.sections.get(section, {}).get(name)
    if stored is None:
        raise CheckpointError(f"the checkpoint has no {full_name(section, name)}")
    filled = fill_boxes(shards, stored.shape)
    if filled is None or (section == MODEL and stored.shape != shards.shape):
        raise CheckpointError(
            f"{full_name(section, shards.name)} has shape {shards.shape} here and {stored.shape} "
            "in the checkpoint",
            hint="the model with the sizes it had when it was saved",
        )
    return Request(section=section, name=name, targets=filled[0]), filled[1]


def _optimizer_targets(
    checkpoint: Checkpoint, state: State, optimizer: Optimizers, match: Match, strict: bool
) -> list[tuple[str, TensorShards]]:
    manifest = checkpoint.manifest
    if manifest.optimizer is None:
        raise CheckpointError(
            "the checkpoint has no optimizer state",
            where=str(checkpoint.folder),
            hint="load_checkpoint(path, module)",
        )
    shapes = {
        section: {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for section, tensors in manifest.sections.items()
    }
    aliases = {**manifest.aliases, **match.stored}
    return load_optimizer(optimizer, state, manifest.optimizer, shapes, aliases, strict=strict)


def _loaded(checkpoint: Checkpoint, **result: Any) -> Loaded:
    saved = checkpoint.manifest
    return Loaded(
        path=checkpoint.folder, step=saved.step, extra=saved.extra, names=saved.names, **result
    )


def read_section(
    checkpoint: Checkpoint, section: str = MODEL, names: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """Return full tensors of a section by name, all or some, and aliases of the model's."""
    manifest = checkpoint.manifest
    require_section(manifest, section)
    stored = manifest.sections[section]
    tensors = {
        name: torch.empty(stored[name].shape, dtype=stored[name].dtype)
        for name in (stored if names is None else names)
    }
    requests = [
        Request(section=section, name=name, targets=[LocalBox(Box.full(tensor.shape), tensor)])
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    try:
        with Reader(checkpoint.folder, manifest) as reader:
            reader.fill(requests)
    except CheckpointError as error:
        raise with_previous(error, checkpoint.folder) from error
    aliases = {alias: name for alias, name in manifest.aliases.items() if name in tensors}
    return {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}


def require_section(manifest: Manifest, section: str) -> None:
    """Refuse a section that the checkpoint does not have."""
    if section not in manifest.sections:
        sections = ", ".join(manifest.sections)
        raise CheckpointError(f"no section {section!r} in the checkpoint, which has {sections}")
