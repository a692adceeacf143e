"""Collectives of ranks on one host, through memory that they share.

Enters: tensors in host memory. Leaves: a handle at once; when it is done, the tensor holds the
operation's result, in the same bits on all ranks that get it.

    shared = SharedBuckets.open(group)                # None: the ranks are on several hosts
    bucket = shared.allocate(1_000_000, torch.float32)
    bucket.copy_(gradients)
    shared.all_reduce(bucket).wait()

A rank says where its data are (*here*), and waits until all others have; does its part of the work
directly in everyone's memory; says that it is *done*, and waits for the others. So there are two
waits, whatever the number of bytes. What is not in a bucket goes through the *stage*, a segment of
fixed size, piece by piece.
"""

from __future__ import annotations

import struct
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import ProgramError, RankError
from shardwise.runtime.handles import CommunicationThread, Handle
from shardwise.runtime.links import ROLL_S, Links, connect
from shardwise.runtime.segments import Segment, make_segment
from shardwise.runtime.shared_calls import Call
from shardwise.runtime.sums import Bytes, bytes_of

__all__ = ["SharedBuckets"]

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
        """A flat tensor of zeros in shared memory: a *bucket*, of the same size on all ranks.

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
        """Share a bucket no longer; its memory is freed when no tensor uses it. All ranks call it,
        when nothing that uses the bucket is under way.
        """
        found = self._find(bucket)
        if found is not None:
            del self._segments[found[0]]

    def is_resident(self, tensor: Tensor) -> bool:
        """Whether collectives of this tensor need no copies."""
        return tensor.is_contiguous() and self._find(tensor) is not None

    # ------------------------------------------------------------ collectives

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Replace the tensor by the sum (or "max", "min") over all ranks."""
        return self._call("all_reduce", tensor, op=op)

    def reduce(self, tensor: Tensor, root: int = 0, op: str = "sum") -> Handle:
        """As `all_reduce`, on rank `root` alone; other ranks keep what they have."""
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
        """The number of a tensor's segment and its offset there; the stage is nobody's."""
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
        mine = bytes_of(flat.view(-1))
        place = self._find(flat)
        size, first = call.dtype.itemsize, 0
        piece = max(1, self._stage_bytes // size)
        while first < call.numel:
            stop = min(call.numel, first + piece)
            found = self._here(call, mine, place, range(first, stop))
            if all(segment != _STAGE for segment, _ in found):
                stop = call.numel
            part = mine[first * size : stop * size]
            views = [
                self._segments[segment].ranks[rank][offset:][: len(part)]
                for rank, (segment, offset) in enumerate(found)
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
        """Where each rank has the piece, after all have said so."""
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
        said = self._links.hear(HERE, str(call))
        for other, body in said.items():
            if body[_PLACE.size :] != text:
                name = self._links.names[other]
                theirs = body[_PLACE.size :].decode()
                self._links.give_up(f"{call}, while rank {name} does {theirs}")
        places = {other: _PLACE.unpack_from(body) for other, body in said.items()}
        places[self.rank] = here
        return [(segment, offset) for _, (segment, offset) in sorted(places.items())]


def _warn(rank: int, reason: str) -> None:
    if rank == 0:
        warnings.warn(
            f"{reason}; gradients take the process group's collectives instead",
            RuntimeWarning,
            stacklevel=3,
        )
