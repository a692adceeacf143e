"""Defer weight gradients, as zero-bubble pipeline schedules require.

A schedule splits backward (B) into input gradients (I) and weight gradients (W). Generated code
calls these operators instead of torch's. Without a queue they are equivalent:

    queue = WeightQueue()
    with queue.deferring():
        output = stage(x)                       # F
    torch.autograd.backward(output, gradient)   # I; with run() at once: B
    queue.run()                                 # W

The queue is chosen in forward and not in backward, for two reasons. Autograd calls a leaf's
post-accumulate hooks even when no gradient arrived, so the leaf must not be part of the graph at
all. And backward on CUDA runs in a thread of autograd's own, so thread-local state of forward has
to travel with the graph; ranks that are threads of one process do not interfere.

`run` gives the gradients to autograd, which sums those of one leaf, adds them to its `.grad` and
calls its hooks once, as in a plain backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.errors import ProgramError

Wanted = tuple[bool, bool]
Gradients = tuple[Tensor | None, Tensor | None]


_local = threading.local()


class _Job:
    """The gradients of one call's weight and bias, still to be computed."""

    __slots__ = ("_grad", "_operator", "_versions", "_x", "bias", "weight")

    def __init__(
        self, operator: _Operator, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self._operator, self.weight, self.bias = operator, weight, bias
        self._grad: Tensor | None = grad
        self._x: Tensor | None = x
        self._versions = grad._version, x._version

    def compute(self, wanted: Wanted) -> Gradients:
        """Return the gradients, and release the tensors they are computed from."""
        grad, x = self._grad, self._x
        assert grad is not None
        assert x is not None
        self._grad = self._x = None
        if (grad._version, x._version) != self._versions:
            raise ProgramError(
                f"the input or output gradient of an operator with a weight of shape "
                f"{tuple(self.weight.shape)} was changed before the weight gradient was computed",
                hint="run the queue before buffers are reused",
            )
        return self._operator.weight_gradients(grad, x, self.weight, self.bias, wanted)


class _Later(torch.autograd.Function):
    """A node whose backward is a job, so that autograd accumulates its results."""

    @staticmethod
    def forward(ctx: Any, job: _Job, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.job = job
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.job.compute(ctx.needs_input_grad[1:])


class WeightQueue:
    """Deferred weight gradients of one or several backward passes, in order."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []

    @contextlib.contextmanager
    def deferring(self) -> Iterator[WeightQueue]:
        """Collect the weight gradients of this thread's computation in the body."""
        outer, _local.queue = getattr(_local, "queue", None), self
        try:
            yield self
        finally:
            _local.queue = outer

    def put(self, job: _Job) -> None:
        """Defer a weight gradient."""
        self._jobs.append(job)

    def run(self) -> None:
        """Compute the gradients, add them to the leaves' `.grad`, and call their hooks."""
        jobs, self._jobs = self._jobs, []
        with torch.enable_grad():  # reversed, because autograd runs the newest node first
            ends = [_Later.apply(job, job.weight, job.bias) for job in reversed(jobs)]  # type: ignore[no-untyped-call]
        ends = [end for end in ends if end.requires_grad]  # not frozen in the meantime
        if ends:
            torch.autograd.backward(ends, [torch.zeros_like(end) for end in ends])

    def clear(self) -> None:
        """Drop all deferred gradients, after an error."""
        self._jobs.clear()


class _Deferrable(torch.autograd.Function):
    """An operator whose weight and bias autograd sees as `to_weight` and `to_bias`.

    These are the weight and bias themselves; or, with a queue, an anchor that makes autograd call
    this backward, and the bias if it is not a leaf.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: _Operator,
        queue: WeightQueue | None,
        leaves: tuple[Tensor, Tensor | None],
        x: Tensor,
        to_weight: Tensor,
        to_bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.operator, ctx.queue, ctx.leaves = operator, queue, leaves
        # The same tensors with and without a queue: recomputation may run without it.
        ctx.save_for_backward(x, leaves[0] if x.requires_grad else None)
        return operator.call(x, *leaves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 6
        operator, (leaf, bias) = ctx.operator, ctx.leaves
        x, weight = ctx.saved_tensors
        x_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad[3:]
        to_x = operator.input_gradient(grad, x, weight) if x_wanted else None
        if ctx.queue is None:
            wanted = (weight_wanted, bias_wanted)
            return None, None, None, to_x, *operator.weight_gradients(grad, x, leaf, bias, wanted)
        if torch.is_grad_enabled():
            raise ProgramError("deferred weight gradients cannot be differentiated again")
        ctx.queue.put(_Job(operator, grad, x, leaf, None if bias_wanted else bias))
        to_bias = None
        if bias_wanted:
            to_bias = operator.weight_gradients(grad, x, leaf, bias, (False, True))[1]
        return None, None, None, to_x, None, to_bias


def _call(operator: _Operator, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call the operator, with deferrable weight gradients where the weight is a leaf."""
    if (
        not weight.is_leaf
        or not weight.requires_grad
        or not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _autocast(weight.device.type)
    ):
        return operator.call(x, weight, bias)
    queue: WeightQueue | None = getattr(_local, "queue", None)
    to_weight, to_bias = weight, bias
    if queue is not None:
        to_weight = weight.new_empty((), requires_grad=True)
        to_bias = None if bias is None or bias.is_leaf else bias
    out = _Deferrable.apply(operator, queue, (weight, bias), x, to_weight, to_bias)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


def _autocast(device_type: str) -> bool:
    available = torch.amp.autocast_mode.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def _rows(tensor: Tensor) -> Tensor:
    """Flatten all dims but the last, also of a tensor without elements."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


# Operators of an input, a weight and perhaps a bias. `weight_gradients` are the wanted ones of
# weight and bias; they do not read the weight's values.


class _Linear:
    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _rows(grad).mm(weight.conj()).view(x.shape)

    def weight_gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
    ) -> Gradients:
        rows = _rows(grad)
        to_weight = rows.t().mm(_rows(x).conj()) if wanted[0] else None
        return to_weight, rows.sum(0) if wanted[1] else None


class _Matmul:
    """`x @ weight`, and `bias + x @ weight` where there is a bias."""

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return _rows(grad).mm(weight.t().conj()).view(x.shape)
        return torch.matmul(grad, weight.mT.conj()).sum_to_size(x.shape)

    def weight_gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
    ) -> Gradients:
        to_weight = to_bias = None
        if wanted[0] and weight.dim() == 2:
            to_weight = _rows(x).t().conj().mm(_rows(grad))
        elif wanted[0]:
            to_weight = torch.matmul(x.mT.conj(), grad).sum_to_size(weight.shape)
        if wanted[1]:
            assert bias is not None
            to_bias = grad.sum_to_size(bias.shape)
        return to_weight, to_bias


@dataclasses.dataclass(frozen=True, slots=True)
class _Embedding:
    padding_idx: int

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, x, self.padding_idx)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
    ) -> Gradients:
        to_weight = torch.ops.aten.embedding_dense_backward(
            grad, x, weight.shape[0], self.padding_idx, False
        )
        return to_weight, None


@dataclasses.dataclass(frozen=True, slots=True)
class _Conv:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *dataclasses.astuple(self))

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, self._backward(grad, x, weight, None, [True, False, False])[0])

    def weight_gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
    ) -> Gradients:
        # The weight gives shape and layout only; its memory may be gone (zero 3).
        result = self._backward(grad, x, torch.empty_like(weight), bias, [False, *wanted])
        return result[1], result[2]

    def _backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: list[bool]
    ) -> Any:
        shape = None if bias is None else list(bias.shape)
        return torch.ops.aten.convolution_backward(
            grad, x, weight, shape, *dataclasses.astuple(self), mask
        )


_Operator = _Linear | _Matmul | _Embedding | _Conv
_LINEAR, _MATMUL = _Linear(), _Matmul()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call `torch.nn.functional.linear`, with a deferrable gradient of weight and bias."""
    if weight.dim() != 2:
        return torch.nn.functional.linear(x, weight, bias)
    return _call(_LINEAR, x, weight, bias)


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Call `torch.addmm`, with a deferrable gradient of weight and bias."""
    return _call(_MATMUL, x, weight, bias)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Call `torch.matmul`, with a deferrable gradient of the weight, its second operand."""
    if weight.dim() < 2 or (x.dim() < 2 and weight.dim() > 2):
        return torch.matmul(x, weight)
    return _call(_MATMUL, x, weight)


def embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """Call `aten.embedding`, with a deferrable gradient of the weight."""
    return _call(_Embedding(padding_idx), indices, weight)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Call `aten.convolution`, with a deferrable gradient of weight and bias."""
    sizes = tuple(stride), tuple(padding), tuple(dilation)
    operator = _Conv(*sizes, transposed, tuple(output_padding), groups)
    return _call(operator, x, weight, bias)
