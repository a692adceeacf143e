"""Move boxes of tensors between the memories of ranks, in messages with checksums.

A `Transfer` is the same value on every rank: which rank sends which box to which other. Moves are
sent in rounds, in which a rank has at most `ROUND_BYTES` of messages in memory, or one box. All
boxes that one rank sends to another in a round are one message, which ends with its CRC-32.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.checkpoint.box_io import BOX_BYTES
from shardwise.checkpoint.files import bytes_of
from shardwise.checkpoint.shards import Box, check_cover
from shardwise.errors import CheckpointError
from shardwise.formatting import size as format_bytes
from shardwise.runtime.transport import Transport

ROUND_BYTES = BOX_BYTES
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A part of a stored box, which `source` has and `target` needs for one of its places.

    `key` is the stored box's, `offset` that of the part within it. `place` counts the boxes that
    the target fills, and `at` is the part's offset within that box.
    """

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    nbytes: int
    source: int
    target: int
    place: int
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The moves, in order, that fill the places of all ranks; a place is the size of a box."""

    places: tuple[tuple[tuple[int, ...], ...], ...]
    moves: tuple[Move, ...]

    @property
    def rounds(self) -> list[list[Move]]:
        """Return the moves between different ranks, in rounds of bounded memory."""
        rounds: list[list[Move]] = [[]]
        load = Counter[int]()
        for move in self.moves:
            ends = (move.source, move.target)
            if move.source == move.target:
                continue
            if rounds[-1] and any(load[rank] + move.nbytes > ROUND_BYTES for rank in ends):
                rounds.append([])
                load.clear()
            rounds[-1].append(move)
            load.update(dict.fromkeys(ends, move.nbytes))
        return [moves for moves in rounds if moves]

    def verify(self, stored: Mapping[str, Box], holders: Mapping[str, Sequence[int]]) -> None:
        """Refuse moves from ranks without the box or outside of it, and places not filled once."""
        filling = defaultdict[tuple[int, int], list[Box]](list)
        for move in self.moves:
            if move.source not in holders.get(move.key, ()):
                raise CheckpointError(f"rank {move.source} does not have {move.key}")
            end = Box(move.offset, move.size).end
            if any(e > n for e, n in zip(end, stored[move.key].size, strict=True)):
                raise CheckpointError(f"{move} is outside of its box {stored[move.key]}")
            filling[move.target, move.place].append(Box(move.at, move.size))
        for rank, sizes in enumerate(self.places):
            for number, size in enumerate(sizes):
                check_cover(f"box {number} on rank {rank}", size, filling.pop((rank, number), []))
        if filling:
            raise CheckpointError(f"moves fill unknown places {sorted(filling)[:3]}")

    def __str__(self) -> str:
        sizes = Counter[tuple[int, int]]()
        for move in self.moves:
            sizes[move.source, move.target] += move.nbytes
        moved = {ends: size for ends, size in sorted(sizes.items()) if ends[0] != ends[1]}
        total, local = sum(moved.values()), sizes.total() - sum(moved.values())
        head = (
            f"Transfer between {len(self.places)} ranks: {format_bytes(total)} in "
            f"{len(self.rounds)} rounds; {format_bytes(local)} stay on their ranks"
        )
        return "\n".join(
            [head, *(f"  rank {a} to {b}: {format_bytes(size)}" for (a, b), size in moved.items())]
        )

    def run(
        self,
        transport: Transport,
        rank: int,
        read: Callable[[Move], Tensor],
        write: Callable[[Move, Tensor], None],
        device: torch.device,
    ) -> None:
        """Carry out the moves of this rank; all ranks call it.

        `read` returns the bytes that a move takes, on the host, and `write` stores them. A corrupt
        message is an error after the last round, so that no other rank waits for this one.
        """
        for move in self.moves:
            if move.source == move.target == rank:
                write(move, read(move))
        corrupt: list[str] = []
        for moves in self.rounds:
            sent, received = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
            for move in moves:
                if move.source == rank:
                    sent[move.target].append(move)
                elif move.target == rank:
                    received[move.source].append(move)
            sends = [(_packed([read(m) for m in part]).to(device), to) for to, part in sent.items()]
            receives = [
                (torch.empty(size, dtype=torch.uint8, device=device), source)
                for source, part in received.items()
                for size in [sum(m.nbytes for m in part) + _CHECKSUM_BYTES]
            ]
            pending, arriving = transport.exchange(sends, receives)
            for (source, part), message in zip(received.items(), arriving, strict=True):
                parts = torch.split(message.wait().cpu(), [*(m.nbytes for m in part), 4])
                if not torch.equal(_packed(parts[:-1])[-_CHECKSUM_BYTES:], parts[-1]):
                    corrupt.append(f"from rank {source} to {rank}")
                    continue
                for move, data in zip(part, parts[:-1], strict=True):
                    write(move, data)
            for message in pending:
                message.wait()
        if corrupt:
            raise CheckpointError(f"checksum mismatch in messages {', '.join(corrupt)}")


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one message, with their checksum."""
    body = torch.cat(list(parts))
    checksum = bytearray(zlib.crc32(bytes_of(body)).to_bytes(_CHECKSUM_BYTES, "little"))
    return torch.cat([body, torch.frombuffer(checksum, dtype=torch.uint8)])
