"""Models of Keras on gloo processes against Keras itself, in float64.

    KERAS_BACKEND=torch python -m benchmarks.frameworks --ranks 4 --strategies fsdp,tensor -o FILE
    KERAS_BACKEND=torch python -m benchmarks.frameworks --only ResNet50,bert

The reference is the Keras model called directly, with a torch optimizer over the values of its
variables. A row has the largest relative error of the loss and the gradients of each step, of the
weights and running statistics after three steps, and of the output after the trained weights have
been copied back into the Keras model. Biases before a norm, and those of attention's keys, have no
gradient but rounding; Adam would scale that to full steps, so the optimizer is SGD with momentum,
and errors of tensors that are almost zero are relative to 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from tests.support.pool import Pool

ROWS, CLASSES, STEPS, LIMIT = 6, 5, 3, 1e-7
APPLICATIONS = {  # of keras.applications, with the smallest images they take
    "ResNet50": 32, "MobileNet": 32, "VGG16": 32, "EfficientNetB0": 32, "MobileNetV3Small": 32,
    "MobileNetV2": 32, "Xception": 71, "ResNet50V2": 32, "ConvNeXtTiny": 32, "DenseNet121": 32,
    "EfficientNetV2B0": 32, "InceptionV3": 75, "NASNetMobile": 32,
}  # fmt: skip


def application(name: str) -> tuple[Any, torch.Tensor]:
    """Return a model of keras.applications and images."""
    import keras

    size = APPLICATIONS[name]
    settings = {"weights": None, "classes": CLASSES, "input_shape": (size, size, 3)}
    model = getattr(keras.applications, name)(classifier_activation=None, **settings)
    return model, torch.randn(ROWS, size, size, 3, dtype=torch.float64)


def transformer(*, causal: bool) -> tuple[Any, torch.Tensor]:
    """Return an encoder or decoder whose padding is masked, and tokens."""
    import keras
    from keras import layers

    tokens = keras.Input((11,), dtype="int32")
    x = layers.Embedding(17, 16, mask_zero=True)(tokens)
    for _ in range(2):
        attention = layers.MultiHeadAttention(4, 4, dropout=0.0)
        x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=causal))
        x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, "gelu")(x)))
    output = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, output), torch.randint(0, 17, (ROWS, 11))


def grouped_attention() -> tuple[Any, torch.Tensor]:
    """Return a model with grouped queries and RMS norms."""
    import keras
    from keras import layers

    x = source = keras.Input((7, 12))
    x = x + layers.GroupQueryAttention(4, 4, 2)(layers.RMSNormalization()(x), x)
    output = layers.Dense(CLASSES)(layers.Flatten()(x))
    return keras.Model(source, output), torch.randn(ROWS, 7, 12, dtype=torch.float64)


def recurrent(kind: str) -> tuple[Any, torch.Tensor]:
    """Return a stack of two recurrent layers."""
    import keras
    from keras import layers

    first = getattr(layers, kind)(10, return_sequences=True)
    if kind == "LSTM":
        first = layers.Bidirectional(first)
    inner = [first, getattr(layers, kind)(6, dropout=0.0)]
    model = keras.Sequential([keras.Input((9, 4)), *inner, layers.Dense(CLASSES)])
    return model, torch.randn(ROWS, 9, 4, dtype=torch.float64)


CASES: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "encoder": lambda: transformer(causal=False),
    "decoder": lambda: transformer(causal=True),
    "grouped attention": grouped_attention,
    "LSTM": lambda: recurrent("LSTM"),
    "GRU": lambda: recurrent("GRU"),
    **{name: lambda name=name: application(name) for name in APPLICATIONS},  # type: ignore[misc]
}


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the norm."""
    difference = (value.detach().double() - expected.detach().double()).norm()
    return (difference / expected.detach().double().norm().clamp_min(1e-30)).item()


def without_dropout(model: Any) -> None:
    """Set the rates of dropout and stochastic depth to zero."""
    for layer in model._flatten_layers():
        for name in ("rate", "drop_path_rate"):
            if name in vars(layer):
                setattr(layer, name, 0.0)


