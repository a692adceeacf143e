"""Collectives of ranks on one host, through memory that they share.

shared = SharedBuckets.open(group)                # None: the ranks are on several hosts
    bucket = shared.allocate(1_000_000, torch.float32)
    bucket.copy_(gradients)
    shared.all_reduce(bucket).wait()

A rank announces the location of its data (*here*) and waits for the announcements of all others;
does its part of the work directly in all ranks' memory; announces that it is *done*, and waits for
the others. So there are two waits, whatever the number of bytes. Tensors outside of buckets are
copied through the *stage*, a segment of fixed size, piece by piece.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ProgramError, RankError, did_you_mean
from shardwise.runtime.collectives import CommunicationThread, Handle
from shardwise.runtime.collectives.links import ROLL_S, Links, connect

# Sums of several ranks' memory, block by block, in the order of ranks. A block fits a core's cache,
# so that it is read from memory once although it is written several times. numpy adds in the
# calling thread alone and without the GIL; it lacks the floating dtypes below 32 bits, which are
# added in float32 and rounded once.


BLOCK_BYTES = 256 << 10
_SERIAL = 32_767  # elements that torch processes in a single thread

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_NUMPY: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_TORCH: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_KNOWN = {
    getattr(torch, name): np.dtype(name)
    for name in [
        *("float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ]
}


def bytes_of(flat: Tensor) -> Bytes:
    """Return a contiguous tensor's memory."""
    return flat.detach().view(torch.uint8).numpy()


def add_up(sources: Sequence[Bytes], targets: Sequence[Bytes], dtype: torch.dtype, op: str) -> None:
    """Write `sources[0] + sources[1] + …` to all targets, which may be sources themselves."""
    assert len(sources) > 1
    if dtype not in _KNOWN:
        _add_up_narrow(sources, targets, dtype, op)
        return
    terms = [source.view(_KNOWN[dtype]) for source in sources]
    results = [target.view(_KNOWN[dtype]) for target in targets]
    combine, length = _NUMPY[op], BLOCK_BYTES // dtype.itemsize
    scratch = np.empty(length if len(terms) > 2 else 0, dtype=_KNOWN[dtype])
    with np.errstate(all="ignore"):
        for first in range(0, terms[0].size, length):
            block = slice(first, first + length)
            rows = [term[block] for term in terms]
            total, *copies = [result[block] for result in results]
            partial = rows[0]
            for row in rows[1:-1]:
                partial = combine(partial, row, out=scratch[: row.size])
            combine(partial, rows[-1], out=total)
            for copy in copies:
                np.copyto(copy, total)


def _add_up_narrow(
    sources: Sequence[Bytes], targets: Sequence[Bytes], dtype: torch.dtype, op: str
) -> None:
    terms = [torch.from_numpy(source).view(dtype) for source in sources]
    results = [torch.from_numpy(target).view(dtype) for target in targets]
    combine, scratch = _TORCH[op], torch.empty(_SERIAL)
    for first in range(0, terms[0].numel(), _SERIAL):
        block = slice(first, first + _SERIAL)
        rows = [term[block] for term in terms]
        total = scratch[: rows[0].numel()].copy_(rows[0])
        for row in rows[1:]:
            combine(total, row.float(), out=total)
        for result in results:
            result[block].copy_(total)


# The part of each rank in a collective over shared memory.


