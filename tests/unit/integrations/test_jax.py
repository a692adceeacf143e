"""JAX loss functions as modules: losses and gradients are JAX's, under every plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.errors import CaptureError, ConfigError


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(
        0.3 * np.random.default_rng([seed, *shape]).standard_normal(shape), "float32"
    )


def to_torch(batch: Any) -> Any:
    return jax.tree_util.tree_map(
        lambda leaf: torch.from_numpy(np.array(leaf)) if hasattr(leaf, "shape") else leaf, batch
    )


def check_gradients(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
    """Compare loss and gradients with JAX's, and return the module."""
    module = sw.from_jax(loss_fn, params, batch)
    tensors = to_torch(batch)
    loss = module(**tensors) if isinstance(tensors, dict) else module(*tensors)
    expected, gradients = jax.value_and_grad(loss_fn)(params, batch)
    torch.testing.assert_close(float(loss), float(expected), rtol=1e-5, atol=1e-5)
    loss.backward()
    for name, gradient in zip(module._paths, jax.tree_util.tree_leaves(gradients), strict=True):
        actual = module.get_parameter(name).grad
        actual = np.zeros(gradient.shape) if actual is None else actual.numpy()
        np.testing.assert_allclose(actual, gradient, rtol=1e-4, atol=1e-5, err_msg=name)
    return module


def mlp(params: Any, batch: Any) -> Any:
    hidden = jax.nn.relu(batch["x"] @ params["up"]["w"] + params["up"]["b"])
    logs = jax.nn.log_softmax(hidden @ params["down"])
    return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()


MLP = {"up": {"w": normal(6, 16), "b": normal(16)}, "down": normal(16, 5)}
BATCH = {"x": normal(8, 6), "y": jnp.arange(8) % 5}


def gpt(params: Any, batch: Any) -> Any:
    """A transformer whose layers are a scan with recomputation."""
    ids = batch["ids"]
    x = params["tokens"][ids] + params["positions"][: ids.shape[1]]

    def block(x: Any, layer: Any) -> Any:
        spread = jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        h = (x - x.mean(-1, keepdims=True)) / spread * layer["norm"]
        rows, length, width = h.shape
        q, k, v = ((h @ w).reshape(rows, length, 2, -1).swapaxes(1, 2) for w in layer["qkv"])
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // 2)
        causal = jnp.tril(jnp.ones((length, length), bool))
        mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
        x = x + mixed.swapaxes(1, 2).reshape(rows, length, width) @ layer["out"]
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
    logits = x @ params["tokens"].T
    chosen = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


GPT = {
    "tokens": normal(11, 8),
    "positions": normal(9, 8),
    "layers": {
        "norm": normal(2, 8) + 1,
        "qkv": tuple(normal(2, 8, 8, seed=i) for i in range(3)),
        "out": normal(2, 8, 8, seed=4),
        "up": normal(2, 8, 16),
        "down": normal(2, 16, 8),
    },
}


def cnn(params: Any, batch: Any) -> Any:
    names = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        batch["x"], params["a"], (2, 2), "SAME", dimension_numbers=names
    )
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.lax.conv_transpose(x, params["b"], (2, 2), "SAME", dimension_numbers=names)
    x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME") / 4
    return jnp.square(x).mean()


def indexing(params: Any, batch: Any) -> Any:
    """Updates in place, dynamic slices, sorting and padding."""
    x = params["t"].at[batch["i"]].add(batch["x"]).at[0, 1].set(3.0).at[batch["i"], 1].multiply(2.0)
    y = jax.lax.dynamic_slice(x, (batch["s"], 0), (2, 3))
    z = jax.lax.dynamic_update_slice(x, 2 * y, (batch["s"] + 1, 0))
    keys, values = jax.lax.sort((z[:, 0], z[:, 1]), num_keys=1)
    top, _ = jax.lax.top_k(z[:, 2], 3)
    padded = jax.lax.pad(z, 1.0, ((1, 0, 1), (0, -1, 0)))
    return (keys * values).sum() + top.sum() + jnp.cumsum(z[:, 0]).sum() + jnp.square(padded).mean()


def random(params: Any, batch: Any) -> Any:
    """Random numbers from a key of the batch, and from a fixed one."""
    first, second = jax.random.split(jax.random.wrap_key_data(batch["key"]))
    h = batch["x"] @ params["w"]
    h = jnp.where(jax.random.bernoulli(first, 0.7, h.shape), h / 0.7, 0.0)
    h += 0.1 * jax.random.normal(jax.random.fold_in(second, 3), h.shape)
    return (h * jax.random.uniform(jax.random.key(1), h.shape)).sum()


