"""Forms of gradient synchronization that take several collectives.

An exchange is a generator: it yields what it must receive before it can go on (the numbers of
rows that other ranks will send, for example) and returns the pending gradient. The reducer
advances exchanges in the same order on all ranks while backward still runs.
"""

import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shardwise.runtime.mesh import Axis
from shardwise.runtime.transport import Pending
from shardwise.shares import part

Result = TypeVar("Result")
Exchange = Generator[Pending, Tensor, Pending]


def complete(exchange: Generator[Pending, Tensor, Result]) -> Result:
    """Run all collectives that an exchange yields, and return its result."""
    try:
        pending = next(exchange)
        while True:
            pending = exchange.send(pending.wait())
    except StopIteration as stop:
        return cast(Result, stop.value)


def all_reduce_by_node(flat: Tensor, axis: Axis, node_ranks: int) -> Exchange:
    """Sum in place: scatter inside of each node, sum parts across nodes, gather inside."""
    inside, across = axis.levels(node_ranks)
    sizes = [part(flat.numel(), inside.size, i)[1] for i in range(inside.size)]
    own = yield inside.reduce_scatter(flat, sizes)
    own = yield across.all_reduce(own.contiguous())
    return inside.all_gather(own, sizes, out=flat)


# ------------------------------------------------------------ rows of sparse gradients
def gather_rows(grad: Tensor, axis: Axis, dtype: torch.dtype) -> Exchange:
    """Return the sum of the ranks' sparse gradients on every rank; each row occurs once."""
    every, rows = yield from gather_by_index(*_rows(grad, dtype), axis)
    return rows.then(lambda flat: _sparse(every, flat, grad.shape))


def gather_by_index(
    indices: Tensor, rows: Tensor, axis: Axis
) -> Generator[Pending, Tensor, tuple[Tensor, Pending]]:
    """Return the indices of all ranks' rows, and the rows in flight as a flat tensor."""
    counts = (yield _counts([len(indices)], axis, rows.device)).tolist()
    width = math.prod(rows.shape[1:])
    pending = axis.all_gather(indices, counts)
    flat = axis.all_gather(rows.reshape(-1), [count * width for count in counts])
    return (yield pending), flat


def send_rows(grad: Tensor, axis: Axis, dtype: torch.dtype, ranges: Sequence[int]) -> Exchange:
    """Send each row to its owner, and return the sum of the rows that this rank owns.

    `ranges` are the first rows of the ranks' ranges, and the number of all rows.
    """
    indices, values = _rows(grad, dtype)
    width = math.prod(values.shape[1:])
    ends = torch.tensor(ranges[1:], device=grad.device, dtype=indices.dtype)
    owners = torch.searchsorted(ends, indices, right=True)
    sent = torch.bincount(owners, minlength=axis.size).tolist()
    table = (yield _counts(sent, axis, grad.device)).view(axis.size, axis.size)
    received = table[:, axis.index].tolist()
    pending = axis.all_to_all(indices, sent, received)
    rows = axis.all_to_all(
        values.reshape(-1), [n * width for n in sent], [n * width for n in received]
    )
    arrived = yield pending
    begin, end = ranges[axis.index], ranges[axis.index + 1]
    shape = (end - begin, *grad.shape[1:])
    return rows.then(lambda flat: _sparse(arrived - begin, flat, shape))


def _rows(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices and rows of a sparse gradient, each row once."""
    grad = grad.coalesce()
    return grad.indices()[0].int(), grad.values().to(dtype)


def _counts(numbers: Sequence[int], axis: Axis, device: torch.device) -> Pending:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    return axis.all_gather(own, [len(numbers)] * axis.size)


def _sparse(indices: Tensor, flat: Tensor, shape: Sequence[int]) -> Tensor:
    rows = flat.view(-1, *shape[1:])
    at = indices[None].long()
    return torch.sparse_coo_tensor(at, rows, tuple(shape), check_invariants=False).coalesce()


# ------------------------------------------------------------ factors of weight gradients
class _Factors(torch.autograd.Function):
    """A linear layer whose weight gradient is recorded as two factors on the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        for_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None
        factors = ctx.weight.__dict__.setdefault("factors", [])
        factors.append((grad.detach().flatten(0, -2), x.detach().flatten(0, -2)))
        # Without elements: autograd only announces that the gradient has arrived.
        at, rows = x.new_empty(2, 0, dtype=torch.int64), x.new_empty(0)
        return for_x, torch.sparse_coo_tensor(at, rows, weight.shape, check_invariants=False)


def linear_factors(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Call `torch.nn.functional.linear`, with a weight gradient that ranks exchange as factors."""
    if not isinstance(weight, torch.nn.Parameter) or x.dim() < 2:
        return torch.nn.functional.linear(x, weight, bias)
    out: Tensor = _Factors.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


def factors_are_smaller(rows: int, shape: Sequence[int]) -> bool:
    """Return whether gathering factors with this many rows takes fewer bytes than summing products.

    >>> factors_are_smaller(64, (4096, 4096)), factors_are_smaller(64, (64, 32))
    (True, False)
    """
    return rows * sum(shape) < 2 * math.prod(shape)


def take_factors(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Remove and return the factors that backward recorded, those of all calls in one."""
    recorded = leaf.__dict__.pop("factors", [])
    if not recorded:
        return leaf.new_empty(0, leaf.shape[0]), leaf.new_empty(0, leaf.shape[1])
    left, right = zip(*recorded, strict=True)
    return torch.cat(left), torch.cat(right)


def gather_factors(leaf: Tensor, axis: Axis, dtype: torch.dtype) -> Exchange:
    """Return the sum of the ranks' products, of gathered factors unless products are smaller.

    A program for other batches may produce the product itself on some rank.
    """
    shape, product, leaf.grad = leaf.shape, leaf.grad, None
    left, right = take_factors(leaf)
    is_product = product is not None and not product.is_sparse
    counts = (yield _counts([-1 if is_product else len(left)], axis, leaf.device)).tolist()
    if -1 in counts or not factors_are_smaller(sum(counts), shape):
        if product is None or product.is_sparse:
            product = left.t() @ right
        return axis.all_reduce(product.to(dtype).contiguous())
    flat = torch.cat([left.reshape(-1), right.reshape(-1)]).to(dtype)

    def multiply(every: Tensor) -> Tensor:
        sizes = itertools.chain.from_iterable((n * shape[0], n * shape[1]) for n in counts)
        parts = torch.split(every, list(sizes))
        lefts = torch.cat([p.view(-1, shape[0]) for p in parts[::2]])
        rights = torch.cat([p.view(-1, shape[1]) for p in parts[1::2]])
        return lefts.t() @ rights

    return axis.all_gather(flat, [n * sum(shape) for n in counts]).then(multiply)
