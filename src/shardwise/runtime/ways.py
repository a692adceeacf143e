"""Collectives that take another way than the library's: solved programs, or shared memory.

Enters: a plan's choices, how a program follows from one (`derive`), and process groups. Leaves:
`Ways`, which a transport asks first: a `Pending`, or None where the library is to do it. What is
answered depends on the operation, the group and the sizes alone: all ranks of a group agree.

Programs are made once for each size and kept. Sums are the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.messages import CollectiveChoice, MessageProgram
from shardwise.runtime.messenger import TIMEOUT_S, Messenger
from shardwise.runtime.transport import Group, Pending

__all__ = ["Derive", "Ways"]

Derive = Callable[
    [CollectiveChoice, tuple[int, ...], int, int, Sequence[int]], MessageProgram | None
]
ADDED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Ways:
    """The ways of the collectives of this rank's groups."""

    def __init__(
        self,
        choices: Sequence[CollectiveChoice] = (),
        derive: Derive | None = None,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._derive, self._timeout_s = derive, timeout_s or TIMEOUT_S
        rank, groups = dist.get_rank(), groups or {}
        self._choices = {
            (choice.operation, ranks): choice
            for choice in choices
            if not choice.is_library
            for ranks in choice.groups
            if rank in ranks
        }
        for _, ranks in self._choices:
            if ranks not in groups:
                raise ProgramError(
                    f"the plan solves a collective of ranks {ranks}, who never talk as a group",
                    hint="sw.choose_collectives(plan, cluster)",
                )
        self._messengers = {
            ranks: Messenger(groups[ranks], timeout_s=self._timeout_s)
            for ranks in dict.fromkeys(ranks for _, ranks in self._choices)
        }
        self._programs: dict[object, MessageProgram | None] = {}

    @property
    def num_programs(self) -> int:
        """How many sizes have had a program."""
        return len(self._programs)

    def all_reduce(self, flat: Tensor, op: str, group: Group) -> Pending | None:
        """Sum in place."""
        if op != "sum" or flat.dtype not in ADDED:
            return None
        program = self._program("all_reduce", group, flat.numel(), flat.element_size())
        if program is None:
            return None
        host = self._staged(flat, group)
        handle = self._messengers[group.ranks].start(program, host)
        back = None if host is flat else lambda: flat.copy_(host)
        return _after(flat, handle.wait, back)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], group: Group) -> Pending | None:
        """This rank's part of the sum; `flat` stays as it is."""
        if flat.dtype not in ADDED:
            return None
        program = self._program(
            "reduce_scatter", group, flat.numel(), flat.element_size(), tuple(sizes)
        )
        if program is None:
            return None
        host = self._staged(flat, group)
        data = host.clone() if host is flat else host
        handle = self._messengers[group.ranks].start(program, data)
        first, count = sum(sizes[: group.index]), sizes[group.index]

        def mine(_: Tensor) -> Tensor:
            # A copy: a slice would keep the memory of the whole alive.
            return data[first : first + count].to(flat.device, copy=True)

        return _after(data, handle.wait).then(mine)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], group: Group, out: Tensor | None
    ) -> Pending | None:
        """All ranks' parts, as bytes of any type."""
        unit = flat.element_size()
        counts = tuple(size * unit for size in sizes)
        program = self._program("all_gather", group, sum(counts), 1, counts)
        if program is None:
            return None
        whole = flat.new_empty(sum(sizes)) if out is None else out
        host = self._staged(whole, group, empty=True)
        part = host[sum(sizes[: group.index]) :][: sizes[group.index]]
        if part.data_ptr() != flat.data_ptr():
            part.copy_(flat)
        handle = self._messengers[group.ranks].start(program, host.view(torch.uint8))
        back = None if host is whole else lambda: whole.copy_(host)
        return _after(whole, handle.wait, back)

    def _program(
        self,
        operation: str,
        group: Group,
        numel: int,
        item_bytes: int,
        counts: tuple[int, ...] = (),
    ) -> MessageProgram | None:
        choice = self._choices.get((operation, group.ranks))
        if choice is None or self._derive is None or numel * item_bytes < choice.min_bytes:
            return None
        key = (operation, group.ranks, numel, item_bytes, counts)
        if key not in self._programs:
            self._programs[key] = self._derive(choice, group.ranks, numel, item_bytes, counts)
        return self._programs[key]

    def _staged(self, tensor: Tensor, group: Group, *, empty: bool = False) -> Tensor:
        """The tensor where its group's messages can take it from: gloo sends from host memory."""
        pg = self._messengers[group.ranks].group
        if not tensor.is_cuda or "nccl" in str(dist.get_backend(pg)):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype) if empty else tensor.cpu()


def _after(
    result: Tensor, wait: Callable[[], None], finish: Callable[[], object] | None = None
) -> Pending:
    def done() -> None:
        wait()
        if finish is not None:
            finish()

    return Pending(result, done)
