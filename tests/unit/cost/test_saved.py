"""Compare the modelled memory with the memory that autograd uses for real tensors."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.ir import Ref, TensorType, map_refs
from shardwise.ir.operators import operator
from tests.support.call_costs import call_cost

A, B, C = (Ref(name) for name in "abc")
FLOAT, INT = torch.float32, torch.int64


class MemoryTracker(TorchDispatchMode):
    """Track the bytes of live storages that operators allocate."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.sizes: dict[int, int] = {}
        self.watches: dict[int, Any] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.known and key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.watches[key] = weakref.ref(storage, lambda _, k=key: self.sizes.pop(k))
        self.peak = max(self.peak, self.live)
        return result


def tensor(type_: TensorType, high: int = 2) -> Tensor:
    if type_.dtype.is_floating_point:
        return torch.randn(type_.shape, dtype=type_.dtype).requires_grad_()
    return torch.randint(0, high, type_.shape, dtype=type_.dtype)


CALLS: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("aten.linear.default", (A, B, C), ((2, 6, 4), (5, 4), (5,))),
    ("aten.matmul.default", (A, B), ((2, 6, 4), (4, 5))),
    ("aten.bmm.default", (A, B), ((2, 6, 4), (2, 4, 5))),
    ("aten.einsum.default", ("bij,bkj->bik", (A, B)), ((2, 6, 4), (2, 5, 4))),
    ("aten.conv2d.default", (A, B, C), ((2, 4, 8, 8), (6, 4, 3, 3), (6,))),
    ("aten.gelu.default", (A,), ((6, 4),)),
    ("aten.silu.default", (A,), ((6, 4),)),
    ("aten.relu.default", (A,), ((6, 4),)),
    ("aten.tanh.default", (A,), ((6, 4),)),
    ("aten.exp.default", (A,), ((6, 4),)),
    ("aten.softmax.int", (A, -1), ((6, 4),)),
    ("aten.log_softmax.int", (A, -1), ((6, 4),)),
    ("aten.layer_norm.default", (A, (4,), B, C), ((6, 4), (4,), (4,))),
    ("aten.group_norm.default", (A, 2, B, C), ((2, 4, 6), (4,), (4,))),
    ("aten.mul.Tensor", (A, B), ((6, 4), (6, 4))),
    ("aten.mul.Tensor", (A, A), ((6, 4), (6, 4))),
    ("aten.mul.Tensor", (A, B), ((6, 4), (4,))),
    ("aten.add.Tensor", (A, B), ((6, 4), (6, 4))),
    ("aten.div.Tensor", (A, B), ((6, 4), (6, 4))),
    ("aten.pow.Tensor_Scalar", (A, 2), ((6, 4),)),
    ("aten.rsqrt.default", (A,), ((6, 4),)),
    ("aten.mean.dim", (A, (-1,)), ((6, 4),)),
    ("aten.sum.dim_IntList", (A, (-1,)), ((6, 4),)),
    ("aten.cat.default", ((A, B), 0), ((6, 4), (2, 4))),
    ("aten.transpose.int", (A, 0, 1), ((6, 4),)),
    ("aten.slice.Tensor", (A, 0, 1, 3), ((6, 4),)),
    ("aten.max_pool2d.default", (A, (2, 2)), ((2, 4, 8, 8),)),
    ("aten.embedding.default", (A, B), ((9, 4), ("int", 6))),
    ("aten.index.Tensor", (A, (B,)), ((9, 4), ("int", 6))),
    ("aten.cross_entropy_loss.default", (A, B), ((6, 4), ("int", 6))),
    ("aten.mse_loss.default", (A, B), ((6, 4), (6, 4))),
    ("aten.scaled_dot_product_attention.default", (A, B, C), ((2, 3, 8, 4),) * 3),
]


def types(shapes: tuple[Any, ...]) -> list[TensorType]:
    return [
        TensorType(tuple(s[1:]), INT) if s[0] == "int" else TensorType(s, FLOAT) for s in shapes
    ]


def really_saved(op: str, args: tuple[Any, ...], operands: list[Tensor]) -> Counter[Any]:
    """Return the bytes that autograd saves by owner, each storage once."""
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    function, supply = operator(op), iter(operands)
    made = map_refs(args, lambda _: next(supply))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function(*made)
    owners = {t.untyped_storage()._cdata: "result" for t in tree_leaves(result)}
    owners |= {t.untyped_storage()._cdata: i for i, t in reversed([*enumerate(operands)])}
    unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in packed}
    total: Counter[Any] = Counter()
    for key, size in unique.items():
        total[owners.get(key, "own")] += size
    return +total


