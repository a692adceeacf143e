from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwise.schedules import (
    Action,
    Schedule,
    ScheduleError,
    check,
    gpipe,
    one_f_one_b,
    zero_bubble_h1,
)


def edited(schedule: Schedule, *rows: str) -> Schedule:
    lists = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
    return replace(schedule, actions=lists)


TWO = one_f_one_b(2, 2)  # 0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1
FIRST, SECOND = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((FIRST, ""), "group 1 has no action of its stage 1"),
        (("0F0 0B0 0B1", SECOND), "group 0 has no 0F1, the forward of stage 0"),
        (("0F0 0F1 0B0", SECOND), "group 0 has 0F1 but no backward of it: 0B1, or 0I1 and 0W1"),
        (("0F0 0F1 0B0 0I1", SECOND), "group 0 has 0I1 but no 0W1: the weight gradients"),
        (("0F0 0F1 0B0 0W1", SECOND), "group 0 has 0W1 but no 0I1: the weight gradients"),
        (("0F0 0F1 0B0 0B1 0I1", SECOND), "group 0 has both 0B1 and 0I1: the same backward twice"),
        (("0F0 0F1 0B0 0B1 0W1", SECOND), "group 0 has both 0B1 and 0W1: the same weight"),
        (("0F0 0F1 0B0 0B1 0I1 0W1", SECOND), "group 0 has 0B1 and also 0I1 and 0W1"),
        (("0F0 0F1 0B0 0B1 0F0", SECOND), "group 0 has 0F0 at position 4 and already at position"),
        (("0F0 0F1 0B0 0B1 1F0", SECOND), "group 0 has 1F0 at position 4, stage 1 is on group 1"),
        (("0F0 0F1 0B0 0B1 2F0", SECOND), "group 0 has 2F0 at position 4, there are 2 stages"),
        (("0F0 0F1 0F2 0B0 0B1", SECOND), "has 0F2 at position 2, there are 2 micro-batches"),
        (("0F0 0B1 0F1 0B0", SECOND), "group 0 has 0B1 at position 1, before 0F1 at position 2"),
        (("0F0 0F1 0B0 0W1 0I1", SECOND), "group 0 has 0W1 at position 3, before 0I1 at position"),
    ],
)
def test_errors_name_the_action(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(edited(TWO, *rows))


def test_a_deadlock_is_reported_with_its_cycle() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(edited(TWO, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert str(caught.value) == (
        "the lists block after 2 of 8 actions\n"
        "  group 0 is at 0B0 and waits for 1B0 of group 1\n"
        "  group 1 is at 1F1 and waits for 0F1 of group 0\n"
        "  cycle: group 0 -> group 1 -> group 0\n"
        "  at: schedule '1f1b'"
    )


def test_groups_outside_the_cycle_are_not_part_of_it() -> None:
    three = one_f_one_b(3, 2)
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"]
    with pytest.raises(ScheduleError) as caught:
        check(edited(three, *rows))
    assert "group 0 is at 0B0 and waits for 1B0 of group 1" in str(caught.value)
    assert "cycle: group 1 -> group 2 -> group 1" in str(caught.value)


def test_dependencies_within_a_group_order_its_list() -> None:
    schedule = Schedule.parse_text("1F0 0F0 1B0 0B0")
    message = "group 0 has 1F0 at position 0, before 0F0 at position 1 whose result it needs"
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_skip_connections_and_several_consumers() -> None:
    schedule = one_f_one_b(4, 3)
    facts = check(schedule, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert facts.sends == (6, 6, 6, 6)
    assert facts.receives == (6, 6, 6, 6)
    assert facts.alive == (3, 3, 2, 1)
    # Without edges the stages are independent, and any order works.
    independent = edited(TWO, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert check(independent, []).sends == (0, 0)


def test_a_stage_waits_for_its_producers_only() -> None:
    schedule = Schedule.parse_text("0F0 0B0\n1F0 1B0\n2F0 2B0")
    check(schedule, [(0, 2)])
    late = Schedule.parse_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F1 2F0 2B0 2B1")
    check(late, [(0, 2)])
    with pytest.raises(ScheduleError, match="cycle: group 1 -> group 2 -> group 1"):
        check(late, [(0, 1), (1, 2)])


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(1, 0)], "the edge 1 -> 0 .* 2 stages"),
        ([(0, 2)], "the edge 0 -> 2 "),
        ([(0, 1), (0, 1)], "the edge 0 -> 1 is given twice"),
    ],
)
def test_invalid_edges_are_rejected(edges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(TWO, edges)


def test_facts_per_stage_and_group() -> None:
    schedule = Schedule.parse_text("0F0 0F1 2F0 2I0 2F1 2W0 2I1 2W1 0B0 0B1\n1F0 1F1 1B0 1B1")
    facts = check(schedule)
    assert facts.alive == (3, 2)
    assert facts.alive_weights == (4, 2)
    assert facts.stage_alive == (2, 2, 1)
    assert facts.stage_alive_weights == (2, 2, 2)
    assert facts.sends == facts.receives == (4, 4)


def test_full_and_split_backwards_may_be_mixed() -> None:
    mixed = edited(TWO, "0F0 0F1 0I0 0W0 0B1", SECOND)
    assert mixed.splits_backward
    check(mixed)


def test_an_evaluation_has_forwards_only() -> None:
    forwards = edited(TWO, "0F0 0F1", "1F0 1F1")
    check(forwards, backward=False)
    with pytest.raises(ScheduleError, match="0F0 but no backward"):
        check(forwards)
    with pytest.raises(ScheduleError, match="group 0 has 0B0, but only forwards are expected"):
        check(TWO, backward=False)
    with pytest.raises(ScheduleError, match="group 1 has no 1F1"):
        check(edited(TWO, "0F0 0F1", "1F0"), backward=False)


def test_a_single_group_sends_nothing() -> None:
    assert check(gpipe(1, 3)).sends == (0,)
    assert check(zero_bubble_h1(1, 3)).receives == (0,)
