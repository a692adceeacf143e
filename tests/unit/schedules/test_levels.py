"""Array replays of schedules equal list replays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedules import make, replay
from shardwise.schedules.levels import KINDS, Levels, levels_of


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
@given(groups=st.integers(2, 5), rounds=st.integers(1, 3), seed=st.integers(0, 999))
@settings(max_examples=12, deadline=None)
def test_arrays_and_lists_replay_equally(name: str, groups: int, rounds: int, seed: int) -> None:
    schedule = make(name, num_groups=groups, num_microbatches=rounds * groups)
    random = np.random.default_rng(seed)
    seconds = random.random((4, schedule.num_stages))
    levels = Levels(schedule)
    starts, ends = levels.simulate(
        seconds[levels.kind, levels.stage], np.full(schedule.num_stages, 0.3)
    )
    durations = {
        (kind, stage): float(seconds[KINDS.index(kind), stage])
        for kind in KINDS
        for stage in range(schedule.num_stages)
    }
    spans = [s for row in replay(schedule, durations, transfer=0.3).spans for s in row]
    np.testing.assert_allclose(starts, [s.start for s in spans], atol=1e-12)
    np.testing.assert_allclose(ends, [s.end for s in spans], atol=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
@given(groups=st.integers(2, 4), rounds=st.integers(1, 3), seed=st.integers(0, 999))
@settings(max_examples=12, deadline=None)
def test_messages_to_a_group_leave_one_after_the_other(
    name: str, groups: int, rounds: int, seed: int
) -> None:
    schedule = make(name, num_groups=groups, num_microbatches=rounds * groups)
    random = np.random.default_rng(seed)
    levels = Levels(schedule)
    seconds = random.random((4, schedule.num_stages))[levels.kind, levels.stage]
    link_time = 3 * random.random(schedule.num_stages)
    sends = link_time + 0.1
    starts, ends = levels.simulate(seconds, sends, None, link_time)
    _, free_ends = levels.simulate(seconds, sends)
    assert (ends >= free_ends - 1e-12).all()
    # All messages of a queue must pass before the last one can be used.
    for queue in np.unique(levels.queue[levels.leaves]):
        senders = np.flatnonzero(levels.leaves & (levels.queue == queue))
        waiting = np.flatnonzero(np.isin(levels.needs, senders).any(axis=1))
        waiting = waiting[levels.group[waiting] != levels.group[senders[0]]]
        passed = ends[senders].min() + link_time[levels.boundary[senders]].sum() + 0.1
        assert starts[waiting].max() >= passed - 1e-9


def test_arrays_of_a_schedule_are_cached() -> None:
    schedule = make("gpipe", num_groups=2, num_microbatches=2)
    assert levels_of(schedule) is levels_of(schedule)
