"""Transfers between any two layouts of any two groups of ranks, in both directions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.runtime.mesh import coordinates
from shardwise.runtime.pipeline.transfers import Holding, Route
from shardwise.runtime.splits import Split, take_local
from shardwise.runtime.transport.threads import ThreadTransport, run_threads

SHAPE = (7, 6, 4)
CUTS = {0: ((1, 7, 1),), 1: ((1, 6, 1),), 2: ((2, 2, 1),)}


@st.composite
def holdings(draw: st.DrawFn, first: int, shared: int) -> Holding:
    """A mesh of up to 6 ranks with some dims split; its first ranks may be shared."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (3, 2), (5,)]))
    axes = {f"a{i}": n for i, n in enumerate(sizes)}
    splits = []
    for name in axes:
        dim = draw(st.sampled_from([None, 0, 1, 2]))
        if dim is not None:
            splits.append(Split(axis=name, dim=dim, of=CUTS[dim]))
    count = len(coordinates(axes, 0)) and torch.Size(sizes).numel()
    start = 0 if shared else first
    place = {"mb": (draw(st.integers(0, 2)), 3)} if draw(st.booleans()) else {}
    return Holding(tuple(range(start, start + count)), axes, SHAPE, tuple(splits), place)


def part(holding: Holding, rank: int, full: torch.Tensor) -> torch.Tensor:
    coords = coordinates(holding.axes, holding.ranks.index(rank))
    return take_local(full, holding.splits, coords, holding.axes).contiguous()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_gets_its_part(data: st.DataObject) -> None:
    source = data.draw(holdings(0, 0))
    shared = data.draw(st.booleans())
    target = data.draw(holdings(len(source.ranks), shared))
    full = torch.arange(7 * 6 * 4).view(SHAPE)
    dtype = data.draw(st.sampled_from([torch.int64, torch.float32, torch.bool]))
    full = (full % 3 == 0) if dtype is torch.bool else full.to(dtype)
    world = max(*source.ranks, *target.ranks) + 1

    def run(rank: int, transport: ThreadTransport) -> torch.Tensor | None:
        route, own, sends = Route(rank, source, target), None, []
        if rank in source.ranks:
            local = part(source, rank, full)
            sends = route.outgoing(local)
            if any(piece.peer == rank for piece in route.sends):
                own = route.own(local)
        if rank not in target.ranks:
            transport.exchange(sends, [])
            return None
        arrival = route.incoming(dtype, torch.device("cpu"))
        arrival.pending = transport.exchange(sends, arrival.expected)[1]
        return arrival.wait(own)

    for rank, received in enumerate(run_threads(world, run, timeout_s=10)):
        if rank in target.ranks:
            assert received is not None
            assert torch.equal(received, part(target, rank, full)), (source, target, rank)
