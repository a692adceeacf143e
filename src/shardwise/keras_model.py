"""Present a Keras 3 model on its torch backend as a plain `nn.Module`.

A Keras model is an `nn.Module`, but one that cannot be copied, whose parameters have the names of
files, and that counts running statistics as parameters. The module here has the same tensors under
names of torch, with trainable variables as parameters and others as buffers, and calls the Keras
model without side effects, through `stateless_call`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import CaptureError
from shardwise.tensor_tree import add_folder, add_tensor, tensor_named

LossFn = Callable[[Any, Any], Any]
_ADAPTER = "_shardwise_module"
_CALLING = threading.RLock()  # a call replaces attributes of the model's layers for a while


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

    __slots__ = ("constants", "losses", "model")

    def __init__(self, model: Any) -> None:
        self.model = model
        self.losses: list[Any] | None = []  # of the last call; None once a step has read them
        self.constants: list[tuple[Any, str, str, torch.Tensor]] = []

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


class _Numbers(TorchFunctionMode):
    """While active, Python numbers that become tensors are operators, not rounded constants.

    `sw.verify` compares in float64, where Keras would round a regularizer's 0.01 differently.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.as_tensor and isinstance(args[0], float):
            return torch.full((), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Layer(nn.Module):
    """The place of a Keras layer: its tensors, and the module path of its operators."""

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)


