"""Transfers of boxes between the memories of ranks, on threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import transfer as transfers
from shardwise.checkpoint.shards import Box
from shardwise.checkpoint.transfer import Move, Transfer
from shardwise.errors import CheckpointError, RankError
from shardwise.runtime.transport import Flat, Pending
from shardwise.runtime.transport.threads import ThreadTransport, run_threads
from shardwise.training.membership import Membership


def move(rows: int, source: int, target: int, *, begin: int = 0, place: int = 0) -> Move:
    """Return a move of some rows of the 6 x 4 box `w`."""
    return Move(
        key="w",
        offset=(begin, 0),
        size=(rows, 4),
        nbytes=rows * 4 * 8,
        source=source,
        target=target,
        place=place,
        at=(0, 0),
    )


STORED, HOLDERS = {"w": Box((0, 0), (6, 4))}, {"w": (0,)}
PLACES = ((), ((2, 4),), ((4, 4),))
MOVES = (move(2, 0, 1), move(4, 0, 2, begin=2))
TRANSFER = Transfer(places=PLACES, moves=MOVES)


class Corrupting(ThreadTransport):
    """Changes a byte of every message that rank 0 sends to rank 2."""

    def exchange(
        self, sends: Sequence[Flat], receives: Sequence[Flat]
    ) -> tuple[list[Pending], list[Pending]]:
        for flat, to in sends:
            if to == 2:
                flat[5] ^= 1
        return super().exchange(sends, receives)


def run(kind: type[ThreadTransport]) -> tuple[list[Tensor], list[str]]:
    """Run the transfer; return what ranks 1 and 2 received, and the errors of all ranks."""
    box = torch.arange(24, dtype=torch.float64).view(6, 4)
    received = [torch.zeros(0), torch.zeros(2, 4).double(), torch.zeros(4, 4).double()]
    errors = ["", "", ""]

    def work(rank: int, transport: ThreadTransport) -> None:

        def read(m: Move) -> Tensor:
            rows = box[m.offset[0] : m.offset[0] + m.size[0]]
            return rows.contiguous().view(-1).view(torch.uint8)

        def write(m: Move, data: Tensor) -> None:
            received[rank].copy_(data.clone().view(torch.float64).view(m.size))

        transport.__class__ = kind
        try:
            TRANSFER.run(transport, rank, read, write, torch.device("cpu"))
        except CheckpointError as error:
            errors[rank] = error.message

    run_threads(3, work)
    return received, errors


def test_boxes_arrive() -> None:
    received, errors = run(ThreadTransport)
    assert errors == ["", "", ""]
    assert received[1][0].tolist() == [0, 1, 2, 3]
    assert received[2][3].tolist() == [20, 21, 22, 23]


def test_a_corrupt_message_is_an_error_and_is_not_stored() -> None:
    received, errors = run(Corrupting)
    assert errors[:2] == ["", ""]
    assert "checksum mismatch in messages from rank 0 to 2" in errors[2]
    assert not received[2].any()
    assert received[1].any()


def test_the_text_lists_messages_between_ranks() -> None:
    assert str(TRANSFER) == (
        "Transfer between 3 ranks: 192 B in 1 rounds; 0 stay on their ranks\n"
        "  rank 0 to 1: 64 B\n"
        "  rank 0 to 2: 128 B"
    )


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "ROUND_BYTES", 100)
    assert [[m.target for m in moves] for moves in TRANSFER.rounds] == [[1], [2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moves": MOVES[:1]}, "box 0 on rank 2 have 0 of its 16"),
        ({"moves": (*MOVES, MOVES[0])}, "overlap"),
        ({"moves": (replace(MOVES[0], source=1), MOVES[1])}, "rank 1 does not have w"),
        ({"moves": (replace(MOVES[0], offset=(5, 0)), MOVES[1])}, "outside of its box"),
        ({"places": PLACES[:2]}, "unknown places"),
    ],
)
def test_verify_refuses_wrong_transfers(change: dict[str, object], message: str) -> None:
    TRANSFER.verify(STORED, HOLDERS)
    with pytest.raises(CheckpointError, match=message):
        replace(TRANSFER, **change).verify(STORED, HOLDERS)  # type: ignore[arg-type]


def test_a_membership_is_text_and_follows_the_one_before() -> None:
    first = Membership(generation=1, members=(0, 1, 2), reason="start")
    second = Membership(generation=2, members=(2, 0), reason="rank 1 was killed", planned=True)
    assert Membership.from_text(second.to_text()) == second
    assert (second.rank_of(0), second.rank_of(1)) == (1, None)
    second.verify(first)
    with pytest.raises(RankError, match="does not follow"):
        replace(second, generation=4).verify(first)
    with pytest.raises(RankError, match="one of them twice"):
        replace(second, members=(0, 0)).verify(first)
