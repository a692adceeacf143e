"""Positions, orders and loading: no sample is lost or repeated, whatever changes on the way."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import TrainingError
from shardwise.training.config import DataConfig
from shardwise.training.data import MapLoader, StreamLoader, ahead, make_source
from shardwise.training.sampling import Permutation, Position, batch_positions, loading_of
from shardwise.training.state import load_random_state, random_state, seeded
from tests.support.trainer import Samples, StatefulStream, Stream


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_an_order_has_every_number_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)[np.arange(size)].tolist()) == list(range(size))


def test_orders_of_epochs_and_seeds_differ_and_huge_ones_cost_nothing() -> None:
    places = np.arange(100)
    found = [Permutation(10**12, seed, epoch)[places] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in found}) == 4
    spread = np.concatenate(found) / 10**12
    assert 0.4 < spread.mean() < 0.6


@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_no_sample_is_lost_or_repeated_when_batch_sizes_change(
    size: int, seed: int, sizes: list[int]
) -> None:
    position, taken = Position(), []
    for batch_size in [*sizes, *([7] * size)]:
        if position.epoch:
            break
        batch = next(batch_positions(size, batch_size, position, seed=seed, drop_last=False))
        taken += batch.samples
        position = batch.after
    assert sorted(taken) == list(range(size))
    assert position == Position(epoch=1)


def test_an_incomplete_batch_is_dropped_or_kept() -> None:
    def sizes(drop: bool) -> list[int]:
        found = batch_positions(10, 4, Position(), drop_last=drop)
        return [len(batch.samples) for batch in islice(found, 5)]

    assert sizes(True) == [4, 4, 4, 4, 4]
    assert sizes(False) == [4, 4, 2, 4, 4]
    with pytest.raises(TrainingError, match="3 samples, a batch is 4"):
        next(batch_positions(3, 4, Position()))


def loader(dataset: object, **options: object) -> MapLoader | StreamLoader:
    config = DataConfig(train=dataset, batch_size=4, **options)  # type: ignore[arg-type]
    return make_source(loading_of(dataset, config, None, training=True), 3)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loading_from_a_position_is_the_rest_of_loading_all(workers: int) -> None:
    every = list(islice(loader(Samples()).batches(Position()), 8))
    rest = list(islice(loader(Samples(), workers=workers).batches(every[2].after), 5))
    for one, other in zip(every[3:], rest, strict=True):
        assert one.after == other.after
        torch.testing.assert_close(one.batch, other.batch, rtol=0, atol=0)


def test_only_the_rows_that_are_asked_for_are_read() -> None:
    samples = Samples()
    source = loader(samples, prefetch=1)
    source.rows = lambda count: (1, 3)
    batches = source.batches(Position())
    first = next(batches)
    batches.close()  # type: ignore[attr-defined]
    order = Permutation(23, 3)[np.arange(23)].tolist()
    assert samples.asked[:2] == [order[1], order[3]]
    assert (first.count, first.rows, len(first.batch["ids"])) == (4, (1, 3), 2)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_streams_go_on_where_they_were(kind: type[Stream]) -> None:
    every = list(islice(loader(kind(), drop_last=False).batches(Position()), 9))
    assert [item.count for item in every[:7]] == [4, 4, 4, 4, 4, 3, 4]
    assert [item.ends_epoch for item in every[:7]] == [False] * 5 + [True, False]
    for at in (1, 4, 5):
        found = loader(kind(), drop_last=False).batches(every[at].after, every[at].state)
        torch.testing.assert_close(next(found).batch, every[at + 1].batch, rtol=0, atol=0)


def test_an_iterator_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(TrainingError, match="can be read once"):
        loader(iter([1])).example()


def test_reading_ahead_passes_errors_on() -> None:
    def broken() -> object:
        yield 1
        raise ValueError("broken sample")

    items = ahead(broken(), 2)  # type: ignore[arg-type]
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken sample"):
        next(items)


def test_seeded_numbers_leave_the_others_alone() -> None:
    state = random_state()
    plain = torch.rand(2), np.random.rand(2)
    load_random_state(state)
    with seeded(1, 2):
        inside = torch.rand(2)
    again = torch.rand(2), np.random.rand(2)
    assert torch.equal(plain[0], again[0])
    assert (plain[1] == again[1]).all()
    with seeded(1, 2):
        assert torch.equal(inside, torch.rand(2))
