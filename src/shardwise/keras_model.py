"""Present a Keras 3 model on its torch backend as a plain `nn.Module`.

A Keras model is an `nn.Module`, but one that cannot be copied, whose parameters have the names of
files, and that counts running statistics as parameters. The module here has the same tensors under
names of torch, with trainable variables as parameters and others as buffers, and calls the Keras
model without side effects, through `stateless_call`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import CaptureError

_ADAPTER = "_shardwise_module"


def without_keras(model: nn.Module) -> nn.Module:
    """Return a Keras model as a plain module, the same one in every call; others unchanged."""
    keras: Any = sys.modules.get("keras")
    if keras is None or not isinstance(model, getattr(keras, "Layer", ())):
        return model
    if not model.built:
        raise CaptureError(
            f"the Keras model {model.name} has no weights yet",
            hint="start with keras.Input(shape), or call the model on a batch once",
        )
    adapter = vars(model).get(_ADAPTER)
    if not isinstance(adapter, KerasModule) or not adapter.presents(model):
        adapter = KerasModule(model)
        vars(model)[_ADAPTER] = adapter  # not a submodule: Keras tracks those
    if adapter.training != model.training:
        adapter.train(model.training)
    return adapter


class KerasSettings(Mapping[str, str]):
    """A Keras model as the settings of its layers, which steps compare with those of the capture.

    Copies of the module share the Keras model: they only call it statelessly.
    """

    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getitem__(self, name: str) -> str:
        if name != "layers":
            raise KeyError(name)
        return "\n".join(map(_describe, self.model._flatten_layers()))

    def __iter__(self) -> Iterator[str]:
        return iter(["layers"])

    def __len__(self) -> int:
        return 1

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasSettings:
        return self


def _describe(layer: Any) -> str:
    """Return the public attributes of a layer that its call may depend on."""
    kinds = (bool, int, float, str, tuple, type(None), types.FunctionType)
    settings = {k: v for k, v in vars(layer).items() if k[0] != "_" and isinstance(v, kinds)}
    return f"{layer.path} {settings}"


class KerasModule(nn.Module):
    """The tensors of a Keras model in a tree of modules, and its call.

    A variable `sequential/up/kernel` of the model `sequential` is the parameter `up.kernel`.
    """

    is_graph_storable = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._keras = KerasSettings(model)
        self._paths = {id(v): _path(v, model.name) for v in _variables(model)}
        for variable in _variables(model):
            self._register(variable)

    def presents(self, model: Any) -> bool:
        """Return whether this module still has the tensors of the model."""
        if self._keras.model is not model or len(self._paths) != len(_variables(model)):
            return False
        return all(
            id(variable) in self._paths
            and self._tensor(variable).data_ptr() == variable.value.data_ptr()
            and isinstance(self._tensor(variable), nn.Parameter) == variable.trainable
            for variable in _variables(model)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model = self._keras.model
        inputs = _inputs(model, args, kwargs)
        trained = [self._tensor(v) for v in model.trainable_variables]
        state = [self._tensor(v) for v in model.non_trainable_variables]
        output, updates, losses = model.stateless_call(
            trained, state, inputs, return_losses=True, training=self.training
        )
        if losses:
            raise CaptureError(
                f"the Keras model {model.name} adds {len(losses)} losses of its own (add_loss, "
                "regularizers), which its output does not contain",
                hint="remove them and add their terms in loss_fn",
            )
        for variable, old, new in zip(model.non_trainable_variables, state, updates, strict=True):
            if new is not old and id(variable) in self._paths:
                *folders, name = self._paths[id(variable)]
                self.get_submodule(".".join(folders))._buffers[name] = new.to(old.dtype)
        return output

    def _register(self, variable: Any) -> None:
        *folders, name = self._paths[id(variable)]
        owner: nn.Module = self
        for folder in folders:
            if folder not in owner._modules:
                owner.add_module(folder, nn.Module())
            owner = owner.get_submodule(folder)
        if variable.trainable:
            owner.register_parameter(name, variable.value)
        else:
            # The buffer shares its memory with the variable, which is a parameter in Keras.
            owner.register_buffer(name, variable.value.detach())

    def _tensor(self, variable: Any) -> torch.Tensor:
        path = self._paths.get(id(variable))
        if path is None:
            seed: torch.Tensor = variable.value
            return seed
        tensor: torch.Tensor = getattr(self.get_submodule(".".join(path[:-1])), path[-1])
        return tensor


def _variables(model: Any) -> list[Any]:
    """Return the variables except seeds: layers without one draw from torch's generator."""
    return [v for v in model.variables if not v.path.endswith("seed_generator_state")]


def _path(variable: Any, model_name: str) -> tuple[str, ...]:
    parts = variable.path.split("/")
    if len(parts) > 1 and parts[0] == model_name:
        parts = parts[1:]
    return tuple(part.replace(".", "_") for part in parts)


def _inputs(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the inputs of a Keras model: the first of a sequence, or those of its names."""
    names = [tensor.name for tensor in getattr(model, "inputs", None) or ()] or ["x"]
    if kwargs:
        if len(names) == 1 and names[0] not in kwargs:
            names = ["x"]  # as in model.fit(x=…)
        for name in names:
            if name not in kwargs:
                raise CaptureError(
                    f"the batch has no {name!r}, an input of the Keras model {model.name}",
                    hint=f"the batch has {', '.join(kwargs)}; or pass a tuple (inputs, labels)",
                )
        args = tuple(kwargs[name] for name in names)
    return args[0] if len(names) == 1 else list(args[: len(names)])
