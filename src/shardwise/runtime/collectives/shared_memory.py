"""Collectives of ranks on one host, through memory that they share.

shared = SharedBuckets.open(group)                # None: the ranks are on several hosts
    bucket = shared.allocate(1_000_000, torch.float32)
    bucket.copy_(gradients)
    shared.all_reduce(bucket).wait()

A rank announces where its data are (*here*) and waits until all others have; does its part of the
work directly in everyone's memory; announces that it is *done*, and waits for the others. So there
are two waits, whatever the number of bytes. Tensors outside of buckets go through the *stage*, a
segment of fixed size, piece by piece.
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
_SERIAL = 32_767  # elements of which torch makes no work for several threads

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
OPERATORS = ("sum", "max", "min")
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


def is_summed(dtype: torch.dtype, op: str) -> bool:
    """Return whether `add_up` supports the dtype; complex numbers have no order."""
    return (dtype in _KNOWN or dtype.is_floating_point) and (op == "sum" or not dtype.is_complex)


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
            so_far = rows[0]
            for row in rows[1:-1]:
                so_far = combine(so_far, row, out=scratch[: row.size])
            combine(so_far, rows[-1], out=total)
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


# What each rank does in a collective over shared memory.


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
        if self.op and self.op not in OPERATORS:
            raise ProgramError(
                f"no operator {self.op!r}{did_you_mean(self.op, OPERATORS)}",
                hint=", ".join(OPERATORS),
            )
        if self.op and not is_summed(self.dtype, self.op):
            raise ProgramError(f"no {self.op} of {self.dtype}", hint="tensor.to(torch.float32)")
        if not 0 <= self.root < self.num_ranks:
            raise ProgramError(f"{self.name}: root {self.root} of {self.num_ranks} ranks")
        cut = self.name in ("reduce_scatter", "all_gather")
        if cut and (
            len(self.counts) != self.num_ranks
            or min(self.counts) < 0
            or sum(self.counts) != self.numel
        ):
            raise ProgramError(
                f"{self.name}: counts {self.counts} for {self.numel} elements on "
                f"{self.num_ranks} ranks",
                hint="a count for each rank, all elements together",
            )

    def __str__(self) -> str:
        how = f" ({self.op})" if self.op else ""
        root = f" with root {self.root}" if self.name in ("reduce", "broadcast") else ""
        cut = f" in {list(self.counts)}" if self.counts else ""
        return f"{self.name}{how} of {self.numel} {str(self.dtype)[6:]}{root}{cut}"

    def shown(self, rank: int, piece: range) -> list[tuple[int, int]]:
        """Return the ranges of a piece that others read from a rank's memory."""
        if self.name == "all_gather":
            return [self._owned(rank, piece)]
        if self.name == "broadcast":
            return [(piece.start, piece.stop)] if rank == self.root else []
        return _others(self._summed(rank, piece), piece)

    def pushed(self, rank: int, piece: range) -> list[tuple[int, int]]:
        """Return the ranges of a piece that others write to a rank's memory."""
        if self.name == "all_reduce" or (self.name == "reduce" and rank == self.root):
            return _others(self._summed(rank, piece), piece)
        return []

    def work(self, rank: int, piece: range, views: Sequence[Bytes], mine: Bytes) -> None:
        """Do this rank's part of a piece in everyone's memory; `mine` is this rank's."""
        if self.name == "all_gather":
            for other, view in enumerate(views):
                if other != rank:
                    remote = self.bytes_of(self._owned(other, piece), piece)
                    mine[remote] = view[remote]
        elif self.name == "broadcast":
            if rank != self.root:
                mine[:] = views[self.root]
        else:
            part = self.bytes_of(self._summed(rank, piece), piece)
            parts = [(mine if r == rank else view)[part] for r, view in enumerate(views)]
            to = {"all_reduce": range(self.num_ranks), "reduce": [self.root]}.get(self.name, [rank])
            add_up(parts, [parts[other] for other in to], self.dtype, self.op)

    def bytes_of(self, elements: tuple[int, int], piece: range) -> slice:
        """Return where a range of elements is in the bytes of a piece."""
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


