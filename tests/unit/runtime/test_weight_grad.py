"""Deferred weight gradients equal those of the plain operators and are accumulated by autograd."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardwise.runtime as rt
from shardwise.errors import ProgramError
from shardwise.runtime.pipeline.weight_grad import WeightQueue
from shardwise.runtime.transport.threads import run_threads

Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
BATCHES = [(4,), (), (2, 3), (2, 1, 3), (0,), (2, 0)]


def values(*shape: int, transposed: bool = False) -> Tensor:
    if transposed and len(shape) > 1:
        return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=torch.float64).mT
    return torch.randn(shape, dtype=torch.float64)


def linear_case(batch: tuple[int, ...], bias: bool, transposed: bool) -> Case:
    tensors = [values(*batch, 5, transposed=transposed), values(3, 5, transposed=transposed)]
    tensors += [values(3)] if bias else []
    return rt.linear, torch.nn.functional.linear, tensors


def addmm_case(rows: int, bias_shape: tuple[int, ...], transposed: bool) -> Case:
    x, weight = values(rows, 5, transposed=transposed), values(5, 3, transposed=transposed)
    bias = values(*bias_shape)
    return (
        lambda x, w, b: rt.addmm(b, x, w),
        lambda x, w, b: torch.addmm(b, x, w),
        [x, weight, bias],
    )


def matmul_case(batch: tuple[int, ...], of_weight: tuple[int, ...], transposed: bool) -> Case:
    tensors = [values(*batch, 5, transposed=transposed), values(*of_weight, 5, 3)]
    return rt.matmul, torch.matmul, tensors


def embedding_case(shape: tuple[int, ...], padding_idx: int) -> Case:
    indices = torch.randint(0, 7, shape)

    def ours(w: Tensor) -> Tensor:
        return rt.embedding(w, indices, padding_idx)

    def plain(w: Tensor) -> Tensor:
        return torch.ops.aten.embedding.default(w, indices, padding_idx)

    return ours, plain, [values(7, 3)]


def conv_case(dims: int, bias: bool, transposed: bool, groups: int, batch: int) -> Case:
    options = ([2] * dims, [1] * dims, [1] * dims, transposed, [0] * dims, groups)
    tensors = [values(batch, 4, *([6] * dims)), values(4, 4 // groups, *([3] * dims))]
    tensors += [values(4)] if bias else []

    def using(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, b=None: op(x, w, b, *options)

    return using(rt.conv), using(torch.ops.aten.convolution.default), tensors


CASES = {
    "linear": lambda draw: linear_case(
        draw(st.sampled_from(BATCHES)), draw(st.booleans()), draw(st.booleans())
    ),
    "addmm": lambda draw: addmm_case(
        draw(st.sampled_from([0, 1, 4])), draw(st.sampled_from([(3,), (1, 3)])), draw(st.booleans())
    ),
    "matmul": lambda draw: matmul_case(
        draw(st.sampled_from([(4,), (), (2, 4), (2, 0), (0,)])),
        draw(st.sampled_from([(), (2,), (1,)])),
        draw(st.booleans()),
    ),
    "embedding": lambda draw: embedding_case(
        draw(st.sampled_from([(4,), (2, 3), (0,), ()])), draw(st.sampled_from([-1, 0, 3]))
    ),
    "conv": lambda draw: conv_case(
        draw(st.sampled_from([1, 2, 3])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([2, 1, 0])),
    ),
}


def deferrable(leaves: list[Tensor]) -> bool:
    """Embeddings have one leaf; torch computes products of a vector and matrices."""
    if len(leaves) == 1 or (leaves[0].dim() == 1 and leaves[1].dim() > 2):
        return False
    return leaves[1].requires_grad


def step(
    op: Callable[..., Tensor],
    tensors: list[Tensor],
    *,
    grads: tuple[bool, ...],
    times: int,
    leaf: bool,
    recompute: bool,
    queue: WeightQueue | None,
) -> tuple[Tensor, list[Tensor | None], list[int]]:
    """Outputs, gradients, and the number of hook calls per leaf in two backward passes."""
    leaves = [t.detach().requires_grad_(g) for t, g in zip(tensors, grads, strict=True)]
    calls = [0] * len(leaves)

    def counting(i: int) -> Callable[[Tensor], None]:
        def hook(tensor: Tensor) -> None:
            assert tensor.grad is not None
            calls[i] += 1

        return hook

    for i, t in enumerate(leaves):
        if t.requires_grad:
            t.register_post_accumulate_grad_hook(counting(i))

    def body(*args: Tensor) -> Tensor:
        used = args if leaf else tuple(a * 1 if a.is_floating_point() else a for a in args)
        return sum((op(*used).sin() for _ in range(times)), torch.zeros((), dtype=torch.float64))

    for _ in range(2):
        with queue.deferring() if queue is not None else contextlib.nullcontext():
            out = checkpoint(body, *leaves, use_reentrant=False) if recompute else body(*leaves)
        if not out.requires_grad:
            break
        before = [None if t.grad is None else t.grad.clone() for t in leaves[1:]]
        out.sum().backward()
        if queue is not None and leaf and deferrable(leaves):
            assert len(queue._jobs) == times
            for t, grad in zip(leaves[1:], before, strict=True):
                assert (t.grad is None) == (grad is None)
                assert grad is None or torch.equal(cast(Tensor, t.grad), grad)
        if queue is not None:
            queue.run()
            assert len(queue._jobs) == 0
    return out.detach(), [t.grad for t in leaves], calls


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_gradients_and_hook_calls_equal_the_plain_operator(name: str, data: Any) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    ours, plain, tensors = CASES[name](data.draw)
    settings = {
        "grads": tuple(data.draw(st.booleans()) for _ in tensors),
        "times": data.draw(st.sampled_from([1, 2])),
        "leaf": data.draw(st.sampled_from([True, True, False])),
        "recompute": data.draw(st.booleans()),
    }
    want = step(plain, tensors, queue=None, **settings)
    for queue in (None, WeightQueue()):
        got = step(ours, tensors, queue=queue, **settings)
        assert torch.equal(got[0], want[0])
        assert got[2] == want[2]
        for a, b in zip(got[1], want[1], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.is_contiguous() == b.is_contiguous()
                torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_input_gradients_are_immediate_and_weight_gradients_deferred() -> None:
    x = values(4, 5).requires_grad_()
    weight, bias = values(3, 5).requires_grad_(), values(3).requires_grad_()
    queue = WeightQueue()
    with queue.deferring():
        rt.linear(x, weight, bias).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert bias.grad is None
    assert len(queue._jobs) == 1
    queue.run()
    assert weight.grad is not None
    assert bias.grad is not None


def test_queues_of_micro_batches_run_in_any_order() -> None:
    weight = values(3, 5).requires_grad_()
    parts = [values(2, 5) for _ in range(3)]
    queues = []
    for part in parts:
        queue = WeightQueue()
        with queue.deferring():
            rt.linear(part, weight).square().sum().backward()
        queues.append(queue)
    for i in (2, 0, 1):
        queues[i].run()
    plain = weight.detach().requires_grad_()
    torch.nn.functional.linear(torch.cat(parts), plain).square().sum().backward()
    torch.testing.assert_close(weight.grad, plain.grad)


def test_leaves_are_finished_in_the_order_of_backward() -> None:
    weights = [values(5, 5).requires_grad_() for _ in range(4)]
    arrived: list[int] = []
    for i, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, i=i: arrived.append(i))
    x, queue = values(2, 5), WeightQueue()
    with queue.deferring():
        for weight in weights:
            x = rt.linear(x, weight)
    x.sum().backward()
    assert arrived == []
    queue.run()
    assert arrived == [3, 2, 1, 0]


def test_inputs_are_released_one_after_the_other() -> None:
    weights = [values(5, 5).requires_grad_() for _ in range(2)]
    queue, x = WeightQueue(), values(2, 5)
    inputs = []
    with queue.deferring():
        for weight in weights:
            x = x.sin()
            inputs.append(weakref.ref(x))
            x = rt.linear(x, weight)
    alive: list[list[bool]] = []
    for weight in reversed(weights):
        weight.register_post_accumulate_grad_hook(
            lambda _: alive.append([each() is not None for each in inputs])
        )
    x.sum().backward()
    del x
    assert [each() is not None for each in inputs] == [True, True]
    queue.run()
    assert alive == [[True, False], [False, False]]


def test_gradients_are_moved_and_not_copied() -> None:
    weight, queue = values(3, 5).requires_grad_(), WeightQueue()
    made: list[int] = []
    weight.register_hook(lambda grad: made.append(grad.data_ptr()))
    with queue.deferring():
        rt.linear(values(4, 5), weight).sum().backward()
    queue.run()
    assert weight.grad is not None
    assert made == [weight.grad.data_ptr()]


def test_the_gradient_of_a_bias_that_is_not_a_leaf_is_immediate() -> None:
    x, weight, source = values(4, 5), values(3, 5).requires_grad_(), values(3).requires_grad_()
    queue = WeightQueue()
    with queue.deferring():
        rt.linear(x, weight, source * 2).sum().backward()
    torch.testing.assert_close(source.grad, torch.full((3,), 8.0, dtype=torch.float64))
    assert weight.grad is None
    queue.run()
    assert weight.grad is not None


def test_autocast_and_weights_that_are_not_leaves_are_not_deferred() -> None:
    x, weight = torch.randn(4, 5), torch.randn(3, 5, requires_grad=True)
    queue = WeightQueue()
    with queue.deferring():
        with torch.autocast("cpu", torch.bfloat16):
            out = rt.linear(x, weight)
        rt.linear(x, weight * 1).sum().backward()
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert len(queue._jobs) == 0


@pytest.mark.parametrize("name", ["linear", "matmul", "conv"])
def test_double_backward_equals_the_plain_operator(name: str) -> None:
    torch.manual_seed(0)
    ours, plain, tensors = {
        "linear": linear_case((2, 3), True, False),
        "matmul": matmul_case((2, 4), (2,), False),
        "conv": conv_case(2, True, False, 1, 2),
    }[name]
    gradients = []
    for op in (ours, plain):
        leaves = [t.detach().requires_grad_() for t in tensors]
        grads = torch.autograd.grad(op(*leaves).sin().sum(), leaves, create_graph=True)
        torch.autograd.backward([g.square().sum() for g in grads])
        gradients.append([t.grad for t in leaves])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_double_backward_of_deferred_gradients_is_refused() -> None:
    x, weight = values(4, 5).requires_grad_(), values(3, 5).requires_grad_()
    with WeightQueue().deferring():
        out = rt.linear(x, weight).sum()
    with pytest.raises(ProgramError, match="cannot be differentiated again"):
        torch.autograd.grad(out, x, create_graph=True)


def test_a_weight_frozen_before_the_run_gets_no_gradient() -> None:
    weight, queue = values(3, 5).requires_grad_(), WeightQueue()
    with queue.deferring():
        rt.linear(values(4, 5), weight).sum().backward()
    weight.requires_grad_(False)
    queue.run()
    assert weight.grad is None


def test_an_input_changed_before_the_run_is_refused() -> None:
    x, weight, queue = values(4, 5), values(3, 5).requires_grad_(), WeightQueue()
    with queue.deferring():
        rt.linear(x, weight).sum().backward()
    x.add_(1)
    with pytest.raises(ProgramError, match=r"\(3, 5\) was changed"):
        queue.run()


def test_queues_nest_and_can_be_cleared() -> None:
    weight = values(3, 5).requires_grad_()
    outer, inner = WeightQueue(), WeightQueue()
    with outer.deferring():
        with inner.deferring():
            rt.linear(values(4, 5), weight).sum().backward()
        rt.linear(values(4, 5), weight).sum().backward()
    assert (len(outer._jobs), len(inner._jobs)) == (1, 1)
    outer.clear()
    outer.run()
    assert weight.grad is None
    rt.linear(values(4, 5), weight).sum().backward()
    assert weight.grad is not None


def test_queues_of_rank_threads_are_separate() -> None:
    def work(rank: int, transport: Any) -> tuple[int, float]:
        weight, queue = torch.ones(1, 1, requires_grad=True), WeightQueue()
        x = torch.full((1, 1), float(rank))
        for _ in range(50):
            with contextlib.nullcontext() if rank % 2 else queue.deferring():
                out = rt.linear(x, weight)
            out.sum().backward()
        before = len(queue._jobs)
        queue.run()
        assert weight.grad is not None
        return before, float(weight.grad)

    assert run_threads(4, work) == [(50, 0.0), (0, 50.0), (50, 100.0), (0, 150.0)]


def test_backward_in_another_thread_uses_the_queue() -> None:
    """On CUDA, backward runs in a thread of autograd."""
    weight, queue = values(3, 5).requires_grad_(), WeightQueue()
    with queue.deferring():
        out = rt.linear(values(4, 5), weight).sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    assert weight.grad is None
    assert len(queue._jobs) == 1


def test_common_cases_are_bitwise_equal() -> None:
    for batch, bias in itertools.product([(4,), (2, 3)], [True, False]):
        ours, plain, tensors = linear_case(batch, bias, False)
        options: dict[str, Any] = {"times": 1, "leaf": True, "recompute": False}
        grads = (True,) * len(tensors)
        want = step(plain, tensors, grads=grads, queue=None, **options)
        got = step(ours, tensors, grads=grads, queue=WeightQueue(), **options)
        assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))  # type: ignore[arg-type]
