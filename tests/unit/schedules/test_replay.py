from __future__ import annotations

import pytest

from shardwise.schedules import Action, Schedule, ScheduleError, one_f_one_b, replay

UNIT = {("F", stage): 1.0 for stage in range(2)} | {("B", stage): 2.0 for stage in range(2)}


def test_start_and_end_of_each_action_in_list_order() -> None:
    timeline = replay(one_f_one_b(2, 2), UNIT, transfer=0.5)
    spans = [[(str(s.action), s.start, s.end) for s in row] for row in timeline.spans]
    assert spans == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert timeline.step_time == 10
    assert timeline.group_bubble(0) == pytest.approx(0.4)
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / (2 * 10))
    assert str(timeline) == (
        "1f1b: step 10 s, bubble 40.0%\n"
        "group 0: busy 6 s, bubble 40.0%\n"
        "group 1: busy 6 s, bubble 40.0%"
    )


def test_results_within_a_group_need_no_transfer() -> None:
    schedule = Schedule.parse_text("0F0 1F0 1B0 0B0")
    assert replay(schedule, UNIT, transfer=100).step_time == 6


def test_durations_may_depend_on_the_micro_batch() -> None:
    schedule = one_f_one_b(1, 3)
    assert replay(schedule, {**UNIT, ("F", 0, 1): 5.0}).step_time == 13
    assert replay(schedule, lambda action: float(action.microbatch)).step_time == 6


def test_edges_determine_dependencies() -> None:
    schedule = Schedule.parse_text("0F0 0B0\n1F0 1B0\n2F0 2B0")
    assert replay(schedule, lambda _: 1.0).step_time == 6
    assert replay(schedule, lambda _: 1.0, edges=[(0, 2)]).step_time == 4
    assert replay(schedule, lambda _: 1.0, edges=[]).step_time == 2


def test_an_empty_step_has_no_bubble() -> None:
    assert replay(one_f_one_b(2, 2), lambda _: 0.0).bubble_fraction == 0


def test_missing_and_invalid_durations_are_rejected() -> None:
    with pytest.raises(ScheduleError) as caught:
        replay(one_f_one_b(2, 1), {("F", 0): 1.0, ("F", 1): 1.0})
    assert "there is no duration for 1B0" in str(caught.value)
    assert "durations['B', 1] = seconds" in str(caught.value)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ScheduleError, match="0F0 takes"):
            replay(one_f_one_b(1, 1), lambda _, wrong=wrong: wrong)
        with pytest.raises(ScheduleError, match="transfer is"):
            replay(one_f_one_b(1, 1), UNIT, transfer=wrong)


def test_a_schedule_that_blocks_cannot_be_replayed() -> None:
    with pytest.raises(ScheduleError, match="waits for 1B0 or 1I0,"):
        replay(Schedule.parse_text("0F0 0B0\n1F0"), UNIT)
    own = Schedule.parse_text("0B0 0F0")
    with pytest.raises(ScheduleError, match="cycle: group 0 -> group 0"):
        replay(own, lambda action: 1.0 if action == Action("F", 0, 0) else 2.0)