@pytest.mark.parametrize(("op", "args", "shapes"), CALLS)
def test_saved_memory_equals_that_of_real_tensors(op: str, args: Any, shapes: Any) -> None:
    given = types(shapes)
    operands = [tensor(t, 4) for t in given]
    if args[:2] == (A, A):
        operands = [operands[0], operands[0]]
    grads = frozenset(i for i, t in enumerate(given) if t.dtype == FLOAT)
    cost = call_cost(op, args, (), given, grads)
    predicted: Counter[Any] = Counter()
    for saved in cost.saved:
        owner = "result" if saved.result is not None else saved.operand
        predicted["own" if owner is None else owner] += saved.num_bytes
    assert not cost.note
    assert +predicted == really_saved(op, args, operands)


# Attention works in buffers of its own; the CPU's mse_loss keeps the memory of its terms.
SIMPLE = [c for c in CALLS if "attention" not in c[0] and "mse" not in c[0]]


@pytest.mark.parametrize(("op", "args", "shapes"), SIMPLE)
def test_memory_of_a_call_equals_that_of_real_tensors(op: str, args: Any, shapes: Any) -> None:
    """Compare the memory after forward, and the peak of backward."""
    given = types(shapes)
    operands = [tensor(t, 4) for t in given]
    if args[:2] == (A, A):
        operands = [operands[0], operands[0]]
    grads = frozenset(i for i, t in enumerate(given) if t.dtype == FLOAT)
    cost = call_cost(op, args, (), given, grads)
    supply = iter(operands)
    made = map_refs(args, lambda _: next(supply))
    leaves = list({id(t): t for t in operands if t.requires_grad}.values())
    with MemoryTracker(operands) as tracker:
        result = operator(op)(*made)
        own = sum(s.num_bytes for s in cost.saved if s.operand is None and s.result is None)
        new = [
            t.num_bytes
            for t, owner in zip(cost.results, cost.aliases, strict=True)
            if owner is None
        ]
        assert tracker.live == own + sum(new)
        assert tracker.peak == tracker.live + cost.forward_temporary_bytes
        seeds = torch.ones_like(result)
        tracker.known.add(seeds.untyped_storage()._cdata)
        tracker.sizes.pop(seeds.untyped_storage()._cdata)
        tracker.watches.clear()
        before = tracker.peak = tracker.live
        gradients = torch.autograd.grad(result, leaves, seeds, retain_graph=True)
        assert tracker.live - before == sum(size for _, size in cost.gradients)
        assert tracker.peak - tracker.live == cost.backward_temporary_bytes
    assert len(gradients) == len(cost.gradients)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    layers=st.lists(st.sampled_from(["linear", "gelu", "norm", "softmax", "square"]), max_size=5),
)
@settings(max_examples=25, deadline=None)
def test_saved_of_random_modules(sizes: list[int], layers: list[str]) -> None:
    """The calls of a module together save the same tensors as the module, each once."""
    batch, rows, width = sizes
    weight, scale = torch.randn(width, width), torch.randn(width)
    parameters = {"w": weight.requires_grad_(), "s": scale.requires_grad_()}
    x = torch.randn(batch, rows, width).requires_grad_()
    calls = {
        "linear": ("aten.linear.default", ("x", "w")),
        "gelu": ("aten.gelu.default", ("x",)),
        "norm": ("aten.layer_norm.default", ("x", (width,), "s", "s")),
        "softmax": ("aten.softmax.int", ("x", -1)),
        "square": ("aten.mul.Tensor", ("x", "x")),
    }
    packed: dict[int, int] = {}
    keep: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        packed[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    predicted: dict[Any, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for step, layer in enumerate(layers):
            op, names = calls[layer]
            tensors = {"x": x, **parameters}
            args = tuple(Ref(n) if isinstance(n, str) else n for n in names)
            refs = [n for n in names if isinstance(n, str)]
            given = [TensorType(tuple(tensors[n].shape), FLOAT) for n in refs]
            cost = call_cost(op, args, (), given, frozenset(range(len(refs))))
            result = operator(op)(*(tensors[n] if isinstance(n, str) else n for n in names))
            for saved in cost.saved:
                key: Any = (step, len(predicted))
                if saved.operand is not None:
                    key = tensors[refs[saved.operand]].untyped_storage()._cdata
                elif saved.result is not None:
                    key = result.untyped_storage()._cdata
                predicted[key] = saved.num_bytes
            keep.append(x)
            x = result
    assert sum(predicted.values()) == sum(packed.values())


def test_a_meta_run_frees_its_tensors() -> None:
    """A result that its own node saves would form a cycle that Python cannot collect."""
    made: list[Any] = []

    def softmax(x: Tensor) -> Tensor:
        made.append(weakref.ref(x))
        return x.softmax(-1)

    kind = TensorType((3, 4), FLOAT)
    cost = call_cost("autograd_function.m.S", (A,), (), [kind], frozenset({0}), function=softmax)
    gc.collect()
    assert cost.saved
    assert [ref() for ref in made] == [None]
