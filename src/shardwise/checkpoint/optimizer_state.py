"""The state of optimizers, by the names of parameters.

Tensors of a parameter's shape are cut as it is: section `optimizer.<key>`. Numbers, and the options
of parameter groups, are JSON. A plain `torch.optim.Optimizer` and a sharded one look the same here,
so that either continues from the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.files import dtype_named
from shardwise.checkpoint.shards import Held, PlainState, State
from shardwise.dtypes import dtype_name
from shardwise.errors import CheckpointError
from shardwise.runtime.optimizer import ShardedOptimizer

__all__ = [
    "OPTIMIZER",
    "Group",
    "OptimizerState",
    "decode",
    "encode",
    "groups_of",
    "load_optimizer",
    "save_optimizer",
]


# Plain values as JSON and back: numbers, texts, lists, tuples and tensors without dims.
#
# What JSON lacks is a mapping with one key that begins with `$`. Nothing else is ever made of a
# file's content.


def encode(value: Any, where: str, keep: Callable[[Tensor, str], None] | None = None) -> Any:
    """A value as JSON. Tensors with dims are given to `keep`, with the path that stands for them.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.95)}, "")
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.95]}}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        if not value.dim() and not value.is_complex():
            number = encode(value.item(), where)
            return {"$tensor": [dtype_name(value.dtype), number]}
        if keep is not None:
            keep(value, where)
            return {"$stored": where}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{where}.{i}" if where else str(i), keep) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: encode(v, f"{where}.{k}" if where else k, keep) for k, v in value.items()}
    raise CheckpointError(
        f"a value of type {type(value).__name__} cannot be saved as JSON or tensor",
        where=where or None,
    )


def decode(value: Any, where: str, stored: Callable[[str], Tensor] | None = None) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(v, where, stored) for v in value]
    if not isinstance(value, dict):
        return value
    special = next((k for k in value if k.startswith("$")), None)
    if special is None:
        return {k: decode(v, where, stored) for k, v in value.items()}
    content = value[special]
    try:
        if special == "$float":
            return float(content)
        if special == "$tuple":
            return tuple(decode(v, where, stored) for v in content)
        if special == "$tensor":
            kind, number = content
            return torch.tensor(decode(number, where), dtype=dtype_named(kind, where))
        if special == "$stored" and stored is not None and isinstance(content, str):
            return stored(content)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"a value {str(value)[:60]} is malformed", where=where) from error
    raise CheckpointError(f"a value {str(value)[:60]} is of no known kind", where=where)


OPTIMIZER = "optimizer"
_OF_PARAMETERS = ("params", "param_names")  # entries of a group that are no options


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: options and state, which are the optimizer's own, and its parameters."""

    options: dict[str, Any]
    state: MutableMapping[Any, Any]
    parameters: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What is saved of an optimizer on this rank: tensors by section, and JSON."""

    sections: Mapping[str, list[Held]]
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]


Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


def each_optimizer(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """The only one, or several that have disjoint parameters."""
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return [optimizer]


def groups_of(optimizer: Optimizers, state: Any) -> list[Group]:
    """The groups of one or several optimizers, with names."""
    return [group for each in each_optimizer(optimizer) for group in _groups_of(each, state)]


def _groups_of(optimizer: torch.optim.Optimizer, state: Any) -> list[Group]:
    kept = optimizer.state
    if isinstance(optimizer, ShardedOptimizer):
        entries = optimizer.grouped_entries
        return [
            Group(options, kept, tuple((e.spec.name, e.piece) for e in group))
            for options, group in zip(optimizer.param_groups, entries, strict=True)
        ]
    if not isinstance(state, PlainState):
        raise CheckpointError(
            f"{type(optimizer).__name__} is no optimizer of a parallel module",
            hint="sw.optimizer(pm, torch.optim.AdamW, lr=…)",
        )
    names = {id(tensor): name for name, tensor in state.named.items()}
    found = []
    for number, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that the module does not have"
                )
        found.append(Group(options, kept, tuple((names[id(p)], p) for p in options["params"])))
    return found


def save_optimizer(optimizer: Optimizers, state: State, rank: int) -> OptimizerState:
    """What this rank has of an optimizer's state."""
    sections: dict[str, list[Held]] = {}
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    for group in groups_of(optimizer, state):
        options = {k: v for k, v in group.options.items() if k not in _OF_PARAMETERS}
        mine = []
        for name, parameter in group.parameters:
            if not parameter.requires_grad and parameter not in group.state:
                continue  # frozen from the beginning
            first = state.cut(name, parameter).holders[0] == rank
            mine += [name] if first else []
            plain: dict[str, Any] = {}
            for key, value in sorted(group.state.get(parameter, {}).items()):
                keep = _keeper(name, parameter, state, sections)
                plain[key] = encode(value, str(key), keep)
            if plain and first:
                values[name] = plain
        groups.append({"options": encode(options, "param_groups"), "params": mine})
    return OptimizerState(sections=sections, groups=groups, values=values)


