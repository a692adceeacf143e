"""The interface of a transport between ranks, and the transport of a single rank.

A transport moves 1-D contiguous tensors within a `Group` of ranks. Everything that knows about
dims, splits and gradients is built on these operations. Each returns at once with a `Pending`,
whose `wait()` returns the result. All ranks of a group call the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from torch import Tensor

from shardwise.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Group:
    """Global ranks in ascending order, and this rank's index among them."""

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


class Pending:
    """A tensor in flight; `wait()` returns it, any number of times."""

    __slots__ = ("_finish", "_poll", "_result")

    def __init__(
        self,
        result: Tensor,
        finish: Callable[[], object] | None = None,
        poll: Callable[[], bool] | None = None,
    ) -> None:
        self._result, self._finish, self._poll = result, finish, poll

    def wait(self) -> Tensor:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return self._result

    @property
    def is_done(self) -> bool:
        """Whether waiting is certain to return at once."""
        return self._finish is None or (self._poll is not None and self._poll())

    def then(self, after: Callable[[Tensor], Tensor]) -> Pending:
        """Return this tensor transformed once it has arrived."""
        chained = Pending(self._result)

        def finish() -> None:
            chained._result = after(self.wait())

        chained._finish = finish
        return chained


def after(
    result: Tensor,
    requests: Sequence[Any],
    finish: Callable[[], object] | None = None,
    keep: Tensor | None = None,
    polled: bool = False,
) -> Pending:
    """Return the result once all requests are done; `keep` stays allocated until then.

    A `polled` one knows whether its requests are done, which gloo's do not tell.
    """

    def wait() -> None:
        for request in requests:
            if request is not None:
                request.wait()
        if finish is not None:
            finish()
        _ = keep

    def is_done() -> bool:
        return all(request is None or request.is_completed() for request in requests)

    return Pending(result, wait, is_done if polled else None)


Flat = tuple[Tensor, int]  # a message: its flat tensor, and the rank at its other end


class Transport(Protocol):
    """Moves flat tensors between the ranks of a group."""

    rank: int
    world_size: int

    @property
    def in_order(self) -> bool:
        """Whether an exchange ends before the next one begins, as on NCCL."""
        ...

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending:
        """Reduce in place with `op` ("sum", "max", "min"); the same bits on every rank."""
        ...

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None = None
    ) -> Pending:
        """Concatenate all ranks' `flat`, rank i having `sizes[i]` elements.

        `flat` may be the very slice of `out` that it belongs to.
        """
        ...

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending:
        """Sum all ranks' `flat` and return this rank's part of it, in parts of `sizes` elements."""
        ...

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], group: Group
    ) -> Pending:
        """Send part i of `flat` to rank i; concatenate the parts received, in rank order."""
        ...

    def broadcast(self, flat: Tensor, root: int, group: Group) -> Pending:
        """Overwrite `flat` with the tensor of the group's `root`-th rank."""
        ...

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        """Start sends and receives as one operation; return them in the same order.

        Messages have no tags: the k-th send from one rank to another meets its k-th receive. On a
        transport that is `in_order`, both belong to the same round of a `MessageOrder`.
        """
        ...


class LocalTransport:
    """The transport of a single rank, whose axes never communicate."""

    rank = 0
    world_size = 1

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ProgramError(f"a single rank cannot communicate: {[*args[1:], *kwargs.values()]}")

    all_reduce = all_gather = reduce_scatter = all_to_all = broadcast = _refuse
    in_order = False

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        return self._refuse(self, sends, receives) if sends or receives else ([], [])
