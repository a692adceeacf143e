"""Reading a checkpoint: `load_checkpoint(path, module, optimizer)`, into any plan.

Each rank reads the boxes that overlap what it holds. Names and shapes are those of the single
device, whatever plan the checkpoint was written under.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.manifest import MODEL, Manifest, StoredTensor, full_name
from shardwise.checkpoint.opening import Opened, open_checkpoint, with_previous
from shardwise.checkpoint.optimizer_state import Optimizers, load_optimizer
from shardwise.checkpoint.shards import Box, Held, Placed, State, state_of
from shardwise.checkpoint.transfer import Reader, Request
from shardwise.checkpoint.write import held_copies
from shardwise.errors import CheckpointError, did_you_mean
from shardwise.runtime.rendezvous import Rendezvous, open_rendezvous

__all__ = ["Loaded", "Match", "load_checkpoint", "match_names", "read_section"]


# Which stored tensor belongs to which of a module's, where their names differ.
#
# Tied tensors have several names, of which a file may have any. Files of Hugging Face may lack the
# prefix of the base model (`model.`), or have it where the module has not.


_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`stored` maps the module's names, aliases included, to those in the file."""

    stored: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def require(self, where: str, *, foreign: bool) -> None:
        """Refuse a file that lacks tensors of the module, or, if it is ours, has others."""
        if self.missing:
            text = f"the checkpoint has no {_some(self.missing)}"
            close = did_you_mean(self.missing[0], self.unexpected)
            raise CheckpointError(
                text + close, where=where, hint="load_checkpoint(…, strict=False) leaves them"
            )
        if self.unexpected and not foreign:
            raise CheckpointError(
                f"the module has no {_some(self.unexpected)}, which the checkpoint has",
                where=where,
                hint="load_checkpoint(…, strict=False) passes over them",
            )


def match_names(
    names: Iterable[str],
    aliases: Mapping[str, str],
    elsewhere: Collection[str],
    manifest: Manifest,
    *,
    foreign: bool,
) -> Match:
    """Find the tensors of a module among those of a checkpoint.

    `names` are those of this rank, with `aliases` to them; `elsewhere` are those of other ranks.
    """
    mine = list(dict.fromkeys(names))
    all_names = {name: [name] for name in mine}
    for alias, name in aliases.items():
        all_names.setdefault(name, [name]).append(alias)
    known = {n for found in all_names.values() for n in found} | set(elsewhere)
    saved = {**{n: n for n in manifest.sections.get(MODEL, {})}, **manifest.aliases}
    if foreign:
        saved = _with_prefix(saved, known)
    stored: dict[str, str] = {}
    for found in all_names.values():
        hit = next((saved[n] for n in found if n in saved), None)
        if hit is not None:
            stored.update(dict.fromkeys(found, hit))
    missing = tuple(name for name in mine if name not in stored)
    unexpected = tuple(name for name in saved if name not in known)
    return Match(stored=stored, missing=missing, unexpected=unexpected)


