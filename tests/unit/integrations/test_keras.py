"""Keras 3 models on the torch backend: captured, verified, trained and saved."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import CaptureError, ConfigError
from shardwise.ir.operators import is_random

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras models need shardwise[keras]")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)
layers = keras.layers

ROWS, CLASSES = 8, 3


def loss_fn(output, batch):
    return F.cross_entropy(output, batch["y"] if isinstance(batch, dict) else batch[1])


def labels():
    return torch.arange(ROWS) % CLASSES


def normalized(rate: float = 0.0):
    """Return a model with equal weights in every call."""
    keras.utils.set_random_seed(0)
    inner = [
        layers.Dense(16, activation="relu", name="up"),
        layers.BatchNormalization(name="norm"),
        layers.Dropout(rate, name="drop"),
    ]
    head = layers.Dense(CLASSES, name="down")
    return keras.Sequential([keras.Input((8,)), *inner, head], name="net")


def batch_of_rows():
    return torch.linspace(-1, 1, ROWS * 8).square().view(ROWS, 8).sin(), labels()


def convolutional():
    inner = [layers.Conv2D(4, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    head = [layers.Flatten(), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((6, 6, 3)), *inner, *head]), (
        torch.linspace(-1, 1, ROWS * 108).view(ROWS, 6, 6, 3).cos(),
        labels(),
    )


def attention():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(12, 8)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    model = keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    return model, (torch.arange(ROWS * 6).view(ROWS, 6) % 12, labels())


def two_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    joined = layers.concatenate([layers.Dense(8)(a), b])
    values = torch.linspace(-1, 1, ROWS * 4).view(ROWS, 4)
    batch = {"a": values, "b": values.flip(0), "y": labels()}
    return keras.Model([a, b], layers.Dense(CLASSES)(joined)), batch


def recurrent():
    model = keras.Sequential([keras.Input((5, 4)), layers.LSTM(8), layers.Dense(CLASSES)])
    return model, (torch.linspace(-1, 1, ROWS * 20).view(ROWS, 5, 4), labels())


def standardized():
    scaling = layers.Normalization()
    scaling.adapt(batch_of_rows()[0].numpy())
    return keras.Sequential([keras.Input((8,)), scaling, layers.Dense(CLASSES)]), batch_of_rows()


MODELS = {
    "standardized": standardized,
    "normalized": lambda: (normalized(0.1), batch_of_rows()),
    "convolutional": convolutional,
    "attention": attention,
    "two_inputs": two_inputs,
    "recurrent": recurrent,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_a_keras_model_is_verified(name):
    model, batch = MODELS[name]()
    graph = sw.capture(model, batch, loss_fn)
    plan = sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2)
    assert sw.verify(model, batch, plan, loss_fn).ok


def test_parameters_and_buffers_have_readable_names():
    graph = sw.capture(normalized(), batch_of_rows(), loss_fn)
    parameters = ["up.kernel", "up.bias", "norm.gamma", "norm.beta", "down.kernel", "down.bias"]
    assert [parameter.name for parameter in graph.parameters] == parameters
    assert [b.name for b in graph.buffers] == ["norm.moving_mean", "norm.moving_variance"]
    assert all(buffer.mutation for buffer in graph.buffers)


def dropouts(graph):
    return [node for node in graph.nodes if "dropout" in node.op]


def test_the_training_flag_decides_about_dropout_and_statistics():
    model, batch = normalized(0.5), batch_of_rows()
    assert len(dropouts(sw.capture(model, batch, loss_fn))) == 1
    graph = sw.capture(model, batch, loss_fn, training=False)
    assert not dropouts(graph)
    assert not any(buffer.mutation for buffer in graph.buffers)


def train(model, batch):
    pm = sw.parallelize(
        model, batch, lambda graph: sw.strategies.ddp(graph, sw.Cluster.local(1)), loss_fn=loss_fn
    )
    return pm, sw.optimizer(pm, torch.optim.SGD, lr=0.1)


def test_trained_weights_and_statistics_are_those_of_keras_and_are_saved(tmp_path):
    model, expected, batch = normalized(), normalized(), batch_of_rows()
    pm, optimizer = train(model, batch)
    reference = torch.optim.SGD([v.value for v in expected.trainable_variables], lr=0.1)
    for _ in range(3):
        loss = loss_fn(expected(batch[0], training=True), batch)
        reference.zero_grad()
        loss.backward()
        reference.step()
        torch.testing.assert_close(pm.train_step(batch).detach(), loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    pm.copy_to(model)
    for actual, variable in zip(model.variables, expected.variables, strict=True):
        torch.testing.assert_close(actual.value, variable.value)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    torch.testing.assert_close(loaded(batch[0]), expected(batch[0]))


def test_a_changed_setting_of_a_layer_is_captured_anew():
    model, batch = normalized(0.5), batch_of_rows()
    expected = normalized(0.5)  # the seed of dropout takes part in drawing the weights
    expected.get_layer("drop").rate = 0.0
    expected = loss_fn(expected(batch[0], training=True), batch)
    pm, _ = train(model, batch)
    pm.train_step(batch)
    model.get_layer("drop").rate = 0.0
    for _ in range(2):
        torch.testing.assert_close(pm.train_step(batch).detach(), expected.detach())


def test_a_frozen_layer_is_not_trained():
    model = normalized()
    model.get_layer("up").trainable = False
    graph = sw.capture(model, batch_of_rows(), loss_fn)
    assert not any(parameter.name.startswith("up.") for parameter in graph.parameters)


def test_nodes_have_the_paths_of_layers():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="gelu")], name="inner")
    inputs = keras.Input((8,))
    outputs = layers.Dense(CLASSES, name="head")(
        layers.Activation("tanh", name="act")(inner(inputs))
    )
    graph = sw.capture(keras.Model(inputs, outputs), batch_of_rows(), loss_fn)
    places = {node.op.split(".")[-2]: node.module for node in graph.nodes}
    assert places["gelu"].startswith("inner.")
    assert places["tanh"] == "act"
    assert "head" in {node.module for node in graph.nodes}


def test_a_layer_without_a_seed_draws_from_torch_and_one_with_a_seed_is_refused():
    noise = [layers.GaussianNoise(0.5), layers.SpatialDropout1D(0.5), layers.Flatten()]
    model = keras.Sequential([keras.Input((4, 2)), *noise, layers.Dense(3)])
    batch = (batch_of_rows()[0].view(ROWS, 4, 2), labels())
    graph = sw.capture(model, batch, loss_fn)
    assert len([node for node in graph.nodes if is_random(node)]) == 2
    seeded = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5, seed=3), layers.Dense(3)])
    with pytest.raises(CaptureError, match=r"dropout\S* has a seed of its own"):
        sw.capture(seeded, batch_of_rows(), loss_fn)


def test_a_model_without_weights_and_a_missing_input_are_refused():
    with pytest.raises(CaptureError, match="no weights yet"):
        sw.capture(keras.Sequential([layers.Dense(3)]), batch_of_rows(), loss_fn)
    model, batch = two_inputs()
    with pytest.raises(CaptureError, match="has no 'b'"):
        sw.capture(model, {"a": batch["a"], "y": batch["y"]}, loss_fn)


def regularized():
    """Return a model whose layers add three losses: of weights, of outputs, and by add_loss."""

    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(x)))
            return x

    keras.utils.set_random_seed(0)
    up = layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1", name="up")
    return keras.Sequential([keras.Input((8,)), up, Penalty(), layers.Dense(CLASSES)])


def test_losses_of_layers_are_added():
    model, batch = regularized(), batch_of_rows()
    output = model(batch[0], training=True)
    expected = loss_fn(output, batch) + sum(model.losses)
    pm, _ = train(model, batch)
    torch.testing.assert_close(pm.train_step(batch).detach(), expected.detach())
    plan = sw.strategies.tensor(sw.capture(model, batch, loss_fn), sw.Cluster.local(2))
    assert sw.verify(model, batch, plan, loss_fn).ok


def test_the_compiled_loss_is_that_of_keras():
    model, (x, y) = regularized(), batch_of_rows()
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    weights = torch.linspace(0.5, 2, ROWS)
    expected = model.compute_loss(x, y, model(x, training=True), weights)
    for batch in ((x, y, weights), {"x": x, "y": y, "sample_weight": weights}):
        plan = sw.strategies.fsdp(sw.capture(model, batch), sw.Cluster.local(2))
        certificate = sw.verify(model, batch, plan)
        assert certificate.ok, certificate
        pm = sw.parallelize(model, batch, lambda g: sw.strategies.ddp(g, sw.Cluster.local(1)))
        torch.testing.assert_close(pm.train_step(batch).detach(), expected.detach())
        del pm  # the next one trains the same parameters


def test_a_step_adds_the_losses_of_layers_itself():
    model, batch = regularized(), batch_of_rows()

    def step(modules, batch):
        return loss_fn(modules.net(batch[0]), batch)

    def complete(modules, batch):
        return step(modules, batch) + sum(modules.net.losses)

    with pytest.raises(CaptureError, match="3 losses"):
        sw.capture({"net": model}, batch, step=step)
    sw.capture({"net": model}, batch, step=complete)


def compiled(optimizer):
    model = normalized()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def fitted(model, **options):
    x = torch.linspace(-1, 1, 20 * 8).square().view(20, 8).sin().numpy()
    y = torch.arange(20).numpy() % CLASSES
    torch.manual_seed(0)
    data = {"validation_data": (x, y), "batch_size": 8, "epochs": 2, "verbose": 0}
    return model.fit(x, y, **data, **options).history


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
def test_fit_under_a_distribution_is_that_of_keras(optimizer):
    from shardwise.integrations.keras import ShardwiseDistribution

    make = getattr(keras.optimizers, optimizer)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    expected, model = compiled(make(schedule)), compiled(make(schedule))
    history = fitted(expected)
    with ShardwiseDistribution("ddp").scope():
        actual = fitted(model)
    for name, values in history.items():
        assert actual[name] == pytest.approx(values), name
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations) == 6
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b))
    assert fitted(model) != history  # without the distribution, Keras continues alone


def test_callbacks_of_fit_see_the_weights_of_their_batch():
    from shardwise.integrations.keras import ShardwiseDistribution

    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(model.get_weights()[0].sum()))
    )
    model = compiled(keras.optimizers.SGD(0.1))
    with ShardwiseDistribution().scope():
        fitted(model, callbacks=[look])
    assert len(set(seen)) == 6


def test_fit_refuses_what_it_cannot_distribute():
    from shardwise.integrations.keras import ShardwiseDistribution

    with ShardwiseDistribution().scope(), pytest.raises(ConfigError, match="use_ema"):
        fitted(compiled(keras.optimizers.SGD(0.1, use_ema=True)))
    constrained = layers.Dense(3, kernel_constraint="max_norm")
    model = keras.Sequential([keras.Input((8,)), constrained])
    model.compile(loss="mse")
    with ShardwiseDistribution().scope(), pytest.raises(ConfigError, match="constraints"):
        fitted(model)


def test_a_keras_file_is_loaded_and_other_files_are_not(tmp_path):
    from shardwise.integrations.keras import from_keras

    model, (x, _) = normalized(), batch_of_rows()
    model.save(tmp_path / "net.keras")
    torch.testing.assert_close(from_keras(tmp_path / "net.keras")(x), model(x))
    (tmp_path / "other.keras").write_text("nothing")
    with pytest.raises(ConfigError, match=r"cannot load .*other.keras"):
        from_keras(tmp_path / "other.keras")
