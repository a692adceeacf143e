"""A state in the memory of some ranks continues under any plan of other ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.checkpoint.memory import Snapshot
from tests.support.checkpoints import BEFORE, FURTHER, SETTINGS, assert_same_state, continued
from tests.support.pool import Pool
from tests.support.snapshots import restore_each, train_and_copy

pytestmark = pytest.mark.distributed

ALL = {**SETTINGS, **FURTHER}


def check_pairs(
    pool: Callable[[int], Pool], model: str, before: list[str], after: list[str]
) -> None:
    """Continue from every setting of `before`, with all ranks and without each one, in `after`."""
    expected = continued(model)[BEFORE:]
    names, states, sources = [], [], []
    for setting in before:
        outcomes = pool(ALL[setting][0]).run(train_and_copy, setting, model, timeout=300)
        available: list[list[Snapshot]] = [[snapshot] for _, snapshot in outcomes]
        for lost in (None, *range(len(available))):
            names.append(f"{setting} without rank {lost}")
            states.append(outcomes[0][0])
            sources.append([h for rank, h in enumerate(available) if rank != lost])
    for setting in after:
        ranks = ALL[setting][0]
        fitting = [index for index, source in enumerate(sources) if len(source) <= ranks]
        given = [sources[index] for index in fitting]
        for outcomes in pool(ranks).run(restore_each, setting, model, given, timeout=300):
            for index, outcome in zip(fitting, outcomes, strict=True):
                message = f"{names[index]} to {setting}"
                assert outcome is not None, message
                assert_same_state(outcome[0], states[index])
                assert outcome[1] == pytest.approx(expected, rel=1e-9), message


def test_either_rank_of_a_pipeline_may_be_lost(pool: Callable[[int], Pool]) -> None:
    check_pairs(pool, "odd", ["pp2"], ["zero1x2"])


@pytest.mark.slow
def test_three_survivors_of_four_continue(pool: Callable[[int], Pool]) -> None:
    settings = {"three": SETTINGS["fsdp3"][0], "four": SETTINGS["tp2xpp2"][0]}
    available = pool(settings["four"]).run(train_and_copy, "tp2xpp2", "odd", timeout=300)
    survivors = [[snapshot] for _, snapshot in (available[0], available[2], available[3])]
    for outcomes in pool(settings["three"]).run(restore_each, "fsdp3", "odd", [survivors]):
        assert outcomes[0] is not None
        assert_same_state(outcomes[0][0], available[0][0])


@pytest.mark.slow
def test_a_state_that_is_lost_with_both_of_its_ranks_is_not_restored(
    pool: Callable[[int], Pool],
) -> None:
    available = pool(4).run(train_and_copy, "fsdp4", "odd", timeout=300)
    survivors = [[snapshot] for _, snapshot in (available[0], available[3])]
    for outcomes in pool(2).run(restore_each, "ddp2", "odd", [survivors]):
        assert outcomes == [None]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["odd", "fused_gpt"])
def test_all_pairs_of_plans(pool: Callable[[int], Pool], model: str) -> None:
    settings = [name for name in ALL if name != "one"]
    check_pairs(pool, model, settings, settings)