@jax.custom_vjp
def straight_through(x: Any) -> Any:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return x * x


@clipped.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return clipped(primals[0]), jnp.clip(2 * primals[0], -0.1, 0.1) * tangents[0]


def custom(params: Any, batch: Any) -> Any:
    h = batch["x"] @ params["w"]
    return (straight_through(3 * h) * h + clipped(h)).mean()


def with_softplus(params: Any, batch: Any) -> Any:
    hidden = jax.vmap(lambda row: jax.nn.softplus(row @ params["up"]))(batch["x"])
    return jax.nn.softplus(hidden @ params["down"]).mean()


@jax.custom_vjp
def damped_softmax(x: Any) -> Any:
    return jax.nn.softmax(x)


def damped(y: Any, gradient: Any) -> Any:
    return (0.5 * y * (gradient - (gradient * y).sum(-1, keepdims=True)),)


damped_softmax.defvjp(lambda x: (jax.nn.softmax(x),) * 2, damped)


def by_rows(params: Any, batch: Any) -> Any:
    return (damped_softmax(batch["x"] @ params["w"]) ** 2).mean()


CASES: dict[str, tuple[Any, Any, Any]] = {
    "mlp": (mlp, MLP, BATCH),
    "gpt": (gpt, GPT, {"ids": (jnp.arange(28) % 11).reshape(4, 7)}),
    "cnn": (cnn, {"a": normal(3, 3, 3, 4), "b": normal(3, 3, 4, 2)}, {"x": normal(3, 9, 9, 3)}),
    "indexing": (
        indexing,
        {"t": normal(6, 3)},
        {"x": normal(4, 3), "i": jnp.array([0, 2, 2, 5]), "s": jnp.array(2)},
    ),
    "random": (
        random,
        {"w": normal(6, 4)},
        {"x": normal(8, 6), "key": np.array([3, 7], np.uint32)},
    ),
    "custom derivatives": (custom, {"w": normal(6, 4)}, {"x": normal(8, 6)}),
    "softplus": (with_softplus, {"up": normal(6, 16), "down": normal(16, 3)}, {"x": normal(7, 6)}),
    "custom derivative of rows": (by_rows, {"w": normal(6, 4)}, {"x": normal(7, 6)}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_jax(name: str) -> None:
    check_gradients(*CASES[name])


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mlp", "hybrid"),
        ("custom derivatives", "ddp"),
        ("softplus", "hybrid"),
        ("custom derivative of rows", "hybrid"),
        pytest.param("gpt", "tensor", marks=pytest.mark.slow),
        pytest.param("random", "ddp", marks=pytest.mark.slow),
    ],
)
def test_parallel_programs_equal_the_module(name: str, plan: str) -> None:
    loss_fn, params, batch = CASES[name]
    module, tensors = sw.from_jax(loss_fn, params, batch), to_torch(batch)
    graph = sw.capture(module, tensors)
    if plan == "hybrid":
        chosen = sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2)
    else:
        chosen = getattr(sw.strategies, plan)(graph, sw.Cluster.local(2))
    certificate = sw.verify(module, tensors, chosen)
    assert certificate.ok, certificate


def test_elementwise_functions_with_custom_derivatives_are_sharded() -> None:
    loss_fn, params, batch = CASES["softplus"]
    module, tensors = sw.from_jax(loss_fn, params, batch), to_torch(batch)
    graph = sw.capture(module, tensors)
    program = sw.compile(graph, sw.strategies.tensor(graph, sw.Cluster.local(2)))
    source = program.source(0)
    assert source.count("WithSlope.apply(") == 2
    assert source.count("rt.reduce(") == 1
    assert "rt.gather(" not in source