def train(name: str, strategy: str, ranks: int) -> dict[str, float]:
    """Train the parallel model beside Keras's own, on every rank; return the largest errors."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    model, x = CASES[name]()
    reference, _ = CASES[name]()
    for each in (model, reference):
        without_dropout(each)
    reference.set_weights(model.get_weights())
    y = torch.arange(ROWS) % CLASSES
    with KeepDouble():  # Keras's torch backend casts float64 to float32 in some functions
        return compare(model, reference, (x, y), strategy, ranks)


def compare(model: Any, reference: Any, batch: Any, strategy: str, ranks: int) -> dict[str, float]:
    """Train three steps beside the reference; return the largest relative errors."""

    def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch[1])

    def plan(graph: sw.Graph) -> sw.Plan:
        return getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks))

    start = time.perf_counter()
    pm = sw.parallelize(model, batch, plan, loss_fn=loss_fn)
    parallelize_s = time.perf_counter() - start
    adapter = sw.keras_model.without_keras(model)
    names = {"/".join(v.path.split("/")): v for v in reference.variables}
    own = {v.path: adapter._paths.get(id(v)) for v in model.variables}
    variables = {
        ".".join(path): reference.variables[index]
        for index, path in enumerate(own.values())
        if path is not None
    }
    assert len(names) == len(own)
    weights = [v.value for v in reference.trainable_variables]
    optimizers = (sw.optimizer(pm, torch.optim.AdamW, lr=1e-3), torch.optim.AdamW(weights, lr=1e-3))
    errors = dict.fromkeys(("first gradients", "loss", "gradients", "weights", "buffers"), 0.0)
    for step in range(STEPS):
        loss = loss_fn(reference(batch[0], training=True), batch)
        loss.backward()
        errors["loss"] = max(errors["loss"], relative(pm.train_step(batch), loss))
        scale = torch.stack([w.grad.norm() for w in weights if w.grad is not None]).max()
        for key, gradient in pm.gather_gradients().items():
            expected = variables[key].value.grad
            difference = (gradient - expected).norm() / expected.norm().clamp_min(1e-8 * scale)
            errors["gradients"] = max(errors["gradients"], difference.item())
        if step == 0:
            errors["first gradients"] = errors["gradients"]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, value in pm.gather_state_dict().items():
        kind = "weights" if variables[key].trainable else "buffers"
        difference = (value - variables[key].value).detach().norm()
        size = variables[key].value.norm().clamp_min(1e-3 * value.numel() ** 0.5)
        errors[kind] = max(errors[kind], (difference / size).item())
    pm.copy_to(model)
    with torch.no_grad():
        output, expected = (m(batch[0], training=False) for m in (model, reference))
    return {**errors, "output": relative(output, expected), "parallelize_s": parallelize_s}


def main() -> None:
    """Compare all models and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strategies", default="fsdp")
    parser.add_argument("--only", default="")
    parser.add_argument("-o", "--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "torch")
    names = arguments.only.split(",") if arguments.only else list(CASES)
    rows = []
    for name in names:
        for strategy in arguments.strategies.split(","):
            pool = Pool(arguments.ranks)
            try:
                results = pool.run(train, name, strategy, arguments.ranks, timeout=1500)
                row = {key: max(r[key] for r in results) for key in results[0]}
                equal = all(value < LIMIT for key, value in row.items() if key != "parallelize_s")
            except Exception as error:
                row, equal = {"error": f"{type(error).__name__}: {error}".split("\n")[0]}, False
            finally:
                pool.close()
            rows.append({"model": name, "strategy": strategy, "equal": equal, **row})
            figures = "  ".join(
                f"{key} {value:.1e}" if isinstance(value, float) else str(value)
                for key, value in row.items()
            )
            print(
                f"{name:18} {strategy:8} {'equal' if equal else 'DIFFERENT':10} {figures}",
                flush=True,
            )
    print(f"{sum(row['equal'] for row in rows)} of {len(rows)} equal within {LIMIT}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"ranks": arguments.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
