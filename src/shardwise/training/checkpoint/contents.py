"""All that one rank contributes to a checkpoint: tensors by section, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.errors import CheckpointError
from shardwise.runtime.module import ParallelModule
from shardwise.training.checkpoint.held import Held, State, state_of
from shardwise.training.checkpoint.manifest import MODEL
from shardwise.training.checkpoint.optimizers import OPTIMIZER, Optimizers, save_optimizer

__all__ = ["Contents", "check_label", "collect", "held_copies"]

_LABEL = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What this rank has of every section, and what it knows beside."""

    sections: Mapping[str, list[Held]]
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
    """What this rank has; no value is copied yet. Without `frozen`, only what is trained."""
    state = state_of(module)
    left_out = set() if frozen else _frozen(module)
    tensors = [held for held in state.tensors() if held.name not in left_out]
    sections: dict[str, list[Held]] = {MODEL: tensors}
    kept: dict[str, Any] | None = None
    if optimizer is not None:
        saved = save_optimizer(optimizer, state, rank)
        sections.update(saved.sections)
        kept = {"groups": saved.groups, "state": saved.values}
    sections.update(held_copies(state, copies, borrowed=False))
    if step is not None and (type(step) is not int or step < 0):
        raise CheckpointError(f"a step is a whole number, not {step!r}")
    return Contents(
        sections=sections,
        aliases={a: n for a, n in state.aliases.items() if n not in left_out},
        order=state.order,
        step=step,
        optimizer=kept,
        module=state.facts(),
        extra=_json(extra),
    )


def _frozen(module: nn.Module) -> set[str]:
    """Parameters that no optimizer updates."""
    if isinstance(module, ParallelModule):
        return {e.spec.name for e in module.store.entries if not e.spec.requires_grad}
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def held_copies(
    state: State, copies: Mapping[str, Mapping[str, Tensor]], *, borrowed: bool
) -> dict[str, list[Held]]:
    """Further sets of tensors, cut as the parameters are; what is borrowed is not written."""
    found = {}
    for label, tensors in copies.items():
        check_label(label)
        found[label] = [
            state.cut(name, tensor)
            for name, tensor in tensors.items()
            if borrowed or not state.borrows(name)
        ]
    return found


def check_label(label: str) -> None:
    """Refuse names of sets that would be mistaken for other sections, or make no file name."""
    if not _LABEL.fullmatch(label) or label in (MODEL, OPTIMIZER):
        raise CheckpointError(
            f"{label!r} cannot be the name of a set of copies",
            hint='letters, digits and "_", other than "model" and "optimizer": {"ema": …}',
        )


def _json(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what the user gave, as JSON has it."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"`extra` cannot be written as JSON: {error}",
            hint="numbers, texts, lists and mappings; tensors in `copies`",
        ) from error
    return found
