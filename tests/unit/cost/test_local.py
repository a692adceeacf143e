"""Compare the modelled cost of the runtime's functions with recorded runs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import runtime as rt
from shardwise.cost import CallCost
from shardwise.ir import Ref, TensorType
from shardwise.runtime.transport.fake import FakeRng, FakeTransport
from shardwise.sharding.rule import MeshAxis
from tests.support.call_costs import call_cost

A, B, C = (Ref(name) for name in "abc")
FLOAT, HALF, INT = torch.float32, torch.bfloat16, torch.int64
TP = MeshAxis(("tp",))
ROWS, WIDTH = 6, 8
MESH = rt.ProcessMesh({"tp": 2}, 0, FakeTransport(0, 2))
RANDOM = {"shape": (2 * ROWS, WIDTH), "splits": (("tp", 0, ((1, 2 * ROWS, 1),)),), "key": "node"}
X, V = (ROWS, WIDTH), (WIDTH,)
LABELS = ("int", ROWS)

CASES: list[tuple[str, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = [
    ("partial_mean", (A, (1,), True), (X,), {"count": 16}),
    ("var", (A, TP, (1,), False, 1.0, 16), (X,), {}),
    ("std", (A, TP, (1,), False, 1.0, 16), (X,), {}),
    ("var_mean", (A, TP, (1,), True, 1.0, 16), (X,), {}),
    ("std_mean", (A, TP, (1,), False, 1.0, 16), (X,), {}),
    ("vector_norm", (A, TP, (1,), False, 2), (X,), {}),
    ("vector_norm", (A, TP, (1,), False, 1), (X,), {}),
    ("amax", (A, TP, (1,)), (X,), {}),
    ("amin", (A, TP, (1,), True), (X,), {}),
    ("any_true", (A, TP, (1,)), (X,), {}),
    ("all_true", (A, TP, (1,)), (X,), {}),
    ("logsumexp", (A, TP, (1,)), (X,), {}),
    ("softmax", (A, TP, 1), (X,), {}),
    ("log_softmax", (A, TP, 1), (X,), {"dtype": FLOAT}),
    ("layer_norm", (A, TP, 1, B, C), (X, V, V), {"eps": 1e-5, "count": 16}),
    ("rms_norm", (A, TP, 1, B), (X, V), {"eps": 1e-5, "count": 16}),
    ("weight_norm", (A, TP, B, 0), (X, (ROWS, 1)), {}),
    ("batch_norm", (A, B, C, None, None, 0.1, 1e-5), ((4, 8, 3), V, V), {}),
    ("batch_norm", (A, B, C, None, None, 0.1, 1e-5), ((4, 8, 3), V, V), {"axis": TP, "count": 24}),
    ("cross_entropy", (A, B), (X, LABELS), {"reduction": "mean", "batch_axis": TP}),
    (
        "cross_entropy",
        (A, B),
        (X, LABELS),
        {"reduction": "mean", "class_axis": TP, "classes": 16, "label_smoothing": 0.1},
    ),
    ("cross_entropy", (A, B), (X, LABELS), {"reduction": "sum", "class_axis": TP, "classes": 16}),
    ("nll_loss", (A, B), (X, LABELS), {"reduction": "mean", "class_axis": TP, "classes": 16}),
    ("partial_loss", ("mse_loss", A, B, 0), (X, X), {"count": 96}),
    ("embedding_rows", (A, B, TP, 12), (X, ("int", 5)), {}),
    ("embedding", (A, B), (X, ("int", 5)), {}),
    ("linear", (A, B, C), ((2, ROWS, WIDTH), (5, WIDTH), (5,)), {}),
    ("matmul", (A, B), ((2, ROWS, WIDTH), (WIDTH, 5)), {}),
    ("addmm", (C, A, B), ((5,), (ROWS, WIDTH), (WIDTH, 5)), {}),
    (
        "conv",
        (A, B, C, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
        ((2, 4, 8, 8), (6, 4, 3, 3), (6,)),
        {},
    ),
    ("dropout", (A, 0.1), (X,), RANDOM),
    ("native_dropout", (A, 0.1), (X,), RANDOM),
    ("alpha_dropout", (A, 0.1), (X,), RANDOM),
    ("bernoulli", (A,), (X,), RANDOM),
    ("nothing", (A, (0, 4), FLOAT), ((ROWS, 4),), {}),
    ("empty_result", ((0, 4), FLOAT, A), (X,), {}),
    ("empty_results", (((0, 4), (2, 0)), (FLOAT, INT), A), (X,), {}),
    ("no_channels", ((2, 5, 6), FLOAT, A, B), ((2, 0, 8), (5, 0, 3)), {}),
]


def real(name: str) -> Callable[..., Any]:
    """Return the runtime's function on a fake mesh."""
    function = getattr(rt, name)

    def bound(arg: Any) -> Any:
        return MESH.axis(*arg.names) if isinstance(arg, MeshAxis) else arg

    def called(*args: Any, **kwargs: Any) -> Any:
        options = {k: bound(v) for k, v in kwargs.items()}
        if "splits" in options:
            options |= {"rng": FakeRng(0, "exact", MESH), "key": "node"}
        return function(*(bound(a) for a in args), **options)

    return called


def types(shapes: tuple[Any, ...], dtype: torch.dtype) -> list[TensorType]:
    return [
        TensorType(tuple(s[1:]), INT) if s and s[0] == "int" else TensorType(s, dtype)
        for s in shapes
    ]


