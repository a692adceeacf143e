"""Keras's own training loop over many ranks, and `.keras` files of other backends.

While a `ShardwiseDistribution` is Keras's distribution, `model.fit` trains with a plan: batches,
callbacks, metrics and the optimizer's formulas stay those of Keras.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.api.parallelize import parallelize
from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.integrations.plan_request import PlanLike, PlanRequest
from shardwise.runtime import optimizer
from shardwise.runtime.devices import backend_of
from shardwise.runtime.rendezvous import init_process_group

os.environ.setdefault("KERAS_BACKEND", "torch")
try:
    import keras
    from keras.src.distribution.distribution_lib import Distribution
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ConfigError(
        f"Keras models need the package keras: {error}", hint="pip install 'shardwise[keras]'"
    ) from error
if keras.backend.backend() != "torch":
    raise ConfigError(
        f"Keras runs on the {keras.backend.backend()} backend, Shardwise trains on torch",
        hint="model.save('model.keras'), then from_keras('model.keras') in a process with "
        "KERAS_BACKEND=torch",
    )

# Their updates of an element read that element alone.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Lion")


def from_keras(path: str | Path, **options: Any) -> Any:
    """Load a `.keras` file, whatever backend has written it, as a model on the torch backend.

    `options` are those of `keras.saving.load_model`. `model.save(path)` writes the file back, which
    Keras then reads on every backend.

    >>> model = from_keras("model.keras")  # doctest: +SKIP
    """
    try:
        return keras.saving.load_model(path, **options)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras cannot load {path}: {str(error).splitlines()[0]}",
            hint="a file of model.save('model.keras'); custom_objects={name: class} for own layers",
        ) from error


class ShardwiseDistribution(Distribution):  # type: ignore[misc]
    """Train Keras models over all ranks: `keras.distribution.set_distribution(…)`, or `scope()`.

    The arguments are those of `sw.Trainer`: a plan, "auto" or the name of a strategy.
    """

    def __init__(
        self,
        plan: PlanLike = "ddp",
        *,
        cluster: Cluster | str | Path | None = None,
        precision: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(device_mesh=None)
        self.request = PlanRequest(plan=plan, cluster=cluster, precision=precision, seed=seed)

    def get_tensor_layout(self, path: str) -> None:
        """Leave layouts to the plan."""


class KerasOptimizer(torch.optim.Optimizer):
    """The update formulas of a Keras optimizer, on the shards of this rank."""

    def __init__(self, params: Any, source: Any) -> None:
        super().__init__(params, {})
        self.source, self.inner = source, type(source).from_config(source.get_config())
        self.pieces = [piece for group in self.param_groups for piece in group["params"]]
        self.variables = [keras.Variable(piece.detach(), trainable=True) for piece in self.pieces]
        for variable, piece in zip(self.variables, self.pieces, strict=True):
            variable._value = piece
        self.inner.build(self.variables)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the shards with the learning rate that the source has now."""
        if not callable(self.source._learning_rate):
            self.inner.learning_rate = self.source.learning_rate
        pairs = [
            (piece.grad, variable)
            for piece, variable in zip(self.pieces, self.variables, strict=True)
            if piece.grad is not None
        ]
        with torch.no_grad():
            self.inner.apply([g for g, _ in pairs], [v for _, v in pairs])
        self.source.iterations.assign(self.inner.iterations)


class _Training(keras.callbacks.Callback):  # type: ignore[misc]
    """The steps of `model.fit`; as a callback, it copies trained weights to the model."""

    def __init__(self, model: Any, distribution: ShardwiseDistribution) -> None:
        super().__init__()
        _check(model)
        self.trained, self.distribution = model, distribution
        self.pm: Any = None
        self.every_batch = False

    def start(self, callbacks: Iterable[Any]) -> None:
        """Prepare a call of `fit`: some callbacks look at the weights after every batch."""
        unused = keras.callbacks.Callback.on_train_batch_end
        self.every_batch = any(
            getattr(callback.on_train_batch_end, "__func__", None) is not unused
            and getattr(callback, "save_freq", 1) != "epoch"
            for callback in callbacks
        )

    def __call__(self, data: Any) -> Any:
        model, batch = self.trained, tuple(part for part in data[0] if part is not None)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data[0])
        if self.pm is None:
            first = torch.utils._pytree.tree_leaves(batch)[0]
            if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
                local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
                backend = backend_of(first.device.type, local)
                init_process_group(backend, timedelta(minutes=10))
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            plan = self.distribution.request.make(model, batch, ranks, first.device)
            self.pm = parallelize(model, batch, plan)
            elementwise = type(model.optimizer).__name__ in _ELEMENTWISE
            norms = (model.optimizer.clipnorm, model.optimizer.global_clipnorm)
            self.update = optimizer(
                self.pm, KerasOptimizer, source=model.optimizer,
                elementwise=elementwise and norms == (None, None),
            )  # fmt: skip
        loss, output = self.pm.train_step(batch, outputs=True)
        self.update.step()
        self.update.zero_grad()
        rows = torch.utils._pytree.tree_leaves(x)[0].shape[0]
        model._loss_tracker.update_state(loss, sample_weight=rows)
        return model.compute_metrics(x, y, output, sample_weight=weights)

    def copy_back(self, *args: Any) -> None:
        """Write the trained weights into the model."""
        if self.pm is not None:
            self.pm.copy_to(self.trained)

    on_test_begin = on_epoch_end = on_train_end = copy_back

    def on_train_batch_end(self, batch: Any, logs: Any = None) -> None:
        """Copy the weights if another callback looks at them now."""
        if self.every_batch:
            self.copy_back()


def _check(model: Any) -> None:
    """Raise for what `fit` would do differently on several ranks."""
    rule = getattr(model, "optimizer", None)
    problems = {
        "a train_step of its own": type(model).train_step is not keras.Model.train_step,
        "constraints of weights": any(v.constraint is not None for v in model.trainable_variables),
        "an optimizer with use_ema": getattr(rule, "use_ema", False),
        "an optimizer that scales the loss": getattr(rule, "loss_scale_factor", None) is not None
        or hasattr(rule, "inner_optimizer"),
        "an optimizer with exclude_from_weight_decay": hasattr(rule, "_exclude_from_weight_decay"),
    }
    for problem, exists in problems.items():
        if exists:
            raise ConfigError(
                f"the Keras model {model.name} has {problem}, which fit cannot distribute",
                hint="sw.parallelize(model, batch, plan, loss_fn=…) with a loop of your own",
            )


_fit = keras.Model.fit


def _distributed_fit(self: Any, *args: Any, callbacks: Any = None, **options: Any) -> Any:
    """Run Keras's `fit`, with steps of the distribution if there is one."""
    current, training = keras.distribution.distribution(), self.train_function
    if isinstance(current, ShardwiseDistribution):
        if not isinstance(training, _Training) or training.distribution is not current:
            self.train_function = training = _Training(self, current)
        given = getattr(callbacks, "callbacks", callbacks) or []
        given = given if isinstance(given, list | tuple) else [given]
        training.start(given)
        callbacks = [training, *given]
    elif isinstance(training, _Training):
        self.train_function = None
    return _fit(self, *args, callbacks=callbacks, **options)


keras.Model.fit = _distributed_fit
