"""Positions, orders and loading: no sample is lost or repeated when settings change."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import TrainingError
from shardwise.training.config import DataConfig
from shardwise.training.data import MapLoader, StreamLoader, make_source, prefetched
from shardwise.training.sampling import Permutation, Position, batch_positions, make_loading
from shardwise.training.state import load_random_state, random_state, seeded
from tests.support.trainer import Samples, StatefulStream, Stream


@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_a_permutation_has_every_number_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch)[np.arange(size)].tolist()) == list(range(size))


def test_permutations_of_epochs_and_seeds_differ_even_of_huge_sizes() -> None:
    indices = np.arange(100)
    orders = [Permutation(10**12, seed, epoch)[indices] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    spread = np.concatenate(orders) / 10**12
    assert 0.4 < spread.mean() < 0.6


@given(
    size=st.integers(1, 60),
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_no_sample_is_lost_or_repeated_when_batch_sizes_change(
    size: int, seed: int, sizes: list[int]
) -> None:
    position, samples = Position(), []
    for batch_size in [*sizes, *([7] * size)]:
        if position.epoch:
            break
        batch = next(batch_positions(size, batch_size, position, seed=seed, drop_last=False))
        samples += batch.samples
        position = batch.after
    assert sorted(samples) == list(range(size))
    assert position == Position(epoch=1)


def test_drop_last_drops_an_incomplete_batch() -> None:
    def sizes(drop: bool) -> list[int]:
        batches = batch_positions(10, 4, Position(), drop_last=drop)
        return [len(batch.samples) for batch in islice(batches, 5)]

    assert sizes(True) == [4, 4, 4, 4, 4]
    assert sizes(False) == [4, 4, 2, 4, 4]
    with pytest.raises(TrainingError, match="3 samples, fewer than a batch of 4"):
        next(batch_positions(3, 4, Position()))


def loader(dataset: object, **options: object) -> MapLoader | StreamLoader:
    config = DataConfig(train=dataset, batch_size=4, **options)  # type: ignore[arg-type]
    return make_source(make_loading(dataset, config, None, training=True), 3)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_loading_from_a_position_continues_loading_from_the_start(workers: int) -> None:
    batches = list(islice(loader(Samples()).batches(Position()), 8))
    resumed = list(islice(loader(Samples(), workers=workers).batches(batches[2].after), 5))
    for expected, actual in zip(batches[3:], resumed, strict=True):
        assert actual.after == expected.after
        torch.testing.assert_close(actual.batch, expected.batch, rtol=0, atol=0)


def test_only_the_rows_of_this_rank_are_read() -> None:
    samples = Samples()
    source = loader(samples, prefetch=1)
    source.rows = lambda count: (1, 3)
    batches = source.batches(Position())
    first = next(batches)
    batches.close()  # type: ignore[attr-defined]
    order = Permutation(23, 3)[np.arange(23)].tolist()
    assert samples.requested[:2] == [order[1], order[3]]
    assert (first.count, first.rows, len(first.batch["ids"])) == (4, (1, 3), 2)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_streams_resume_at_their_position(kind: type[Stream]) -> None:
    batches = list(islice(loader(kind(), drop_last=False).batches(Position()), 9))
    assert [item.count for item in batches[:7]] == [4, 4, 4, 4, 4, 3, 4]
    assert [item.ends_epoch for item in batches[:7]] == [False] * 5 + [True, False]
    for i in (1, 4, 5):
        resumed = loader(kind(), drop_last=False).batches(batches[i].after, batches[i].state)
        torch.testing.assert_close(next(resumed).batch, batches[i + 1].batch, rtol=0, atol=0)


def test_a_single_use_iterator_is_refused() -> None:
    with pytest.raises(TrainingError, match="can be read once"):
        loader(iter([1])).example()


def test_prefetching_passes_errors_on() -> None:
    def broken() -> object:
        yield 1
        raise ValueError("broken sample")

    items = prefetched(broken(), 2)  # type: ignore[arg-type]
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken sample"):
        next(items)


def test_seeded_restores_the_generators() -> None:
    state = random_state()
    expected = torch.rand(2), np.random.rand(2)
    load_random_state(state)
    with seeded(1, 2):
        inside = torch.rand(2)
    actual = torch.rand(2), np.random.rand(2)
    assert torch.equal(expected[0], actual[0])
    assert (expected[1] == actual[1]).all()
    with seeded(1, 2):
        assert torch.equal(inside, torch.rand(2))
