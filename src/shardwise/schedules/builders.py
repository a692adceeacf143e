"""Build the known pipeline schedules, and keep the registry of them.

All but `zero_bubble_v` follow one pattern (`_alternate`): some forwards to warm up, then one
forward and one backward in turn, then the remaining backwards. They differ in the number of warm-up
forwards, in the order of a group's stages, and in whether weight gradients are deferred.
`zero_bubble_v` is planned slot by slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import did_you_mean
from shardwise.schedules.schedule import (
    Action,
    Schedule,
    ScheduleError,
    require_counts,
    require_positive,
)
from shardwise.shares import part


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A schedule that plans can name, with the properties that the planner uses.

    `build(num_stages, num_microbatches, num_groups)` returns the schedule.
    """

    name: str
    build: Callable[[int, int, int], Schedule]
    stages_per_group: tuple[int, ...] = (1,)  # the supported counts; () means any
    default_stages_per_group: int = 1
    searched_stages_per_group: tuple[int, ...] = ()  # the counts that automatic planning tries
    searched_as: str = ""  # the name that automatic planning tries instead of this one
    splits_backward: bool = False  # weight gradients are separate actions, I and W
    is_v_shaped: bool = False  # the first and the last stage are on one group
    runs_in_rounds: bool = False  # a round has one micro-batch per group; fewer leave groups idle


SCHEDULES: dict[str, ScheduleKind] = {}
DEFAULT_SCHEDULE = "1f1b"


def register_schedule(kind: ScheduleKind) -> None:
    """Make a schedule available by its name in plans, strategies, the planner and the CLI."""
    if kind.name in SCHEDULES:
        raise ScheduleError(f"a schedule named {kind.name!r} is already registered")
    SCHEDULES[kind.name] = kind


def default_schedule(num_stages: int, num_groups: int) -> str:
    """Return the schedule for a plan that does not name one."""
    return DEFAULT_SCHEDULE if num_stages == num_groups else "interleaved"


def schedule_kind(name: str) -> ScheduleKind:
    """Look up a schedule; an empty name means the default."""
    if name and name not in SCHEDULES:
        raise ScheduleError(
            f"there is no schedule {name!r}{did_you_mean(name, list(SCHEDULES))}",
            hint=f"one of {', '.join(SCHEDULES)}, or a file: Schedule.load(path)",
        )
    return SCHEDULES[name or DEFAULT_SCHEDULE]


def make(
    name: str, *, num_groups: int, num_microbatches: int, num_stages: int | None = None
) -> Schedule:
    """Build a schedule by its name in `SCHEDULES`.

    Without `num_stages` there is one stage per group, two for "interleaved" and "zb_v".
    "zero_bubble" is "zb_h1" for one stage per group and "zb_v" for two.
    """
    kind = schedule_kind(name)
    require_positive("num_groups", num_groups)
    if num_stages is None:
        num_stages = kind.default_stages_per_group * num_groups
    counts = [count * num_groups for count in kind.stages_per_group]
    if counts and num_stages not in counts:
        raise ScheduleError(
            f"{name} on {num_groups} groups needs {' or '.join(map(str, counts))} stages, "
            f"not {num_stages}",
            hint=f"make('interleaved', num_groups={num_groups}, num_stages={num_stages}, "
            f"num_microbatches={num_microbatches})"
            if num_groups <= num_stages
            else f"num_groups={num_stages}",
        )
    return kind.build(num_stages, num_microbatches, num_groups)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule in their order, for evaluation."""
    forwards = (tuple(a for a in actions if a.kind == "F") for actions in schedule.actions)
    return replace(schedule, name=f"{schedule.name} forward", actions=tuple(forwards))


# ---------------------------------------------------------------- one stage per group
def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Run all forwards, then all backwards (GPipe)."""
    return _one_stage_each("gpipe", num_stages, num_microbatches, lambda _: num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Alternate forwards and backwards (1F1B): group g holds at most stages - g micro-batches."""
    return _one_stage_each("1f1b", num_stages, num_microbatches, lambda g: num_stages - 1 - g)


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Delay the weight gradients of 1F1B's group g by g micro-batches (ZB-H1).

    At most `num_stages` micro-batches wait for their weight gradients, which is also the number
    that group 0 of 1F1B holds. If F, I and W take one unit of time each, a step takes
    3 * num_microbatches + stages - 1 units, and one of 1F1B 3 * (num_microbatches + stages - 1).
    """
    return _one_stage_each(
        "zb_h1", num_stages, num_microbatches, lambda g: num_stages - 1 - g, delay=lambda g: g
    )


def _one_stage_each(
    name: str,
    num_stages: int,
    num_microbatches: int,
    warm_up: Callable[[int], int],
    delay: Callable[[int], int | None] = lambda _: None,
) -> Schedule:
    require_counts(num_stages, num_microbatches)
    by_stage = [[(stage, m) for m in range(num_microbatches)] for stage in range(num_stages)]
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(range(num_stages)),
        actions=tuple(
            _alternate(items, items, warm_up(g), delay(g)) for g, items in enumerate(by_stage)
        ),
    )


