"""Which parameters an optimizer works on, and in which groups.

Enters: what the user writes: globs on original names, or tensors as in `torch.optim` (those of
`pm.parameters()`, or of the model that was parallelized). Leaves: options and entries per group.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import OptimizerError, did_you_mean
from shardwise.runtime.flat import Entry
from shardwise.runtime.store import ParameterStore

__all__ = ["Params", "claim_names", "find_groups", "require_claimed", "select_entries"]

Params = str | Tensor | Iterable[str | Tensor]


class _Selection:
    """Parameters by glob or tensor; every one of them must exist."""

    def __init__(self, store: ParameterStore, params: Params) -> None:
        given = [params] if isinstance(params, str | Tensor) else list(params)
        tensors = [item for item in given if isinstance(item, Tensor)]
        self.by_tensor = bool(tensors)
        self.names = set(_names_of(store, tensors))
        self.globs = [item for item in given if isinstance(item, str)]
        known = [name for e in store.entries for name in (e.spec.name, *e.spec.aliases)]
        known += sorted(store.elsewhere)
        for glob in self.globs:
            if not fnmatch.filter(known, glob):
                raise OptimizerError(f"no parameter matches {glob!r}{did_you_mean(glob, known)}")

    def has(self, names: Iterable[str]) -> bool:
        return any(
            name in self.names or any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)
            for name in names
        )


def _names_of(store: ParameterStore, tensors: Iterable[Tensor]) -> Iterator[str]:
    shown = store.names_by_tensor()
    for tensor in tensors:
        name = shown.get(id(tensor)) or store.original_name(tensor)
        if name is None:
            raise OptimizerError(
                f"a tensor of shape {tuple(tensor.shape)} is neither a parameter of the parallel "
                "module nor of the model that it was made of",
                hint="pm.parameters(), the model's parameters, or globs on their names",
            )
        yield name


def _names(entry: Entry) -> tuple[str, ...]:
    return (entry.spec.name, *entry.spec.aliases)


def select_entries(store: ParameterStore, params: Params | None) -> list[Entry]:
    """The entries of these parameters on this rank; all of them by default."""
    if params is None:
        return list(store.entries)
    chosen = _Selection(store, params)
    return [entry for entry in store.entries if chosen.has(_names(entry))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Options and entries of each group, and the names of all parameters in them on all ranks."""

    options: tuple[dict[str, Any], ...]
    entries: tuple[tuple[Entry, ...], ...]
    names: frozenset[str]


def find_groups(
    store: ParameterStore,
    groups: Iterable[Mapping[str, Any] | Tensor],
    params: Params | None,
    *,
    rest: bool,
) -> Groups:
    """The groups; an entry goes to the first one whose glob matches.

    What is selected and in no group goes into a last one, unless groups list tensors: these are
    complete, as in `torch.optim`. Frozen parameters belong to groups too, as in plain PyTorch:
    without a gradient they stay as they are, and they are updated once they are unfrozen.
    """
    selected = None if params is None else _Selection(store, params)
    left = [e for e in store.entries if not e.spec.borrowed and _has_gradients(e.dtype)]
    # Other stages may have a rest: groups have the same numbers on all of them.
    borrowed = [_names(e) for e in store.entries if e.spec.borrowed]
    others = [*borrowed, *store.parameters_elsewhere]
    if selected is not None:
        left = [e for e in left if selected.has(_names(e))]
        others = [names for names in others if selected.has(names)]
    found: list[tuple[dict[str, Any], list[Entry]]] = []
    every: list[_Selection] = []
    for group in _written(groups):
        mine = _Selection(store, group["params"])
        _refuse_twice(mine, every)
        every.append(mine)
        matched = [e for e in left if mine.has(_names(e))]
        left = [e for e in left if e not in matched]
        found.append(({k: v for k, v in group.items() if k != "params"}, matched))
    rest = rest and not any(selection.by_tensor for selection in every)
    unmatched = bool(left) or any(not any(s.has(names) for s in every) for names in others)
    if not found or (rest and unmatched):
        found.append(({}, left))
    taken = others if rest or not every else [n for n in others if any(s.has(n) for s in every)]
    here = (entry.spec.name for _, entries in found for entry in entries)
    return Groups(
        options=tuple(options for options, _ in found),
        entries=tuple(tuple(entries) for _, entries in found),
        names=frozenset((*here, *(names[0] for names in taken))),
    )


def _written(groups: Iterable[Mapping[str, Any] | Tensor]) -> list[Mapping[str, Any]]:
    """Groups as dicts; a plain list of tensors is one group."""
    given = list(groups)
    if given and all(isinstance(item, Tensor) for item in given):
        return [{"params": given}]
    made: list[Mapping[str, Any]] = []
    for item in given:
        if not isinstance(item, Mapping) or "params" not in item:
            raise OptimizerError(
                f"a group is a dict with 'params', not {type(item).__name__}",
                hint='groups=[{"params": "*.bias", "weight_decay": 0.0}]',
            )
        made.append(item)
    return made


def _refuse_twice(mine: _Selection, before: Sequence[_Selection]) -> None:
    """A tensor in two groups is a mistake; of globs the first one counts."""
    for twice in sorted(mine.names & {name for other in before for name in other.names}):
        raise OptimizerError("the parameter is in two groups", where=twice)


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def claim_names(store: ParameterStore, owner: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Note that an optimizer updates these parameters; one that did so before may not go on."""
    for name in names:
        store.optimizers[name] = weakref.ref(owner)


def require_claimed(
    store: ParameterStore, owner: torch.optim.Optimizer, names: Iterable[str]
) -> None:
    """Raise, on all ranks, if another optimizer has taken one of these parameters over."""
    for name in names:
        held = store.optimizers.get(name)
        other = None if held is None else held()
        if other is not None and other is not owner:
            raise OptimizerError(
                f"two optimizers update this parameter: {type(owner).__name__} was made first, "
                "and another one after it",
                where=name,
                hint='give each its own: sw.optimizer(pm, cls, params="G.*", …)',
            )