def _keeper(
    name: str, parameter: Tensor, state: State, sections: dict[str, list[Held]]
) -> Callable[[Tensor, str], None]:
    def keep(tensor: Tensor, path: str) -> None:
        alike = tensor.shape == parameter.shape
        held = state.cut(name, tensor) if alike else state.whole(name, tensor)
        sections.setdefault(f"{OPTIMIZER}.{path}", []).append(held)

    return keep


def load_optimizer(
    optimizer: Optimizers,
    state: State,
    saved: Mapping[str, Any],
    shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    aliases: Mapping[str, str],
    *,
    strict: bool,
) -> list[tuple[str, Held]]:
    """Give an optimizer its groups' options and numbers, and memory for its tensors.

    `shapes` are those of the saved tensors, by section and name. What is returned is yet to be
    filled: tensors by section.
    """
    groups, values = _checked(saved)
    group_of = {aliases.get(n, n): i for i, g in enumerate(groups) for n in g["params"]}
    wanted: list[tuple[str, Held]] = []
    for number, group in enumerate(groups_of(optimizer, state)):
        names = {
            aliases.get(name, name): name
            for name, parameter in group.parameters
            if parameter.requires_grad or aliases.get(name, name) in group_of
        }
        options = _options(number, names, groups, group_of, strict)
        group.options.update(options)
        for name, parameter in group.parameters:
            plain = values.get(aliases.get(name, name))
            if plain is None:
                group.state.pop(parameter, None)
                continue
            fill = _Filler(aliases.get(name, name), parameter, group.options, state, shapes, wanted)
            group.state[parameter] = {k: fill.value(k, v) for k, v in plain.items()}
    return wanted


def _checked(saved: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    groups, values = saved.get("groups"), saved.get("state")
    good = isinstance(groups, list) and isinstance(values, dict)
    for group in groups if isinstance(groups, list) else []:
        good = good and isinstance(group, dict) and isinstance(group.get("options"), dict)
        names = group.get("params") if isinstance(group, dict) else None
        good = good and isinstance(names, list) and all(isinstance(n, str) for n in names)
    good = good and all(isinstance(v, dict) for v in (values or {}).values())
    if not good or not isinstance(groups, list) or not isinstance(values, dict):
        raise CheckpointError("the optimizer's state in the checkpoint is malformed")
    return groups, values


def _options(
    number: int,
    names: Mapping[str, str],
    groups: list[dict[str, Any]],
    group_of: Mapping[str, int],
    strict: bool,
) -> dict[str, Any]:
    """The saved options of a group, which is known by its parameters."""
    missing = [name for name in names if name not in group_of]
    if missing and strict:
        raise CheckpointError(
            f"the checkpoint's optimizer did not train {missing[0]}"
            + (f" and {len(missing) - 1} others" if missing[1:] else ""),
            hint="load_checkpoint(…, strict=False) begins their state anew",
        )
    of = sorted({group_of[name] for name in names if name in group_of})
    if not of:
        of = [number] if not names and number < len(groups) else []
    decoded = [decode(groups[i]["options"], f"param_groups.{i}") for i in of]
    if any(options != decoded[0] for options in decoded[1:]):
        raise CheckpointError(
            f"group {number} of the optimizer has parameters that were in groups {of} of the "
            "checkpoint, with different options",
            hint="the same groups as when it was saved",
        )
    found = decoded[0] if decoded else {}
    return {key: value for key, value in found.items() if key not in _OF_PARAMETERS}


@dataclass(frozen=True, slots=True)
class _Filler:
    """Makes one parameter's state."""

    name: str
    parameter: Tensor
    options: Mapping[str, Any]
    state: State
    shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
    wanted: list[tuple[str, Held]]

    def value(self, key: str, saved: Any) -> Any:
        made = decode(saved, f"{OPTIMIZER}.{key} of {self.name}", self.stored)
        if not isinstance(made, Tensor) or made.dim():
            return made
        # As torch does: a step that lives on the device is for fused and capturable updates.
        on_device = self.options.get("capturable") or self.options.get("fused")
        if on_device or (key != "step" and not self.parameter.dim()):
            return made.to(self.parameter.device)
        return made

    def stored(self, path: str) -> Tensor:
        """Memory for a saved tensor, of a type that goes with the parameter's."""
        section = f"{OPTIMIZER}.{path}"
        found = self.shapes.get(section, {}).get(self.name)
        if found is None:
            raise CheckpointError(f"the checkpoint has no {section}.{self.name}")
        shape, dtype = found
        if dtype.is_floating_point and self.parameter.is_floating_point():
            dtype = self.parameter.dtype
        like = self.state.cut(self.name, self.parameter)
        alike = shape == like.shape
        made = torch.empty(
            self.parameter.shape if alike else shape, dtype=dtype, device=self.parameter.device
        )
        held = self.state.cut(self.name, made) if alike else self.state.whole(self.name, made)
        self.wanted.append((section, held))
        return made
