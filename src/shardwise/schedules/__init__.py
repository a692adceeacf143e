"""Pipeline schedules as data: built, read from files, checked and replayed, without any tensors."""

from shardwise.schedules.builders import (
    DEFAULT_SCHEDULE,
    SCHEDULES,
    ScheduleKind,
    default_schedule,
    forward_only,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
    register_schedule,
    schedule_kind,
    zero_bubble_h1,
    zero_bubble_v,
)
from shardwise.schedules.check import Facts, check
from shardwise.schedules.messages import (
    Message,
    MessageOrder,
    Round,
    check_messages,
    order_messages,
)
from shardwise.schedules.replay import Durations, Timeline, replay
from shardwise.schedules.schedule import Action, Links, Schedule, ScheduleError, Span