_LINE_BYTES = 64  # parts of a sum begin at cache lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective of `numel` elements; equal on all ranks."""

    name: str
    op: str
    dtype: torch.dtype
    numel: int
    root: int
    counts: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if self.op and self.op not in _NUMPY:
            raise ProgramError(
                f"unknown operator {self.op!r}{did_you_mean(self.op, _NUMPY)}",
                hint=", ".join(_NUMPY),
            )
        is_known = self.dtype in _KNOWN or self.dtype.is_floating_point
        # Complex numbers are not ordered.
        if self.op and not (is_known and (self.op == "sum" or not self.dtype.is_complex)):
            raise ProgramError(
                f"cannot compute the {self.op} of {self.dtype}", hint="tensor.to(torch.float32)"
            )
        if not 0 <= self.root < self.num_ranks:
            raise ProgramError(f"{self.name}: root {self.root} of {self.num_ranks} ranks")
        if self.name in ("reduce_scatter", "all_gather") and (
            len(self.counts) != self.num_ranks
            or min(self.counts) < 0
            or sum(self.counts) != self.numel
        ):
            raise ProgramError(
                f"{self.name}: counts {self.counts} for {self.numel} elements on "
                f"{self.num_ranks} ranks",
                hint="one count per rank, which add up to the number of elements",
            )

    def __str__(self) -> str:
        op = f" ({self.op})" if self.op else ""
        root = f" with root {self.root}" if self.name in ("reduce", "broadcast") else ""
        counts = f" in {list(self.counts)}" if self.counts else ""
        return f"{self.name}{op} of {self.numel} {str(self.dtype)[6:]}{root}{counts}"

    def read_by_others(self, rank: int, piece: range) -> list[tuple[int, int]]:
        """Return the ranges of a piece that others read from a rank's memory."""
        if self.name == "all_gather":
            return [self._owned(rank, piece)]
        if self.name == "broadcast":
            return [(piece.start, piece.stop)] if rank == self.root else []
        return self._not_summed(rank, piece)

    def written_by_others(self, rank: int, piece: range) -> list[tuple[int, int]]:
        """Return the ranges of a piece that others write to a rank's memory."""
        if self.name == "all_reduce" or (self.name == "reduce" and rank == self.root):
            return self._not_summed(rank, piece)
        return []

    def _not_summed(self, rank: int, piece: range) -> list[tuple[int, int]]:
        first, last = self._summed(rank, piece)
        return [(piece.start, first), (last, piece.stop)]

    def work(self, rank: int, piece: range, views: Sequence[Bytes], own: Bytes) -> None:
        """Do this rank's part of a piece in all ranks' memory; `own` is this rank's."""
        if self.name == "all_gather":
            for other, view in enumerate(views):
                if other != rank:
                    remote = self.bytes_of(self._owned(other, piece), piece)
                    own[remote] = view[remote]
        elif self.name == "broadcast":
            if rank != self.root:
                own[:] = views[self.root]
        else:
            part = self.bytes_of(self._summed(rank, piece), piece)
            parts = [(own if r == rank else view)[part] for r, view in enumerate(views)]
            targets = {"all_reduce": range(self.num_ranks), "reduce": [self.root]}
            to = targets.get(self.name, [rank])
            add_up(parts, [parts[other] for other in to], self.dtype, self.op)

    def bytes_of(self, elements: tuple[int, int], piece: range) -> slice:
        """Return the slice of a range of elements in the bytes of a piece."""
        size = self.dtype.itemsize
        return slice((elements[0] - piece.start) * size, (elements[1] - piece.start) * size)

    def _summed(self, rank: int, piece: range) -> tuple[int, int]:
        """Return the elements of a piece that a rank adds up."""
        if self.name == "reduce_scatter":
            return self._owned(rank, piece)
        line = _LINE_BYTES // self.dtype.itemsize
        lines = -(-len(piece) // line)
        first, last = (lines * r // self.num_ranks * line for r in (rank, rank + 1))
        return piece.start + min(first, len(piece)), piece.start + min(last, len(piece))

    def _owned(self, rank: int, piece: range) -> tuple[int, int]:
        """Return the elements of a piece that belong to a rank by `counts`."""
        ends = list(accumulate(self.counts, initial=0))
        start = min(max(ends[rank], piece.start), piece.stop)
        return start, max(start, min(ends[rank + 1], piece.stop))


# Memory that several processes share: each rank's segment is mapped by all. It is in anonymous
# files, so that nothing remains however processes end, and no file system limits its size.


SEGMENT = ord("S")
_SIZE = struct.Struct("<Q?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of every rank's memory, as bytes; `own` is this rank's as a tensor."""

    ranks: tuple[Bytes, ...]
    own: Tensor

    def offset(self, address: int, num_bytes: int) -> int | None:
        """Return the offset of a range of addresses in this rank's part, if it is inside."""
        offset = address - self.own.data_ptr()
        return offset if 0 <= offset <= self.own.numel() - num_bytes else None


def make_segment(links: Links, rank: int, num_bytes: int) -> Segment | str:
    """Make a segment of zeros, or return the reason of a failure; all ranks call it."""
    num_bytes = max(num_bytes, 1)
    with contextlib.ExitStack() as opened:
        number, reason = _reserve(num_bytes)
        if number >= 0:
            opened.callback(os.close, number)
        links.tell(SEGMENT, _SIZE.pack(num_bytes, number >= 0), [number] if number >= 0 else [])
        messages = links.hear(SEGMENT, f"a segment of {num_bytes} bytes")
        for message in messages.values():
            for file in message.files:
                opened.callback(os.close, file)
        files = {rank: number}
        for other, message in messages.items():
            size, has_memory = _SIZE.unpack(message.body)
            if size != num_bytes:
                links.give_up(f"rank {other} shares {size} bytes, rank {rank} {num_bytes}")
            if not (has_memory and message.files):
                return reason or f"rank {other} has no memory for {num_bytes} bytes"
            files[other] = message.files[0]
        if reason:
            return reason
        maps = [_map(files[other], num_bytes) for other in sorted(files)]
    return Segment(ranks=tuple(map(bytes_of, maps)), own=maps[rank])


def _reserve(num_bytes: int) -> tuple[int, str]:
    """Return an open file of this size, or -1 and the reason."""
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
    result = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    result[:: mmap.PAGESIZE].sum()  # take page faults now, not within the first collective
    return result


TIMEOUT_S = 300.0
STAGE_BYTES = 16 << 20
HERE, DONE = ord("H"), ord("D")
_STAGE = 0  # the number of the stage's segment
_PLACE = struct.Struct("<QQ")  # segment and offset, before the text of the call


class SharedBuckets:
    """Memory and collectives of the ranks of a group that are on one host.

    All ranks call the same methods in the same order. A thread runs collectives one after the
    other; a tensor may not be used until its handle is done. After an error, all later collectives
    fail with it. `open` creates an instance.
    """

    def __init__(self, links: Links, stage: Segment, timeout_s: float) -> None:
        self.rank, self.num_ranks = links.rank, len(links.names)
        self.timeout_s = timeout_s
        self._links = links
        self._segments: dict[int, Segment] = {_STAGE: stage}
        self._stage_bytes = stage.own.numel()
        self._num_segments = 1
        self._warned = False
        self._thread = CommunicationThread("shared-memory")
        weakref.finalize(self, links.close)

    @classmethod
    def open(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        stage_bytes: int = STAGE_BYTES,
    ) -> SharedBuckets | None:
        """Connect all ranks of the group; return None on all of them if they cannot share memory.

        Rank 0 warns about the reason, except if ranks are on several hosts, as is usual.
        """
        links = connect(group, timeout_s)
        if isinstance(links, Links):
            stage = make_segment(links, links.rank, stage_bytes)
            if isinstance(stage, Segment):
                return cls(links, stage, timeout_s)
            links.close()
            _warn(dist.get_rank(), stage)
        elif "hosts" not in links:
            _warn(dist.get_rank(), links)
        return None

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor of zeros in shared memory: a *bucket*, equally large on all ranks.

        Collectives work on it, and on contiguous parts of it, without copies. Other ranks change
        it only within a collective. If memory does not suffice, it is an ordinary tensor on all
        ranks, and rank 0 warns once. A bucket stays shared until `free`.
        """
        segments: list[Segment | str] = []
        size = numel * dtype.itemsize
        self._start(lambda: segments.append(make_segment(self._links, self.rank, size))).wait()
        number, self._num_segments = self._num_segments, self._num_segments + 1
        (segment,) = segments
        if isinstance(segment, str):
            if not self._warned:
                _warn(self._links.names[self.rank], segment)
            self._warned = True
            return torch.zeros(numel, dtype=dtype)
        self._segments[number] = segment
        return segment.own[:size].view(dtype)

    def free(self, bucket: Tensor) -> None:
        """Stop sharing a bucket; its memory is freed when no tensor uses it.

        All ranks call it, while no collective uses the bucket.
        """
        location = self._find(bucket)
        if location is not None:
            del self._segments[location[0]]

    def is_resident(self, tensor: Tensor) -> bool:
        """Return whether collectives of this tensor need no copies."""
        return tensor.is_contiguous() and self._find(tensor) is not None

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Replace the tensor by the sum (or "max", "min") over all ranks."""
        return self._call("all_reduce", tensor, op=op)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = "sum") -> Handle:
        """Reduce to rank `root` only; the values of other ranks stay the same."""
        return self._call("reduce", tensor, op=op, root=root)

    def reduce_scatter(self, tensor: Tensor, counts: Sequence[int], op: str = "sum") -> Handle:
        """Replace this rank's part by its sum, in consecutive parts of `counts` elements.

        The other parts are undefined afterwards.
        """
        return self._call("reduce_scatter", tensor, op=op, counts=counts)

    def all_gather(self, tensor: Tensor, counts: Sequence[int]) -> Handle:
        """Fill in the parts of the other ranks; this rank's part is already in place."""
        return self._call("all_gather", tensor, counts=counts)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Replace the tensor by the one of rank `root`."""
        return self._call("broadcast", tensor, root=root)

    def close(self) -> None:
        """End after the collectives started so far; buckets stay usable as ordinary memory."""
        self._thread.close(self.timeout_s)
        self._links.close()
        self._segments.clear()

    def _call(
        self, name: str, tensor: Tensor, *, op: str = "", root: int = 0, counts: Sequence[int] = ()
    ) -> Handle:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ProgramError(
                f"{name} of a {tensor.layout} tensor on {tensor.device} in shared memory",
                hint="tensor.cpu(), or the process group's own collective",
            )
        call = Call(
            name=name,
            op=op,
            dtype=tensor.dtype,
            numel=tensor.numel(),
            root=root,
            counts=tuple(counts),
            num_ranks=self.num_ranks,
        )
        pieces = 1 + tensor.nbytes // self._stage_bytes
        return self._start(lambda: self._run(call, tensor.detach()), pieces)

    def _start(self, job: Callable[[], None], pieces: int = 1) -> Handle:
        def run() -> None:
            try:
                job()
            except RankError:
                raise
            except Exception as error:
                self._links.give_up(f"{type(error).__name__}: {error}")

        # Two waits for each piece, and as much again for the work on it.
        return self._thread.start(run, 4 * pieces * self.timeout_s + ROLL_S)

    def _find(self, flat: Tensor) -> tuple[int, int] | None:
        """Return a tensor's segment number and offset, if it is in a bucket."""
        size = flat.numel() * flat.element_size()
        for number, segment in self._segments.items():
            offset = segment.offset(flat.data_ptr(), size)
            if number != _STAGE and offset is not None:
                return number, offset
        return None

    def _run(self, call: Call, tensor: Tensor) -> None:
        if not call.numel or self.num_ranks == 1:
            return
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        own = bytes_of(flat.view(-1))
        place = self._find(flat)
        size, first = call.dtype.itemsize, 0
        piece = max(1, self._stage_bytes // size)
        while first < call.numel:
            stop = min(call.numel, first + piece)
            places = self._announce(call, own, place, range(first, stop))
            if all(segment != _STAGE for segment, _ in places):
                stop = call.numel  # no rank needs staging: the rest is one piece
            part = own[first * size : stop * size]
            views = [
                self._segments[segment].ranks[rank][offset:][: len(part)]
                for rank, (segment, offset) in enumerate(places)
            ]
            call.work(self.rank, range(first, stop), views, part)
            self._links.tell(DONE)
            self._links.hear(DONE, str(call))
            if place is None:
                for written in call.written_by_others(self.rank, range(first, stop)):
                    where = call.bytes_of(written, range(first, stop))
                    part[where] = views[self.rank][where]
            first = stop
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _announce(
        self, call: Call, own: Bytes, place: tuple[int, int] | None, piece: range
    ) -> list[tuple[int, int]]:
        """Announce where this rank has the piece; return the places of all ranks."""
        size, text = call.dtype.itemsize, str(call).encode()
        if place is None:
            stage = self._segments[_STAGE].ranks[self.rank]
            part = own[piece.start * size : piece.stop * size]
            for read in call.read_by_others(self.rank, piece):
                where = call.bytes_of(read, piece)
                stage[where] = part[where]
            here = (_STAGE, 0)
        else:
            here = (place[0], place[1] + piece.start * size)
        self._links.tell(HERE, _PLACE.pack(*here) + text)
        reported = self._links.hear(HERE, str(call))
        for other, message in reported.items():
            if message.body[_PLACE.size :] != text:
                name = self._links.names[other]
                remote = message.body[_PLACE.size :].decode()
                self._links.give_up(f"{call}, while rank {name} runs {remote}")
        places = {other: _PLACE.unpack_from(m.body) for other, m in reported.items()}
        places[self.rank] = here
        return [(segment, offset) for _, (segment, offset) in sorted(places.items())]


def _warn(rank: int, reason: str) -> None:
    if rank == 0:
        warnings.warn(
            f"{reason}; gradients use the process group's collectives instead",
            RuntimeWarning,
            stacklevel=3,
        )