def _with_prefix(saved: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """The names as the module has them, if one prefix more or less makes more of them match."""
    heads = {name.partition(".")[0] + "." for name in (*saved, *known) if "." in name}
    best, count = dict(saved), sum(name in known for name in saved)
    for head in sorted(heads):
        longer = {head + n if head + n in known else n: s for n, s in saved.items()}
        shorter = {_without(n, head, known): s for n, s in saved.items()}
        for renamed in (longer, shorter):
            hits = sum(name in known for name in renamed)
            if hits > count and len(renamed) == len(saved):
                best, count = renamed, hits
    return best


def _without(name: str, head: str, known: Collection[str]) -> str:
    short = name.removeprefix(head)
    return short if short in known else name


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint held beside what went into module and optimizer.

    `state_dict` is the whole model's if no module was given. `missing` and `unexpected` are names
    that only the module, or only the checkpoint, has; of a module on meta, `missing` has buffers
    that no checkpoint has.
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

    The folder is one that `save_checkpoint` wrote, under whatever plan, or one of Hugging Face with
    safetensors files. `module` is a parallel module, and then all ranks call this, or a plain one.
    Without a module the result has the whole `state_dict`. With `strict`, all that module and
    optimizer have must be there.

    Nothing is executed, and a file that is damaged is named, with the previous checkpoint to try.
    A module may be half filled then.
    """
    if module is None and (optimizer is not None or copies):
        raise CheckpointError(
            "optimizer state and copies belong to a module", hint="load_checkpoint(path, module, …)"
        )
    if module is None:
        opened = open_checkpoint(path)
        return _loaded(opened, state_dict=read_section(opened))
    state = state_of(module)
    rendezvous = open_rendezvous("load", CheckpointError) if state.collective else Rendezvous()
    found: Loaded = rendezvous.run(
        lambda: _load(Path(path), state, optimizer, copies or {}, strict), timeout_s
    )
    return found


def _load(
    path: Path,
    state: State,
    optimizer: Optimizers | None,
    copies: Mapping[str, Mapping[str, Tensor]],
    strict: bool,
) -> Loaded:
    opened = open_checkpoint(path)
    manifest = opened.manifest
    targets = state.targets()
    names = [held.name for held in targets]
    match = match_names(names, state.aliases, state.elsewhere, manifest, foreign=opened.foreign)
    if strict:
        match.require(str(path), foreign=opened.foreign)
    requests = [
        _request(manifest, MODEL, held, match) for held in targets if held.name in match.stored
    ]
    if optimizer is not None:
        requests += _optimizer_requests(opened, state, optimizer, match, strict)
    for label, held_list in held_copies(state, copies, borrowed=True).items():
        if label not in manifest.sections:
            raise CheckpointError(f"the checkpoint has no set {label!r}", where=str(path))
        requests += [_request(manifest, label, held, match) for held in held_list]
    try:
        with Reader(opened.folder, manifest) as reader:
            reader.fill(requests)
    except CheckpointError as error:
        raise with_previous(error, path) from error
    finally:
        state.filled()
    state.received(match.stored)
    state.take_facts(manifest.module)
    return _loaded(opened, match=match, unfilled=tuple(state.unfilled()))


def _request(manifest: Manifest, section: str, held: Held, match: Match) -> Request:
    name = match.stored.get(held.name, held.name)
    stored = manifest.sections.get(section, {}).get(name)
    if stored is None:
        raise CheckpointError(f"the checkpoint has no {full_name(section, name)}")
    if stored.shape != held.shape:
        raise CheckpointError(
            f"{full_name(section, held.name)} has shape {held.shape} here and {stored.shape} in "
            "the checkpoint",
            hint="the model with the sizes it had when it was saved",
        )
    return Request(section=section, name=name, wanted=held.placed)


def _optimizer_requests(
    opened: Opened,
    state: State,
    optimizer: Optimizers,
    match: Match,
    strict: bool,
) -> list[Request]:
    manifest = opened.manifest
    if manifest.optimizer is None:
        raise CheckpointError(
            "the checkpoint has no optimizer's state",
            where=str(opened.folder),
            hint="load_checkpoint(path, module)",
        )
    shapes = {
        section: {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for section, tensors in manifest.sections.items()
    }
    canonical = {**manifest.aliases, **match.stored}
    wanted = load_optimizer(optimizer, state, manifest.optimizer, shapes, canonical, strict=strict)
    return [_request(manifest, section, held, match) for section, held in wanted]


def _loaded(
    opened: Opened,
    match: Match | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    unfilled: tuple[str, ...] = (),
) -> Loaded:
    manifest = opened.manifest
    return Loaded(
        path=opened.folder,
        step=manifest.step,
        extra=manifest.extra,
        names=manifest.names,
        state_dict=state_dict or {},
        missing=(*match.missing, *unfilled) if match else (),
        unexpected=match.unexpected if match else (),
    )


def read_section(
    opened: Opened, section: str = MODEL, names: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """Whole tensors by name, aliases of the model's included; all of a section, or some."""
    stored = opened.manifest.sections.get(section)
    if stored is None:
        known = ", ".join(opened.manifest.sections)
        raise CheckpointError(f"no section {section!r} in the checkpoint, which has {known}")
    chosen = {name: stored[name] for name in (stored if names is None else names)}
    made = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in chosen.items()}
    requests = [_whole(section, name, made[name], chosen[name]) for name in chosen]
    try:
        with Reader(opened.folder, opened.manifest) as reader:
            reader.fill(requests)
    except CheckpointError as error:
        raise with_previous(error, opened.folder) from error
    aliases = {a: n for a, n in opened.manifest.aliases.items() if n in made}
    return {**made, **{alias: made[name] for alias, name in aliases.items()}}


def _whole(section: str, name: str, made: Tensor, stored: StoredTensor) -> Request:
    wanted = [Placed(Box.whole(stored.shape), made)] if made.numel() else []
    return Request(section=section, name=name, wanted=wanted)
