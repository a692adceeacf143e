"""TensorFlow functions come in as ONNX files, and their trained weights go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.integrations.onnx.weights import RECORDED_KINDS

tf: Any = pytest.importorskip("tensorflow", reason="needs tensorflow and tf2onnx")
pytest.importorskip("tf2onnx", reason="needs tensorflow and tf2onnx")

from examples import tensorflow_onnx  # noqa: E402 - needs the packages
from examples.tensorflow_onnx import assign, to_onnx  # noqa: E402

ARGUMENTS = {
    "x": np.random.default_rng(0).standard_normal((5, 8)).astype("f"),
    "image": np.random.default_rng(1).standard_normal((5, 6, 6, 2)).astype("f"),
    "ids": np.array([1, 2, 3, 4, 9], "i"),
}


class Source(tf.Module):  # type: ignore[misc]
    """Products, a convolution, an embedding, a scalar parameter and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        draw = tf.random.Generator.from_seed(0).normal
        self.weight = tf.Variable(draw((8, 16)), name="weight")
        self.other = tf.Variable(draw((16, 16)), name="weight")  # a second one of that name
        self.kernel = tf.Variable(draw((3, 3, 2, 4)), name="kernel")
        self.table = tf.Variable(draw((10, 8)), name="table")
        self.gain = tf.Variable(0.5, name="gain")
        self.scale = tf.Variable([2.0, 3.0], trainable=False, name="scale")

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, 8), tf.float32, name="x"),
            tf.TensorSpec((None, 6, 6, 2), tf.float32, name="image"),
            tf.TensorSpec((None,), tf.int32, name="ids"),
        ]
    )
    def run(self, x: Any, image: Any, ids: Any) -> Any:
        hidden = tf.math.erfc((x + tf.gather(self.table, ids)) @ self.weight * 0.1) @ self.other
        pooled = tf.reduce_mean(tf.nn.conv2d(image, self.kernel, 1, "SAME"), [1, 2])
        return {"hidden": hidden * self.gain, "pooled": pooled * self.scale[1]}


def outputs(module: Any) -> dict[str, np.ndarray[Any, Any]]:
    tensors = module(**{name: torch.from_numpy(value) for name, value in ARGUMENTS.items()})
    return {n: t.detach().numpy() for n, t in zip(module.output_names, tensors, strict=True)}


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_allclose(got[name], expected[name].numpy(), rtol=1e-5, atol=1e-5)


def test_functions_come_in_and_weights_go_back(tmp_path: Path) -> None:
    source = Source()
    to_onnx(source.run, tmp_path / "model.onnx")
    module = sw.from_onnx(tmp_path / "model.onnx")
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        "weight": (8, 16), "weight_2": (16, 16), "kernel": (3, 3, 2, 4), "table": (10, 8),
        "gain": (),
    }  # fmt: skip
    assert_close(outputs(module), source.run(*ARGUMENTS.values()))

    arguments = [tf.constant(value) for value in ARGUMENTS.values()]
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(v**2) for v in source.run(*arguments).values())
    variables = [source.weight, source.other, source.table, source.gain]
    expected = dict(zip(("weight", "weight_2", "table", "gain"), tape.gradient(loss, variables),
                        strict=True))  # fmt: skip
    tensors = module(**{name: torch.from_numpy(value) for name, value in ARGUMENTS.items()})
    torch.stack([tensor.square().sum() for tensor in tensors]).sum().backward()
    for name, gradient in expected.items():
        own = dict(module.named_parameters())[name].grad
        np.testing.assert_allclose(own, tf.convert_to_tensor(gradient), rtol=2e-4, atol=2e-4)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
    module.save_onnx(tmp_path / "trained.onnx")
    assign(tmp_path / "trained.onnx", source.run)
    assert_close(outputs(module), source.run(*ARGUMENTS.values()))


def test_saved_models_are_written_with_new_weights(tmp_path: Path) -> None:
    source = Source()
    tf.saved_model.save(source, tmp_path / "saved", signatures=source.run)
    loaded = tf.saved_model.load(tmp_path / "saved")
    to_onnx(loaded.signatures["serving_default"], tmp_path / "model.onnx")
    module = sw.from_onnx(tmp_path / "model.onnx")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    module.save_onnx(tmp_path / "trained.onnx")
    assign(tmp_path / "trained.onnx", loaded.signatures["serving_default"])
    tf.saved_model.save(loaded, tmp_path / "new", signatures=loaded.signatures)
    new = tf.saved_model.load(tmp_path / "new")
    arguments = {name: tf.constant(value) for name, value in ARGUMENTS.items()}
    assert_close(outputs(module), new.signatures["serving_default"](**arguments))


def test_the_script_converts_and_writes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tensorflow_onnx.RECORDED_KINDS == RECORDED_KINDS
    source = Source()
    tf.saved_model.save(source, tmp_path / "saved", signatures=source.run)
    for words in (["saved", "model.onnx"], ["saved", "model.onnx", "--save-to", "new"]):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["tensorflow_onnx.py", *words])
        tensorflow_onnx.main()
    assert tf.saved_model.load(tmp_path / "new").signatures["serving_default"] is not None


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    source = Source()
    to_onnx(source.run, tmp_path / "model.onnx")
    other = tf.Variable(tf.ones((3, 4)), name="weight")
    function = tf.function(lambda: other + 1.0, input_signature=[])
    with pytest.raises(ValueError, match=r"no weights weight of the shape \(3, 4\)"):
        assign(tmp_path / "model.onnx", function)
    unknown = tf.function(tf.linalg.logm, input_signature=[tf.TensorSpec((3, 3), tf.complex64)])
    with pytest.raises(ValueError, match="tf2onnx cannot convert"):
        to_onnx(unknown, tmp_path / "other.onnx")