def summary(actual: CallCost) -> dict[str, Any]:
    """Return what must agree; the memory of a sum over ranks depends on the transport."""
    return {
        "forward": Counter((k.op, k.flops, k.bytes, k.dtype) for k in actual.forward),
        "backward": Counter((k.op, k.flops, k.bytes, k.dtype) for k in actual.backward),
        "saved": Counter((s.operand, s.result, s.num_bytes) for s in actual.saved),
        "results": actual.results,
    }


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize(("name", "args", "shapes", "options"), CASES)
def test_the_cost_of_a_runtime_function(
    name: str, args: Any, shapes: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    given = types(shapes, dtype)
    grads = frozenset(i for i, t in enumerate(given) if t.dtype == dtype)
    if name in ("any_true", "all_true", "bernoulli"):
        grads = frozenset()
    pairs = tuple(options.items())
    actual = call_cost(f"rt.{name}", args, pairs, given, grads)
    expected = call_cost(f"rt.{name}", args, pairs, given, grads, function=real(name))
    assert (actual.note, expected.note) == ("", "")
    assert summary(actual) == summary(expected)
    assert bool(actual.backward) == bool(grads) or name in ("nothing",)


@pytest.mark.parametrize(("dropped", "causal"), [(0.0, True), (0.1, False), (0.1, True)])
def test_attention_of_the_runtime(dropped: float, causal: bool) -> None:
    shape = (2, 4, 8, 16)
    given = types((shape, shape, shape), HALF)
    options: dict[str, Any] = {"is_causal": causal}
    if causal:
        options |= {"row_axis": TP, "rows": 16}
    if dropped:
        full_shape = (2, 4, 16, 8)
        splits = (("tp", 2, ((1, 16, 1),)),)
        options |= {"dropout_p": dropped, "shape": full_shape, "splits": splits, "key": "k"}
    every = frozenset(range(3))
    actual = call_cost("rt.attention", (A, B, C), tuple(options.items()), given, every)
    assert not actual.note
    if not dropped:
        assert [k.kind for k in actual.forward if k.flops] == ["attention"]
        return
    expected = call_cost(
        "rt.attention", (A, B, C), tuple(options.items()), given, every, function=real("attention")
    )
    assert summary(actual) == summary(expected)


def test_collectives_of_a_loss_with_sharded_classes() -> None:
    """Forward reduces a maximum, a sum and the loss of every row; backward one sum."""
    options = {"reduction": "mean", "class_axis": TP, "classes": 16}
    given = types((X, LABELS), FLOAT)
    actual = call_cost("rt.cross_entropy", (A, B), tuple(options.items()), given, frozenset({0}))
    assert [(t.op, t.num_bytes, t.axes) for t in actual.collectives] == [
        ("all_reduce", ROWS * 4, ("tp",)),
        ("all_reduce", ROWS * 4, ("tp",)),
        ("all_reduce", 4, ("tp",)),
    ]
    assert [(t.op, t.num_bytes) for t in actual.backward_collectives] == [("all_reduce", ROWS * 4)]


def test_the_weight_part_of_backward_has_no_collectives() -> None:
    options = {"eps": 1e-5, "count": 16}
    given = types((X, V, V), FLOAT)
    args = (A, TP, 1, B, C)
    every = frozenset(range(3))
    actual = call_cost("rt.layer_norm", args, tuple(options.items()), given, every, every - {0})
    assert len(actual.collectives) == 2
    assert len(actual.backward_collectives) == 1
    assert 0 < len(actual.weight) < len(actual.backward)


def test_factories_use_the_types_of_their_results() -> None:
    results = [TensorType((3, 4), HALF)]
    for fn, args in (("rt.draw", ("normal",)), ("rt.eye", (3, 4))):
        drawn = (("shape", (6, 4)), ("splits", ()))
        options = (("dtype", HALF), *(drawn if fn == "rt.draw" else ()))
        actual = call_cost(fn, args, options, (), results=results)
        assert actual.results == tuple(results)
        assert actual.forward
        assert not actual.note


def test_random_numbers_and_factories_have_the_size_of_their_results() -> None:
    results = [TensorType((6,), INT)]
    drawn = (("shape", (6,)), ("splits", ()), ("dtype", INT), ("device", "cpu"))
    cut = (((1, 12, 1),), TP)
    calls = [
        ("rt.draw", ("randperm",), drawn),
        ("rt.arange", (0, 1, *cut), (("dtype", INT),)),
        ("rt.linspace", (0.0, 1.0, 12, *cut), (("dtype", INT),)),
    ]
    for fn, args, options in calls:
        actual = call_cost(fn, args, options, (), results=results)
        assert (actual.results, actual.note) == (tuple(results), "")
    for fn in ("rt.tril", "rt.triu", "rt.eye"):
        dtype = TensorType((3, 4), HALF)
        options = (("row_of", 6), ("row_axis", TP))
        if fn == "rt.eye":
            actual = call_cost(fn, (6, 4), (*options, ("dtype", HALF)), results=[dtype])
        else:
            actual = call_cost(fn, (A, 0), options, [dtype], results=[dtype])
        assert (actual.results, actual.note) == ((dtype,), "")
    hot = TensorType((5, 4), INT)
    actual = call_cost("rt.one_hot", (A, 8, TP), (), [TensorType((5,), INT)], results=[hot])
    assert (actual.results, actual.note) == ((hot,), "")


def test_rows_of_experts() -> None:
    given = types(((12, 4), (2, 5, 4), ("int", 2)), FLOAT)
    actual = call_cost("rt.grouped_linear", (A, B, C), (), given, frozenset({0, 1}))
    assert not actual.note
    assert [k.shape for k in actual.forward if k.flops] == [(2, 6, 5, 4)]
    assert [k.shape for k in actual.backward if k.flops] == [(2, 6, 4, 5), (2, 5, 4, 6)]
