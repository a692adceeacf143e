"""A `DataLoader` as data: the settings that are used, and the loaders that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.training.config import DataConfig
from shardwise.training.data import make_source
from shardwise.training.sampling import Position, make_loading
from tests.support import trainer as support


class Numbers:
    """Samples that equal their indices."""

    def __init__(self, size: int = 11) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Streamed(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(11))


class Descending:
    """Batches of unequal sizes, in descending order of samples."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([10, 9, 8], [7], [6, 5, 4, 3, 2], [1, 0])


def load(loader: Any, start: Position, count: int, training: bool = True) -> list[list[int]]:
    loading = make_loading(loader, DataConfig(train=loader), None, training=training)
    batches = make_source(loading, 5).batches(start)
    loaded = [next(batches).batch.tolist() for _ in range(count)]
    batches.close()  # type: ignore[attr-defined]
    return loaded


def test_a_sequential_loader_yields_its_own_batches() -> None:
    for dataset in (Numbers(), Streamed()):
        for drop_last in (False, True):
            loader: Any = DataLoader(dataset, batch_size=4, drop_last=drop_last)  # type: ignore[arg-type]
            plain = [batch.tolist() for batch in loader]
            assert load(loader, Position(), 2 * len(plain)) == plain + plain


def test_a_shuffling_loader_yields_every_sample_once() -> None:
    loader: Any = DataLoader(Numbers(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    first, second = load(loader, Position(), 6)[:3], load(loader, Position(), 6)[3:]
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(11))
    assert first != second
    assert load(loader, Position(epoch=1, sample=4), 2) == second[1:]
    assert load(loader, Position(), 3, training=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_a_sampler_draws_the_same_samples_in_every_process_and_after_a_resume() -> None:
    weights = torch.arange(11, dtype=torch.float64)
    generator = torch.Generator()
    for sampler in (
        WeightedRandomSampler(weights.tolist(), 7),
        WeightedRandomSampler(weights.tolist(), 7, generator=generator),
        RandomSampler(range(11), replacement=True, num_samples=7),  # type: ignore[arg-type]
    ):
        loader: Any = DataLoader(Numbers(), batch_size=3, sampler=sampler)  # type: ignore[arg-type]
        batches = load(loader, Position(), 6)
        torch.rand(3)
        assert [len(batch) for batch in batches] == [3, 3, 1] * 2
        assert batches[:3] != batches[3:]
        assert load(loader, Position(epoch=1, sample=3), 2) == batches[4:]


def test_a_batch_sampler_defines_the_batches() -> None:
    loader: Any = DataLoader(Numbers(), batch_sampler=Descending())  # type: ignore[arg-type, call-overload]
    epoch = list(Descending())
    assert load(loader, Position(), 8) == epoch + epoch
    assert load(loader, Position(epoch=3, sample=4), 2) == epoch[2:]
    plain: Any = DataLoader(Numbers(), batch_sampler=BatchSampler(range(11), 4, False))  # type: ignore[arg-type]
    assert load(plain, Position(), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_workers_and_collation_are_those_of_the_loader() -> None:
    def doubled(samples: list[torch.Tensor]) -> torch.Tensor:
        return 2 * torch.stack(samples)

    loader: Any = DataLoader(Numbers(), batch_size=4, num_workers=1, collate_fn=doubled)  # type: ignore[arg-type]
    assert load(loader, Position(), 2) == [[0, 2, 4, 6], [8, 10, 12, 14]]


class OwnLoader(DataLoader[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"batch_size": 4}, {"batch_size": 4}, "data.batch_size and a DataLoader both define"),
        ({"batch_size": 4}, {"shuffle": False}, "data.shuffle and a DataLoader both define"),
        ({"batch_size": None}, {}, "batch_size=None"),
        ({"sampler": DistributedSampler(range(11), 2, 0)}, {}, "DistributedSampler divides"),  # type: ignore[arg-type]
        (
            {"batch_sampler": BatchSampler(DistributedSampler(range(11), 2, 0), 2, False)},  # type: ignore[arg-type]
            {},
            "DistributedSampler divides",
        ),
        ({"dataset": Streamed(), "num_workers": 2}, {}, "2 worker processes has no order"),
        ({"kind": OwnLoader}, {}, "OwnLoader overrides __iter__"),
    ],
)
def test_loaders_that_ranks_cannot_share_are_refused(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    arguments = {"dataset": Numbers(), **options}
    loader = arguments.pop("kind", DataLoader)(**arguments)
    with pytest.raises(ConfigError) as caught:
        make_loading(loader, DataConfig(train=loader, **fields), None, training=True)
    assert message in caught.value.message
    assert caught.value.where == "data.train"
    assert caught.value.hint


def test_training_with_loaders_equals_training_with_their_datasets(tmp_path: Path) -> None:
    plain = support.fit(steps=6, data={"drop_last": False})
    data: Any = {
        "train": DataLoader(support.Samples(), batch_size=4, shuffle=True),  # type: ignore[arg-type]
        "evaluation": DataLoader(support.Samples(9), batch_size=4),  # type: ignore[arg-type]
    }
    fields = {**support.fields(steps=6), "data": data, "folder": str(tmp_path)}
    with sw.Trainer(**{**fields, "callbacks": [support.StopAt(2)]}) as trainer:
        before = trainer.fit()
    with sw.Trainer(**fields) as trainer:
        after = trainer.fit()
    assert before.losses + after.losses == plain.losses
    assert after.metrics["evaluation_loss"] == plain.metrics["evaluation_loss"]


def test_data_may_be_a_loader() -> None:
    loader: Any = DataLoader(support.Samples(), batch_size=4, collate_fn=default_collate)  # type: ignore[arg-type]
    fields = support.fields(steps=2, data={})
    with sw.Trainer(**{**fields, "data": loader}) as trainer:
        assert trainer.fit().steps == 2
