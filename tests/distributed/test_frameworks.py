"""Models of other frameworks on real ranks: gradients and trained weights equal one process."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from tests.support.pool import Pool
from tests.support.training import assert_close

pytestmark = pytest.mark.distributed


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss


def compare(model: nn.Module, batch: Any, ranks: int) -> None:
    """Train beside a copy on one process; the model gets the weights."""
    reference = copy.deepcopy(model)
    plan = sw.strategies.fsdp(sw.capture(model, batch), sw.Cluster.local(ranks))
    pm = sw.parallelize(model, batch, plan)
    optimizers = (
        sw.optimizer(pm, torch.optim.AdamW, lr=0.01),
        torch.optim.AdamW(reference.parameters(), lr=0.01),
    )
    for step in range(3):
        loss = reference(**batch)
        loss.backward()
        assert_close(pm.train_step(batch), loss.detach(), f"loss {step}")
        gradients = pm.gather_gradients()
        for name, parameter in reference.named_parameters():
            assert_close(gradients[name], parameter.grad, f"{name} in step {step}", 1e-3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pm.copy_to(model)
    for name, tensor in reference.state_dict().items():
        assert_close(model.state_dict()[name], tensor, name, 0.1)


def train_onnx(folder: Path, ranks: int) -> None:
    module = sw.from_onnx(folder / "net.onnx")
    x = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(12, 8)
    compare(WithLoss(module), {"x": x}, ranks)
    if torch.distributed.get_rank() == 0:
        module.save_onnx(folder / "trained.onnx")
        assert_close(sw.from_onnx(folder / "trained.onnx")(x), module(x).detach(), "file")


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_onnx_files_train_and_come_back(pool: Any, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).double()
    x = torch.zeros(12, 8, dtype=torch.float64)
    torch.onnx.export(net, (x,), str(tmp_path / "net.onnx"), input_names=["x"], verbose=False)
    pool(ranks).run(train_onnx, tmp_path, ranks)


def train_jax(ranks: int) -> None:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def loss_fn(params: Any, batch: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            state = jnp.tanh(state @ params["state"] + row @ params["row"])
            return state, None

        rows = batch["x"].swapaxes(0, 1)
        state, _ = jax.lax.scan(step, jnp.zeros((rows.shape[1], 6)), rows)
        return (jax.nn.relu(state @ params["head"]) ** 2).mean()

    random = np.random.RandomState(0)
    shapes = {"state": (6, 6), "row": (4, 6), "head": (6, 5)}
    params = {name: jnp.asarray(random.randn(*shape)) for name, shape in shapes.items()}
    x = random.randn(12, 3, 4)
    module = sw.from_jax(loss_fn, params, {"x": jnp.asarray(x)})
    batch = {"x": torch.from_numpy(x)}
    compare(module, batch, ranks)
    expected = float(loss_fn(module.pytree(), {"x": jnp.asarray(x)}))
    assert abs(module(**batch).item() - expected) < 1e-12


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_jax_functions_train_and_come_back(pool: Any, ranks: int) -> None:
    pytest.importorskip("jax")
    pool(ranks).run(train_jax, ranks)


def fit_keras(strategy: str) -> float:
    """Return the largest difference of weights between `fit` on all ranks and on one."""
    import keras

    from shardwise.integrations.keras import ShardwiseDistribution

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, y = np.random.RandomState(0).randn(44, 8), np.arange(44) % 3
    models = []
    for distribution in (ShardwiseDistribution(strategy), None):
        keras.distribution.set_distribution(distribution)
        keras.utils.set_random_seed(0)
        inner = [keras.layers.Dense(32, activation="relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.AdamW(0.01), loss=loss, metrics=["accuracy"])
        with KeepDouble():  # Keras's torch backend multiplies matrices of float64 in float32
            model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y))
        models.append(model.get_weights())
    return max(float(np.abs(a - b).max()) for a, b in zip(*models, strict=True))


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_fit_of_keras_on_four_ranks_is_fit_on_one(strategy: str) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    pytest.importorskip("keras", reason="Keras models need shardwise[keras]")
    pool = Pool(4)  # with the backend in its environment
    try:
        assert max(pool.run(fit_keras, strategy, timeout=120)) < 1e-12
    finally:
        pool.close()