class KerasModule(nn.Module):
    """The tensors of a Keras model in a tree of modules, and its call.

    A variable `sequential/up/kernel` of the model `sequential` is the parameter `up.kernel`.
    """

    is_graph_storable = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._keras = KerasSettings(model)
        self._paths: dict[int, str] = {}  # of variables and layers
        for layer in model._flatten_layers(include_self=False):
            self._paths[id(layer)] = add_folder(self, _path(layer, model.name), _Layer)
        for variable in _variables(model):
            # A buffer shares its memory with the variable, which is a parameter in Keras.
            value = variable.value if variable.trainable else variable.value.detach()
            self._paths[id(variable)] = add_tensor(
                self, _path(variable, model.name), value, is_parameter=variable.trainable
            )
        # Tensors of layers besides variables, such as those of Normalization.
        for layer in model._flatten_layers(include_self=False):
            for attribute, value in vars(layer).items():
                if isinstance(value, torch.Tensor):
                    path = (*self._paths[id(layer)].split("."), attribute)
                    name = add_tensor(self, path, value.detach(), is_parameter=False)
                    self._keras.constants.append((layer, attribute, name, value))

    @property
    def losses(self) -> Sequence[torch.Tensor]:
        """The losses that layers added in the last call; a step function adds them to its own."""
        losses, self._keras.losses = self._keras.losses, None
        return losses or ()

    def presents(self, model: Any) -> bool:
        """Return whether this module still has the tensors of the model."""
        variables, layers = _variables(model), model._flatten_layers(include_self=False)
        known = {id(item) for item in (*variables, *layers)}
        if self._keras.model is not model or known != self._paths.keys():
            return False
        if any(
            vars(layer).get(name) is not value for layer, name, _, value in self._keras.constants
        ):
            return False
        return all(
            self._tensor(variable).data_ptr() == variable.value.data_ptr()
            and isinstance(self._tensor(variable), nn.Parameter) == variable.trainable
            for variable in variables
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model = self._keras.model
        inputs, _, _ = _split(model, args, kwargs)
        trained, state = self._tensors()
        with _CALLING, self._inside_modules(), _unseeded(model), _Numbers():
            output, updates, losses = model.stateless_call(
                trained, state, inputs, return_losses=True, training=self.training
            )
        self._keras.losses = losses
        for variable, old, new in zip(model.non_trainable_variables, state, updates, strict=True):
            if new is not old and id(variable) in self._paths:
                folder, _, name = self._paths[id(variable)].rpartition(".")
                self.get_submodule(folder)._buffers[name] = new.to(old.dtype)
        return output

    def loss_fn(self, own: LossFn | None) -> LossFn | None:
        """Return a loss function with the losses of layers: the user's own, or the compiled one."""
        if own is None:
            return self._compiled_loss if getattr(self._keras.model, "compiled", False) else None

        def loss_fn(output: Any, batch: Any) -> Any:
            loss, losses = own(output, batch), self.losses
            return sum((term.sum() for term in losses), loss) if losses else loss

        return loss_fn

    def _compiled_loss(self, output: Any, batch: Any) -> Any:
        model, losses = self._keras.model, self.losses
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        args = args if isinstance(args, tuple | list) else (args,)
        inputs, labels, weights = _split(model, args, kwargs)
        if labels is None and not losses:
            return output
        metrics = [torch.zeros(v.shape, dtype=v.value.dtype) for v in model.metrics_variables]
        model._losses_override = list(losses)  # as Keras's own trainer of the JAX backend does
        try:
            with _Numbers():
                loss, _ = model.stateless_compute_loss(
                    *self._tensors(), metrics, training=self.training,
                    x=inputs, y=labels, y_pred=output, sample_weight=weights,
                )  # fmt: skip
        finally:
            model._losses_override = []
        return loss

    def require_read_losses(self) -> None:
        """Raise if a step function has not read the losses that layers added."""
        if losses := self._keras.losses:
            raise CaptureError(
                f"the Keras model {self._keras.model.name} adds {len(losses)} losses of its own "
                "(add_loss, regularizers), which the step does not contain",
                hint="add sum(modules.NAME.losses) to the loss of the step",
            )

    def _tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = self._keras.model
        trained = [self._tensor(v) for v in model.trainable_variables]
        return trained, [self._tensor(v) for v in model.non_trainable_variables]

    @contextlib.contextmanager
    def _inside_modules(self) -> Iterator[None]:
        """Run the call of every layer inside the module of its path, which its nodes then have."""
        layers = self._keras.model._flatten_layers(include_self=False)
        for layer in layers:
            place = self.get_submodule(self._paths[id(layer)])
            vars(layer)["call"] = functools.partial(place, layer.call)
        for layer, attribute, buffer, _ in self._keras.constants:
            vars(layer)[attribute] = self.get_buffer(buffer)
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["call"]
            for layer, attribute, _, value in self._keras.constants:
                vars(layer)[attribute] = value

    def _tensor(self, variable: Any) -> torch.Tensor:
        name = self._paths.get(id(variable))
        seed: torch.Tensor = variable.value
        return seed if name is None else tensor_named(self, name)


def _variables(model: Any) -> list[Any]:
    """Return the variables except seeds: layers without one draw from torch's generator."""
    return [v for v in model.variables if not v.path.endswith("seed_generator_state")]


def _path(item: Any, model_name: str) -> tuple[str, ...]:
    """Return the path of a variable or layer without the model's name."""
    parts = (item.path or item.name).split("/")
    if len(parts) > 1 and parts[0] == model_name:
        parts = parts[1:]
    parts = [part.replace(".", "_") for part in parts]
    return tuple(f"{part}_" if hasattr(nn.Module, part) else part for part in parts)


@contextlib.contextmanager
def _unseeded(model: Any) -> Iterator[None]:
    """Draw random numbers from torch's generator; refuse layers that have a seed of their own."""
    random: Any = sys.modules["keras.src.backend.torch.random"]
    config = sys.modules["keras"].config
    filtering = config.is_traceback_filtering_enabled()  # errors would become others of Keras
    config.disable_traceback_filtering()
    original = random.torch_seed_generator

    def generator(seed: Any) -> None:
        if seed is None or getattr(seed, "_initial_seed", 0) is None:
            return
        layers = [v for v in model._flatten_layers() if getattr(v, "seed_generator", 0) is seed]
        raise CaptureError(
            f"{layers[0].name if layers else model.name} has a seed of its own, whose random "
            "numbers depend on how often the layer was called",
            hint="leave seed= out of the layer: the plan's seed determines the numbers",
        )

    random.torch_seed_generator = generator
    try:
        yield
    finally:
        random.torch_seed_generator = original
        if filtering:
            config.enable_traceback_filtering()


def _split(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the inputs of a Keras model, the labels and the sample weights of a batch."""
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
        args = [*(kwargs[name] for name in names), kwargs.get("y"), kwargs.get("sample_weight")]
    count = 1 if isinstance(args[0], tuple | list | dict) else len(names)
    labels, weights = (*args[count:], None, None)[:2]
    return (args[0] if count == 1 else list(args[:count])), labels, weights
