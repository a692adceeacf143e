"""Which stored tensor belongs to which of a module's, where their names differ.

Tied tensors have several names, of which a file may have any. Files of Hugging Face may lack the
prefix of the base model (`model.`), or have it where the module has not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardwise.errors import CheckpointError, did_you_mean
from shardwise.training.checkpoint.manifest import MODEL, Manifest

__all__ = ["Match", "match_names"]

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