def _alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warm_up: int,
    delay: int | None = None,
) -> tuple[Action, ...]:
    """Run `warm_up` forwards, then alternate forwards and backwards while there are forwards.

    With `delay`, backwards are I, and each is followed by the W of the one `delay` before it.
    """
    actions = [Action("F", *item) for item in forwards[:warm_up]]
    for i, item in enumerate(backwards):
        if warm_up + i < len(forwards):
            actions.append(Action("F", *forwards[warm_up + i]))
        actions.append(Action("B" if delay is None else "I", *item))
        if delay is not None and i >= delay:
            actions.append(Action("W", *backwards[i - delay]))
    if delay is not None:
        actions += [Action("W", *item) for item in backwards[max(0, len(backwards) - delay) :]]
    return tuple(actions)


# ---------------------------------------------------------------- several stages per group
def interleaved(num_stages: int, num_microbatches: int, num_groups: int) -> Schedule:
    """Run 1F1B over several stages per group, stage s on group s % groups, as Megatron does.

    Micro-batches run in rounds of about one per group, each round through all of a group's stages.
    If the number of stages is not a multiple of the groups, the schedule is built for the next
    multiple and the actions of the added last stages are dropped, which can only shorten waits.
    """
    require_counts(num_stages, num_microbatches)
    require_positive("num_groups", num_groups)
    if num_stages < num_groups:
        raise ScheduleError(
            f"{num_stages} stages on {num_groups} groups: {num_groups - num_stages} groups have no "
            "stage",
            hint=f"num_groups={num_stages}, or num_stages={2 * num_groups}",
        )
    if num_stages == num_groups:
        return replace(one_f_one_b(num_stages, num_microbatches), name="interleaved")
    padded = -(-num_stages // num_groups) * num_groups
    rounds = _rounds(num_microbatches, num_groups)
    actions = []
    for group in range(num_groups):
        stages = range(group, padded, num_groups)
        forwards, backwards = (
            [(stage, m) for microbatches in rounds for stage in order for m in microbatches]
            for order in (stages, stages[::-1])
        )
        warm_up = (len(stages) - 1) * len(rounds[0]) + 2 * (num_groups - 1 - group)
        alternated = _alternate(forwards, backwards, warm_up)
        actions.append(tuple(action for action in alternated if action.stage < num_stages))
    return Schedule(
        name="interleaved",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(stage % num_groups for stage in range(num_stages)),
        actions=tuple(actions),
    )


def _rounds(num_microbatches: int, num_groups: int) -> list[range]:
    """Divide the micro-batches into even rounds of at least `num_groups`, larger ones first."""
    count = max(1, num_microbatches // num_groups)
    parts = (part(num_microbatches, count, i) for i in range(count))
    return [range(start, start + size) for start, size in parts]


# ---------------------------------------------------------------- slot by slot
def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Place two stages on each group, the second half in reverse order (ZB-V).

    No group holds more than `num_stages` forwards that wait for their weight gradients. Each is
    half as large as a stage of 1F1B, so the memory is that of 1F1B. If F, I and W take equally
    long, a group hardly waits for anything but its first input.
    """
    require_counts(num_stages, num_microbatches)
    if num_stages % 2:
        raise ScheduleError(
            f"zero_bubble_v has two stages per group, {num_stages} is odd",
            hint=f"num_stages={num_stages + 1}",
        )
    plans = [_slot_by_slot(num_stages, num_microbatches, reserve) for reserve in (0, 1)]
    _, actions = min((plan for plan in plans if plan), key=lambda plan: plan[0])
    return Schedule(
        name="zb_v",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages)),
        actions=actions,
    )


def _slot_by_slot(
    num_stages: int, num_microbatches: int, reserve: int
) -> tuple[int, tuple[tuple[Action, ...], ...]] | None:
    """Plan ZB-V greedily, one slot for each F, I and W; return the number of slots and the lists.

    In each slot each group runs the best action that is ready: I before F before W, then the
    oldest micro-batch, then the later stage. A group stores up to `num_stages` forwards; one of the
    first half of the stages leaves `reserve` places free, so that with one place the micro-batches
    under way always reach their backward. Return None if every group waits for a free place.
    """
    lists: list[list[Action]] = [[] for _ in range(num_stages // 2)]
    num_stored = [0] * len(lists)
    counts = {kind: [0] * num_stages for kind in "FIW"}
    slot, remaining = 0, 3 * num_stages * num_microbatches
    while remaining:
        before = {kind: tuple(by_stage) for kind, by_stage in counts.items()}
        for group, actions in enumerate(lists):
            ready = [
                ("IFW".index(kind), before[kind][stage], -stage, kind)
                for stage in (group, num_stages - 1 - group)
                for kind in "IFW"
                if before[kind][stage] < _available(kind, stage, before, num_microbatches)
                and (
                    kind != "F"
                    or num_stored[group] < num_stages - (reserve if stage == group else 0)
                )
            ]
            if ready:
                _, microbatch, minus_stage, kind = min(ready)
                actions.append(Action(kind, -minus_stage, microbatch))
                counts[kind][-minus_stage] += 1
                num_stored[group] += (kind == "F") - (kind == "W")
                remaining -= 1
        if before == {kind: tuple(by_stage) for kind, by_stage in counts.items()}:
            return None
        slot += 1
    return slot, tuple(tuple(actions) for actions in lists)


def _available(
    kind: str, stage: int, counts: dict[str, tuple[int, ...]], num_microbatches: int
) -> int:
    """Return the number of micro-batches for which a stage has the inputs of an action."""
    if kind == "W":
        return counts["I"][stage]
    if kind == "F":
        return counts["F"][stage - 1] if stage else num_microbatches
    later = counts["I"][stage + 1] if stage + 1 < len(counts["I"]) else num_microbatches
    return min(counts["F"][stage], later)


# ---------------------------------------------------------------- the registry
def _zero_bubble(num_stages: int, num_microbatches: int, num_groups: int) -> Schedule:
    build = zero_bubble_h1 if num_stages == num_groups else zero_bubble_v
    return build(num_stages, num_microbatches)


# Automatic planning tries schedules in this order, and prefers the earlier of equally fast ones.
for _kind in (
    ScheduleKind(name="gpipe", build=lambda stages, count, _: gpipe(stages, count)),
    ScheduleKind(
        name="1f1b",
        build=lambda stages, count, _: one_f_one_b(stages, count),
        searched_stages_per_group=(1,),
    ),
    ScheduleKind(
        name="zb_h1",
        build=lambda stages, count, _: zero_bubble_h1(stages, count),
        searched_stages_per_group=(1,),
        splits_backward=True,
    ),
    ScheduleKind(
        name="interleaved",
        build=interleaved,
        stages_per_group=(),
        default_stages_per_group=2,
        searched_stages_per_group=(2, 3, 4, 6, 8),
        runs_in_rounds=True,
    ),
    ScheduleKind(
        name="zb_v",
        build=lambda stages, count, _: zero_bubble_v(stages, count),
        stages_per_group=(2,),
        default_stages_per_group=2,
        searched_stages_per_group=(2,),
        splits_backward=True,
        is_v_shaped=True,
    ),
    ScheduleKind(
        name="zero_bubble",
        build=_zero_bubble,
        stages_per_group=(1, 2),
        searched_as="zb_h1",
        splits_backward=True,
    ),
):
    register_schedule(_kind)
