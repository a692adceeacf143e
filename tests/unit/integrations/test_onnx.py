"""ONNX files as modules: ONNX's own conformance cases, exported models, training and back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CaptureError, ConfigError
from shardwise.integrations.onnx.module import OnnxModule, _inlined

SEEDED = ("bernoulli",)  # cases whose expected output is another draw
# Warnings of the cases themselves:
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
EVERYDAY = (
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumSum", "Einsum", "Gather",
    "GatherND", "Gemm", "GRU", "LSTM", "LayerNormalization", "Loop", "MaxPool", "OneHot", "Pad",
    "Pow", "ReduceSum", "Reshape", "ScatterND", "Slice", "SoftmaxCrossEntropyLoss", "Split", "TopK",
)  # fmt: skip


def outcome(case: Any) -> str:
    """Run a conformance case, with small inputs as tensors and then as known values."""
    inputs, outputs = case.data_sets[0]
    try:
        module = OnnxModule(_inlined(case.model), case.name)
    except (CaptureError, ConfigError):
        return "unsupported"
    result = ""
    for known in (False, True):
        values = {
            name: array if known and number and array.ndim <= 1 else torch.from_numpy(array.copy())
            for number, (name, array) in enumerate(zip(module.input_names, inputs, strict=True))
        }
        try:
            actual = module._run(module._body, values)
        except CaptureError:
            result = "refused"
            continue
        for value, expected in zip(actual, outputs, strict=False):
            array = value.detach().numpy() if isinstance(value, Tensor) else value
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            half = expected.dtype == np.float16
            np.testing.assert_allclose(
                array, expected, rtol=1e-2 if half else 1e-3, atol=1e-2 if half else 1e-5
            )
        return "equal"
    return result


def conformance(operators: Collection[str] = ()) -> Counter[str]:
    """Count the outcomes of the standard's cases, of some operators or of all."""
    counts: Counter[str] = Counter()
    for case in collect_testcases(None):
        if not case.data_sets or any(word in case.name for word in SEEDED):
            continue
        arrays = [value for values in case.data_sets[0] for value in values]
        if not all(isinstance(v, np.ndarray) and v.dtype.kind in "fiub" for v in arrays):
            continue
        if not operators or case.model.graph.node[0].op_type in operators:
            counts[outcome(case)] += 1
    return counts


def test_operators_conform_to_the_standard() -> None:
    counts = conformance(EVERYDAY)
    assert counts["equal"] >= 190
    assert counts["unsupported"] + counts["refused"] < 15


@pytest.mark.slow
def test_all_operators_conform_to_the_standard() -> None:
    counts = conformance()
    assert counts["equal"] >= 1150


class Net(nn.Module):
    """Convolutions, a norm and attention, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.gelu(self.norm(self.conv(image))), 2).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        output: Tensor = self.head(x.mean(1))
        return output


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.model(image), label)


@pytest.fixture(params=[True, False], ids=["dynamo", "script"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    net, path = Net().eval(), tmp_path / "net.onnx"
    torch.onnx.export(
        net, (torch.randn(6, 3, 8, 8),), str(path), dynamo=request.param, input_names=["image"],
        opset_version=18, verbose=False,
    )  # fmt: skip
    return net, path


def test_exported_models_train_and_come_back(exported: tuple[nn.Module, Path]) -> None:
    net, path = exported
    module = sw.from_onnx(path)
    batch = {"image": torch.randn(6, 3, 8, 8), "label": torch.arange(6) % 5}
    torch.testing.assert_close(module(batch["image"]), net(batch["image"]))
    torch.testing.assert_close(module(image=batch["image"]), net(batch["image"]))
    model = WithLoss(module)
    graph = sw.capture(model, batch)
    for plan in (
        sw.strategies.fsdp(graph, sw.Cluster.local(3)),
        sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2),
    ):
        assert sw.verify(model, batch, plan).ok
    pm = sw.parallelize(model, batch, sw.strategies.ddp(graph, sw.Cluster.local(1)))
    optimizer = sw.optimizer(pm, torch.optim.SGD, lr=0.1)
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        pm.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
        reference(**batch).backward()
        plain.step()
        plain.zero_grad()
    pm.copy_to(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    module.save_onnx(path)
    torch.testing.assert_close(sw.from_onnx(path)(batch["image"]), reference.model(batch["image"]))


def file(
    tmp_path: Path,
    nodes: list[Any],
    inputs: dict[str, list[int]],
    outputs: dict[str, list[int]],
    initializers: dict[str, np.ndarray[Any, Any]],
    opset: int = 18,
) -> Path:
    """Write a file by hand."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path = tmp_path / "hand.onnx"
    onnx.save(model, path)
    return path


