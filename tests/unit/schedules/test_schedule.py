from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.schedules import Action, Schedule, ScheduleError, one_f_one_b, zero_bubble_v


def test_actions_have_the_text_form_of_torch() -> None:
    action = Action("W", 12, 3)
    assert str(action) == "12W3"
    assert Action.parse(" 12W3 ") == action
    assert issubclass(ScheduleError, PlanError)


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0f3", "0UNSHARD", "-1F0", "0F3F", "٣F0"])
def test_malformed_actions_are_rejected(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_unknown_kinds_and_negative_stages_are_rejected() -> None:
    with pytest.raises(ScheduleError, match="no action of kind 'X'"):
        Action("X", 0, 0)
    with pytest.raises(ScheduleError, match="for stage -1"):
        Action("F", -1, 0)


def test_the_table_has_a_row_per_group_and_a_column_per_slot() -> None:
    assert str(one_f_one_b(2, 3)) == (
        "1f1b: 2 stages on 2 groups, 3 micro-batches\n"
        "group 0 0F0 0F1 .   0B0 0F2 0B1 .   0B2\n"
        "group 1 .   1F0 1B0 1F1 1B1 1F2 1B2 ."
    )


def test_the_table_of_a_blocked_schedule_shows_its_lists() -> None:
    text = "0F0 0B0\n1B0 1F0\n"
    assert str(Schedule.parse_text(text)) == (
        "custom: 2 stages on 2 groups, 1 micro-batches (as listed: it blocks)\n"
        "group 0 0F0 0B0\n"
        "group 1 1B0 1F0"
    )


def test_a_file_may_have_comments_spaces_and_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "custom.csv"
    path.write_text("# by hand\n\n0F0,0F1,, 0B0 0B1  # group 0\n,1F0 1B0,1F1,1B1\n")
    schedule = Schedule.load(path)
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == ("custom", 2, 2)
    assert schedule.placement == (0, 1)
    assert schedule.to_text() == "0F0, 0F1, 0B0, 0B1\n1F0, 1B0, 1F1, 1B1\n"


def test_a_saved_schedule_is_read_back(tmp_path: Path) -> None:
    schedule = zero_bubble_v(6, 5)
    schedule.save(tmp_path / "zb_v.csv")
    assert Schedule.load(tmp_path / "zb_v.csv") == schedule


def test_torch_reads_the_same_text() -> None:
    from torch.distributed.pipelining import schedules

    schedule = zero_bubble_v(4, 3)
    for line, actions in zip(schedule.to_text().splitlines(), schedule.actions, strict=True):
        read = [schedules._Action.from_str(cell) for cell in line.split(",")]
        assert [str(action) for action in read] == [str(action) for action in actions]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0F0\n0F0 what 0B0", ["'what' is not an action", "line 2", "0F3"]),
        ("0F0, 1F0\n# middle\n1B0, 2F0", ["stage 1 is in two lines: 1F0 in line 1, 1B0 in line 3"]),
        ("0F0\n2F0", ["stage 1", "stage 2"]),
        ("# nothing\n", ["one line per group"]),
    ],
)
def test_errors_in_a_text_are_located(text: str, parts: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse_text(text)
    for part in parts:
        assert part in str(caught.value)


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"there is no schedule file .*none\.csv"):
        Schedule.load(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match="is a folder, not a schedule"):
        Schedule.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="not UTF-8"):
        Schedule.load(tmp_path / "binary")


def test_counts_and_placement_must_agree() -> None:
    lists = ((Action("F", 0, 0),), (Action("F", 1, 0),))
    with pytest.raises(ScheduleError, match="has 2 stages, its placement has 1"):
        Schedule(name="x", num_stages=2, num_microbatches=1, placement=(0,), actions=lists)
    with pytest.raises(ScheduleError, match=r"has 2 groups, its placement names the groups \[0\]"):
        Schedule(name="x", num_stages=2, num_microbatches=1, placement=(0, 0), actions=lists)
    with pytest.raises(ScheduleError, match="num_microbatches is True"):
        Schedule(name="x", num_stages=2, num_microbatches=True, placement=(0, 1), actions=lists)
