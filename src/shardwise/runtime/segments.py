"""Memory that several processes have: each rank's own segment, seen by all.

Enters: a size. Leaves: a `Segment`, the same range of memory of every rank. Files without a name
hold it, so that nothing is left behind however processes end, and no folder limits its size.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.runtime.links import Links
from shardwise.runtime.sums import Bytes, bytes_of

__all__ = ["Segment", "make_segment"]

SEGMENT = ord("S")
_SIZE = struct.Struct("<Q?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of every rank's memory, as bytes; `mine` is this rank's as a tensor."""

    ranks: tuple[Bytes, ...]
    mine: Tensor

    def offset(self, address: int, num_bytes: int) -> int | None:
        """Where a range of this rank's addresses is in the segment, if it is."""
        offset = address - self.mine.data_ptr()
        return offset if 0 <= offset <= self.mine.numel() - num_bytes else None


def make_segment(links: Links, rank: int, num_bytes: int) -> Segment | str:
    """A segment of so many bytes, full of zeros, or why there is none; all ranks call it."""
    num_bytes = max(num_bytes, 1)
    with contextlib.ExitStack() as opened:
        number, reason = _reserve(num_bytes)
        if number >= 0:
            opened.callback(os.close, number)
        links.tell(SEGMENT, _SIZE.pack(num_bytes, number >= 0), [number] if number >= 0 else [])
        came = links.hear_files(SEGMENT, f"a segment of {num_bytes} bytes")
        for message in came.values():
            for file in message.files:
                opened.callback(os.close, file)
        files = {rank: number}
        for other, message in came.items():
            size, has = _SIZE.unpack(message.body)
            if size != num_bytes:
                links.give_up(f"rank {other} shares {size} bytes, rank {rank} {num_bytes}")
            if not (has and message.files):
                return reason or f"rank {other} has no memory for {num_bytes} bytes"
            files[other] = message.files[0]
        if reason:
            return reason
        maps = [_map(files[other], num_bytes) for other in sorted(files)]
    return Segment(ranks=tuple(bytes_of(each) for each in maps), mine=maps[rank])


def _reserve(num_bytes: int) -> tuple[int, str]:
    """An open file of so many bytes, or -1 and why there is none."""
    number = -1
    try:
        number = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        os.posix_fallocate(number, 0, num_bytes)
    except (OSError, AttributeError) as error:
        if number >= 0:
            os.close(number)
        return -1, f"no shared memory of {num_bytes} bytes: {error}"
    return number, ""


def _map(file: int, num_bytes: int) -> Tensor:
    path = f"/proc/self/fd/{file}"
    found = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    found[:: mmap.PAGESIZE].sum()  # page faults now, not within the first collective
    return found
