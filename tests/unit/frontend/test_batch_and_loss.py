"""Inputs and outputs of the model, and the part of the outputs that is the loss."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from shardwise.errors import CaptureError, LossError
from shardwise.frontend import capture, flatten_batch, rebuild_output
from shardwise.ir import Ref
from shardwise.ir.operators import interpret
from tests.support.capture import assert_captured

F64 = torch.float64
Pair = namedtuple("Pair", "first second")


@dataclass
class Sample:
    x: torch.Tensor
    extra: tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    note: str = "kept"


class Model(nn.Module):
    """`function(linear, *args, **kwargs)`."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(3, 2, dtype=F64)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self.linear, *args, **kwargs)


def data(rows=4):
    return torch.randn(rows, 3, dtype=F64)


def outputs_of(graph, model, batch):
    values = interpret(
        graph, dict(model.named_parameters()), dict(model.named_buffers()), flatten_batch(batch)[0]
    )
    leaves = [values[x.name] if isinstance(x, Ref) else x for x in graph.outputs]
    return rebuild_output(graph.output_spec, leaves)


def test_batches_of_every_shape():
    model = Model(lambda f, x: f(x).sum())
    for batch in ((data(),), [data()], data()):
        graph = assert_captured(model, batch)
        assert graph.inputs[0].name == "0"
    named = Model(lambda f, x, y: (f(x) * y).sum())
    graph = assert_captured(named, {"y": torch.ones(4, 2, dtype=F64), "x": data()})
    assert [i.name for i in graph.inputs] == ["y", "x"]
    assert [i.path for i in graph.inputs] == [("y",), ("x",)]


def test_nested_batches_and_dataclasses():
    def function(f, sample, scale):
        a, rest = sample.extra
        return (f(sample.x) * scale + f(a) + rest["deep"][0]).sum()

    deep = {"deep": (torch.ones(4, 2, dtype=F64),)}
    batch = {"sample": Sample(data(), (data(), deep)), "scale": 2}
    graph = assert_captured(Model(function), batch)
    assert [i.name for i in graph.inputs] == ["sample.x", "sample.extra.0", "sample.extra.1.deep.0"]
    assert graph.input_constants == (("scale", 2),)
    assert all(value.isidentifier() for value in graph.values)


def test_numbers_of_the_batch_become_constants():
    def function(f, x, *, flag, mode, nothing, count):
        assert nothing is None
        assert mode == "sum"
        return f(x).sum() * count if flag else f(x).mean()

    batch = {"x": data(), "flag": True, "mode": "sum", "nothing": None, "count": 3}
    graph = assert_captured(Model(function), batch)
    assert dict(graph.input_constants) == {"flag": True, "mode": "sum", "nothing": None, "count": 3}


def test_integer_and_bool_tensors():
    def function(f, x, index, mask):
        return torch.where(mask[:, None], f(x)[index], 0.0).sum()

    batch = {"x": data(), "index": torch.tensor([1, 0, 3, 2]), "mask": torch.ones(4).bool()}
    assert_captured(Model(function), batch)


def test_a_tensor_passed_twice_is_two_inputs():
    x = data()
    model = Model(lambda f, a, b: (f(a) * f(b).detach()).sum())
    graph = assert_captured(model, {"a": x, "b": x})
    assert len(graph.inputs) == 2
    other = {"a": x, "b": data()}
    values = interpret(graph, dict(model.named_parameters()), {}, other)
    assert torch.allclose(values[graph.loss], model(**other))


def test_meta_and_fake_batches_give_the_same_graph():
    model = Model(lambda f, x: f(x).sum() + torch.arange(3, device=x.device).sum())
    real = capture(model, {"x": data()})
    meta = capture(model, {"x": data().to("meta")})
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(4, 3, dtype=F64)
    assert real.fingerprint == meta.fingerprint == capture(model, {"x": fake}).fingerprint
    assert "meta" not in str(meta)


def test_unsupported_values_in_a_batch_are_refused():
    with pytest.raises(CaptureError, match="x is a object"):
        capture(Model(lambda f, x: f(x).sum()), {"x": object()})


def test_output_structures_are_rebuilt():
    structures = {
        "dataclass": lambda f, x: Result(loss=f(x).sum(), logits=f(x)),
        "tuple": lambda f, x: (f(x).sum(), [f(x), {"a": f(x) * 2}], None, "text", 3),
        "namedtuple": lambda f, x: Pair(f(x).sum(), f(x)),
        "ordered": lambda f, x: OrderedDict(loss=f(x).sum(), other=f(x).sum()),
    }
    for name, function in structures.items():
        model, batch = Model(function), (data(),)
        graph = assert_captured(model, batch)
        rebuilt, expected = outputs_of(graph, model, batch), model(*batch)
        assert type(rebuilt) is type(expected), name
        if name == "dataclass":
            assert torch.equal(rebuilt.logits, expected.logits)
            assert rebuilt.note == "kept"
        if name == "tuple":
            assert torch.equal(rebuilt[1][1]["a"], expected[1][1]["a"])
            assert rebuilt[2:] == (None, "text", 3)


