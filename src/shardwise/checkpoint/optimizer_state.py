"""Save and load the state of optimizers, by the names of parameters.

State tensors of a parameter's shape are sharded as the parameter: section `optimizer.<key>`.
Numbers, and the options of parameter groups, are JSON. A plain `torch.optim.Optimizer` and a
sharded one have the same form, so that either continues from the other.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import decode, encode
from shardwise.checkpoint.shards import PlainState, State, TensorShards
from shardwise.checkpoint.sync_state import fill_boxes
from shardwise.errors import CheckpointError
from shardwise.runtime.optimizer import ShardedOptimizer, is_by_row
from shardwise.schema import Reader

# ------------------------------------------------------------ groups of parameters
OPTIMIZER = "optimizer"
_NOT_OPTIONS = ("params", "param_names")  # entries of a group


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group: the optimizer's own options and state, and the named parameters."""

    options: dict[str, Any]
    state: MutableMapping[Any, Any]
    parameters: tuple[tuple[str, Tensor], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """The state of an optimizer on this rank: tensors by section, and JSON."""

    sections: Mapping[str, list[TensorShards]]
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]


Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


def each_optimizer(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return one optimizer, or several that have disjoint parameters, as a list."""
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return [optimizer]


def groups_of(optimizer: Optimizers, state: Any) -> list[Group]:
    """Return the groups of one or several optimizers, with the names of parameters."""
    return [g for single in each_optimizer(optimizer) for g in _groups_of(single, state)]


def _groups_of(optimizer: torch.optim.Optimizer, state: Any) -> list[Group]:
    if isinstance(optimizer, ShardedOptimizer):
        entries = optimizer.grouped_entries
        return [
            Group(options, optimizer.state, tuple((e.spec.name, e.piece) for e in group))
            for options, group in zip(optimizer.param_groups, entries, strict=True)
        ]
    if not isinstance(state, PlainState):
        raise CheckpointError(
            f"{type(optimizer).__name__} is not an optimizer of a parallel module",
            hint="sw.optimizer(pm, torch.optim.AdamW, lr=…)",
        )
    names = {id(tensor): name for name, tensor in state.named.items()}
    groups = []
    for number, options in enumerate(optimizer.param_groups):
        for parameter in options["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that the module does not have"
                )
        parameters = tuple((names[id(p)], p) for p in options["params"])
        groups.append(Group(options, optimizer.state, parameters))
    return groups


# ------------------------------------------------------------ saving
def save_optimizer(optimizer: Optimizers, state: State, rank: int | None) -> OptimizerState:
    """Return the part of an optimizer's state that a rank writes, or all that this one has."""
    sections: dict[str, list[TensorShards]] = {}
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    for group in groups_of(optimizer, state):
        options = {k: v for k, v in group.options.items() if k not in _NOT_OPTIONS}
        names = []
        for name, parameter in group.parameters:
            if not parameter.requires_grad and parameter not in group.state:
                continue  # it was never trained

            def store(tensor: Tensor, path: str, name: str = name, p: Tensor = parameter) -> None:
                is_sharded = tensor.shape == p.shape or is_by_row(tensor, p.shape)
                shards = (state.sharded if is_sharded else state.replicated)(name, tensor)
                sections.setdefault(f"{OPTIMIZER}.{path}", []).append(shards)

            encoded = {
                key: encode(value, str(key), store)
                for key, value in sorted(group.state.get(parameter, {}).items())
            }
            if rank is None or state.is_first(name, parameter, rank):
                names.append(name)
                if encoded:
                    values[name] = encoded
        groups.append({"options": encode(options, "param_groups"), "params": names})
    return OptimizerState(sections=sections, groups=groups, values=values)


# ------------------------------------------------------------ loading
def load_optimizer(
    optimizer: Optimizers,
    state: State,
    saved: Mapping[str, Any],
    shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    aliases: Mapping[str, str],
    *,
    strict: bool,
) -> list[tuple[str, TensorShards]]:
    """Set the options and numbers of an optimizer, and allocate its tensors.

    `shapes` are those of the saved tensors, by section and name. Return the tensors to be filled,
    with their sections.
    """
    groups, values = _validated(saved)
    group_of = {aliases.get(n, n): i for i, g in enumerate(groups) for n in g["params"]}
    targets: list[tuple[str, TensorShards]] = []
    for number, group in enumerate(groups_of(optimizer, state)):
        names = {
            aliases.get(name, name): name
            for name, parameter in group.parameters
            if parameter.requires_grad or aliases.get(name, name) in group_of
        }
        options = _options(number, names, groups, group_of, strict)
        group.options.update(options)
        for name, parameter in group.parameters:
            saved_name = aliases.get(name, name)
            encoded = values.get(saved_name)
            if encoded is None:
                group.state.pop(parameter, None)
                continue
            loader = _Loader(saved_name, parameter, group.options, state, shapes, targets)
            group.state[parameter] = {k: loader.value(k, v) for k, v in encoded.items()}
    return targets


def _validated(saved: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    groups, values = saved.get("groups"), saved.get("state")
    reader = Reader(CheckpointError, "the optimizer state in the checkpoint")
    reader.read(Mapping[str, Mapping[str, Any]], values, ("state",))
    for number, group in enumerate(reader.read(tuple[Mapping[str, Any], ...], groups, ("groups",))):
        reader.read(Mapping[str, Any], group.get("options"), ("groups", number, "options"))
        reader.read(tuple[str, ...], group.get("params"), ("groups", number, "params"))
    return groups, values  # type: ignore[return-value]


def _options(
    number: int,
    names: Mapping[str, str],
    groups: list[dict[str, Any]],
    group_of: Mapping[str, int],
    strict: bool,
) -> dict[str, Any]:
    """Return the saved options of a group, which is identified by its parameters."""
    missing = [name for name in names if name not in group_of]
    if missing and strict:
        raise CheckpointError(
            f"the checkpoint's optimizer did not train {missing[0]}"
            + (f" and {len(missing) - 1} others" if missing[1:] else ""),
            hint="load_checkpoint(…, strict=False) starts with a new state for them",
        )
    numbers = sorted({group_of[name] for name in names if name in group_of})
    if not numbers:
        numbers = [number] if not names and number < len(groups) else []
    decoded = [decode(groups[i]["options"], f"param_groups.{i}") for i in numbers]
    if any(options != decoded[0] for options in decoded[1:]):
        raise CheckpointError(
            f"group {number} of the optimizer has parameters that were in groups {numbers} of the "
            "checkpoint, with different options",
            hint="the same groups as when it was saved",
        )
    options = decoded[0] if decoded else {}
    return {key: value for key, value in options.items() if key not in _NOT_OPTIONS}


@dataclass(frozen=True, slots=True)
class _Loader:
    """Restores the state of one parameter."""

    name: str
    parameter: Tensor
    options: Mapping[str, Any]
    state: State
    shapes: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
    targets: list[tuple[str, TensorShards]]

    def value(self, key: str, saved: Any) -> Any:
        """Return a saved value, with memory for tensors that are filled later."""
        value = decode(saved, f"{OPTIMIZER}.{key} of {self.name}", self.allocate)
        if not isinstance(value, Tensor) or value.dim():
            return value
        # As in torch: fused and capturable updates need the step count on the device.
        on_device = self.options.get("capturable") or self.options.get("fused")
        if on_device or (key != "step" and not self.parameter.dim()):
            return value.to(self.parameter.device)
        return value

    def allocate(self, path: str) -> Tensor:
        """Return memory for a saved tensor, of a dtype that fits the parameter's."""
        section = f"{OPTIMIZER}.{path}"
        if self.name not in self.shapes.get(section, {}):
            raise CheckpointError(f"the checkpoint has no {section}.{self.name}")
        shape, dtype = self.shapes[section][self.name]
        if dtype.is_floating_point and self.parameter.is_floating_point():
            dtype = self.parameter.dtype
        memory = partial(torch.empty, dtype=dtype, device=self.parameter.device)
        own = self.parameter.shape  # (1, 1) is a factor of Adafactor's, not the only row of ranks
        for part in dict.fromkeys((own, own if shape == (1, 1) else own[:1])):
            tensor = memory(part)
            shards = self.state.sharded(self.name, tensor)
            if fill_boxes(shards, shape) is not None:
                break
        else:
            tensor = memory(shape)
            shards = self.state.replicated(self.name, tensor)
        self.targets.append((section, shards))
        return tensor