def linear(tmp_path: Path, **more: Any) -> Path:
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    return file(
        tmp_path,
        [helper.make_node("Gemm", ["x", "w:0", "a.b"], ["y"], name="product")],
        {"x": [2, 4]},
        {"y": [2, 3]},
        {"w:0": weight, "a.b": np.ones(3, np.float32), "unused.scalar": np.float32(2).reshape(())},
        **more,
    )


def test_parameters_have_the_names_of_initializers(tmp_path: Path) -> None:
    module = sw.from_onnx(linear(tmp_path))
    assert sorted(dict(module.named_parameters())) == ["a.b", "w_0"]
    only = sw.from_onnx(linear(tmp_path), trainable="a.*")
    assert list(dict(only.named_parameters())) == ["a.b"]
    with pytest.raises(ConfigError, match="3 initializers"):
        sw.from_onnx(linear(tmp_path), trainable="c.*")


class Constants(nn.Module):
    """A model whose files have constants besides its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 8)
        self.instance, self.group = nn.InstanceNorm2d(4), nn.GroupNorm(2, 4, affine=False)
        self.register_buffer("positions", torch.randn(16, 8))
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.instance(self.conv(x))).flatten(2).transpose(1, 2)
        x = self.linear(x) * self.scale + self.positions
        causal = torch.ones(16, 16).tril()
        return (x @ x.transpose(1, 2) * causal - (1 - causal) * 1e4).softmax(-1) @ x


def test_constants_that_an_exporter_adds_are_not_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "constants.onnx"
    x = torch.randn(2, 3, 6, 6)
    torch.onnx.export(Constants(), (x,), str(path), verbose=False)
    module = sw.from_onnx(path)
    shapes = sorted(tuple(parameter.shape) for parameter in module.parameters())
    assert shapes == [(4,), (4, 3, 3, 3), (4, 8), (8,), (8,)]  # linear.weight is transposed
    assert module(x).shape == (2, 16, 8)


def test_recorded_parameters_of_one_element_are_trained(tmp_path: Path) -> None:
    source, path = nn.Linear(3, 1), tmp_path / "one.onnx"
    torch.onnx.export(source, (torch.ones(2, 3),), dynamo=True, verbose=False).save(path)
    module = sw.from_onnx(path)
    assert sorted(p.numel() for p in module.parameters()) == [1, 3]


def test_names_and_uses_decide_where_nothing_is_recorded(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_7"], ["h"]),
        helper.make_node("LayerNormalization", ["h", "val_3", "norm.bias"], ["n"]),
        helper.make_node("Mul", ["n", "const_fold_opt__9"], ["s"]),
        helper.make_node("Add", ["s", "attention.mask"], ["m"]),
        helper.make_node("Add", ["m", "positions"], ["y"]),
    ]
    values = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    arrays = {
        "onnx::MatMul_7": values,
        "val_3": np.ones(4, np.float32),
        "norm.bias": np.zeros(4, np.float32),
        "const_fold_opt__9": values,
        "attention.mask": np.triu(np.full((4, 4), -1e9, np.float32), 1),
        "positions": values,
    }
    path = file(tmp_path, nodes, {"x": [4, 4]}, {"y": [4, 4]}, arrays, opset=17)
    names = sorted(dict(sw.from_onnx(path).named_parameters()))
    assert names == ["norm.bias", "onnx__MatMul_7", "positions"]
    every = sw.from_onnx(path, trainable="*")
    assert len(list(every.parameters())) == 6


def test_arguments_are_the_inputs_of_the_file(tmp_path: Path) -> None:
    module = sw.from_onnx(linear(tmp_path))
    assert (module.input_names, module.output_names) == (("x",), ("y",))
    for args, kwargs in (((), {}), ((1, 2), {}), ((), {"z": 1}), ((1,), {"x": 1})):
        with pytest.raises(TypeError):
            module(*args, **kwargs)


def test_loops_and_branches_on_known_values_are_unrolled(tmp_path: Path) -> None:
    value = [helper.make_tensor_value_info("v", TensorProto.FLOAT, ["n", "m"])]
    flag = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["v_in", "w"], ["v"]),
            helper.make_node("Identity", ["v"], ["scan"]),
            helper.make_node("Identity", ["c_in"], ["c"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v_in", TensorProto.FLOAT, ["n", "m"]),
        ],
        [flag, value[0], helper.make_tensor_value_info("scan", TensorProto.FLOAT, ["n", "m"])],
    )
    then, other = (
        helper.make_graph([helper.make_node(op, ["last"], ["v"])], op, [], value)
        for op in ("Neg", "Abs")
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Loop", ["n", "", "x"], ["last", "all"], body=body),
        helper.make_node("Greater", ["n", "two"], ["large"]),
        helper.make_node("If", ["large"], ["y"], then_branch=then, else_branch=other),
    ]
    path = file(
        tmp_path, nodes, {"x": [3, 2]}, {"y": [3, 2], "all": [3, 3, 2]},
        {"w": np.array([2.0, 3.0], np.float32), "zero": np.array(0), "two": np.array(2)},
    )  # fmt: skip
    x = torch.ones(3, 2)
    y, steps = sw.from_onnx(path)(x)
    torch.testing.assert_close(y, -x * torch.tensor([8.0, 27.0]))
    assert steps.shape == (3, 3, 2)


def test_what_is_not_supported_is_named_with_its_place(tmp_path: Path) -> None:
    nodes = [helper.make_node("Unique", ["x"], ["y"], name="here")]
    with pytest.raises(CaptureError, match="Unique") as caught:
        sw.from_onnx(file(tmp_path, nodes, {"x": [4]}, {"y": [4]}, {}))
    assert "here" in str(caught.value.where)
    with pytest.raises(ConfigError, match="opset 11, at least 13"):
        sw.from_onnx(linear(tmp_path, opset=11))
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["v"])],
        "branch",
        [],
        [helper.make_tensor_value_info("v", TensorProto.FLOAT, ["n", "m"])],
    )
    branches = {"then_branch": branch, "else_branch": branch}
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], "choice", **branches),
    ]
    path = file(tmp_path, nodes, {"x": [4]}, {"y": [4]}, {"zero": np.float32(0).reshape(())})
    with pytest.raises(CaptureError, match="depends on the values of tensors") as caught:
        sw.from_onnx(path)(torch.ones(4))
    assert "choice" in str(caught.value.where)


def test_files_that_are_not_onnx(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        sw.from_onnx(tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ConfigError, match="not a valid ONNX file"):
        sw.from_onnx(tmp_path / "text.onnx")


def test_statistics_that_share_an_array_with_a_weight_are_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    x = torch.randn(8, 4)
    path = tmp_path / "net.onnx"  # with the mean as a copy of the bias: both are zeros
    torch.onnx.export(
        net, (x,), str(path), dynamo=False, do_constant_folding=False, input_names=["x"]
    )
    module = sw.from_onnx(path)
    assert len(dict(module.named_parameters())) == 6
    assert len(dict(module.named_buffers())) == 2
    for model in (net, module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
    module.save_onnx(path)
    torch.testing.assert_close(sw.from_onnx(path)(x), net(x))