def test_hugging_face_outputs_are_rebuilt():
    from tests.support import zoo

    model, batch = zoo.build("gpt2")
    graph = capture(model, batch)
    output = outputs_of(graph, model, batch)
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert torch.allclose(output.logits, model(**batch).logits)


def test_an_opaque_output_is_dropped_with_a_warning():
    class Cache:
        pass

    graph = capture(Model(lambda f, x: (f(x).sum(), Cache())), (data(),))
    assert graph.outputs[1] is None
    assert "Cache" in graph.warnings[0]


def test_loss_fn_is_part_of_the_graph():
    model = Model(lambda f, x, target: f(x))
    batch = {"x": data(), "target": torch.ones(4, 2, dtype=F64)}
    graph = assert_captured(model, batch, lambda out, b: nn.functional.mse_loss(out, b["target"]))
    assert [leaf.name for leaf in graph.outputs] == ["linear"]
    assert graph.loss == "mse_loss"
    assert [p.name for p in graph.parameters] == ["linear.weight", "linear.bias"]
    as_dict = assert_captured(model, batch, lambda out, b: {"loss": out.mean(), "aux": out.sum()})
    assert as_dict.loss == "mean"
    positional = Model(lambda f, x, y: f(x))
    pair = (data(), torch.ones(4, 2, dtype=F64))
    assert_captured(positional, pair, lambda out, b: ((out - b[1]) ** 2).mean())


def test_a_loss_of_shape_one_is_a_loss():
    graph = assert_captured(Model(lambda f, x: f(x).sum().reshape(1)), (data(),))
    assert graph.values[graph.loss].shape == ()


def test_an_unclear_loss_is_an_error_that_says_how_to_mark_it():
    def message(function, loss_fn=None):
        with pytest.raises(LossError) as error:
            capture(Model(function), (data(),), loss_fn)
        return str(error.value)

    assert "2 scalars" in message(lambda f, x: (f(x).sum(), f(x).mean()))
    assert "loss_fn=" in message(lambda f, x: (f(x).sum(), f(x).mean()))
    assert "no scalar" in message(lambda f, x: (f(x), f(x)))
    assert "shape [4, 2]" in message(lambda f, x: f(x))
    assert "shape [4, 2]" in message(lambda f, x: f(x), lambda out, b: out)
    assert "not a tensor" in message(lambda f, x: f(x), lambda out, b: 3.0)
    assert "torch.int64" in message(lambda f, x: f(x).argmax())


def test_evaluation_needs_no_loss():
    graph = capture(Model(lambda f, x: f(x)), (data(),), training=False)
    assert graph.loss is None
    assert not graph.training


def test_a_loss_with_parameters_is_refused():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, out, batch):
            return out.mean() * self.w

    with pytest.raises(CaptureError, match="loss_fn has parameters"):
        capture(Model(lambda f, x: f(x)), (data(),), Loss())


@pytest.mark.parametrize(
    "loss_fn", [lambda output: output.mean(), lambda output, batch, weight: output.mean()]
)
def test_a_loss_function_with_a_wrong_signature_is_refused(loss_fn):
    with pytest.raises(CaptureError, match="called with the model's output and the batch"):
        capture(nn.Linear(2, 1), (torch.zeros(3, 2),), loss_fn)


@pytest.mark.parametrize("loss_fn", [lambda *args: args[0].mean(), lambda y, b, k=1: k * y.mean()])
def test_a_loss_function_may_have_optional_arguments(loss_fn):
    assert capture(nn.Linear(2, 1), (torch.zeros(3, 2),), loss_fn).nodes


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_products_of_two_dtypes_are_refused(
    dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(5, 3)).double()
    with pytest.raises(CaptureError, match=rf"linear.* {dtype} and torch.float64") as error:
        capture(model, (torch.ones(4, 5, dtype=dtype),), lambda y, batch: y.sum())
    assert error.value.where == "0"
    with pytest.raises(CaptureError, match="reduction dim"):
        capture(model, (torch.ones(4, 6).double(),), lambda y, batch: y.sum())
    assert capfd.readouterr().err == ""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert capture(nn.Linear(5, 3), (torch.ones(4, 5),), lambda y, batch: y.sum()).nodes
