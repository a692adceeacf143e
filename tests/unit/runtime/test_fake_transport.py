from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.runtime import dropout
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.transport import Group, Pending, Transport
from shardwise.runtime.transport.fake import FakeRng, FakeTransport, UninitializedTransport
from shardwise.runtime.transport.threads import run_threads

SIZES = [3, 2]

OPERATIONS: dict[str, Callable[[Transport, Group], Pending]] = {
    "all_reduce": lambda t, g: t.all_reduce(torch.ones(4), "sum", g),
    "all_gather": lambda t, g: t.all_gather(torch.ones(SIZES[g.index]), SIZES, g),
    "all_gather_out": lambda t, g: t.all_gather(
        torch.ones(SIZES[g.index]), SIZES, g, torch.empty(5)
    ),
    "reduce_scatter": lambda t, g: t.reduce_scatter(torch.ones(5), SIZES, g),
    "reduce_scatter_half": lambda t, g: t.reduce_scatter(
        torch.ones(5, dtype=torch.bfloat16), SIZES, g
    ),
    "all_to_all": lambda t, g: t.all_to_all(
        torch.ones(4), [2 - g.index, 2 + g.index], [2 - g.index, 2 - g.index], g
    ),
    "broadcast": lambda t, g: t.broadcast(torch.ones(4), 0, g),
    "send": lambda t, g: t.exchange([(torch.ones(4), 1 - g.index)], [])[0][0],
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [FakeTransport, UninitializedTransport])
def test_results_have_the_shape_and_dtype_of_real_ones(
    name: str, rank: int, kind: type[FakeTransport]
) -> None:
    def form(transport: Transport, index: int) -> tuple[object, ...]:
        result = OPERATIONS[name](transport, Group((0, 1), index)).wait()
        return result.shape, result.dtype

    if name == "all_to_all":  # what one sends is what the other receives
        faked = OPERATIONS[name](kind(rank, 2), Group((0, 1), rank)).wait()
        assert faked.numel() == 2 * (2 - rank)
        return
    real = run_threads(2, lambda index, transport: form(transport, index))
    assert form(kind(rank, 2), rank) == real[rank]


def test_fake_transport_accepts_fake_tensors() -> None:
    transport, group = FakeTransport(0, 2), Group((0, 1), 0)
    with FakeTensorMode():
        gathered = transport.all_gather(torch.empty(3), [3, 2], group).wait()
        scattered = transport.reduce_scatter(torch.empty(5), [3, 2], group).wait()
        received = transport.exchange([], [(torch.empty(7), 1)])[1][0].wait()
    assert [t.numel() for t in (gathered, scattered, received)] == [5, 3, 7]


def test_a_sent_message_stays_until_the_next_one_or_an_answer() -> None:
    transport = FakeTransport(0, 3)

    def waiting() -> dict[int, Tensor]:
        return dict(transport._sent)

    first, second = torch.empty(3), torch.empty(4)
    transport.exchange([(first, 1)], [])
    assert waiting()[1] is first
    transport.exchange([(second, 1)], [])
    assert waiting()[1] is second
    answer = transport.exchange([], [(torch.empty(2), 1)])[1][0]
    assert waiting()
    answer.wait()
    assert not waiting()


def test_received_values_are_ordinary_and_their_time_is_counted() -> None:
    transport, group = UninitializedTransport(1, 3), Group((0, 1, 2), 1)
    data, nan = torch.tensor([2.0, 3.0]), float("nan")
    assert transport.all_gather(data, [3, 2, 2], group).wait().tolist() == [2, 3, 2, 3, 2, 3, 2]
    full = torch.tensor([nan, nan, nan, 5.0, 6.0, nan, nan])  # of which the part is a view
    gathered = transport.all_gather(full[3:5], [3, 2, 2], group, full).wait()
    assert gathered.tolist() == [5, 6, 5, 6, 5, 6, 5]
    assert transport.all_gather(torch.empty(0), [1, 0, 1], group).wait().tolist() == [0, 0]
    exchanged = transport.all_to_all(data, [1, 1, 0], [2, 1, 0], group).wait()
    assert exchanged.tolist() == [2, 3, 2]
    received = transport.exchange([], [(torch.full((4,), nan), 0)])[1][0].wait()
    assert received.isfinite().all()
    indices = transport.exchange([], [(torch.full((4,), 10**9), 0)])[1][0].wait()
    assert not indices.any()
    before = transport.seconds
    scattered = transport.reduce_scatter(torch.ones(1 << 20), [1 << 20, 0, 0], Group((0, 1, 2), 0))
    assert scattered.wait().numel() == 1 << 20
    assert transport.seconds > before > 0


def test_random_numbers_of_fake_tensors() -> None:
    rng = FakeRng(0, "exact", ProcessMesh({}))
    with FakeTensorMode():
        x = dropout(torch.empty(4, 6), 0.5, rng, "drop", (4, 6))
    assert x.shape == (4, 6)
