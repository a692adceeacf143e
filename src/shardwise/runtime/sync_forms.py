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
def space_for(rows: int) -> int:
    """Return the rows that the next message has space for: their numbers vary by the root."""
    return rows + math.isqrt(rows)


def record_bytes(width: int, item_bytes: int) -> int:
    """Return the bytes of one row of a gradient and its index.

    >>> record_bytes(6, 8), record_bytes(6, 2)
    (56, 16)
    """
    return width * item_bytes + max(4, item_bytes)


class RowExchange:
    """The exchange of rows of tables of one width over an axis, step after step.

    Tables count as one table, in which each begins at one of the rows `starts`; the last of them is
    the number of all rows. A row travels behind its index, as a record of elements of its dtype.
    The first record of a gathered message has the number of rows instead of an index. All ranks
    know the message's size from the rank's last one; rows beyond it follow in a second message.
    """

    def __init__(self, axis: Axis, starts: Sequence[int], width: Sequence[int]) -> None:
        self.axis, self.starts, self.width = axis, list(starts), tuple(width)
        self._space = [0] * axis.size

    def gather(self, grads: Sequence[Tensor], dtype: torch.dtype) -> Exchange:
        """Return the sum of the ranks' sparse gradients on every rank, as one table."""
        indices, rows = yield from self.gather_rows(*self._joined(grads, dtype))
        return Pending(_sparse(indices, rows, (self.starts[-1], *self.width)))

    def gather_rows(
        self, indices: Tensor, rows: Tensor
    ) -> Generator[Pending, Tensor, tuple[Tensor, Tensor]]:
        """Return the indices and rows of all ranks."""
        axis, space, own = self.axis, self._space, self._records(indices, rows)
        length = own.shape[1]
        message = own.new_empty(1 + max(space[axis.index], len(own)), length)
        message[0] = self._records(indices.new_full((1,), len(own)), rows.new_zeros(1, *self.width))
        message[1 : 1 + len(own)] = own
        first, rest = message.tensor_split([1 + space[axis.index]])
        sizes = [(1 + size) * length for size in space]
        every = yield axis.all_gather(first.view(-1), sizes)
        parts = [part.view(-1, length) for part in torch.split(every, sizes)]
        counts = self._indices(torch.stack([part[0] for part in parts])).tolist()
        pairs = zip(counts, space, strict=True)
        missing = [max(0, count - known) * length for count, known in pairs]
        parts = [part[1 : 1 + count] for part, count in zip(parts, counts, strict=True)]
        if any(missing):
            every = yield axis.all_gather(rest.view(-1), missing)
            parts += [part.view(-1, length) for part in torch.split(every, missing)]
        self._space = [space_for(count) for count in counts]
        return self._read(torch.cat(parts))

    def send(self, grad: Tensor, dtype: torch.dtype) -> Exchange:
        """Send each row to its owner, and return the sum of the rows that this rank owns.

        Here `starts` are the first rows of the ranks' ranges.
        """
        axis, starts = self.axis, self.starts
        indices, rows = self._joined([grad], dtype)
        ends = torch.searchsorted(indices, indices.new_tensor(starts)).tolist()
        sent = [end - begin for begin, end in itertools.pairwise(ends)]
        table = (yield _counts(sent, axis, grad.device)).view(axis.size, axis.size)
        records = self._records(indices, rows)
        sizes = [[n * records.shape[1] for n in c] for c in (sent, table[:, axis.index].tolist())]
        every = yield axis.all_to_all(records.view(-1), *sizes)
        begin, end = starts[axis.index : axis.index + 2]
        indices, rows = self._read(every.view(-1, records.shape[1]))
        return Pending(_sparse(indices - begin, rows, (end - begin, *self.width)))

    def split(self, table: Tensor) -> list[Tensor]:
        """Return the sparse gradient of each table."""
        if len(self.starts) == 2:
            return [table]
        ranges = itertools.pairwise(self.starts)
        return [table.narrow_copy(0, begin, end - begin) for begin, end in ranges]

    def forget(self) -> None:
        """Expect nothing of the next messages, after a step that failed."""
        self._space = [0] * self.axis.size

    def _joined(self, grads: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the indices and rows of all tables, each row once."""
        grad = grads[0]
        if len(grads) > 1:
            pairs = zip(grads, self.starts, strict=False)
            indices = torch.cat([grad._indices()[0] + start for grad, start in pairs])
            rows = torch.cat([grad._values() for grad in grads])
            grad = _sparse(indices, rows, (self.starts[-1], *self.width))
        grad = grad.coalesce()
        return grad.indices()[0], grad.values().to(dtype)

    def _records(self, indices: Tensor, rows: Tensor) -> Tensor:
        """Return a matrix of the indices and rows, as bits of the rows' dtype."""
        at = indices[:, None].repeat(1, max(1, rows.element_size() // 8))
        return torch.cat([at.to(self._integer(rows.dtype)).view(rows.dtype), rows.flatten(1)], 1)

    def _read(self, records: Tensor) -> tuple[Tensor, Tensor]:
        rows = records[:, records.shape[1] - math.prod(self.width) :]
        return self._indices(records), rows.reshape(-1, *self.width)

    def _indices(self, records: Tensor) -> Tensor:
        at = records[:, : records.shape[1] - math.prod(self.width)].contiguous()
        return at.view(self._integer(records.dtype))[:, 0].long()

    def _integer(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int64 if max(dtype.itemsize, self.starts[-1] >> 28) >= 8 else torch.int32


def _counts(numbers: Sequence[int], axis: Axis, device: torch.device) -> Pending:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    return axis.all_gather(own, [len(numbers)] * axis.size)


def _sparse(indices: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    at = indices[None]
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
