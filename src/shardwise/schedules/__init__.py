"""Pipeline schedules as data: made, read from files, checked and replayed, without any tensors."""

from shardwise.schedules.action import Action, ScheduleError
from shardwise.schedules.check import Facts, check
from shardwise.schedules.generate import (
    NAMES,
    forward_only,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from shardwise.schedules.order import Span
from shardwise.schedules.replay import Durations, Timeline, replay
from shardwise.schedules.schedule import Schedule

__all__ = [
    "NAMES",
    "Action",
    "Durations",
    "Facts",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "check",
    "forward_only",
    "gpipe",
    "interleaved",
    "make",
    "one_f_one_b",
    "replay",
    "zero_bubble_h1",
    "zero_bubble_v",
]
