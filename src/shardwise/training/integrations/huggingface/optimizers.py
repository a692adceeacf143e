"""A torch optimizer of the whole model as one of this rank's part.

Enters: the optimizer that the trainer or the user made for the model's parameters. Leaves: a
`ShardedOptimizer` of the same class, groups and options.
"""

from __future__ import annotations

import glob
import inspect
from typing import Any

import torch
from torch import nn

from shardwise.errors import OptimizerError
from shardwise.frontend import skeleton
from shardwise.runtime import ParallelModule, ShardedOptimizer
from shardwise.runtime import optimizer as optimizer


def shard_optimizer(
    made: torch.optim.Optimizer, model: nn.Module, parallel: ParallelModule
) -> ShardedOptimizer:
    """The same optimizer on the pieces that this rank owns."""
    if made.state:
        raise OptimizerError(
            "the optimizer has state of earlier steps, which cannot be taken over",
            hint="give a new one, or resume from a checkpoint",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [_group(group, names) for group in made.param_groups]
    _require_all(model, [name for group in groups for name in group["params"]])
    for group in groups:
        group["params"] = [glob.escape(name) for name in group["params"]]
    kind = type(made)
    known = inspect.signature(kind.__init__).parameters
    options = {key: value for key, value in made.defaults.items() if key in known}
    return optimizer(parallel, kind, groups, rest=False, **options)


def stand_in(model: nn.Module) -> nn.Module:
    """A model on meta with one number for every parameter, of which an optimizer can be made."""
    twin = skeleton(model)
    made: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        for name, old in module._parameters.items():
            if old is not None:
                like = nn.Parameter(torch.zeros(1), requires_grad=old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), like)
    return twin


def _group(group: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
    if unknown:
        raise OptimizerError(
            f"the optimizer has {len(unknown)} parameters that are not the model's, the first of "
            f"shape {unknown[0]}",
            hint="make it of model.parameters(), of the model that the trainer is given",
        )
    trained = [names[id(p)] for p in group["params"] if p.requires_grad]
    return {**group, "params": trained}


def _require_all(model: nn.Module, found: list[str]) -> None:
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = sorted({*trained} - {*found})
    if missing:
        raise OptimizerError(
            f"the optimizer lacks {len(missing)} of {len(trained)} parameters that are trained, "
            f"{missing[0]} for one",
            hint="requires_grad_(False) on what is not to be trained",
        )