def _others(part: tuple[int, int], piece: range) -> list[tuple[int, int]]:
    """Return the ranges of a piece that remain without a part of it."""
    return [(piece.start, part[0]), (part[1], piece.stop)]


# Memory that several processes share: each rank's own segment, mapped by all. Anonymous files hold
# it, so that nothing is left behind however processes end, and no file system limits its size.


SEGMENT = ord("S")
_SIZE = struct.Struct("<Q?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of every rank's memory, as bytes; `mine` is this rank's as a tensor."""

    ranks: tuple[Bytes, ...]
    mine: Tensor

    def offset(self, address: int, num_bytes: int) -> int | None:
        """Return where a range of this rank's addresses is in the segment, if it is."""
        offset = address - self.mine.data_ptr()
        return offset if 0 <= offset <= self.mine.numel() - num_bytes else None


def make_segment(links: Links, rank: int, num_bytes: int) -> Segment | str:
    """Make a segment of zeros, or return why there is none; all ranks call it."""
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
    result[:: mmap.PAGESIZE].sum()  # page faults now, not within the first collective
    return result


TIMEOUT_S = 300.0
STAGE_BYTES = 16 << 20
HERE, DONE = ord("H"), ord("D")
_STAGE = 0  # the number of the stage's segment
_PLACE = struct.Struct("<QQ")  # segment and offset; the call follows as text


class SharedBuckets:
    """Memory and collectives of the ranks of a group that are on one host.

    All ranks call the same methods in the same order. Collectives are done one after the other by a
    thread; a tensor must be left alone until its handle is done. After an error, all that follows
    fails with it. `open` makes one.
    """

    def __init__(self, links: Links, stage: Segment, timeout_s: float) -> None:
        self.rank, self.num_ranks = links.rank, len(links.names)
        self.timeout_s = timeout_s
        self._links = links
        self._segments: dict[int, Segment] = {_STAGE: stage}
        self._stage_bytes = stage.mine.numel()
        self._made = 1
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
        """Connect all ranks of the group; None, on all of them, if they cannot share memory.

        Ranks on several hosts are no surprise. Of anything else that is in the way, rank 0 warns.
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

        Collectives work on it, and on contiguous parts of it, without copies. It is this rank's
        own: others change it only within a collective. Where memory does not suffice, it is a
        common tensor, on all ranks, and rank 0 warns once. A bucket stays shared until `free`.
        """
        made: list[Segment | str] = []
        size = numel * dtype.itemsize
        self._start(lambda: made.append(make_segment(self._links, self.rank, size))).wait()
        number, self._made = self._made, self._made + 1
        (segment,) = made
        if isinstance(segment, str):
            if not self._warned:
                _warn(self._links.names[self.rank], segment)
            self._warned = True
            return torch.zeros(numel, dtype=dtype)
        self._segments[number] = segment
        return segment.mine[:size].view(dtype)

    def free(self, bucket: Tensor) -> None:
        """Stop sharing a bucket; its memory is freed when no tensor uses it. All ranks call it,
        when nothing that uses the bucket is under way.
        """
        result = self._find(bucket)
        if result is not None:
            del self._segments[result[0]]

    def is_resident(self, tensor: Tensor) -> bool:
        """Return whether collectives of this tensor need no copies."""
        return tensor.is_contiguous() and self._find(tensor) is not None

    # ------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Replace the tensor by the sum (or "max", "min") over all ranks."""
        return self._call("all_reduce", tensor, op=op)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = "sum") -> Handle:
        """Reduce to rank `root` alone; other ranks keep their values."""
        return self._call("reduce", tensor, op=op, root=root)

    def reduce_scatter(self, tensor: Tensor, counts: Sequence[int], op: str = "sum") -> Handle:
        """Replace this rank's of the consecutive parts of `counts` elements by its sum.

        What the other parts hold afterwards is not said.
        """
        return self._call("reduce_scatter", tensor, op=op, counts=counts)

    def all_gather(self, tensor: Tensor, counts: Sequence[int]) -> Handle:
        """Replace the parts of the other ranks by theirs; this rank's is in its place already."""
        return self._call("all_gather", tensor, counts=counts)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Replace the tensor by that of rank `root`."""
        return self._call("broadcast", tensor, root=root)

    def close(self) -> None:
        """End after what was started; buckets stay usable, as this rank's own memory."""
        self._thread.close(self.timeout_s)
        self._links.close()
        self._segments.clear()

    # ------------------------------------------------------------ how

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
        return self._start(lambda: self._do(call, tensor.detach()), pieces)

    def _start(self, job: Callable[[], None], pieces: int = 1) -> Handle:
        def told() -> None:
            try:
                job()
            except RankError:
                raise
            except Exception as error:
                self._links.give_up(f"{type(error).__name__}: {error}")

        # Two waits for each piece, and the work on it, which must be less.
        return self._thread.start(told, 4 * pieces * self.timeout_s + ROLL_S)

    def _find(self, flat: Tensor) -> tuple[int, int] | None:
        """Return a tensor's segment number and offset; the staging area has none."""
        size = flat.numel() * flat.element_size()
        for number, segment in self._segments.items():
            offset = segment.offset(flat.data_ptr(), size)
            if number != _STAGE and offset is not None:
                return number, offset
        return None

    def _do(self, call: Call, tensor: Tensor) -> None:
        if not call.numel or self.num_ranks == 1:
            return
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        own = bytes_of(flat.view(-1))
        place = self._find(flat)
        size, first = call.dtype.itemsize, 0
        piece = max(1, self._stage_bytes // size)
        while first < call.numel:
            stop = min(call.numel, first + piece)
            result = self._here(call, own, place, range(first, stop))
            if all(segment != _STAGE for segment, _ in result):
                stop = call.numel
            part = own[first * size : stop * size]
            views = [
                self._segments[segment].ranks[rank][offset:][: len(part)]
                for rank, (segment, offset) in enumerate(result)
            ]
            call.work(self.rank, range(first, stop), views, part)
            self._links.tell(DONE)
            self._links.hear(DONE, str(call))
            if place is None:
                for done in call.pushed(self.rank, range(first, stop)):
                    where = call.bytes_of(done, range(first, stop))
                    part[where] = views[self.rank][where]
            first = stop
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _here(
        self, call: Call, mine: Bytes, place: tuple[int, int] | None, piece: range
    ) -> list[tuple[int, int]]:
        """Return where each rank has the piece, after all have reported it."""
        size, text = call.dtype.itemsize, str(call).encode()
        if place is None:
            stage = self._segments[_STAGE].ranks[self.rank]
            part = mine[piece.start * size : piece.stop * size]
            for seen in call.shown(self.rank, piece):
                where = call.bytes_of(seen, piece)
                stage[where] = part[where]
            here = (_STAGE, 0)
        else:
            here = (place[0], place[1] + piece.start * size)
        self._links.tell(HERE, _PLACE.pack(*here) + text)
        reported = self._links.hear(HERE, str(call))
        for other, body in reported.items():
            if body[_PLACE.size :] != text:
                name = self._links.names[other]
                remote = body[_PLACE.size :].decode()
                self._links.give_up(f"{call}, while rank {name} does {remote}")
        places = {other: _PLACE.unpack_from(body) for other, body in reported.items()}
        places[self.rank] = here
        return [(segment, offset) for _, (segment, offset) in sorted(places.items())]


def _warn(rank: int, reason: str) -> None:
    if rank == 0:
        warnings.warn(
            f"{reason}; gradients take the process group's collectives instead",
            RuntimeWarning,
            stacklevel=3,
        )