def test_other_batch_sizes_and_trained_weights() -> None:
    module = sw.from_jax(mlp, MLP, BATCH)
    small = {"x": normal(3, 6), "y": jnp.arange(3)}
    np.testing.assert_allclose(float(module(**to_torch(small))), mlp(MLP, small), rtol=1e-5)
    tensors = to_torch(BATCH)
    graph = sw.capture(module, tensors)
    pm = sw.parallelize(module, tensors, sw.strategies.ddp(graph, sw.Cluster.local(1)))
    optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.1)
    params: Any = MLP
    for _ in range(3):
        pm.train_step(tensors)
        optimizer.step()
        optimizer.zero_grad()
        gradients = jax.grad(mlp)(params, BATCH)
        params = jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, gradients)
    pm.copy_to(module)
    trained = module.pytree()
    assert jax.tree_util.tree_structure(trained) == jax.tree_util.tree_structure(MLP)
    for actual, expected in zip(*map(jax.tree_util.tree_leaves, (trained, params)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_parameters_may_have_names_of_methods() -> None:
    params = {"forward": {"train": jnp.ones(3)}, "forward_": jnp.ones(3)}
    x = jnp.arange(3.0)

    def loss(p: Any, batch: Any) -> Any:
        return (p["forward"]["train"] * p["forward_"] * batch["x"]).sum()

    module = sw.from_jax(loss, params, {"x": x})
    assert [name for name, _ in module.named_parameters()] == ["forward__", "forward_.train_"]
    assert float(module(x=torch.arange(3.0)).detach()) == 3.0


def test_positional_batches_and_loops_of_known_length() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x, times = batch
        x = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]
        x = jax.lax.cond(len(times) > 1, lambda v: v + 1, lambda v: v, x)
        return (x @ params).sum()

    check_gradients(loss, normal(4), (normal(5, 4), jnp.arange(2)))


def test_what_depends_on_values_is_refused_with_the_line() -> None:
    def branch(params: Any, batch: Any) -> Any:
        h = (batch["x"] * params["w"]).sum()
        return jax.lax.cond(h > 0, lambda v: v, lambda v: -v, h)

    module = sw.from_jax(branch, {"w": normal(4)}, {"x": normal(4)})
    with pytest.raises(CaptureError, match="depends on parameters") as caught:
        module(x=torch.ones(4))
    assert "test_jax.py" in str(caught.value.where)

    def triangular(params: Any, batch: Any) -> Any:
        return jnp.linalg.svd(batch["x"] * params["w"])[1].sum()

    module = sw.from_jax(triangular, {"w": normal(3, 3)}, {"x": normal(3, 3)})
    with pytest.raises(CaptureError, match="svd"):
        module(x=torch.ones(3, 3))


def test_functions_that_are_not_losses() -> None:
    with pytest.raises(CaptureError, match=r"float32\[8, 16\]"):
        sw.from_jax(lambda p, b: b["x"] @ p["up"]["w"], MLP, BATCH)
    with pytest.raises(CaptureError, match="ValueError"):
        sw.from_jax(lambda p, b: int("x"), MLP, BATCH)
    with pytest.raises(ConfigError, match="floating-point arrays"):
        sw.from_jax(mlp, {"n": 3}, BATCH)


@pytest.mark.slow
def test_flax_and_equinox_models() -> None:
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    equinox = pytest.importorskip("equinox", reason="equinox is not installed")

    class Net(linen.Module):  # type: ignore[misc, name-defined]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.avg_pool(linen.silu(linen.GroupNorm(2)(linen.Conv(4, (3, 3))(x))), (2, 2))
            x = linen.LayerNorm()(linen.Dense(8)(x.reshape(x.shape[0], -1)))
            return linen.Dense(3)(linen.MultiHeadDotProductAttention(2)(x[:, None])[:, 0])

    net, batch = Net(), {"x": normal(4, 6, 6, 3), "y": normal(4, 3)}
    variables = net.init(jax.random.key(0), batch["x"])
    check_gradients(lambda p, b: jnp.square(net.apply(p, b["x"]) - b["y"]).mean(), variables, batch)

    mlp = equinox.nn.MLP(6, 3, 8, 2, key=jax.random.key(0))
    batch = {"x": normal(5, 6), "y": normal(5, 3)}

    def loss(model: Any, batch: Any) -> Any:
        return jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]).mean()

    module = sw.from_jax(loss, mlp, batch)
    value, gradients = equinox.filter_value_and_grad(loss)(mlp, batch)
    result = module(**to_torch(batch))
    result.backward()
    np.testing.assert_allclose(float(result), value, rtol=1e-5)
    np.testing.assert_allclose(
        module.layers.get_submodule("0").weight.grad,
        gradients.layers[0].weight,
        rtol=1e-4,
        atol=1e-6,
    )
    assert isinstance(module.pytree(), equinox.nn.MLP)
