from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    check,
    forward_only,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
    replay,
    zero_bubble_h1,
    zero_bubble_v,
)


def seconds(action: Action) -> float:
    return 2.0 if action.kind == "B" else 1.0


def bubble(schedule: Schedule) -> float:
    return replay(schedule, seconds).bubble_fraction


SHAPES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 3), (4, 8), (5, 3), (8, 16)]


@pytest.mark.parametrize(("stages", "num_microbatches"), SHAPES)
def test_1f1b_warms_up_with_one_micro_batch_per_later_stage(
    stages: int, num_microbatches: int
) -> None:
    schedule = one_f_one_b(stages, num_microbatches)
    for group, actions in enumerate(schedule.actions):
        first_backward = [a.kind for a in actions].index("B")
        assert first_backward == min(stages - group, num_microbatches)
    alive = tuple(min(stages - group, num_microbatches) for group in range(stages))
    facts = check(schedule)
    assert facts.alive == facts.alive_weights == facts.stage_alive == alive


@pytest.mark.parametrize(("stages", "num_microbatches"), SHAPES)
def test_gpipe_keeps_every_micro_batch_alive(stages: int, num_microbatches: int) -> None:
    assert check(gpipe(stages, num_microbatches)).alive == (num_microbatches,) * stages


@pytest.mark.parametrize(("stages", "num_microbatches"), SHAPES)
@pytest.mark.parametrize("make_schedule", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_have_the_textbook_bubble(
    make_schedule: Callable[[int, int], Schedule], stages: int, num_microbatches: int
) -> None:
    expected = (stages - 1) / (num_microbatches + stages - 1)
    assert bubble(make_schedule(stages, num_microbatches)) == pytest.approx(expected)


@pytest.mark.parametrize(("stages", "num_microbatches"), SHAPES)
def test_zb_h1_has_the_memory_of_1f1b_and_a_smaller_bubble(
    stages: int, num_microbatches: int
) -> None:
    schedule, baseline = (
        zero_bubble_h1(stages, num_microbatches),
        one_f_one_b(stages, num_microbatches),
    )
    facts = check(schedule)
    assert facts.alive == check(baseline).alive
    assert max(facts.alive_weights) == max(check(baseline).alive)
    assert stages == 1 or bubble(schedule) < bubble(baseline)
    if num_microbatches >= stages:
        assert replay(schedule, seconds).step_time == 3 * num_microbatches + stages - 1


@pytest.mark.parametrize("groups", range(1, 10))
def test_zb_v_hardly_waits_after_the_first_input(groups: int) -> None:
    for num_microbatches in (2 * groups, 2 * groups + 1, 3 * groups + 2):
        schedule = zero_bubble_v(2 * groups, num_microbatches)
        assert max(check(schedule).alive_weights) <= 2 * groups
        step_time = replay(schedule, seconds).step_time
        assert step_time <= 6 * num_microbatches + groups - 1 + 2
        assert groups == 1 or bubble(schedule) < bubble(zero_bubble_h1(groups, num_microbatches))
    assert bubble(zero_bubble_v(2 * groups, 4 * groups)) < 0.05


def test_zb_v_places_stages_in_a_v() -> None:
    assert zero_bubble_v(6, 2).placement == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("groups", [2, 3, 4, 8])
@pytest.mark.parametrize("per_group", [2, 3])
def test_interleaved_divides_the_bubble_by_the_stages_per_group(
    groups: int, per_group: int
) -> None:
    for num_microbatches in (groups, 2 * groups, 2 * groups + 1, 3 * groups - 1):
        schedule = interleaved(per_group * groups, num_microbatches, groups)
        expected = (groups - 1) / (per_group * num_microbatches + groups - 1)
        assert bubble(schedule) == pytest.approx(expected)
        assert bubble(schedule) < bubble(one_f_one_b(groups, num_microbatches))
        assert check(schedule).alive[-1] <= (per_group - 1) * (2 * groups - 1) + 1


def test_interleaved_stages_need_not_divide_evenly() -> None:
    schedule = interleaved(7, 10, 3)
    assert schedule.placement == (0, 1, 2, 0, 1, 2, 0)
    check(schedule)
    padded = interleaved(9, 10, 3)
    assert replay(schedule, seconds).step_time <= replay(padded, seconds).step_time


def test_interleaved_with_one_stage_per_group_is_1f1b() -> None:
    assert interleaved(3, 5, 3).actions == one_f_one_b(3, 5).actions


def test_exact_lists_of_small_schedules() -> None:
    assert zero_bubble_h1(2, 3).to_text() == (
        "0F0, 0F1, 0I0, 0W0, 0F2, 0I1, 0W1, 0I2, 0W2\n1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2\n"
    )
    assert interleaved(4, 2, 2).to_text() == (
        "0F0, 0F1, 2F0, 2F1, 2B0, 2B1, 0B0, 0B1\n1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 1B0, 1B1\n"
    )


def test_forward_only_keeps_the_forwards_in_order() -> None:
    schedule = forward_only(one_f_one_b(2, 3))
    assert schedule.to_text() == "0F0, 0F1, 0F2\n1F0, 1F1, 1F2\n"
    facts = check(schedule, backward=False)
    assert (facts.alive, facts.sends, facts.receives) == ((0, 0), (3, 0), (0, 3))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_make_by_name(name: str) -> None:
    schedule = make(name, num_groups=3, num_microbatches=4)
    assert schedule.num_groups == 3
    assert schedule.num_stages == (6 if name in ("interleaved", "zb_v") else 3)
    assert schedule.splits_backward == name.startswith("z")
    check(schedule)


def test_zero_bubble_depends_on_the_stages_per_group() -> None:
    assert make("zero_bubble", num_groups=2, num_microbatches=4).name == "zb_h1"
    assert make("zero_bubble", num_groups=2, num_microbatches=4, num_stages=4).name == "zb_v"


def test_make_rejects_invalid_requests() -> None:
    with pytest.raises(ScheduleError, match="did you mean 'interleaved'"):
        make("interleave", num_groups=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="1f1b on 2 groups needs 2 stages, not 3"):
        make("1f1b", num_groups=2, num_microbatches=2, num_stages=3)
    with pytest.raises(ScheduleError, match="needs 2 or 4 stages, not 5"):
        make("zero_bubble", num_groups=2, num_microbatches=2, num_stages=5)
    with pytest.raises(ScheduleError, match="2 stages on 3 groups: 1 groups have no stage"):
        make("interleaved", num_groups=3, num_microbatches=2, num_stages=2)
    with pytest.raises(ScheduleError, match="5 is odd"):
        zero_bubble_v(5, 2)
    with pytest.raises(ScheduleError, match="num_microbatches is 0"):
        make("gpipe", num_groups=2, num_microbatches=0)
