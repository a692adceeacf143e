"""The order of messages without tags: its text, its proof, and the orders that it refuses."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.schedules import (
    Action,
    Links,
    MessageOrder,
    Round,
    Schedule,
    ScheduleError,
    check_messages,
    forward_only,
    make,
    one_f_one_b,
    order_messages,
)

ONE_F_ONE_B = """\
0F0 [>0F0:1] 0F1 [>0F1:1] [<1I0:0] 0B0 0F2 [>0F2:1 <1I1:0] 0B1 [<1I2:0] 0B2
[<0F0:1] 1F0 [<0F1:1] 1B0 [>1I0:0] 1F1 1B1 [>1I1:0 <0F2:1] 1F2 1B2 [>1I2:0]
"""
CHAIN = Links.of(2)


def order_of(schedule: Schedule) -> MessageOrder:
    return order_messages(schedule.actions, schedule.placement, Links.of(schedule.num_stages))


def test_the_order_of_1f1b_sends_and_receives_together() -> None:
    order = order_of(one_f_one_b(2, 3))
    assert order.to_text() == ONE_F_ONE_B
    assert MessageOrder.parse_text(ONE_F_ONE_B) == order


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_every_schedule_has_an_order_that_cannot_block(name: str) -> None:
    for groups, num_microbatches in product((1, 2, 3, 4, 8), (1, 2, 5, 8)):
        schedule = make(name, num_groups=groups, num_microbatches=num_microbatches)
        links = Links.of(schedule.num_stages)
        for part in (schedule, forward_only(schedule)):
            order = order_of(part)
            check_messages(order, part.placement, links)
            assert MessageOrder.parse_text(order.to_text()) == order
            for group, items in enumerate(order.lists):
                actions = tuple(item for item in items if isinstance(item, Action))
                assert actions == part.actions[group]


def test_parts_within_a_group_are_exchanged_only_if_asked() -> None:
    schedule = make("zb_v", num_groups=1, num_microbatches=1)
    links = Links.of(2)
    assert not any(isinstance(item, Round) for item in order_of(schedule).lists[0])
    order = order_messages(schedule.actions, schedule.placement, links, [(0, 1)])
    rounds = [str(item) for item in order.lists[0] if isinstance(item, Round)]
    assert rounds == ["[>0F0:1 <0F0:1]", "[>1I0:0 <1I0:0]"]
    check_messages(order, schedule.placement, links)


BLOCKED = {
    # As the receives of the next action were started ahead of the current one: over NCCL, both
    # ranks wait in a receive.
    "receives ahead": (
        "0F0 [>0F0:1] [<1I0:0] 0F1 [>0F1:1] 0B0 [<1I1:0] 0B1\n"
        "[<0F0:1] 1F0 [<0F1:1] 1B0 [>1I0:0] 1F1 1B1 [>1I1:0]\n",
        "group 0 is at [<1I0:0], position 2 and waits for ['<1I0:0']",
    ),
    "sends without their receives": (
        "0F0 [>0F0:1] 0F1 [>0F1:1] [<1I0:0] 0B0 [<1I1:0] 0B1\n"
        "[<0F0:1] 1F0 1B0 [>1I0:0] [<0F1:1] 1F1 1B1 [>1I1:0]\n",
        "group 1 is at [>1I0:0], position 3 and waits for ['>1I0:0']",
    ),
    "another order": (
        "0F0 0F1 [>0F0:1] [>0F1:1] [<1I0:0] 0B0 [<1I1:0] 0B1\n"
        "[<0F1:1] [<0F0:1] 1F0 1B0 1F1 1B1 [>1I0:0] [>1I1:0]\n",
        "message 0 from group 0 to group 1 is 0F0:1 for its sender, 0F1:1 for its receiver",
    ),
    "a lost receive": (
        "0F0 [>0F0:1] 0F1 [>0F1:1] [<1I0:0] 0B0 [<1I1:0] 0B1\n"
        "[<0F0:1] 1F0 1B0 [>1I0:0] 1F1 1B1 [>1I1:0]\n",
        "message 1 from group 0 to group 1 is 0F1:1 for its sender, not received",
    ),
    "an action before its message": (
        "0F0 [>0F0:1] 0F1 [>0F1:1] [<1I0:0] 0B0 0B1 [<1I1:0]\n"
        "[<0F0:1] [<0F1:1] 1F0 1B0 [>1I0:0] 1F1 1B1 [>1I1:0]\n",
        "group 0 has 0B1 at position 6, before it has 1I1",
    ),
    "a send before its action": (
        "[>0F0:1] 0F0 0F1 [>0F1:1] [<1I0:0] 0B0 [<1I1:0] 0B1\n"
        "[<0F0:1] [<0F1:1] 1F0 1B0 [>1I0:0] 1F1 1B1 [>1I1:0]\n",
        "group 0 has 0F0:1 at position 0, before it has 0F0",
    ),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_orders_that_block_are_refused_with_the_place(name: str) -> None:
    text, message = BLOCKED[name]
    with pytest.raises(ScheduleError) as caught:
        check_messages(MessageOrder.parse_text(text), (0, 1), CHAIN)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["[=0F0:1]", "[>0F0]", "[>0F0:x]", "0X0", "[>0F0:1"])
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        MessageOrder.parse_text(text)
